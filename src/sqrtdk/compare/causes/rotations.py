"""Differences of the rotations of q and k: missing, other frequencies, positions, channels, pairing, amplitude.

Angles are position * frequency. Each cause puts one of these into A's table and keeps the others. If the result equals
B's table within rounding, B's angles are taken exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes.angles import angle_differences
from sqrtdk.compare.causes.norms import norms_before_rotation
from sqrtdk.compare.causes.projections import like_amplitude, relabelled
from sqrtdk.compare.causes.turns import like_widths, nearness, snapped, turns_of
from sqrtdk.compare.inside.program import QK, NormStep, Rotation, VectorPath
from sqrtdk.compare.inside.suspect import BothParts, PartDifference, Sides, change_step, norms_of, path_of, rotation_of
from sqrtdk.compare.numbers import few_digits
from sqrtdk.messages import Message
from sqrtdk.tracing.probe.tables import Turn, take_apart, unit_amplitude

ROTATED, NOT_ROTATED = "causes.rope_missing.rotated", "causes.rope_missing.not_rotated"
ONE_BASE = 0.01  # relative distance of equal bases: few pairs show a base roughly
MOST_SORTED = 2**23  # numbers from which a median is taken: quantile refuses more than 2^24


def rotation_pairs(sides: Sides) -> Iterator[BothParts[Rotation]]:
    """Yield the rotations of q, then of k, for each vector that both sides rotate.

    If A rotates a single row of q, and B rotates only k, B's q counts as rotated at position 0, which changes nothing.
    """
    sides = _with_position_0(sides)
    for vector in QK:
        a, b = rotation_of(path_of(sides.a, vector)), rotation_of(path_of(sides.b, vector))
        if a is not None and b is not None:
            yield BothParts(sides, a, b, change_step(vector, Rotation), vector)


def _with_position_0(sides: Sides) -> Sides:
    """Return the sides with B's single row of q at position 0, if A rotates it and B rotates only k.

    At position 0 a rotation changes nothing, so it can't be told from a missing one.
    """
    own, other, keys = rotation_of(sides.a.query), rotation_of(sides.b.query), rotation_of(sides.b.key)
    if own is None or other is not None or keys is None or own.table.shape[1] != 1:
        return sides
    still = replace(own, table=torch.ones_like(own.table))
    return replace(sides, b=replace(sides.b, query=replace(sides.b.query, steps=(*sides.b.query.steps, still))))


def like_rotation_pairs(sides: Sides) -> Iterator[BothParts[Rotation]]:
    """Yield the same as `rotation_pairs`, after `like_widths` made the numbers of rotating neighbours alike."""
    return rotation_pairs(like_widths(sides))


# -- there or not ------------------------------------------------------------------------------------------------------


def compare_rotation_presence(both: BothParts[VectorPath]) -> PartDifference | None:
    """Return the difference if only one side rotates the vector; None otherwise.

    `a` and `b` say "rotated" or "not rotated". The edit removes A's rotation, or inserts B's at the same place among
    the norms.
    """
    a, b = rotation_of(both.a), rotation_of(both.b)
    if a is not None and b is None:
        of_position_0 = both.vector == "query" and _with_position_0(both.sides) is not both.sides
        return None if of_position_0 else PartDifference(Message(ROTATED), Message(NOT_ROTATED), edit=_without_rotation)
    if b is None or a is not None:
        return None
    before = norms_before_rotation(both.b)
    last = before == len(norms_of(both.b))

    def added(old: VectorPath) -> VectorPath:
        rest = _without_rotation(old).steps
        # among A's norms, at the place that it has among B's
        places = [i for i, step in enumerate(rest) if isinstance(step, NormStep)][before:]
        place = len(rest) if last or not places else places[0]
        return replace(old, steps=(*rest[:place], b, *rest[place:]))

    return PartDifference(Message(NOT_ROTATED), Message(ROTATED), edit=added)


def _without_rotation(old: VectorPath) -> VectorPath:
    return replace(old, steps=tuple(step for step in old.steps if not isinstance(step, Rotation)))


# -- which channels ----------------------------------------------------------------------------------------------------


def compare_layout(both: BothParts[Rotation]) -> PartDifference | None:
    """Return the difference in how channels are paired; None if there is none.

    The layouts are "half", which pairs channel c with c + R / 2, and "interleaved", which pairs 2 c with 2 c + 1, for R
    rotating channels. It is no difference if only two channels rotate, or if the rows of the projection are permuted to
    match.
    """
    a, b = both.a, both.b
    if (a.layout, a.spread) == (b.layout, b.spread) or max(a.width, b.width) == 2 or relabelled(both.sides):
        return None
    # pairs too slow to show as neighbours would be other pairs in the half-split layout
    like = rotation_of(path_of(like_widths(both.sides).a, both.vector)) or a

    def edit(own: Rotation) -> Rotation:
        table = like.table if like.width != a.width == own.width else own.table
        return replace(own, layout=b.layout, spread=b.spread, table=table)

    old, new = _layout(a), _layout(b)
    if not b.spread:
        return PartDifference(old, new, edit=edit)
    words = {"table": _name(b.spread), "layout": _name(b.layout), "code": _name(f"{b.layout}_code")}
    return PartDifference(old, new, words, edit, text="causes.rope_layout.no_rotation")


def _layout(turned: Rotation) -> Message:
    name = _name(turned.layout)
    if not turned.spread:
        return name
    return Message("causes.rope_layout.laid_out", layout=name, table=_name(turned.spread))


def _name(layout: str) -> Message:
    return Message(f"causes.rope_layout.{layout}")


def compare_direction(both: BothParts[Rotation]) -> PartDifference | None:
    """Return the difference if the sides rotate in opposite directions; None otherwise or if unknown.

    A reverse rotation has the complex conjugate of the table, which is what the edit makes of A's.
    """
    a, b = turns_of(both)
    if a is None or b is None or a.sign == b.sign:
        return None
    old, new = (_name("backwards" if turn.sign < 0 else "forwards") for turn in (a, b))
    return PartDifference(old, new, edit=lambda own: replace(own, table=own.table.conj().resolve_conj()))


def compare_channels(both: BothParts[Rotation]) -> PartDifference | None:
    """Return the difference in which channels rotate; None if the same ones do.

    Frequencies may depend on the number R of rotating channels, base^(-2c / R), or on that of all channels of the head.
    The edit takes the variant closest to B's frequencies; any remaining difference is left to the cause `rope_base`.
    """
    a, b, turns = both.a, both.b, turns_of(both)
    near = nearness(both, *turns)
    moving = _moving(a, turns[0], near), _moving(b, turns[1], near)
    if (a.width, a.first, moving[0]) == (b.width, b.first, moving[1]):
        return None
    old, new = (_channels(x, both.sides.head_dim, pairs) for x, pairs in zip((a, b), moving, strict=True))
    words = {"of_a": "", "of_b": ""} if a.width == b.width or a.layout != b.layout else _pairs_apart(both, *turns)
    return PartDifference(
        old, new, words, edit=lambda own: replace(own, table=_resized(own, b, turns[1], near), first=b.first)
    )


def _moving(turned: Rotation, turn: Turn | None, tolerance: float) -> int:
    """Return how many of the first pairs rotate; all if unknown.

    Half a head that rotates by the table of the whole head has pairs that stand still: cat(angles[:n], zeros).
    """
    pairs = turned.width // 2
    if turn is None:
        return pairs
    still = turn.still(tolerance)
    first = int((~still).sum())
    shows = turn.law is not None and float(turn.law.frequencies(pairs)[first:].sum()) * turn.span > 2 * tolerance
    return first if shows and not bool(still[:first].any()) else pairs


def _pairs_apart(both: BothParts[Rotation], *turns: Turn | None) -> dict[str, str]:
    """Return the distance between paired channels on each side, and the divisor of the exponents of a common base."""
    bases = [turn.law.base for turn in turns if turn is not None and turn.law is not None]
    one_base = len(bases) == 2 and abs(bases[0] / bases[1] - 1) < ONE_BASE
    words: dict[str, str] = {}
    for name, x in (("of_a", both.a), ("of_b", both.b)):
        apart, width = x.width // 2, x.width
        if x.layout == "half" and one_base:
            words[name] = Message("causes.rope_partial.of_both", apart=apart, width=width)
        elif x.layout == "half":
            words[name] = Message("causes.rope_partial.of_pairs", apart=apart)
        else:
            words[name] = Message("causes.rope_partial.of_base", width=width) if one_base else ""
    return words


def _channels(turned: Rotation, head_dim: int, moving: int) -> Message:
    where, pairs = Message("causes.rope_partial.all", dims=head_dim), turned.width // 2
    if turned.width != head_dim:
        last = turned.first + turned.width - 1
        where = Message("causes.rope_partial.channels", first=turned.first, last=last, dims=head_dim)
    if moving == pairs:
        return where
    return Message("causes.rope_partial.first_pairs", moving=moving, pairs=pairs, channels=where)


def _resized(own: Rotation, target: Rotation, other: Turn | None, tolerance: float) -> Tensor:
    """Return a table for as many channels as `target` rotates, with `own`'s positions, amplitude and law."""
    turn, pairs = take_apart(own.table), target.width // 2
    if turn is None or other is None:
        return own.table if own.width == target.width else target.table
    if own.width == target.width and torch.equal(turn.still(tolerance), other.still(tolerance)):
        return own.table
    wanted = other.frequencies
    if turn.law is not None:
        laws = [turn.sign * turn.law.frequencies(pairs, of) for of in (pairs, len(turn.frequencies))]
        laws += [torch.where(wanted == 0, 0.0, one) for one in laws]
        wanted = min(laws, key=lambda one: float((one.abs() - other.frequencies.abs()).abs().max()))
    return snapped(turn.with_frequencies(wanted).table(), target.table, tolerance)


