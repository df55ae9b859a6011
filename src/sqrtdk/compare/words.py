"""Prepares what paragraphs, tables and pages say of pairs: groups with the same causes, sites, numbers as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

from sqrtdk._sites import ROOT_NAME, fold_sites
from sqrtdk.compare.records import UNKNOWN_CAUSE, Cause, PairDiff
from sqrtdk.messages import Message, joined

_NUMBER_IN_TEXT = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_OTHER_WEIGHT = ("causes.weights.other", "causes.weights.other_named")
_VECTOR_LETTERS = ("q", "k", "v")
_MOST_SITES_LISTED = 4
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Group:
    """Pairs that differ for the same reasons.

    Attributes:
        pairs: pairs with a difference of their own, in A's order.
        causes: causes of the first pair, without "unknown".
        unknown: part or all of the difference has no known cause.
        followers: pairs whose difference comes from one of these.
    """

    pairs: tuple[PairDiff, ...]
    causes: tuple[Cause, ...]
    unknown: bool
    followers: tuple[PairDiff, ...]

    @property
    def worst(self) -> PairDiff:
        """Return the pair with the largest `excess`: the remaining error over the allowed rounding error."""
        return max(self.pairs, key=excess)

    @property
    def resolved(self) -> bool:
        """Return whether the causes explain everything.

        It is True if there is at least one cause, no unknown one, and every pair's `excess` is at most 1: the outputs
        agree within rounding once all causes are applied.
        """
        return bool(self.causes) and not self.unknown and all(excess(pair) <= 1 for pair in self.pairs)

    @property
    def only_reached(self) -> bool:
        """Return whether the group is `resolved` and every pair has the single cause "input": its input differs."""
        return self.resolved and all(is_reached(pair) and len(pair.causes) == 1 for pair in self.pairs)

    @property
    def numbers_differ(self) -> bool:
        """Return whether the texts of the named causes are not the same for all pairs, such as by another number."""
        return len({tuple(cause.text for cause in named_causes(pair)) for pair in self.pairs}) > 1


def groups(pairs: Iterable[PairDiff]) -> tuple[Group, ...]:
    """Return groups of pairs that differ for the same reasons, in the order of their first pairs.

    Only pairs with `same` False and without `follows_from` are grouped. Two pairs share a group if their named causes
    have the same names, stages and texts, apart from the numbers in the texts; pairs with an unknown cause must also
    have the same first differing stage. Pairs that follow from a member are the group's `followers`.
    """
    every = list(pairs)

    def causes(pair: PairDiff) -> tuple[object, ...] | None:
        if pair.same is not False or pair.follows_from is not None:
            return None
        # Layers that differ alike differ in their numbers: 0.125 and 0.25 make no second group.
        named = [(cause.name, cause.stage, numbers_masked(cause.text)) for cause in named_causes(pair)]
        return (*named, pair.first_stage) if _unknown(pair) else tuple(named)

    found = []
    for members in _by(every, causes).values():
        places = {site_of_pair(pair) for pair in members}
        followers = tuple(pair for pair in every if pair.follows_from is not None and _origin(pair) in places)
        found.append(Group(tuple(members), named_causes(members[0]), _unknown(members[0]), followers))
    return tuple(found)


def by_cause(found: Sequence[Group]) -> list[tuple[Cause, list[PairDiff], bool]]:
    """Return the causes of several groups, each once: the cause, the pairs that have it, and whether numbers differ.

    Two causes are one if their names, stages and texts are the same, apart from the numbers in the texts.

    Args:
        found: Groups that their causes explain.

    Returns:
        Nothing if no cause is in two groups: then each group is said by itself.
    """
    first: dict[tuple[str, str, str], Cause] = {}
    having: dict[tuple[str, str, str], list[PairDiff]] = {}
    texts: dict[tuple[str, str, str], set[str]] = {}
    many = 0
    for group in found:
        for pair in group.pairs:
            for cause in shown_causes(named_causes(pair)):
                key = cause.name, cause.stage, numbers_masked(cause.text)
                first.setdefault(key, cause)
                having.setdefault(key, []).append(pair)
                texts.setdefault(key, set()).add(str(cause.text))
        many += len(shown_causes(group.causes))
    if len(first) == many:
        return []
    return [(cause, having[key], len(texts[key]) > 1) for key, cause in first.items()]


def orphans(pairs: Iterable[PairDiff], found: Iterable[Group]) -> dict[str, list[PairDiff]]:
    """Return the pairs that follow from another pair and are no follower of any group.

    Args:
        pairs: all pairs.
        found: result of `groups` for these pairs.

    Returns:
        The pairs by the site of A that they follow from, as in `PairDiff.follows_from`.
    """
    followers = {id(pair) for group in found for pair in group.followers}
    return _by(pairs, lambda pair: None if pair.follows_from is None or id(pair) in followers else _origin(pair))


def cancelling(pairs: Iterable[PairDiff]) -> dict[tuple[tuple[str, ...], bool], list[PairDiff]]:
    """Return the pairs with stages that differ without changing the output.

    Returns:
        The pairs by (these stages, whether the pair also has a difference that does change the output, with causes).
    """
    own = {id(pair): pair.same is False and bool(pair.causes) for pair in pairs}
    return _by(pairs, lambda pair: (pair.cancelling, own[id(pair)]) if pair.cancelling else None)


def left_out(pairs: Iterable[PairDiff]) -> dict[tuple[int, int], list[PairDiff]]:
    """Return the pairs with rows that were not compared because they see no key.

    Returns:
        The pairs by (number of rows left out, number of all rows).
    """
    return _by(pairs, lambda pair: (pair.rows_left_out, pair.rows) if pair.rows_left_out else None)


def _by(pairs: Iterable[PairDiff], key: Callable[[PairDiff], Key | None]) -> dict[Key, list[PairDiff]]:
    """Return pairs by a key; pairs whose key is None are left out."""
    found: dict[Key, list[PairDiff]] = {}
    for pair in pairs:
        if (name := key(pair)) is not None:
            found.setdefault(name, []).append(pair)
    return found


def numbers_masked(text: str) -> str:
    """Return a text with "#" for each number, so that texts which differ in numbers alone are equal."""
    return _NUMBER_IN_TEXT.sub("#", text)


def named_causes(pair: PairDiff) -> tuple[Cause, ...]:
    """Return the causes of a pair in their order, without those named "unknown"."""
    return tuple(cause for cause in pair.causes if cause.name != UNKNOWN_CAUSE)


def shown_causes(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return causes as shown to a reader: other weights of q, k and v become one cause.

    The joined cause stands where the first of them was, names all vectors ("q, k, v") and takes the largest
    `explained`. All other causes stay as they are.

    Example:
        >>> def off(part, size):
        ...     how = Message("causes.weights.rows", differ=8, rows=8, share=size)
        ...     return Cause("weights", part, part, 0.5, Message("causes.weights.other", parts=part, how=how), "query")
        >>> [(cause.a, cause.text) for cause in shown_causes([off("q", "0.5"), off("k", "0.2")])]
        [('q, k', 'has other weights for q and k (off by 0.2 to 0.5 of their size)')]
    """
    every = list(causes)
    # Another checkpoint gives three causes that say the same of q, k and v.
    weights = [(cause, cause.text) for cause in every if isinstance(cause.text, Message)]
    weights = [(cause, text) for cause, text in weights if text.id in _OTHER_WEIGHT]
    if not weights:
        return tuple(every)
    letters = [letter for _, text in weights for letter in _VECTOR_LETTERS if letter in str(text.values["parts"])]
    first, text = weights[0]
    if len(weights) > 1:
        text = _other_weights(letters, [text.values["how"] for _, text in weights])
    parts = joined(letters, "comma")
    one = replace(first, a=parts, b=parts, text=text, codes=(), explained=max(cause.explained for cause, _ in weights))
    others = [id(cause) for cause, _ in weights[1:]]
    return tuple(one if cause is first else cause for cause in every if id(cause) not in others)


