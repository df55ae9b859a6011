"""Compares what the two models return: every floating tensor, by a dotted name, with measured rounding.

A difference is a share of the size of A's tensor, by the root mean square of all entries; if only single entries
differ, by the largest entry of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from sqrtdk.compare.chain import Chain, Entry
from sqrtdk.compare.changes import LAYER
from sqrtdk.compare.measured import FEW, Blind, Both, Size, as_rounding, errors_of, judged, padding_of, rows_of
from sqrtdk.compare.numbers import difference
from sqrtdk.compare.precision import unit
from sqrtdk.compare.records import OutputDiff, PairDiff
from sqrtdk.compare.sides import Exact, Side
from sqrtdk.compare.words import OfOutputs, listed, reached_by, short, where

MOST_NAMES = 4  # names that a sentence lists
FOLLOWS = "which follows from the attentions"
BESIDE = "which the attentions alone do not explain"
FIRST = "the first difference is in "
NOT_FINITE = "one side has a number where the other has none"


@dataclass(frozen=True, slots=True)
class Ends:
    """The comparison of the outputs: every tensor, why none were compared, what is left out, and what leads there."""

    outputs: tuple[OutputDiff, ...] = ()
    missing: str | None = None
    notes: tuple[str, ...] = ()
    chain: Chain = field(default_factory=Chain)


def pair_outputs(a: Side, b: Side, blind: Blind) -> tuple[tuple[Both, ...], Ends]:
    """Returns the outputs of both sides that can be compared, and what is known about the others.

    They are paired by name. If A's first output has no partner, it gets an output of B with its shape: a model of
    transformers returns `logits`, its port a tensor. If B has several, such as the states after every layer, the
    closest one is taken. Places in a tuple are names only if both sides have the same places.
    """
    for letter, side in (("A", a), ("B", b)):
        if side.outputs is None:
            return (), Ends(missing=f"{letter} is a {side.info.kind}")
        if not side.outputs:
            return (), Ends(missing=f"{letter} returns no floating tensor")
    one, other = a.outputs or {}, b.outputs or {}
    names = {name: name for name in one if name in other and one[name].shape == other[name].shape}
    first = next(iter(one))
    left = [name for name in other if name not in names and other[name].shape == one[first].shape]
    # `model(ids).logits` on one side, `model(ids)` on the other
    if first not in names and left:
        names[first] = min(
            left, key=lambda name: float(difference(one[first].cpu().double(), other[name].cpu().double()).norm())
        )
    dtypes = [getattr(torch, side.info.dtype, None) for side in (a, b)]
    paired = []
    for name in filter(names.__contains__, one):
        x, y = one[name].cpu(), other[names[name]].cpu()
        units = [max(unit(own or z.dtype), unit(z.dtype)) for own, z in zip(dtypes, (x, y), strict=True)]
        rows = rows_of(x.shape, blind, cache=name.rpartition(".")[2] in ("key", "value"))
        paired.append(Both(name, names[name], x, y, rows, (units[0], units[1])))
    taken = {*names.values()}
    shared = [name for name in one if name in other and name not in names and name not in taken]
    unlike = [name for name in shared if not name.isdecimal() or set(one) == set(other)]
    if not names and not unlike:
        shapes = [tuple(next(iter(side.values())).shape) for side in (one, other)]
        return (), Ends(missing=f"A returns {shapes[0]}, B {shapes[1]}")
    shapes_of = {name: f"A returns {tuple(one[name].shape)}, B {tuple(other[name].shape)}" for name in unlike}
    alone = ("A", [name for name in one if name not in names]), ("B", [name for name in other if name not in taken])
    notes = []
    for letter, every in alone:
        if lost := [f"`{name}`" for name in every if name not in unlike]:
            more = [f"{len(lost) - MOST_NAMES} more"] if len(lost) > MOST_NAMES else []
            notes.append(f"{letter} alone returns {', '.join(lost[:MOST_NAMES] + more)}: not compared")
    notes += [
        f"rows of padding are left out of what the models return: {int(hidden.sum())} of {hidden.numel()}"
        for hidden in padding_of(a, b).values()
        if any(both.rows is not None for both in paired)
    ]
    differ = tuple(OutputDiff(name, False, None, None, reason) for name, reason in shapes_of.items())
    return tuple(paired), Ends(differ, notes=tuple(notes))


def compare_outputs(
    paired: Sequence[Both], exact: Sequence[Exact | None] | None, attentions: int
) -> tuple[OutputDiff, ...]:
    """Compares every output pair of `pair_outputs`, after the given number of attentions.

    `exact` are the float64 runs of both sides, if any; None if one rounding explains every difference.
    """
    errors = []
    for both in paired:
        names = (both.name, both.name_b)
        known = [None if one is None else one.outputs.get(name) for one, name in zip(exact or (), names, strict=False)]
        errors.append(errors_of(both, known or None))
    # An output of few entries shows little of its own rounding, so it is allowed at least that of the large ones.
    least = [_largest_share(paired, errors, side) for side in (0, 1)]
    compared = []
    for both, measured in zip(paired, errors, strict=True):
        verdict = judged(both, measured, attentions, least)
        gap, allowed = (x / verdict.size if verdict.size else 0.0 for x in (verdict.gap, verdict.allowed))
        if verdict.same is None and verdict.reason is None:
            compared.append(OutputDiff(both.name, None, None, None))
            continue
        most = allowed if math.isfinite(allowed) else None
        gap = math.inf if math.isinf(verdict.gap) else gap
        compared.append(OutputDiff(both.name, verdict.same, gap, most, verdict.reason))
    return tuple(compared)


def _largest_share(paired: Sequence[Both], errors: Sequence[Sequence[Size | None]], side: int) -> float:
    """Returns the largest rounding of a side's outputs with many entries, as a share of their size."""
    shares = [0.0]
    for both, measured in zip(paired, errors, strict=True):
        error, size = as_rounding(both, measured)[side], both.sizes[side][0]
        if error is not None and both.a.numel() >= FEW and 0.0 < size < math.inf and math.isfinite(error[0]):
            shares.append(error[0] / size)
    return max(shares)


