"""Differences of rotary frequencies in words: a base, exponents, a named scaling for long contexts.

Scalings are tried with the parameters that configs use. One is named only if it gives the frequencies of the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.compare.causes.turns import SAME_FREQUENCY
from sqrtdk.compare.inside.program import Rotation
from sqrtdk.compare.inside.suspect import BothParts
from sqrtdk.compare.numbers import four_digits, unequal_texts
from sqrtdk.laws.rotations import ORIGINAL, scaled_frequencies
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.probe.rotation import USUAL_BASES
from sqrtdk.tracing.probe.tables import FREQUENCY_TOLERANCE, LEAST_TURN, Law, Turn

SMALLEST_DIVISOR = torch.finfo(torch.float64).tiny
MOST_UNCERTAINTY = 1e-4  # radians a position: frequencies known less precisely show no law
MORE_DIGITS = 1e-6  # relative: bases closer than this, as from float32 tables, are equal
CONTEXT_LENGTHS = tuple(2**power for power in range(4, 21))  # context lengths for which models are trained
LOW_HIGH = ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (2.0, 4.0), (2.0, 8.0), (1.0, 32.0))  # of llama3, usual ones first
FAST_SLOW = ((32.0, 1.0), (16.0, 1.0), (32.0, 2.0), (64.0, 1.0))  # of YaRN, usual ones first
Parameters = dict[str, float | bool]
RecordAndWords = tuple[str | float, str]  # frequencies as the record shows them, and as the sentence does


class Scaling(NamedTuple):
    """A scaling of rotary frequencies for long contexts.

    Attributes:
        base: the base that it scales, as text.
        words: name and parameters of the scaling, as a message.
    """

    base: str
    words: Message


def wanted_frequencies(a: Turn, b: Turn) -> Tensor | None:
    """Return B's frequencies for as many pairs of channels as A rotates, in radians a position.

    They have the sign of A's. If the sides rotate different numbers of pairs, they are computed from B's base; None if
    a base is unknown, or if one side only rotates fewer pairs by the same frequencies.
    """
    if len(a.frequencies) == len(b.frequencies):
        one_way = bool((b.frequencies * b.frequencies.sum() >= 0).all())
        return b.frequencies.abs() * a.sign if one_way else b.frequencies
    pairs = min(len(a.frequencies), len(b.frequencies))
    one_law = torch.allclose(a.frequencies[:pairs].abs(), b.frequencies[:pairs].abs(), rtol=1e-3, atol=0)
    # with one law, a side may just rotate fewer pairs
    return None if a.law is None or b.law is None or one_law else b.law.frequencies(len(a.frequencies)) * a.sign


def frequency_words(
    both: BothParts[Rotation], a: Turn, b: Turn, wanted: Tensor, near: float
) -> tuple[str | float, str | float, Sequence[str]]:
    """Return the frequencies of A and of B as the record shows them, and both as the sentence shows them.

    Args:
        both: both rotations.
        a: A's table as positions and frequencies.
        b: B's table as positions and frequencies.
        wanted: B's frequencies for A's pairs, as `wanted_frequencies` returns them.
        near: allowed difference of equal angles, in radians.

    Returns:
        For A and for B a base, or text on other frequencies; then a sequence of the two texts for the sentence.
    """
    (old, old_shown), (new, new_shown) = _frequencies(a, near), _frequencies(b, near)
    if old == new:
        one, other = _more_digits(a, b, wanted)
        return one[0], other[0], [one[1], other[1]]
    plain = [turn.law.base for turn in (a, b) if turn.law is not None and turn.law.factor == 1]
    scaled = [_scaling(turn, plain, near) for turn in (a, b)]
    if scaled == [None, None] and both.a.width == both.b.width != both.sides.head_dim and len(plain) == 2:
        exponents = _exponents(plain[0], plain[1], both.a.width, both.sides.head_dim)
        if exponents is not None:
            return old, new, exponents
    shown = [words if law is None else law.words for law, words in zip(scaled, (old_shown, new_shown), strict=True)]
    if scaled[0] is not None and scaled[1] is None and isinstance(new, float) and f"{new:g}" == scaled[0].base:
        shown[1] = Message("causes.rope_base.unscaled", base=shown[1])
    return old, new, shown


def _frequencies(turn: Turn, tolerance: float) -> RecordAndWords:
    """Return the base of the frequencies, a usual one if it fits within `tolerance` radians; else their range."""
    sizes, law = turn.frequencies.abs(), turn.law
    if tolerance > MOST_UNCERTAINTY * turn.span:  # half precision shows a base to two digits
        apart = {base: float((Law(base).frequencies(len(sizes)) - sizes).abs().max()) for base in USUAL_BASES}
        base = min(USUAL_BASES, key=lambda base: apart[base])
        if apart[base] * turn.span <= tolerance:
            return _with_base(base)
    if law is None:
        most, least = four_digits(float(sizes.max())), four_digits(float(sizes.min()))
        words = Message("causes.rope_base.other_law", most=most, least=least)
        return words, words
    base = four_digits(law.base)
    if law.factor == 1:
        return _with_base(base)
    factor = f"{four_digits(law.factor):g}"
    return _with_base(Message("causes.rope_base.positions_times", base=f"{base:g}", factor=factor))


def _with_base(base: str | float) -> RecordAndWords:
    return base, Message("causes.rope_base.base", base=f"{base:g}" if isinstance(base, float) else base)


def _more_digits(a: Turn, b: Turn, wanted: Tensor) -> Sequence[RecordAndWords]:
    """Return two frequencies that agree to four digits: the base in more digits, or the pair that differs most."""
    one_width = len(a.frequencies) == len(b.frequencies)
    if a.law is not None and b.law is not None and one_width and abs(a.law.base / b.law.base - 1) > MORE_DIGITS:
        return [_with_base(base) for base in unequal_texts(a.law.base, b.law.base, 6)]
    pair = int((wanted.abs() - a.frequencies.abs()).abs().argmax())
    values = unequal_texts(float(a.frequencies[pair].abs()), float(wanted[pair].abs()))
    words = [Message("causes.rope_base.frequency", value=value, pair=pair) for value in values]
    return [(each, each) for each in words]


def _exponents(a: float, b: float, width: int, head: int) -> Sequence[Message] | None:
    """Return words for the exponents of the rotating channels, 2c / R, against those of the whole head, 2c / E."""
    if min(a, b) <= 1:
        return None
    for base, other, turn in ((a, b, 1), (b, a, -1)):
        if abs(math.log(other) / math.log(base) * head / width - 1) < SAME_FREQUENCY:
            own = Message("causes.rope_base.exponents", base=f"{base:g}", width=width)
            of_head = Message("causes.rope_base.whole_head", base=f"{base:g}", head=head)
            return (own, of_head)[::turn]
    return None


# -- scalings for long contexts, by the names and the parameters that configs have -------------------------------------


def _scaling(turn: Turn, bases: Sequence[float], tolerance: float) -> Scaling | None:
    """Return the scaling that turns a base's frequencies into these; None if no known scaling does.

    Unscaled `bases` of the tables are tried first: "base 10000 scaled by linear (factor 4)".
    """
    law, sizes, pairs = turn.law, turn.frequencies.abs(), len(turn.frequencies)

    def fits(table: Tensor | None) -> bool:
        return table is not None and float((table - sizes).abs().max()) * turn.span <= tolerance

    if law is not None and law.factor != 1:
        base, factor = f"{four_digits(law.base):g}", f"{four_digits(1 / law.factor):g}"
        linear = Message("causes.rope_base.linear", base=base, factor=factor)
        return Scaling(base, linear) if law.factor < 1 else None
    if law is not None and fits(law.frequencies(pairs)):
        return next(filter(None, (_dynamic(law.base, base, pairs) for base in bases)), None)
    if tolerance > MOST_UNCERTAINTY * turn.span:
        return None
    for usual in dict.fromkeys(map(four_digits, (*bases, *USUAL_BASES))):
        for name, parameters in _tries(usual, turn):
            if fits(scaled_frequencies(name, usual, 2 * pairs, parameters)):
                by = name if parameters.pop("truncate", True) else Message("causes.rope_base.not_truncated", law=name)
                words = joined([f"{key} {four_digits(value):g}" for key, value in parameters.items()], "comma")
                base = f"{usual:g}"
                return Scaling(base, Message("causes.rope_base.scaled", base=base, law=by, parameters=words))
    for plain in bases if law is None else ():
        # Every pair slowed down, slow pairs at least as much as fast ones: longrope, whose factors are a table.
        divided = Law(plain).frequencies(pairs) / sizes.clamp_min(SMALLEST_DIVISOR)
        if bool((divided > 1 - FREQUENCY_TOLERANCE).all()) and bool((divided.diff() > -FREQUENCY_TOLERANCE).all()):
            least, most = (f"{four_digits(float(x)):g}" for x in torch.aminmax(divided))
            base = f"{plain:g}"
            return Scaling(base, Message("causes.rope_base.longrope", base=base, least=least, most=most))
    return None


def _dynamic(base: float, plain: float, pairs: int) -> Scaling | None:
    """Return words for `dynamic`: plain * alpha^(R / (R - 2)), alpha = factor * length / longest - (factor - 1)."""
    if pairs < 2 or base <= plain * (1 + FREQUENCY_TOLERANCE) or four_digits(base) == float(f"{base:.2g}"):
        return None
    alpha = (base / plain) ** ((pairs - 1) / pairs)
    if abs(alpha * 4 - round(alpha * 4)) > FREQUENCY_TOLERANCE * alpha:
        return None
    words = {"base": f"{plain:g}", "alpha": f"{round(alpha * 4) / 4:g}", "new": f"{four_digits(base):g}"}
    return Scaling(words["base"], Message("causes.rope_base.dynamic", **words))


def _tries(base: float, turn: Turn) -> Iterator[tuple[str, Parameters]]:
    """Yield laws that keep fast pairs and divide the frequencies of slow ones by a factor, with parameters.

    The usual parameters of every law come before the others; YaRN comes first if the table has its amplitude.
    """
    plain = Law(base).frequencies(len(turn.frequencies))
    ratio = plain / turn.frequencies.abs().clamp_min(SMALLEST_DIVISOR)
    factor = float(f"{float(ratio.max()):.3g}")
    if factor <= 1 + FREQUENCY_TOLERANCE or base <= 1:
        return
    order = [("llama3", LOW_HIGH), ("yarn", FAST_SLOW)]
    has_yarns = abs(float(turn.amplitude.median()) - 1 - 0.1 * math.log(factor)) < FREQUENCY_TOLERANCE
    # YaRN multiplies cos and sin by 0.1 log(factor) + 1.
    usual = [(name, each[0]) for name, each in (order[::-1] if has_yarns else order)]
    for name, (first, second) in (*usual, *((name, two) for name, each in order for two in each[1:])):
        if name == "yarn":
            for original in CONTEXT_LENGTHS:
                parameters = {"factor": factor, ORIGINAL: original, "beta_fast": first, "beta_slow": second}
                yield from ((name, {**parameters, "truncate": truncate}) for truncate in (True, False))
            continue
        share = (1 / ratio - 1 / factor) / (1 - 1 / factor)  # kept part of a frequency, of pairs between fast and slow
        between = ((share > LEAST_TURN) & (share < 1 - LEAST_TURN)).nonzero()[:1, 0].tolist()
        turns = [float(share[c]) * (second - first) + first for c in between]  # turns within the original length
        fitted = [round(2 * math.pi * times / float(plain[c])) for c, times in zip(between, turns, strict=True)]
        for original in dict.fromkeys((*fitted, *CONTEXT_LENGTHS)):
            factors = {"factor": factor, "low_freq_factor": first, "high_freq_factor": second}
            yield name, {**factors, ORIGINAL: original}
