"""Reads attention computed block by block with a running maximum and sum (online softmax), and merges the blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.weights import dropout_of
from sqrtdk.tracing.probe.replays import subgraph_between
from sqrtdk.tracing.readback.blocks import Span, aligned, assembled_pairs, is_attention, joined_cells, positions_of
from sqrtdk.tracing.readback.chain import read_chain
from sqrtdk.tracing.readback.eager import read_span
from sqrtdk.tracing.readback.reading import Cell, Layout, Logits, Reading
from sqrtdk.tracing.readback.regroup import Positions
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Hide, Scale, Step, Unknown
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape.node import Exponential, Node, Online, SoftmaxRun

MOST_JOINED_LOGITS = 2**26  # logits of all blocks together that are held at once
FAULT_BLOCKS = "trace.fault.blocks"
FAULT_MAXIMA = "trace.fault.maxima"
STATISTICS_TOO_LARGE = "trace.statistics.too_large"


@dataclass(frozen=True, slots=True)
class _Block:
    """One `exp(z - m)`, read as if it were an attention, with the places of its rows and keys."""

    reading: Reading
    value: Tensor
    rows: Positions | None
    keys: Positions | None


def read_online(run: Online, heads_hint: int | None) -> list[Reading] | str:
    """Return the attentions of a run, one or one for each block of queries; a string says why there is none.

    Args:
        run: the exponentials and the output.
        heads_hint: number of heads that the module declares.
    """
    blocks: list[_Block] = []
    for exponential in run.parts:
        if not isinstance(exponential, Exponential):
            continue
        block = _read(exponential, run.output, heads_hint)
        if block is None:
            return Message("trace.missed.no_product_in_blocks")
        blocks.append(block)
    readings: list[Reading] = []
    groups = _groups(blocks)
    for group in groups:
        placed = _cells(group)
        if placed is None:
            return Message("trace.missed.places_of_blocks")
        reading = _joined([cell for cell, _ in placed], run.output if len(groups) == 1 else None)
        values = [(cell.key, value) for cell, value in placed]
        fault = FAULT_MAXIMA if run.loose else None if _adds_up(reading, values) else FAULT_BLOCKS
        readings.append(reading if fault is None else _faulty(reading, Message(fault)))
    return readings


def _adds_up(reading: Reading, values: Sequence[tuple[int, Tensor]]) -> bool:
    """Whether the output is softmax(logits) @ v; True if that can't be checked."""
    operands, output = reading.operands, reading.output
    unknown = reading.dropout or any(isinstance(step, Unknown) for step in reading.steps)
    if unknown or output is None or not isinstance(operands, Logits) or operands.values.is_meta:
        return True
    return is_attention(operands.values, values, output) is not False


def _faulty(reading: Reading, fault: str) -> Reading:
    return replace(reading, steps=(*reading.steps, Unknown(fault)), fault=fault, output=None)


def _read(exponential: Exponential, output: Tensor, heads_hint: int | None) -> _Block | None:
    chain = read_chain(exponential.node)
    if chain.product is None or chain.product.product is None:
        return None
    held = exponential.logits is not None or exponential.power is not None
    hides = _hidden_later(exponential)
    logits = _logits(exponential, hides) if held else torch.empty(exponential.shape, device="meta")
    softmax_run = SoftmaxRun(
        node=exponential.node,
        logits=logits,
        weights=logits,
        dim=exponential.dim,
        op="aten.exp",
        entry=exponential.entry,
        flex=False,
        stored=exponential.stored,
    )
    reading = read_span(softmax_run, exponential.value, output, Span(chain), heads_hint)
    steps = reading.steps
    if exponential.base != math.e:
        base = Scale(Factor(math.log(exponential.base), "logits", f"base {exponential.base:g}"))
        # 2 ** (z * log2(e)): the base is a factor ln 2. Scales and masks commute with it, so it may stand innermost.
        inside = all(isinstance(step, (Scale, Hide)) for step in steps)
        steps = (base, *steps) if inside else (*steps, base)
    rate = max((drop[0] for node in exponential.way if (drop := dropout_of(node)) is not None), default=0.0)
    reading = replace(reading, dropout=rate, steps=(*steps, *hides), device=exponential.value.device, output=None)
    if not held:
        reading = replace(reading, no_slope=Message(STATISTICS_TOO_LARGE), no_stats=Message(STATISTICS_TOO_LARGE))
    return _Block(aligned(reading), exponential.value, *positions_of(reading))


def _logits(exponential: Exponential, hides: Sequence[Step]) -> Tensor:
    """Return the logits in natural-log units: the exp's input plus its maximum; -inf where the exp was zeroed."""
    if exponential.power is not None:
        entered = exponential.power.log() / math.log(exponential.base)
    else:
        assert exponential.logits is not None
        entered = exponential.logits
    entered = entered if exponential.offset is None else entered + exponential.offset
    entered = entered if exponential.base == math.e else entered * math.log(exponential.base)
    for step in hides:
        if isinstance(step, Hide) and step.visible is not None and not entered.is_meta:
            entered = entered.masked_fill(~step.visible.at_softmax(), -math.inf)
    return entered


