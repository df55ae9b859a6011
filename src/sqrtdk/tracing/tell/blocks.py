"""The scale of each block of keys, and what they come to together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqrtdk.tracing.read.blocks import ALIKE
from sqrtdk.tracing.read.reading import Cell, Reading
from sqrtdk.tracing.records import BLOCKS, Factor, KeyBlock, Scale
from sqrtdk.tracing.steps import Scale as Scaling
from sqrtdk.tracing.steps import Unknown
from sqrtdk.tracing.tell import slope
from sqrtdk.tracing.tell.scale import tell_scale
from sqrtdk.tracing.tell.sight import look


def tell_blocks(reading: Reading, width: int, *, measure_slope: bool) -> tuple[KeyBlock, ...]:
    """The scale of each block of keys, by both readings; rows that were computed apart are told together.

    Args:
        reading: the attention.
        width: E of the query, without padding.
        measure_slope: read the scale from the numbers as well.
    """
    keys: dict[tuple[int, int], list[Cell]] = {}
    for cell in reading.blocks:
        keys.setdefault((cell.key, cell.key + cell.reading.layout.columns - 1), []).append(cell)
    return tuple(
        KeyBlock(first, last, together(_of_rows(cells, width, measure_slope=measure_slope)))
        for (first, last), cells in sorted(keys.items())
    )


def _of_rows(cells: Sequence[Cell], width: int, *, measure_slope: bool) -> list[Scale]:
    """The scales of one block of keys for all blocks of rows; the numbers of one of them are enough.

    A causal mask hides least from the last rows; a rotation is the same for the rows and the keys of one place.
    """
    scales: list[Scale] = []
    for cell in sorted(cells, key=lambda cell: (abs(cell.reading.offset or 0), -cell.row)):
        wanted = measure_slope and all(scale.numeric is None for scale in scales)
        scales.append(_of_one(cell.reading, width, measure_slope=wanted))
    return scales


def _of_one(reading: Reading, width: int, *, measure_slope: bool) -> Scale:
    scalings = [step for step in reading.steps if isinstance(step, Scaling)]
    on_logits = [replace(step.factor, at=step.factor.at or step.at) for step in scalings]
    unknown = [step.name for step in reading.steps if isinstance(step, Unknown)]
    why = slope.unread(reading)
    read = slope.read_slope(reading, look(reading)) if why is None and measure_slope else why
    return tell_scale(
        reading,
        [*reading.query.factors, *reading.key.factors, *on_logits],
        [*reading.query.unknown, *reading.key.unknown, *unknown],
        width,
        read if isinstance(read, slope.Slope) else None,
        read if isinstance(read, str) else None,
    )


def of_blocks(blocks: Sequence[KeyBlock]) -> Scale:
    """The scale of a call from those of its blocks; none where they are unlike."""
    scales = [block.scale for block in blocks]
    if any(scale.effective is None or scale.agree is False for scale in scales) or _alike(scales):
        return together(scales)
    unlike = (Factor(None, "logits", BLOCKS),)
    return Scale(None, None, None, None, None, unlike, reason=f"blocks of keys have unlike scales: {text(blocks)}")


def text(blocks: Sequence[KeyBlock]) -> str:
    """The blocks with their scales, neighbours of one scale as one: "keys 0 to 3 are scaled by 1, key 4 by 2"."""
    runs: list[KeyBlock] = []
    for block in blocks:
        if runs and runs[-1].last + 1 == block.first and _alike([runs[-1].scale, block.scale]):
            runs[-1] = replace(runs[-1], last=block.last)
        else:
            runs.append(block)
    parts: list[str] = []
    for run in runs:
        keys = f"key {run.first}" if run.first == run.last else f"keys {run.first} to {run.last}"
        verb = "" if parts else " is scaled" if run.first == run.last else " are scaled"
        parts.append(f"{keys}{verb} by {run.scale.effective:.4g}")
    return ", ".join(parts)


def together(scales: Sequence[Scale]) -> Scale:
    """One scale of parts that should have the same: that of the first that says least, agreeing where all do."""
    if len(scales) == 1:
        return scales[0]
    lost = next((scale for scale in scales if scale.effective is None or scale.agree is False), None)
    if lost is not None:
        return lost
    first = scales[0]
    read = [scale for scale in scales if scale.numeric is not None]
    if not read:
        return first
    return Scale(
        effective=first.effective,
        ratio=first.ratio,
        symbolic=first.symbolic,
        numeric=sum(scale.numeric or 0.0 for scale in read) / len(read),
        r_squared=min(scale.r_squared or 0.0 for scale in read),
        factors=first.factors,
        per_head=first.per_head,
        agree=read[0].agree,
    )


def _alike(scales: Sequence[Scale]) -> bool:
    first = scales[0].per_head or (scales[0].effective or 0.0,)
    others = [scale.per_head or (scale.effective or 0.0,) for scale in scales]
    return all(
        len(other) == len(first) and all(abs(a - b) <= ALIKE * abs(b) for a, b in zip(other, first, strict=True))
        for other in others
    )
