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
        """The pair with the largest residue in units of allowed rounding."""
        return max(self.pairs, key=excess)

    @property
    def resolved(self) -> bool:
        """Whether the outputs of every pair agree within rounding once all causes are applied."""
        return bool(self.causes) and not self.unknown and all(excess(pair) <= 1 for pair in self.pairs)

    @property
    def only_reached(self) -> bool:
        """Whether another input is the only difference of these pairs."""
        return self.resolved and all(is_reached(pair) and len(pair.causes) == 1 for pair in self.pairs)

    @property
    def numbers_differ(self) -> bool:
        """Whether the sentences of the causes contain other numbers at other sites."""
        return len({tuple(cause.text for cause in named_causes(pair)) for pair in self.pairs}) > 1


def groups(pairs: Iterable[PairDiff]) -> tuple[Group, ...]:
    """Return pairs with a difference of their own, grouped by their causes, each group with its followers."""
    every = list(pairs)

    def causes(pair: PairDiff) -> tuple[object, ...] | None:
        if pair.same is not False or pair.follows_from is not None:
            return None
        # Layers that differ alike differ in their numbers: 0.125 and 0.25 make no second group.
        named = [(cause.name, cause.stage, _NUMBER_IN_TEXT.sub("#", cause.text)) for cause in named_causes(pair)]
        return (*named, pair.first_stage) if _unknown(pair) else tuple(named)

    found = []
    for members in _by(every, causes).values():
        places = {site_of_pair(pair) for pair in members}
        followers = tuple(pair for pair in every if pair.follows_from is not None and _origin(pair) in places)
        found.append(Group(tuple(members), named_causes(members[0]), _unknown(members[0]), followers))
    return tuple(found)


def orphans(pairs: Iterable[PairDiff], found: Iterable[Group]) -> dict[str, list[PairDiff]]:
    """Return pairs that follow from a pair outside all groups, by the site of that pair."""
    followers = {id(pair) for group in found for pair in group.followers}
    return _by(pairs, lambda pair: None if pair.follows_from is None or id(pair) in followers else _origin(pair))


def cancelling(pairs: Iterable[PairDiff]) -> dict[tuple[tuple[str, ...], bool], list[PairDiff]]:
    """Return pairs with stages that differ without changing the output, by these stages and whether others do."""
    own = {id(pair): pair.same is False and bool(pair.causes) for pair in pairs}
    return _by(pairs, lambda pair: (pair.cancelling, own[id(pair)]) if pair.cancelling else None)


def left_out(pairs: Iterable[PairDiff]) -> dict[tuple[int, int], list[PairDiff]]:
    """Return pairs with rows that were left out as they see no key, by (rows left out, all rows)."""
    return _by(pairs, lambda pair: (pair.rows_left_out, pair.rows) if pair.rows_left_out else None)


def _by(pairs: Iterable[PairDiff], key: Callable[[PairDiff], Key | None]) -> dict[Key, list[PairDiff]]:
    """Return pairs by a key; pairs whose key is None are left out."""
    found: dict[Key, list[PairDiff]] = {}
    for pair in pairs:
        if (name := key(pair)) is not None:
            found.setdefault(name, []).append(pair)
    return found


def named_causes(pair: PairDiff) -> tuple[Cause, ...]:
    """Return the causes of a pair that have a name."""
    return tuple(cause for cause in pair.causes if cause.name != UNKNOWN_CAUSE)


def shown_causes(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return causes as shown to a reader: other weights of q, k and v become one cause.

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
    """Return the stage of a difference without a cause: that of the cause "unknown", else the first that differs."""
    stages = [cause.stage for cause in pair.causes if cause.name == UNKNOWN_CAUSE and cause.stage]
    return stages[0] if stages else pair.first_stage


def site_text(site: str, index: int) -> str:
    """Return a site as records name it: "h.0", "h.0#1", "(root)" for the root."""
    return f"{site or ROOT_NAME}{f'#{index}' if index else ''}"


def site_of_pair(pair: PairDiff) -> str:
    """Return the site of A."""
    return site_text(pair.site_a, pair.index_a)


def is_to_the_end(members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> bool:
    """Return whether these are several pairs, and all from the first of them on."""
    last = pairs[-len(members) :]
    return len(members) > 1 and all(one is other for one, other in zip(members, last, strict=True))


def sites_of_pairs(members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> Message:
    """Return where pairs are: "at h.3"; "from h.0 on" if all later pairs are included; else their folded sites."""
    if is_to_the_end(members, pairs):
        return Message("paragraphs.where.since", site=site_of_pair(members[0]))
    return Message("paragraphs.where.sites", sites=site_list([site_of_pair(pair) for pair in members]))


def site_list(sites: Iterable[str]) -> str:
    """Return folded sites as text; only the first ones of many."""
    folded = fold_sites(sites)
    names, more = joined(folded[:_MOST_SITES_LISTED], "comma"), len(folded) - _MOST_SITES_LISTED
    return Message("paragraphs.sites.more", sites=names, count=more) if more > 0 else names


def one_paragraph(sentences: Sequence[str]) -> str:
    """Return whole sentences as one paragraph."""
    return reduce(lambda first, second: Message("paragraphs.then", first=first, second=second), sentences)


def short(value: float | None) -> str:
    """Return a difference with two digits.

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
    """Return the pair with the largest size; NaN ranks above all numbers, unknown sizes below."""

    def rank(pair: PairDiff) -> float:
        value = size(pair)
        return -1.0 if value is None else math.inf if math.isnan(value) else value

    return max(pairs, key=rank)


def is_reached(pair: PairDiff) -> bool:
    """Return whether a difference comes in with the input and not from an earlier attention."""
    return any(cause.name == "input" for cause in pair.causes)


def reached_by(pairs: Sequence[PairDiff]) -> list[PairDiff]:
    """Return pairs whose input differs because of a module that is not an attention."""
    first = {site_of_pair(pair) for pair in pairs if is_reached(pair)}
    return [pair for pair in pairs if is_reached(pair) or pair.follows_from in first]


def _origin(pair: PairDiff) -> str:
    return pair.follows_from or ROOT_NAME


def excess(pair: PairDiff) -> float:
    """Return the residue in units of what is allowed; infinite if either is unknown or NaN."""
    residue, allowed = pair.residue, pair.allowed
    if residue is None or allowed is None or math.isnan(residue) or math.isnan(allowed):
        return math.inf
    return residue / allowed if allowed > 0 else 0.0 if residue <= allowed else math.inf


def _unknown(pair: PairDiff) -> bool:
    return not named_causes(pair) or any(cause.name == UNKNOWN_CAUSE for cause in pair.causes)
