"""What rotary tables have in common with those of the other side: laws of frequencies, widths, angles that are B's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sqrtdk.compare.causes.turns import WHOLE, Turn, off, take_apart, unit
from sqrtdk.compare.numbers import number
from sqrtdk.compare.program import Program, Rotation
from sqrtdk.compare.suspect import QK, Sides, on_step, rotation, way_of
from sqrtdk.positions import yarn_frequencies
from sqrtdk.tracing.probe.rotation import USUAL

ANGLE = 2.0**-21  # of a position: angles are computed in float32 where the tables are made, whatever the dtype
LAW = 1e-3  # of a frequency, relative: as far as one may be from the law that it follows
NEAR = 0.03  # of a pair: a count of pairs that near to a whole one is one
FEW = 8  # rows of which a usual base is tried, as the one of a step of decoding
ENOUGH = 4  # pairs: by chance one place among many fits the angles of two
FIT = 1e-3  # radians
SAME = 1e-3  # relative, of frequencies, or of the logs of two bases
LOOSE = 0.1  # radians that an angle of positions times frequencies may be off by, in half precision
UNSEEN = 0.05  # angle in radians over all positions: a frequency that turns less is not known well enough to judge


@dataclass(frozen=True, slots=True)
class Law:
    """frequency of pair c: factor * base^(-c / P)."""

    base: float
    factor: float

    def frequencies(self, pairs: int, of: int = 0) -> Tensor:
        """(pairs,), radians a position; the first ones of a law of `of` pairs, where that is given."""
        return self.factor * self.base ** (-torch.arange(pairs, dtype=torch.float64) / (of or pairs))


def turn_of(program: Program, vector: str) -> Turn | None:
    """The table of q's or k's rotation taken apart; that of one row with the frequencies of the other of the two."""
    own = rotation(way_of(program, vector))
    if own is None:
        return None
    turn = take_apart(own.table)
    if turn is not None:
        return turn
    other = rotation(way_of(program, "key" if vector == "query" else "query"))
    known = None if other is None or other.width != own.width else take_apart(other.table)
    if known is not None:
        return take_apart(own.table, known.frequencies)
    few = math.prod(own.table.shape[:2]) <= FEW
    return next(filter(None, (_by_base(own.table, base) for base in USUAL)), None) if few else None


def in_units(table: Tensor, turn: Turn | None, known: Tensor) -> Turn | None:
    """A table taken apart by known frequencies, where those of `turn` are multiples of them: its unit is another."""
    if turn is None:
        turn = take_apart(table, known)
        return None if turn is None or off(turn.table(), table) > LOOSE else turn
    ratio = turn.frequencies / known
    by = float(ratio[0].abs())
    if (
        abs(by - 1) < SAME
        or abs(float(known[0].abs()) - 1) > SAME
        or not bool((ratio / ratio[0] - 1).abs().max() < SAME)
    ):
        return turn
    places = turn.positions * by
    whole = places.round()
    places = torch.where((places - whole).abs() < WHOLE, whole, places)
    return replace(turn, positions=places, frequencies=turn.frequencies / by)


@lru_cache(maxsize=64)
def _by_base(table: Tensor, base: float) -> Turn | None:
    """A table of few rows, of which no other tells the frequencies, by those of a usual base; only if they fit."""
    pairs = table.shape[-1]
    turn = take_apart(table, Law(base, 1.0).frequencies(pairs)) if pairs >= ENOUGH else None
    return turn if turn is not None and off(turn.table(), table) < FIT else None


def law_of(turn: Turn) -> Law | None:
    """The law of its frequencies; None where they follow none, as YaRN's."""
    sizes = turn.frequencies.abs()
    pairs, number_of = len(sizes), torch.arange(len(sizes), dtype=torch.float64)
    seen = sizes * turn.span > UNSEEN
    if int(seen.sum()) < 2:
        return None
    logs, weight = sizes[seen].log(), sizes[seen] ** 2
    c = number_of[seen]
    mean_c, mean_log = (weight * c).sum() / weight.sum(), (weight * logs).sum() / weight.sum()
    slope = (weight * (c - mean_c) * (logs - mean_log)).sum() / (weight * (c - mean_c) ** 2).sum()
    factor = float((mean_log - slope * mean_c).exp())
    if abs(factor - 1) < LAW:
        factor, slope = 1.0, (weight * c * logs).sum() / (weight * c * c).sum()
    law = Law(math.exp(float(-slope) * pairs), factor)
    off = (law.frequencies(pairs)[seen] - sizes[seen]).abs()
    return law if bool((off < LAW * sizes[seen] + UNSEEN / 5 / turn.span).all()) else None


def base_words(turn: Turn, tolerance: float) -> str | float:
    """The base of its frequencies, a usual one where that fits within `tolerance`, radians; or what they are."""
    sizes, law = turn.frequencies.abs(), law_of(turn)
    if tolerance > KNOWN * turn.span:  # of half precision, which tells a base by two digits
        apart = {base: float((Law(base, 1.0).frequencies(len(sizes)) - sizes).abs().max()) for base in USUAL}
        base = min(USUAL, key=lambda base: apart[base])
        if apart[base] * turn.span <= tolerance:
            return base
    if law is None:
        return f"frequencies of another law, {number(float(sizes.max()))} to {number(float(sizes.min()))}"
    base = number(law.base)
    return base if law.factor == 1 else f"{base:g}, positions times {number(law.factor):g}"


