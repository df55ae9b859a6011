"""How two tables of angles differ: rounded to a dtype, by axes, by frequencies, by positions.

An angle is position * frequency. Both tables are taken apart, and each hypothesis is a table put together again: it is
said only where it is the other side's table within rounding. The first that fits is taken. Frequencies and positions
may differ at once: each is a change of A's table that leaves the other as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.causes.laws import (
    LOOSE,
    SAME,
    Law,
    angle_slack,
    base_words,
    in_units,
    law_of,
    retold,
    scaling,
    turn_of,
)
from sqrtdk.compare.causes.positions import axes_words, places_words, times_words
from sqrtdk.compare.causes.turns import Turn, off, unit
from sqrtdk.compare.numbers import told_apart
from sqrtdk.compare.program import Rotation
from sqrtdk.compare.suspect import Both, Difference, Edit

MORE_DIGITS = 1e-6  # relative: bases that are less apart, as of tables that were made in float32, are one
HALF = ("bfloat16", "float16")
ROWS = 128  # that are enough to look for what is rounded
FINER = 16  # times as fine as a dtype a side computes that can tell what was rounded to it


def of_kind(kind: str) -> Callable[[Both[Rotation]], Difference | None]:
    """What compares the angles: "rounding", "rope_base" or "positions"."""
    return lambda both: differing(both).get(kind)


def differing(both: Both[Rotation]) -> dict[str, Difference]:
    """How the angles differ, by the name of the cause."""
    a, b = turns_of(both)
    near, tables = nearness(both, a, b), (both.a.table, both.b.table)
    alike = tables[0].shape[1:] == tables[1].shape[1:]
    if alike and (off(*tables) > near or not _one_amplitude(both)):
        rounded = _rounded(both, a, b, near)
        if rounded is not None:
            return {"rounding": rounded}
        plain = all(turn is not None and off(turn.table(), x) <= LOOSE for turn, x in zip((a, b), tables, strict=True))
        words = None if plain else axes_words(*tables, near)
        if words is None and (a is None or b is None):
            words = "its own angles", "other angles", "turns {parts} by other angles, of no one position a row"
        words = words or times_words(both, a, b, near)
        if words is not None and off(*tables) > near:
            return {"positions": Difference(words[0], words[1], {"text": words[2]}, _angles_of(both.b))}
    if a is None or b is None:
        return {}
    found = {"rope_base": _frequencies(both, a, b, near), "positions": _positions(both, a, b, near)}
    return {name: difference for name, difference in found.items() if difference is not None}


def nearness(both: Both[Any], *turns: Turn | None) -> float:
    """Radians that equal angles of both tables may be apart."""
    return 2 * angle_slack(both.sides, max([1.0, *(turn.span for turn in turns if turn is not None)]))


def turns_of(both: Both[Any]) -> tuple[Turn | None, Turn | None]:
    """Both tables taken apart, in positions of one size: where the frequencies are multiples, those of the unscaled.

    Where cached keys turn twice, most rows are two positions apart, and two would be taken for one.
    """
    a, b = (turn_of(side, both.vector) for side in (both.sides.a, both.sides.b))
    return _in_units_of(b, both.a, a), _in_units_of(a, both.b, b)


def _in_units_of(other: Turn | None, own: Any, turn: Turn | None) -> Turn | None:
    if other is None or not isinstance(own, Rotation) or own.table.shape[-1] != len(other.frequencies):
        return turn
    again = in_units(own.table, turn, other.frequencies)
    if turn is not None and off(other.with_frequencies(turn.frequencies).table(), own.table) < LOOSE:
        return turn  # all rows alike: frequencies that are scaled
    return again


def _one_amplitude(both: Both[Rotation]) -> bool:
    """Whether the amplitudes of each table are one: they are not where cos and sin were rounded."""
    sizes = [x.table.abs() for x in (both.a, both.b)]
    return all(bool((size / size.median() - 1).abs().max() <= both.sides.slack) for size in sizes)


def _angles_of(other: Rotation) -> Edit[Rotation]:
    def edit(own: Rotation) -> Rotation:
        return own if own.width != other.width else replace(own, table=own.table.abs() * unit(other.table))

    return edit


# -- rounded to half precision -----------------------------------------------------------------------------------------


def _rounded(both: Both[Rotation], a: Turn | None, b: Turn | None, near: float) -> Difference | None:
    """The angles of one side, rounded to half precision, are those of the other."""
    for turn, target in ((a, both.b.table), (b, both.a.table)):
        for dtype in HALF:
            if turn is None or both.sides.slack * FINER > torch.finfo(getattr(torch, dtype)).eps:
                continue
            what = _what_is_rounded(turn, target, dtype, near)
            if what:
                values = ("its own dtype", dtype) if turn is a else (dtype, "its own dtype")
                text = f"rounds {what} of the rotation of {{parts}} to {dtype}, and A does not: keep them in float32"
                if turn is b:
                    text = f"does not round {what} of the rotation of {{parts}} to {dtype}, as A does"
                return Difference(*values, {"text": text}, lambda own: replace(own, table=both.b.table))
    return None


def _what_is_rounded(turn: Turn, target: Tensor, dtype: str, near: float) -> str:
    """The part that makes the table the target, "" where none does; looked for in few rows, and looked at in all."""
    some = torch.linspace(0, target.shape[1] - 1, min(target.shape[1], ROWS)).long()
    sample = replace(turn, positions=turn.positions[:, some], amplitude=turn.amplitude[:, some])
    fits = [_is_table(table, target[:, some], near) for _, table in _roundings(sample, dtype)]
    found = next((i for i, fit in enumerate(fits) if fit), 0)
    if not found:
        return ""
    what, table = next(itertools.islice(_roundings(turn, dtype), found, None))
    return what if _is_table(table, target, near) else ""


def _is_table(table: Tensor, target: Tensor, near: float) -> bool:
    """Whether two tables are one, each amplitude relative to all of them."""
    sizes = target.abs() / target.abs().median(), table.abs() / table.abs().median()
    return off(table, target) <= near and float((sizes[0] - sizes[1]).abs().max()) <= near


def _roundings(turn: Turn, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Tables with a part of the angles rounded, and what that part is called; first with none: "".

    What is not rounded is computed in float32.
    """
    half: torch.dtype = getattr(torch, dtype)
    law, pairs = law_of(turn), len(turn.frequencies)
    exact = (turn.frequencies if law is None else law.frequencies(pairs) * turn.frequencies.sum().sign()).float()
    steps = {"": exact, "the frequencies": exact.to(half).float()}
    if law is not None:  # 1 / base ** (arange(0, R, 2) / R), all of it in half precision
        exponents = torch.arange(pairs).to(half) / pairs
        steps["base, exponents and frequencies"] = (1.0 / torch.tensor(law.base).to(half) ** exponents).float()
    at = turn.positions.float()[..., None]
    found: list[tuple[list[str], Tensor]] = []
    for of_frequencies, frequencies in steps.items():
        for of_positions, positions in {"the positions": at.to(half).float(), "": at}.items():
            angles = positions * frequencies
            for of_angles, result in {"": angles, "the angles": angles.to(half).float()}.items():
                found.append(([name for name in (of_positions, of_frequencies, of_angles) if name], result))
    for names, result in sorted(found, key=lambda one: len(one[0])):
        yield " and ".join(names), torch.polar(torch.ones_like(result).double(), result.double())
    angles = at * exact
    yield "cos and sin", torch.complex(angles.cos().to(half).double(), angles.sin().to(half).double())