def _hidden_later(exponential: Exponential) -> tuple[Step, ...]:
    """Return the masks that zero the exp, `exp(z - m) * mask`; any other change of it is an unknown step."""
    steps: list[Step] = []
    for node in exponential.way:
        if node.op in ("mul", "div", "masked_fill", "where") and dropout_of(node) is None:
            steps += _zeroed(node, exponential.shape)
    return tuple(steps)


def _zeroed(node: Node, shape: tuple[int, ...]) -> list[Step]:
    """Return what an operation on the exp hides, by its effect on ones; [] if it multiplies all by one number."""
    main = node.main()
    part = None if main is None else subgraph_between(main, node)
    if main is None or part is None or node.shape != shape:
        return [Unknown(Message("trace.step.on_weights", name=node.op))]
    try:
        by = part.run(torch.ones(main.shape, device=part.device))
    except Exception:  # the values of the mask are not known
        return [Hide("bool", -math.inf)]
    if any(parent is not main for parent in node.parents()) and bool(((by == 0) | (by == 1)).all()):
        return [Hide("bool", -math.inf, StepTensor(by != 0, (), shape))]
    return [] if bool((by == by.flatten()[0]).all()) else [Unknown(Message("trace.step.on_weights", name=node.op))]


def _groups(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Return the blocks of each attention: blocks whose queries, and whose keys, come from one tensor."""
    groups: dict[tuple[object, ...], list[_Block]] = {}
    for block in blocks:
        rows, keys = block.rows, block.keys
        sources = [None if at is None else (at.source, at.axis, at.others) for at in (rows, keys)]
        groups.setdefault((*sources, block.reading.layout.batch, block.reading.layout.heads), []).append(block)
    return [part for group in groups.values() for part in _connected(group)]


def _connected(group: Sequence[_Block]) -> list[list[_Block]]:
    """Splits a group into blocks connected by shared rows or keys; packed sequences in one tensor share neither."""
    parts: list[tuple[set[object], list[_Block]]] = []
    for block in group:
        ends: set[object] = {("rows", block.rows and block.rows.first), ("keys", block.keys and block.keys.first)}
        near = [part for part in parts if part[0] & ends]
        parts = [part for part in parts if not part[0] & ends]
        met = [*(other for _, blocks in near for other in blocks), block]
        parts.append((ends.union(*(each for each, _ in near)), met))
    return [blocks for _, blocks in parts]


def _cells(group: Sequence[_Block]) -> list[tuple[Cell, Tensor]] | None:
    """Return the blocks at their rows and keys, with their values; None if they overlap or a place is unknown."""
    rows = [block.rows.first if block.rows is not None else 0 for block in group]
    sizes = {block.reading.layout.rows for block in group if block.rows is None}
    if len(sizes) > 1:
        return None
    if all(block.keys is not None for block in group):
        keys = [block.keys.first for block in group if block.keys is not None]
    else:  # keys of unknown place: the blocks are taken in the order in which they ran
        keys, after = [], 0
        for block in group:
            keys.append(after)
            after += block.reading.layout.columns
    first_row, first_key = min(rows), min(keys)
    cells = [
        (Cell(row - first_row, key - first_key, block.reading), block.value)
        for row, key, block in sorted(zip(rows, keys, group, strict=True), key=lambda entry: (entry[1], entry[0]))
    ]
    return None if _overlap([cell for cell, _ in cells]) else cells


def _overlap(cells: Sequence[Cell]) -> bool:
    """Whether two blocks share both rows and keys, or share only some of their rows."""
    keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for cell in cells:
        sizes = cell.reading.layout
        span = (cell.key, cell.key + sizes.columns)
        keys.setdefault((cell.row, cell.row + sizes.rows), []).append(span)
    return any(
        before[1] > after[0] for spans in (keys, *keys.values()) for before, after in itertools.pairwise(sorted(spans))
    )


def _joined(cells: Sequence[Cell], output: Tensor | None) -> Reading:
    first = cells[0].reading
    layout = replace(
        first.layout,
        rows=max(cell.row + cell.reading.layout.rows for cell in cells),
        columns=max(cell.key + cell.reading.layout.columns for cell in cells),
    )
    logits = _whole(cells, layout)
    if logits is None:
        return replace(joined_cells(cells, layout, None, None), output=output, no_stats=Message(STATISTICS_TOO_LARGE))
    weights = logits if logits.is_meta else logits.softmax(-1).nan_to_num(0.0)
    return replace(joined_cells(cells, layout, logits, weights), output=output)


def _whole(cells: Sequence[Cell], layout: Layout) -> Tensor | None:
    """Return the logits of all blocks, (B, H, L, S), or None if they are too many or were not held."""
    if layout.batch * layout.heads * layout.rows * layout.columns > MOST_JOINED_LOGITS:
        return None
    if any(cell.reading.no_stats is not None for cell in cells):
        return None
    return assembled_pairs(cells, layout, _logits_of, -math.inf)


def _logits_of(cell: Cell) -> Tensor | None:
    operands = cell.reading.operands
    return operands.arrange(operands.values) if isinstance(operands, Logits) else None