# -- in words ----------------------------------------------------------------------------------------------------------


def since_of(chain: Chain) -> str:
    """Returns the chain in half sentences.

    Example:
        >>> from sqrtdk.compare.records import FirstModule
        >>> head = Entry(FirstModule("head", "head", "model.py:42"), "`head`", "Linear in A, LowRank in B")
        >>> since_of(Chain((head,), whole=True))
        'the first difference is in `head` (model.py:42): Linear in A, LowRank in B; nothing else differs'
    """
    if not chain.entries:
        return FOLLOWS if chain.whole and chain.beside else ""
    halves, kinds = [BESIDE] if chain.beside else [], dict[str, Entry]()
    for entry in chain.entries:  # layers that differ alike are reported once
        kind = LAYER.sub("#", f"{entry.where}: {entry.how}")
        known = kinds.setdefault(kind, entry)
        if known is not entry:
            kinds[kind] = replace(known, others=(*known.others, entry.module.a, *entry.others))
    for number, entry in enumerate(kinds.values()):
        lead = "another is in " if number else "another difference is in " if chain.beside else FIRST
        lines = f" ({entry.module.place})" if entry.module.place else ""
        halves.append(f"{lead}{entry.where}{lines}{f': {entry.how}' if entry.how else ''}")
        halves += [f"the same holds for {listed(entry.others)}"] if entry.others else []
    if chain.whole:
        every = chain.attentions and not chain.beside
        halves.append("the attentions explain the rest" if every else "nothing else differs")
    return "; ".join(halves)