# -- scalings for long contexts, by the names and the parameters that configs have -------------------------------------

LENGTHS = tuple(2**power for power in range(4, 21))  # that models were trained for
LOW_HIGH = ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (2.0, 4.0), (2.0, 8.0), (1.0, 32.0))  # the usual ones first
FAST_SLOW = ((32.0, 1.0), (16.0, 1.0), (32.0, 2.0), (64.0, 1.0))
KNOWN = 1e-4  # radians a position: frequencies that are known less well tell no law
ORIGINAL = "original_max_position_embeddings"


def scaling(turn: Turn, bases: Sequence[float], tolerance: float) -> str | None:
    """The scaling that makes its frequencies of those of a base, with parameters that do.

    Args:
        turn: the table.
        bases: of the tables that are not scaled.
        tolerance: radians that its angles may be off by.

    Returns:
        "base 10000 scaled by linear (factor 4)"; None where no scaling that is known does it.
    """
    law, sizes, pairs = law_of(turn), turn.frequencies.abs(), len(turn.frequencies)
    if law is not None and law.factor != 1:
        by = f"linear (factor {number(1 / law.factor):g})"
        return f"base {number(law.base):g} scaled by {by}" if law.factor < 1 else None
    if law is not None and float((law.frequencies(pairs) - sizes).abs().max()) * turn.span <= tolerance:
        return next(filter(None, (_dynamic(law.base, base, pairs) for base in bases)), None)
    if tolerance > KNOWN * turn.span:
        return None
    for base in dict.fromkeys(map(number, (*bases, *USUAL))):
        for name, parameters, table in _scaled(base, sizes, float(turn.amplitude.median())):
            if float((table - sizes).abs().max()) * turn.span <= tolerance:
                words = ", ".join(f"{key} {number(value):g}" for key, value in parameters.items())
                return f"base {base:g} scaled by {name} ({words})"
    for base in bases if law is None else ():
        divided = Law(base, 1.0).frequencies(pairs) / sizes.clamp_min(torch.finfo(torch.float64).tiny)
        if bool((divided > 1 - LAW).all()) and bool((divided.diff() > -LAW).all()):
            least, most = (number(float(x)) for x in torch.aminmax(divided))
            return f"base {base:g} scaled by longrope (factors {least:g} to {most:g})"
    return None


def _dynamic(base: float, plain: float, pairs: int) -> str | None:
    """The base of `dynamic`, plain * alpha^(R / (R - 2)) with alpha = factor * length / longest - (factor - 1)."""
    if pairs < 2 or base <= plain * (1 + LAW) or number(base) == float(f"{base:.2g}"):
        return None
    alpha = (base / plain) ** ((pairs - 1) / pairs)
    if abs(alpha * 4 - round(alpha * 4)) > LAW * alpha:
        return None
    return f"base {plain:g} scaled by dynamic (NTK) by {round(alpha * 4) / 4:g} to {number(base):g}"


def _scaled(base: float, sizes: Tensor, amplitude: float) -> Iterator[tuple[str, dict[str, float], Tensor]]:
    """Frequencies of a base by laws that leave fast pairs as they are and divide those of slow ones by a factor.

    Each with the usual parameters before any with others, YaRN first where the table has its amplitude.
    """
    plain = Law(base, 1.0).frequencies(len(sizes))
    ratio = plain / sizes.clamp_min(torch.finfo(torch.float64).tiny)
    factor = float(f"{float(ratio.max()):.3g}")
    if factor <= 1 + LAW or base <= 1:
        return
    usual = [(_llama3, LOW_HIGH[0]), (_yarn, FAST_SLOW[0])]
    if abs(amplitude - 1 - 0.1 * math.log(factor)) < LAW:
        usual.reverse()
    others = [(law, two) for law, each in ((_llama3, LOW_HIGH), (_yarn, FAST_SLOW)) for two in each[1:]]
    for law, two in (*usual, *others):
        yield from law(base, plain, ratio, factor, two)


def _llama3(
    _base: float, plain: Tensor, ratio: Tensor, factor: float, low_high: tuple[float, float]
) -> Iterator[tuple[str, dict[str, float], Tensor]]:
    low, high = low_high
    share = (1 / ratio - 1 / factor) / (1 - 1 / factor)
    between = ((share > UNSEEN) & (share < 1 - UNSEEN)).nonzero()[:1, 0].tolist()
    fitted = [round(2 * math.pi * float((share[c] * (high - low) + low) / plain[c])) for c in between]
    for original in dict.fromkeys((*fitted, *LENGTHS)):
        blend = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        parameters = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, ORIGINAL: original}
        yield "llama3", parameters, (1 - blend) * plain / factor + blend * plain