# -- frequencies and positions -----------------------------------------------------------------------------------------


def _changed(both: Both[Any], known: Tensor, tolerance: float, **changed: Tensor) -> Edit[Rotation]:
    """The edit that puts other frequencies or positions into a table."""
    return lambda own: replace(own, table=retold(own, both.b, tolerance, known=known, **changed))


def _positions(both: Both[Rotation], a: Turn, b: Turn, near: float) -> Difference | None:
    """Rows are turned as if they stood elsewhere. The same shift of q and of k changes no logit."""
    shift = b.positions - a.positions
    if float(shift.abs().max()) * float(a.frequencies.abs().max()) <= near:
        return None
    old, new, text, key = places_words(both, a.positions, b.positions)
    return Difference(old, new, {"text": text}, _changed(both, a.frequencies, near, positions=b.positions), key)


def _frequencies(both: Both[Rotation], a: Turn, b: Turn, near: float) -> Difference | None:
    """Another base, exponents of another width, or another scaling for long contexts."""
    wanted = _wanted(a, b)
    if wanted is None or float((wanted - a.frequencies).abs().max()) * max(a.span, b.span) <= near:
        return None
    words, laws = (base_words(a, near), base_words(b, near)), (law_of(a), law_of(b))
    shown = [_with_base(word) for word in words]
    if words[0] == words[1]:
        words = _bases_apart(a, b, wanted)
        shown = [_with_base(word) for word in words]
    else:
        bases = [law.base for law in laws if law is not None and law.factor == 1]
        scaled = [scaling(turn, bases, near) for turn in (a, b)]
        shown = [one or plain for one, plain in zip(scaled, shown, strict=True)]
        if shown[0].startswith(f"{shown[1]} scaled"):
            shown[1] += ", unscaled,"
        if None not in laws and both.a.width == both.b.width != both.sides.head_dim and scaled == [None, None]:
            shown = _exponents(both, *laws) or shown  # type: ignore[arg-type]
    return Difference(*words, {"a": shown[0], "b": shown[1]}, _changed(both, a.frequencies, near, frequencies=wanted))


