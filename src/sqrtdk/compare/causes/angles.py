"""Differences of two tables of angles: rounded to a dtype, by axes, by frequencies, by positions.

An angle is position * frequency. Both tables are taken apart, and each hypothesis is a rebuilt table. A hypothesis is
reported only if it equals the other side's table within rounding; the first one is taken. Frequencies and positions may
both differ: each is a change of A's table that keeps the other part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes.laws import frequency_words, wanted_frequencies
from sqrtdk.compare.causes.positions import axes_words, places_words, times_words
from sqrtdk.compare.causes.turns import HALF_PRECISION_RADIANS, nearness, turns_of, with_table_parts
from sqrtdk.compare.inside.program import Rotation
from sqrtdk.compare.inside.suspect import OWN_DTYPE, BothParts, DifferenceWords, Edit, PartDifference
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.probe.tables import Turn, angle_gap, phase, unit_amplitude

ROUNDED_TO = ("bfloat16", "float16")
MOST_ROWS_TRIED = 128  # rows that suffice to find out what is rounded
FINER = 16  # a side must compute this many times finer than a dtype to show what was rounded to it


def compare_angles(kind: str) -> Callable[[BothParts[Rotation]], PartDifference | None]:
    """Return a function that returns the difference of two rotations' angles for one cause, or None.

    Args:
        kind: name of the cause: "rounding", "rope_base" (frequencies) or "positions".
    """
    return lambda both: angle_differences(both).get(kind)


def angle_differences(both: BothParts[Rotation]) -> dict[str, PartDifference]:
    """Return the differences of two rotations' angles by name of the cause; {} if the angles agree.

    The names are "rounding", which excludes the others, "rope_base" (other frequencies) and "positions".
    """

    def with_angles(own: Rotation) -> Rotation:
        return own if own.width != both.b.width else replace(own, table=own.table.abs() * unit_amplitude(both.b.table))

    a, b = turns_of(both)
    near, tables = nearness(both, a, b), (both.a.table, both.b.table)
    alike = tables[0].shape[1:] == tables[1].shape[1:]
    other_angles = alike and angle_gap(*tables) > near
    sizes = [table.abs() / table.abs().median() for table in tables]  # not all 1 if cos and sin were rounded
    if other_angles or (alike and any(bool((size - 1).abs().max() > both.sides.slack) for size in sizes)):
        rounded = _rounded(both, a, b, near)
        if rounded is not None:
            return {"rounding": rounded}
    if other_angles:
        plain = all(
            x is not None and angle_gap(x.table(), y) <= HALF_PRECISION_RADIANS
            for x, y in zip((a, b), tables, strict=True)
        )
        words = None if plain else axes_words(*tables, near)
        if words is None and (a is None or b is None):
            own, other = Message("causes.positions.angles_own"), Message("causes.positions.angles_other")
            words = DifferenceWords(own, other, "causes.positions.other_angles")
        words = words or times_words(both, a, b, near)
        if words is not None:
            return {"positions": PartDifference(words.a, words.b, words.values, with_angles, text=words.text)}
    if a is None or b is None:
        return {}

    def with_parts(**parts: Tensor) -> Edit[Rotation]:
        return lambda own: with_table_parts(own, both.b, near, a.frequencies, **parts)

    found = {}
    wanted = wanted_frequencies(a, b)
    if wanted is not None and float((wanted - a.frequencies).abs().max()) * max(a.span, b.span) > near:
        old, new, shown = frequency_words(both, a, b, wanted, near)
        found["rope_base"] = PartDifference(old, new, {"a": shown[0], "b": shown[1]}, with_parts(frequencies=wanted))
    if float((b.positions - a.positions).abs().max()) * float(a.frequencies.abs().max()) > near:
        words = places_words(both, a.positions, b.positions)
        edit = with_parts(positions=b.positions)
        # equal shifts of q and k are one suspicion, by the key: shifting both changes no logit
        key = words.text, words.values
        found["positions"] = PartDifference(words.a, words.b, words.values, edit, key, words.text)
    return found


# -- rounded to half precision -----------------------------------------------------------------------------------------

POSITIONS, FREQUENCIES = "causes.rounding.positions", "causes.rounding.frequencies"
ANGLES, TABLES = "causes.rounding.angles", "causes.rounding.tables"
EXPONENTS = "causes.rounding.exponents"  # 1 / base ** (arange(0, R, 2) / R), computed in half precision
ROUNDED_PARTS = (  # nothing first, then few parts before many
    (), (POSITIONS,), (FREQUENCIES,), (EXPONENTS,), (ANGLES,), (POSITIONS, FREQUENCIES), (POSITIONS, EXPONENTS),
    (POSITIONS, ANGLES), (FREQUENCIES, ANGLES), (EXPONENTS, ANGLES), (POSITIONS, FREQUENCIES, ANGLES),
    (POSITIONS, EXPONENTS, ANGLES), (TABLES,),
)  # fmt: skip


def _rounded(both: BothParts[Rotation], a: Turn | None, b: Turn | None, near: float) -> PartDifference | None:
    """Return a difference if the angles of one side, rounded to half precision, are those of the other."""
    for turn, target in ((a, both.b.table), (b, both.a.table)):
        for dtype in ROUNDED_TO:
            if turn is None or both.sides.slack * FINER > torch.finfo(getattr(torch, dtype)).eps:
                continue
            parts = _what_is_rounded(turn, target, getattr(torch, dtype), near)
            if not parts:
                continue
            words = {"what": joined([Message(part) for part in parts], "side_by_side"), "dtype": dtype}
            own, edit = Message(OWN_DTYPE), lambda own: replace(own, table=both.b.table)
            if turn is a:
                return PartDifference(own, dtype, words, edit, text="causes.rounding.of_rotation")
            return PartDifference(dtype, own, words, edit, text="causes.rounding.not_of_rotation")
    return None


def _what_is_rounded(turn: Turn, target: Tensor, half: torch.dtype, near: float) -> tuple[str, ...]:
    """Return the parts whose rounding makes the table the target; () if none do. A sample is tried before all rows."""

    def is_target(parts: tuple[str, ...], rows: Tensor) -> bool:
        table, wanted = _with_rounded(turn, rows, parts, half), target[:, rows]
        sizes = [x.abs() / x.abs().median() for x in (table, wanted)]  # each row of amplitudes relative to their median
        return angle_gap(table, wanted) <= near and float((sizes[0] - sizes[1]).abs().max()) <= near

    rows = target.shape[1]
    sample = torch.linspace(0, rows - 1, min(rows, MOST_ROWS_TRIED)).long()
    found = next((parts for parts in ROUNDED_PARTS if is_target(parts, sample)), ())
    return found if found and is_target(found, torch.arange(rows)) else ()


def _with_rounded(turn: Turn, rows: Tensor, parts: tuple[str, ...], half: torch.dtype) -> Tensor:
    """Return some rows of the table, computed in float32, with some parts rounded."""

    def part(name: str, value: Tensor) -> Tensor:
        return value.float().to(half).float() if name in parts else value.float()

    law, pairs = turn.law, len(turn.frequencies)
    frequencies = turn.frequencies if law is None else law.frequencies(pairs) * turn.sign
    if EXPONENTS in parts and law is not None:
        frequencies = 1.0 / torch.tensor(law.base).to(half) ** (torch.arange(pairs).to(half) / pairs)
    angles = part(POSITIONS, turn.positions[:, rows])[..., None] * part(FREQUENCIES, frequencies)
    angles = part(ANGLES, angles)
    if TABLES in parts:
        return torch.complex(part(TABLES, angles.cos()).double(), part(TABLES, angles.sin()).double())
    return phase(angles.double())