def _yarn(
    base: float, plain: Tensor, _ratio: Tensor, factor: float, fast_slow: tuple[float, float]
) -> Iterator[tuple[str, dict[str, float], Tensor]]:
    fast, slow = fast_slow
    for original in LENGTHS:
        parameters = {"factor": factor, ORIGINAL: original, "beta_fast": fast, "beta_slow": slow}
        for truncate in (True, False):
            table = yarn_frequencies(
                2 * len(plain), factor=factor, original_length=original, base=base, beta_fast=fast,
                beta_slow=slow, truncate=truncate, dtype=torch.float64,
            )  # fmt: skip
            yield "yarn" if truncate else "yarn without truncation", parameters, table


def angle_slack(sides: Sides, span: float) -> float:
    """Radians that two equal tables may be apart."""
    return sides.slack if sides.slack < ANGLE / 8 else sides.slack + ANGLE * span


def snapped(table: Tensor, target: Tensor, tolerance: float) -> Tensor:
    """The table with the angles of `target` where all of them are the same within `tolerance`: no rounding is left."""
    if table.shape[1:] != target.shape[1:]:
        return table
    wanted = unit(target.to(torch.complex128))
    return table if float((unit(table) - wanted).abs().max()) > tolerance else table.abs() * wanted


def retold(
    own: Rotation,
    target: Rotation,
    tolerance: float,
    *,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """The table of `own` with other positions or frequencies, and its amplitude; as it is where it can't be told.

    Args:
        own: what is changed.
        target: the other side's; where the result is its table within rounding its angles are taken.
        tolerance: of that, in radians.
        positions: in place of its own.
        frequencies: in place of its own.
        known: its own frequencies, where its rows can't tell them.
    """
    turn = take_apart(own.table)
    if known is not None and own.table.shape[-1] == len(known):
        turn = in_units(own.table, turn, known)
    if turn is None:
        return own.table
    if frequencies is not None:
        other_width = len(frequencies) != len(turn.frequencies)
        # of neighbours more, or fewer, may have been said to turn: by too little to show
        if other_width and (own.layout != "interleaved" or _shows(turn, frequencies, tolerance)):
            return own.table
        turn = turn.with_frequencies(-frequencies if _against(frequencies, turn.frequencies) else frequencies)
    if positions is not None:
        turn = replace(turn, positions=positions)
    return snapped(turn.table(), target.table, tolerance)


def _against(one: Tensor, other: Tensor) -> bool:
    """Whether two sets of frequencies turn in opposite directions, which is no matter of the base."""
    return float(one.sum() * other.sum()) < 0


def _shows(turn: Turn, frequencies: Tensor, tolerance: float) -> bool:
    """Whether pairs that the one has and the other has not turn by more than `tolerance`, radians, in all positions."""
    pairs = min(len(frequencies), len(turn.frequencies))
    beyond = torch.cat([frequencies[pairs:], turn.frequencies[pairs:]])
    return bool(float(beyond.abs().max()) * turn.span > tolerance)


# -- how many neighbouring channels turn, where the slow pairs turn too little to show ---------------------------------


def like_widths(sides: Sides) -> Sides:
    """The sides, with rotations of neighbours of the width that is most like the other side's.

    In half precision a fit can't tell whether the last pairs of neighbours turn by almost nothing or do not turn, and
    may say another width on each side. A width that makes the law of one side that of the other is taken, else the
    other's.
    """
    for vector in QK:
        a, b = rotation(way_of(sides.a, vector)), rotation(way_of(sides.b, vector))
        if a is None or b is None or "interleaved" not in (a.layout, b.layout):
            continue
        own, other = (b, a) if b.layout == "interleaved" else (a, b)
        like = _like(own, other, sides)
        change = on_step(vector, Rotation)(lambda _, like=like: like)  # type: ignore[misc]
        sides = replace(sides, b=change(sides.b)) if own is b else replace(sides, a=change(sides.a))
    return sides


def _like(own: Rotation, other: Rotation, sides: Sides) -> Rotation:
    turn, known = take_apart(own.table), take_apart(other.table)
    law, like = (None if each is None else law_of(each) for each in (turn, known))
    if turn is None or law is None or law.factor != 1 or law.base <= 1:
        return own
    ratio = law.base ** (-1 / len(turn.frequencies))
    widths = [other.width]
    if like is not None and like.factor == 1 and like.base > 1:
        pairs = -math.log(like.base) / math.log(ratio)
        if abs(pairs - round(pairs)) < NEAR and round(pairs) > 0:
            widths.insert(0, 2 * round(pairs))
    for width in widths:
        if width == own.width:
            return own
        hidden = turn.frequencies.abs()[min(width, own.width) // 2 :]
        most = max([ratio ** (min(width, own.width) // 2), *hidden.tolist()])
        if own.first + width <= sides.head_dim and most * turn.span < sides.slack:
            more = turn.frequencies.sum().sign() * ratio ** torch.arange(width // 2, dtype=torch.float64)
            have = turn.frequencies[: width // 2]
            return replace(own, table=turn.with_frequencies(torch.cat([have, more[len(have) :]])).table())
    return own
