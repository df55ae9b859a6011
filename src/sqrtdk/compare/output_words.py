"""What a comparison says of the way of a difference: where it enters, by what, and what it reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sqrtdk.compare.chain import Chain, Entry
from sqrtdk.compare.changes import LAYER
from sqrtdk.compare.outputs import MOST_NAMES
from sqrtdk.compare.records import FirstModule, OutputDiff, PairDiff
from sqrtdk.compare.words import listed, reached_by, short, where

FOLLOWS = "which follows from the attentions"
BESIDE = "which the attentions alone do not explain"
FIRST = "the first difference is in "
NOT_FINITE = "one side has a number where the other has none"


@dataclass(frozen=True, slots=True)
class Ends:
    """What came of the outputs: every tensor, why they were not compared, what is left out, and what leads to them."""

    outputs: tuple[OutputDiff, ...] = ()
    missing: str | None = None
    notes: tuple[str, ...] = ()
    chain: Chain = field(default_factory=Chain)

    @property
    def first_module(self) -> FirstModule | None:
        """Where the models begin to differ."""
        return self.chain.entries[0].module if self.chain.entries else None

    @property
    def since(self) -> str:
        """The chain in half sentences."""
        return since_of(self.chain)


def since_of(chain: Chain) -> str:
    """The chain in half sentences.

    Example:
        >>> head = Entry(FirstModule("head", "head"), "`head`", "Linear in A, LowRank in B")
        >>> since_of(Chain((head,), whole=True))
        'the first difference is in `head`: Linear in A, LowRank in B; nothing else differs'
    """
    if not chain.entries:
        return FOLLOWS if chain.whole and chain.beside else ""
    told, kinds = [BESIDE] if chain.beside else [], dict[str, Entry]()
    for entry in chain.entries:  # layers that differ alike are told once
        kind = LAYER.sub("#", f"{entry.place}: {entry.how}")
        known = kinds.setdefault(kind, entry)
        if known is not entry:
            kinds[kind] = replace(known, others=(*known.others, entry.module.a, *entry.others))
    for number, entry in enumerate(kinds.values()):
        lead = "another is in " if number else "another difference is in " if chain.beside else FIRST
        told.append(f"{lead}{entry.place}{f': {entry.how}' if entry.how else ''}")
        told += [f"the same holds for {listed(entry.others)}"] if entry.others else []
    if chain.whole:
        rest = "the attentions explain the rest" if chain.attentions and not chain.beside else "nothing else differs"
        told.append(rest)
    return "; ".join(told)


def differing(outputs: Sequence[OutputDiff]) -> list[OutputDiff]:
    """The outputs whose numbers differ."""
    return [one for one in outputs if one.same is False and one.reason is None]


def unlike(outputs: Sequence[OutputDiff]) -> list[OutputDiff]:
    """The outputs that have another shape on each side."""
    return [one for one in outputs if one.same is False and one.reason is not None]


def unjudged_by_reason(output: OutputDiff) -> bool:
    """Whether an output was not judged, for another reason than NaN on both sides."""
    return output.same is None and output.reason is not None


def percent(share: float) -> str:
    """A share of a size, in percent.

    Example:
        >>> percent(1.0), percent(0.01234), percent(3.14e-7)
        ('100%', '1.23%', '3.1e-5%')
    """
    return f"{share * 100:.3g}%" if 1e-4 <= share < 9.995 else f"{short(share * 100)}%"


def sizes(outputs: Sequence[OutputDiff]) -> tuple[str, str]:
    """By how much the outputs differ at most, "" where that is no number; and which do, "" where there is one alone."""
    off = differing(outputs)
    by = max((one.difference or 0.0 for one in off), default=0.0)
    names = [f"`{one.name}`" for one in off]
    more = f", {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    listed = f"{', '.join(names[:MOST_NAMES])}{more}" if len(outputs) > 1 else ""
    return percent(by) if math.isfinite(by) else "", listed


def of_outputs(pairs: Sequence[PairDiff], ends: Ends) -> tuple[list[str], list[str]]:
    """What there is to say of the outputs: before what is said of the attentions, and after it.

    Example:
        >>> off = (OutputDiff("logits", False, 1.0, 2e-6),)
        >>> pair = PairDiff("h.0", "h.0", 0, 0, True, None, None, (), 2e-7, 1e-6)
        >>> chain = Chain((Entry(FirstModule("lm_head", "lm_head"), "`lm_head`"),))
        >>> of_outputs([pair, pair], Ends(off, chain=chain))
        (['The attentions agree; outputs differ by 100%. The first difference is in `lm_head`.'], [])
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
    since = ends.since
    first, *more = [f"{half[:1].upper()}{half[1:]}." for half in since.split("; ")]
    if reached and since.startswith(FIRST):
        attentions = f"the attention{'' if len(reached) == 1 else 's'} {where(reached, pairs)}"
        ends_too = f", and what the models return differs{size}" if off else ""
        return [" ".join([first, f"It reaches {attentions}{ends_too}.", *more]), *before], after
    if not off:
        return before, after
    if since == FOLLOWS:
        first = "The attentions explain all of it."
    elif since.startswith(BESIDE):
        first = "The attentions explain a part."
    chain = "".join(f" {sentence}" for sentence in (first, *more)) if since else ""
    if pairs and all(pair.same for pair in pairs):
        agree = "The attention agrees" if len(pairs) == 1 else "The attentions agree"
        return [f"{agree}; outputs differ{size}.{chain}", *before], after
    return before, [f"What the models return differs{size}.{chain}", *after]