def differing(outputs: Sequence[OutputDiff]) -> list[OutputDiff]:
    """Returns the outputs whose numbers differ."""
    return [one for one in outputs if one.same is False and one.reason is None]


def unlike(outputs: Sequence[OutputDiff]) -> list[OutputDiff]:
    """Returns the outputs with another shape on each side."""
    return [one for one in outputs if one.same is False and one.reason is not None]


def unjudged_by_reason(output: OutputDiff) -> bool:
    """Returns whether an output could not be judged, for a reason other than NaN on both sides."""
    return output.same is None and output.reason is not None


def percent(share: float) -> str:
    """Returns a share of a size in percent.

    Example:
        >>> percent(1.0), percent(0.01234), percent(3.14e-7)
        ('100%', '1.23%', '3.1e-5%')
    """
    return f"{share * 100:.3g}%" if 1e-4 <= share < 9.995 else f"{short(share * 100)}%"


def sizes(outputs: Sequence[OutputDiff]) -> tuple[str, str]:
    """Returns the largest difference of outputs ("" if not finite) and the names that differ ("" for only one)."""
    off = differing(outputs)
    by = max((one.difference or 0.0 for one in off), default=0.0)
    names = [f"`{one.name}`" for one in off]
    more = f", {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    listed = f"{', '.join(names[:MOST_NAMES])}{more}" if len(outputs) > 1 else ""
    return percent(by) if math.isfinite(by) else "", listed


def of_outputs(pairs: Sequence[PairDiff], ends: Ends) -> OfOutputs:
    """Returns the sentences about the outputs.

    Example:
        >>> off = (OutputDiff("logits", False, 1.0, 2e-6),)
        >>> pair = PairDiff("h.0", "h.0", 0, 0, True, None, None, (), 2e-7, 1e-6)
        >>> from sqrtdk.compare.records import FirstModule
        >>> chain = Chain((Entry(FirstModule("lm_head", "lm_head"), "`lm_head`"),))
        >>> of_outputs([pair, pair], Ends(off, chain=chain)).before
        ['The attentions agree; outputs differ by 100%. The first difference is in `lm_head`.']
    """
    before = [f"The output `{one.name}` has another shape: {one.reason}." for one in unlike(ends.outputs)]
    after = [f"The models' outputs were not compared: {ends.missing}."] if ends.missing else []
    if unjudged := [f"`{one.name}`" for one in ends.outputs if one.same is None and one.reason is None]:
        after.append(f"The models' outputs have NaN on both sides and were not judged: {', '.join(unjudged)}.")
    after += [
        f"The output `{one.name}` was not judged: {one.reason}." for one in ends.outputs if unjudged_by_reason(one)
    ]
    off, reached = differing(ends.outputs), reached_by(pairs)
    by, names = sizes(ends.outputs)
    size = f" by {'up to ' if names else ''}{by}" if by else f", {NOT_FINITE}"
    size += f" ({names})" if names else ""
    chain, since = ends.chain, since_of(ends.chain)
    first, *more = [f"{half[:1].upper()}{half[1:]}." for half in since.split("; ")]
    if reached and chain.entries and not chain.beside:
        attentions = f"the attention{'' if len(reached) == 1 else 's'} {where(reached, pairs)}"
        ends_too = f", and what the models return differs{size}" if off else ""
        return OfOutputs([" ".join([first, f"It reaches {attentions}{ends_too}.", *more]), *before], after, chain=True)
    if not off:
        return OfOutputs(before, after)
    if chain.beside:
        first = f"The attentions explain {'a part' if chain.entries else 'all of it'}."
    told = " ".join((first, *more)) if since else ""
    if pairs and all(pair.same for pair in pairs):
        agree = "The attention agrees" if len(pairs) == 1 else "The attentions agree"
        return OfOutputs([f"{agree}; outputs differ{size}. {told}".rstrip(), *before], after, agree=True)
    return OfOutputs(before, [f"What the models return differs{size}. {told}".rstrip(), *after])