def _other_weights(letters: Sequence[str], distances: Iterable[object]) -> Message:
    parts = joined(letters, "and")
    shares = [how.values["share"] for how in distances if isinstance(how, Message) and "share" in how.values]
    if not shares:
        return Message("causes.weights.others", parts=parts)
    least, most = (short(end(map(float, shares))) for end in (min, max))
    span = least if least == most else Message("causes.value.range", least=least, most=most)
    return Message("causes.weights.others_off", parts=parts, share=span)


def lost_stage(pair: PairDiff) -> str | None:
    """Return the stage of a difference without a known cause; None if the pair has no differing stage.

    This is the stage of the first cause "unknown" that has one, else the first stage that differs.
    """
    stages = [cause.stage for cause in pair.causes if cause.name == UNKNOWN_CAUSE and cause.stage]
    return stages[0] if stages else pair.first_stage


def site_text(site: str, index: int) -> str:
    """Return a module path with the number of its call, unless that is 0: "h.0", "h.0#1"; "(root)" for the path ""."""
    return f"{site or ROOT_NAME}{f'#{index}' if index else ''}"


def site_of_pair(pair: PairDiff) -> str:
    """Return the site of A as text: module path and number of the call, as `site_text` writes them."""
    return site_text(pair.site_a, pair.index_a)