def _exponents(both: Both[Rotation], a: Law, b: Law) -> list[str] | None:
    """The exponents of the channels that turn on one side, 2c / R, and those of the whole head on the other, 2c / E."""
    turning, head = both.a.width, both.sides.head_dim
    if min(a.base, b.base) <= 1 or a.factor != 1 or b.factor != 1:
        return None
    ratio = math.log(b.base) / math.log(a.base)
    for base, wider, order in ((a.base, head / turning, (0, 1)), (b.base, turning / head, (1, 0))):
        if abs(ratio * wider - 1) < SAME:
            shown = [f"{base:g}^(-2c/{turning})", f"{base:g}^(-2c/{head}), the exponents of the whole head,"]
            return [shown[i] for i in order]
    return None


def _with_base(words: str | float) -> str:
    if isinstance(words, float):
        return f"base {words:g}"
    return words if words.startswith("frequenc") else f"base {words}"


def _bases_apart(a: Turn, b: Turn, wanted: Tensor) -> tuple[str, str]:
    """What two frequencies of one law to four digits are: the base in more digits, or that of the pair farthest off."""
    laws = law_of(a), law_of(b)
    if laws[0] is not None and laws[1] is not None:
        bases = laws[0].base, laws[1].base
        if abs(bases[0] / bases[1] - 1) > MORE_DIGITS and len(a.frequencies) == len(b.frequencies):
            return told_apart(*bases, 6)
    pair = int((wanted.abs() - a.frequencies.abs()).abs().argmax())
    old, new = told_apart(float(a.frequencies[pair].abs()), float(wanted[pair].abs()))
    return f"frequency {old} of pair {pair}", f"frequency {new} of pair {pair}"


def _wanted(a: Turn, b: Turn) -> Tensor | None:
    """B's frequencies for as many pairs as A turns, in A's direction; None where that can't be told."""
    sign = torch.where(a.frequencies.sum() < 0, -1.0, 1.0)
    pairs = min(len(a.frequencies), len(b.frequencies))
    if len(a.frequencies) == len(b.frequencies):
        return b.frequencies.abs() * sign if bool((b.frequencies * b.frequencies.sum() >= 0).all()) else b.frequencies
    mine, other = law_of(a), law_of(b)
    if mine is None or other is None:
        return None
    if torch.allclose(a.frequencies[:pairs].abs(), b.frequencies[:pairs].abs(), rtol=1e-3, atol=0):
        return None  # one law, of which one side turns fewer pairs
    return other.frequencies(len(a.frequencies)) * sign