# -- amplitude ---------------------------------------------------------------------------------------------------------


def compare_amplitude(both: BothParts[Rotation]) -> PartDifference | None:
    """Return the difference of the factor on cos and sin, such as YaRN's; None if there is none.

    `a` and `b` are the medians of the absolute values of the tables. The edit changes only these, so the angles stay
    A's. It is also None if rounded angles explain the difference.
    """
    mine, wanted = both.a.table.abs(), both.b.table.abs()
    if both.a.width != both.b.width:  # only channels that both rotate
        mine, wanted = (x.median(-1, keepdim=True).values for x in (mine, wanted))
    if mine.shape[1] != wanted.shape[1]:
        return None
    ratio = (wanted / mine.clamp_min(torch.finfo(torch.float64).tiny)).flatten()[:MOST_SORTED]
    if max(abs(float(ratio.median()) - 1), float((ratio - 1).abs().quantile(0.5))) <= both.sides.slack:
        return None
    if "rounding" in angle_differences(both):  # rounded cos and sin change lengths too
        return None

    def edit(own: Rotation) -> Rotation:
        size = wanted if wanted.shape[-1] in (1, own.table.shape[-1]) else wanted[..., :1]
        return replace(own, table=unit_amplitude(own.table) * size)

    old, new = (float(x.flatten()[:MOST_SORTED].median()) for x in (mine, wanted))
    return PartDifference(*few_digits(old, new), edit=edit)


def compare_amplitude_as_factor(both: BothParts[VectorPath]) -> PartDifference | None:
    """Return the difference of an equal factor on q and k that both rotate; None without one.

    Such a factor can't be told from an amplitude of the rotary tables. `a` and `b` are the factors of both sides.
    """
    if not like_amplitude(both.sides):
        return None
    old, new = (float(torch.as_tensor(path.scaled).flatten()[0]) for path in (both.a, both.b))
    return PartDifference(*few_digits(old, new))