def is_to_the_end(members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> bool:
    """Return whether these are at least two pairs, and the last ones of all pairs without a gap.

    Args:
        members: some of the pairs, in order.
        pairs: all pairs; members are found by identity, not by equality.
    """
    last = pairs[-len(members) :]
    return len(members) > 1 and all(one is other for one, other in zip(members, last, strict=True))


def sites_of_pairs(members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> Message:
    """Return where some pairs are, as text.

    Args:
        members: pairs to name, in order.
        pairs: all pairs.

    Returns:
        "from h.0 on" if the members are at least two and the last of all pairs; else "at" and the list of their sites.
    """
    if is_to_the_end(members, pairs):
        return Message("paragraphs.where.since", site=site_of_pair(members[0]))
    return Message("paragraphs.where.sites", sites=site_list([site_of_pair(pair) for pair in members]))


def site_list(sites: Iterable[str]) -> str:
    """Return sites as one text, numbered ones folded into ranges; after the first 4 entries only how many more."""
    folded = fold_sites(sites)
    names, more = joined(folded[:_MOST_SITES_LISTED], "comma"), len(folded) - _MOST_SITES_LISTED
    return Message("paragraphs.sites.more", sites=names, count=more) if more > 0 else names


def one_paragraph(sentences: Sequence[str]) -> str:
    """Return at least one sentence as one paragraph, joined as the catalogue of texts prescribes."""
    return reduce(lambda first, second: Message("paragraphs.then", first=first, second=second), sentences)


def short(value: float | None) -> str:
    """Return a difference with two significant digits; "-" for None.

    Example:
        >>> short(3.14e-6), short(0.25), short(12345.6), short(0.0), short(None), short(math.nan)
        ('3.1e-6', '0.25', '1.2e4', '0', '-', 'NaN')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].replace("+", ""), f"{value:.2g}")


def share_text(value: float | None) -> str:
    """Return a share in percent, rounded down so that an unexplained rest never disappears.

    Example:
        >>> share_text(1.0), share_text(0.99999), share_text(0.8738), share_text(None)
        ('100%', '99.99%', '87.3%', '-')
    """
    if value is None or not math.isfinite(value):
        return short(value)
    digits = 100 if value >= 0.99 else 10
    return f"{math.floor(100 * digits * value + 1e-9) / digits:g}%"


def largest_pair(pairs: Iterable[PairDiff], size: Callable[[PairDiff], float | None]) -> PairDiff:
    """Return the pair for which `size` is largest; a NaN counts as infinite and None as less than all.

    There must be at least one pair.
    """

    def rank(pair: PairDiff) -> float:
        value = size(pair)
        return -1.0 if value is None else math.inf if math.isnan(value) else value

    return max(pairs, key=rank)


def is_reached(pair: PairDiff) -> bool:
    """Return whether one of the pair's causes is "input": what enters it differs, due to no earlier attention."""
    return any(cause.name == "input" for cause in pair.causes)


def reached_by(pairs: Sequence[PairDiff]) -> list[PairDiff]:
    """Return the pairs with the cause "input" and those that follow from one of them, in order."""
    first = {site_of_pair(pair) for pair in pairs if is_reached(pair)}
    return [pair for pair in pairs if is_reached(pair) or pair.follows_from in first]


def _origin(pair: PairDiff) -> str:
    return pair.follows_from or ROOT_NAME


def excess(pair: PairDiff) -> float:
    """Return residue / allowed of a pair: the error left once all causes are applied, over the allowed rounding error.

    It is infinite if either number is None or NaN. If nothing is allowed, it is 0 for a residue of 0 and else infinite.
    """
    residue, allowed = pair.residue, pair.allowed
    if residue is None or allowed is None or math.isnan(residue) or math.isnan(allowed):
        return math.inf
    return residue / allowed if allowed > 0 else 0.0 if residue <= allowed else math.inf


def _unknown(pair: PairDiff) -> bool:
    return not named_causes(pair) or any(cause.name == UNKNOWN_CAUSE for cause in pair.causes)
