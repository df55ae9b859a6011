"""What a comparison says of the models' outputs, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sqrtdk.compare.first_module import Traced
from sqrtdk.compare.outputs import MOST_NAMES
from sqrtdk.compare.records import FirstModule, OutputDiff, PairDiff
from sqrtdk.compare.words import short

FOLLOWS = "which follows from the attentions"
BESIDE = "which the attentions alone do not explain"
NOT_FINITE = "one side has a number where the other has none"


@dataclass(frozen=True, slots=True)
class Ends:
    """What came of the outputs; as in `DiffReport`.

    Attributes:
        outputs: every tensor.
        first_module: where they begin to differ.
        since: half a sentence on it.
        missing: why they were not compared.
        notes: sentences on those that are left out.
    """

    outputs: tuple[OutputDiff, ...] = ()
    first_module: FirstModule | None = None
    since: str = ""
    missing: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, outputs: tuple[OutputDiff, ...], missing: str, way: Traced | None = None, notes: tuple[str, ...] = ()
    ) -> Ends:
        """With what was found of the way of a difference."""
        reason = missing or None
        if way is None or (way.found is None and not way.follows):
            return cls(outputs, missing=reason, notes=notes)
        if way.found is None:
            return cls(outputs, None, FOLLOWS if differing(outputs) else "", reason, notes)
        since = f"{BESIDE}; {way.found.since}" if way.beside else way.found.since
        return cls(outputs, way.found.module, since if differing(outputs) else "", reason, notes)


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
        >>> of_outputs([pair, pair], Ends(off, FirstModule("lm_head", "lm_head"), "from `lm_head` on"))
        (['The attentions agree; outputs differ by 100%, from `lm_head` on.'], [])
    """
    if ends.missing:
        return [], [f"The models' outputs were not compared: {ends.missing}."]
    unjudged = [f"`{one.name}`" for one in ends.outputs if one.same is None and one.reason is None]
    nan = [f"The models' outputs have NaN on both sides and were not judged: {', '.join(unjudged)}."]
    after = [
        f"The output `{one.name}` was not judged: {one.reason}." for one in ends.outputs if unjudged_by_reason(one)
    ]
    after = (nan if unjudged else []) + after
    before = [f"The output `{one.name}` has another shape: {one.reason}." for one in unlike(ends.outputs)]
    if not differing(ends.outputs):
        return before, after
    by, names = sizes(ends.outputs)
    size = f" by {'up to ' if names else ''}{by}" if by else f", {NOT_FINITE}"
    mark = ":" if ends.since.startswith("the ") else ","
    said = f"outputs differ{size}{f' ({names})' if names else ''}{f'{mark} {ends.since}' if ends.since else ''}."
    if pairs and all(pair.same for pair in pairs):
        agree = "The attention agrees" if len(pairs) == 1 else "The attentions agree"
        return [f"{agree}; {said}", *before], after
    returned = f"What the models return differs{size}{f' ({names})' if names else ''}"
    return before, [f"{returned}{_since(ends.since)}", *after]


def _since(since: str) -> str:
    """The end of the sentence, and what explains the difference."""
    if since == FOLLOWS:
        return ". The attentions explain all of it."
    if since.startswith(BESIDE):
        place = since.removeprefix(f"{BESIDE}; ").removeprefix("the difference enters ")
        begins = place.removeprefix("from ").removesuffix(" on")
        where = f"at {begins}" if begins != place else place
        return f". The attentions explain a part. Another difference begins {where}."
    mark = ":" if since.startswith("the ") else ","
    return f"{mark} {since}." if since else "."
