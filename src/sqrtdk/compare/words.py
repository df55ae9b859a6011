"""Writes the result of a comparison in sentences: a paragraph for each group of pairs with the same causes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, TypeVar

from sqrtdk._sites import ROOT, fold_sites
from sqrtdk.compare.records import Cause, PairDiff, SideInfo, Unpaired, stage_word
from sqrtdk.messages import Message, joined

UNKNOWN = "unknown"  # name of the stand-in for a cause that was not found
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_OTHER_WEIGHT = ("causes.weights.other", "causes.weights.other_named")
_LETTERS = ("q", "k", "v")
_MOST_SITES = 4
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
        return len({tuple(cause.text for cause in known(pair)) for pair in self.pairs}) > 1


class OfOutputs(NamedTuple):
    """Sentences on the models' outputs.

    Attributes:
        before: sentences before those on the attentions.
        after: sentences after them.
        chain: the sentences name the first difference and the attentions that it reaches.
        agree: the sentences state that the attentions agree.
    """

    before: Sequence[str] = ()
    after: Sequence[str] = ()
    chain: bool = False
    agree: bool = False


_NOTHING = OfOutputs()


def paragraphs(
    pairs: Sequence[PairDiff],
    unpaired_a: Sequence[Unpaired],
    unpaired_b: Sequence[Unpaired],
    a: SideInfo,
    b: SideInfo,
    of_outputs: OfOutputs = _NOTHING,
) -> tuple[str, ...]:
    """Returns the result of a comparison in sentences, most important first.

    The order is: differences with causes, differences without, calls without a partner, what could not be compared,
    and what agrees. Sites are A's.

    Example:
        >>> pair = PairDiff("h.0", "h.0", 0, 0, True, None, None, (), 2e-7, 1e-6, difference=2e-7)
        >>> side = SideInfo("demo", "model", dtype="float32")
        >>> paragraphs([pair], (), (), side, side)
        ('The one attention agrees: the largest difference is 2e-7, the rounding of float32 allows 1e-6.',)
    """
    found, dtypes = groups(pairs), dtypes_of(a, b)
    own = [group for group in found if group.causes]
    if of_outputs.chain:
        own = [group for group in own if not group.only_reached]
    sentences = [*of_outputs.before, *(_caused(group, pairs, dtypes) for group in own)]
    sentences += [_unexplained(group, pairs, dtypes) for group in found if not group.causes]
    sentences += [
        Message("paragraphs.follow.origin", differences=_differences(lost), origin=origin)
        for origin, lost in orphans(pairs, found).items()
    ]
    sentences += of_outputs.after
    if unpaired_a or unpaired_b:
        sentences.append(_alone(len(unpaired_a), len(unpaired_b)))
    if unjudged := [pair for pair in pairs if pair.same is None]:
        sentences.append(_unjudged(unjudged, len(pairs)))
    if not pairs:
        sentences.append(Message("paragraphs.nothing"))
    if same := [pair for pair in pairs if pair.same]:
        sentences.append(_same(same, len(pairs), dtypes, of_outputs.agree))
    sentences += [_cancelling(stages, members, pairs) for stages, members in cancelling(pairs).items()]
    sentences += [
        Message("paragraphs.rows_left_out", count=f"{out:,}", rows=f"{rows:,}", where=where(members, pairs))
        for (out, rows), members in left_out(pairs).items()
    ]
    return tuple(sentences)


def groups(pairs: Iterable[PairDiff]) -> tuple[Group, ...]:
    """Returns pairs with a difference of their own, grouped by their causes, each group with its followers."""
    every = list(pairs)

    def causes(pair: PairDiff) -> tuple[object, ...] | None:
        if pair.same is not False or pair.follows_from is not None:
            return None
        # Layers that differ alike differ in their numbers: 0.125 and 0.25 make no second group.
        named = [(cause.name, cause.stage, _NUMBER.sub("#", cause.text)) for cause in known(pair)]
        return (*named, pair.first_stage) if _unknown(pair) else tuple(named)

    found = []
    for members in _by(every, causes).values():
        places = {place_of(pair) for pair in members}
        followers = tuple(pair for pair in every if pair.follows_from is not None and _origin(pair) in places)
        found.append(Group(tuple(members), known(members[0]), _unknown(members[0]), followers))
    return tuple(found)


def orphans(pairs: Iterable[PairDiff], found: Iterable[Group]) -> dict[str, list[PairDiff]]:
    """Returns pairs that follow from a pair outside all groups, by the site of that pair."""
    followers = {id(pair) for group in found for pair in group.followers}
    return _by(pairs, lambda pair: None if pair.follows_from is None or id(pair) in followers else _origin(pair))


def cancelling(pairs: Iterable[PairDiff]) -> dict[tuple[str, ...], list[PairDiff]]:
    """Returns pairs with stages that differ without changing the output, by these stages."""
    return _by(pairs, lambda pair: pair.cancelling or None)


def left_out(pairs: Iterable[PairDiff]) -> dict[tuple[int, int], list[PairDiff]]:
    """Returns pairs with rows that were left out as they see no key, by (rows left out, all rows)."""
    return _by(pairs, lambda pair: (pair.rows_left_out, pair.rows) if pair.rows_left_out else None)


def _by(pairs: Iterable[PairDiff], key: Callable[[PairDiff], Key | None]) -> dict[Key, list[PairDiff]]:
    """Returns pairs by a key; pairs whose key is None are left out."""
    found: dict[Key, list[PairDiff]] = {}
    for pair in pairs:
        if (name := key(pair)) is not None:
            found.setdefault(name, []).append(pair)
    return found


def known(pair: PairDiff) -> tuple[Cause, ...]:
    """Returns the causes of a pair that have a name."""
    return tuple(cause for cause in pair.causes if cause.name != UNKNOWN)


def told(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Returns causes as shown to a reader: other weights of q, k and v become one cause.

    Example:
        >>> def off(part, size):
        ...     how = Message("causes.weights.rows", differ=8, rows=8, share=size)
        ...     return Cause("weights", part, part, 0.5, Message("causes.weights.other", parts=part, how=how), "query")
        >>> [(cause.a, cause.text) for cause in told([off("q", "0.5"), off("k", "0.2")])]
        [('q, k', 'has other weights for q and k (off by 0.2 to 0.5 of their size)')]
    """
    every = list(causes)
    weights = [(cause, cause.text) for cause in every if isinstance(cause.text, Message)]
    weights = [(cause, text) for cause, text in weights if text.id in _OTHER_WEIGHT]
    if not weights:
        return tuple(every)
    letters = [letter for _, text in weights for letter in _LETTERS if letter in str(text.values["parts"])]
    first, text = weights[0]
    if len(weights) > 1:
        text = _other_weights(letters, [text.values["how"] for _, text in weights])
    parts = joined(letters, "comma")
    one = replace(first, a=parts, b=parts, text=text, explained=max(cause.explained for cause, _ in weights))
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
    """Returns the stage of a difference without a cause: that of the cause "unknown", else the first that differs."""
    stages = [cause.stage for cause in pair.causes if cause.name == UNKNOWN and cause.stage]
    return stages[0] if stages else pair.first_stage


def place(site: str, index: int) -> str:
    """Returns a site as records name it: "h.0", "h.0#1", "(root)" for the root."""
    return f"{site or ROOT}{f'#{index}' if index else ''}"


def place_of(pair: PairDiff) -> str:
    """Returns the site of A."""
    return place(pair.site_a, pair.index_a)


def is_to_the_end(members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> bool:
    """Returns whether these are several pairs, and all from the first of them on."""
    last = pairs[-len(members) :]
    return len(members) > 1 and all(one is other for one, other in zip(members, last, strict=True))


def where(members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> Message:
    """Returns where pairs are: "at h.3"; "from h.0 on" if all later pairs are included; else their folded sites."""
    if is_to_the_end(members, pairs):
        return Message("paragraphs.where.since", site=place_of(members[0]))
    return Message("paragraphs.where.sites", sites=listed([place_of(pair) for pair in members]))


def listed(sites: Iterable[str]) -> str:
    """Returns folded sites as text; only the first ones of many."""
    folded = fold_sites(sites)
    names, more = joined(folded[:_MOST_SITES], "comma"), len(folded) - _MOST_SITES
    return Message("paragraphs.sites.more", sites=names, count=more) if more > 0 else names


def together(sentences: Sequence[str]) -> str:
    """Returns whole sentences as one paragraph."""
    return reduce(lambda first, second: Message("paragraphs.then", first=first, second=second), sentences)


def short(value: float | None) -> str:
    """Returns a difference with two digits.

    Example:
        >>> short(3.14e-6), short(0.25), short(12345.6), short(0.0), short(None), short(math.nan)
        ('3.1e-6', '0.25', '1.2e4', '0', '-', 'NaN')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].replace("+", ""), f"{value:.2g}")


def share(value: float | None) -> str:
    """Returns a share in percent, rounded down so that an unexplained rest never disappears.

    Example:
        >>> share(1.0), share(0.99999), share(0.8738), share(None)
        ('100%', '99.99%', '87.3%', '-')
    """
    if value is None or not math.isfinite(value):
        return short(value)
    digits = 100 if value >= 0.99 else 10
    return f"{math.floor(100 * digits * value + 1e-9) / digits:g}%"


def dtypes_of(a: SideInfo, b: SideInfo) -> str:
    """Returns the dtypes whose rounding allows a difference: "float32"; "" if unknown."""
    names = list(dict.fromkeys(side.dtype for side in (a, b) if side.dtype))
    return Message("paragraphs.dtypes", first=names[0], second=names[1]) if len(names) > 1 else "".join(names)


def _allows(dtypes: str, allowed: float | None) -> Message:
    if not dtypes:
        return Message("paragraphs.allows", allowed=short(allowed))
    return Message("paragraphs.allows_of", dtypes=dtypes, allowed=short(allowed))


def largest(pairs: Iterable[PairDiff], size: Callable[[PairDiff], float | None]) -> PairDiff:
    """Returns the pair with the largest size; NaN ranks above all numbers, unknown sizes below."""

    def rank(pair: PairDiff) -> float:
        value = size(pair)
        return -1.0 if value is None else math.inf if math.isnan(value) else value

    return max(pairs, key=rank)


def _caused(group: Group, pairs: Sequence[PairDiff], dtypes: str) -> str:
    worst = group.worst
    text = Message("paragraphs.caused.differs", what=_what_differs(group), where=where(group.pairs, pairs))
    if group.numbers_differ:
        text = Message("paragraphs.caused.of_first", text=text)
    words: dict[str, str] = {"text": text, "all": _all_of(group), "allows": _allows(dtypes, worst.allowed)}
    left = short(worst.residue)
    if group.resolved:
        sentences: list[str] = [Message("paragraphs.caused.gone", left=left, **words)]
    else:
        words |= {"share": share(worst.explained), "left": f"{left[:1].upper()}{left[1:]}"}  # it begins a sentence
        if (stage := lost_stage(worst)) and group.unknown:
            sentences = [Message("paragraphs.caused.less_at", stage=stage_word(stage), **words)]
        else:
            sentences = [Message("paragraphs.caused.less", **words)]
    return together([*sentences, *_in_code(group), *_followed(group)])


def _what_differs(group: Group) -> str:
    texts = [cause.text or Message("causes.unknown.by_name", name=cause.name) for cause in told(group.causes)]
    if len(texts) == 1:
        return texts[0]
    first = reduce(lambda one, next: Message("paragraphs.causes.comma", first=one, second=next), texts[:-1])
    return Message("paragraphs.causes.last", first=first, second=texts[-1])


def _all_of(group: Group) -> Message:
    """Returns all causes as the object of a sentence; causes that are told as one may still be several."""
    number = len(told(group.causes))
    if number == 1:
        return Message("paragraphs.all.it" if len(group.causes) == 1 else "paragraphs.all.them")
    return Message("paragraphs.all.both") if number == 2 else Message("paragraphs.all.all", number=number)


def _in_code(group: Group) -> list[str]:
    """Returns the sentence on the lines of code where the causes are; [] if no line is known."""
    named: dict[tuple[str, str], list[str]] = {}
    for cause in group.causes:
        if cause.at_a and cause.at_b:
            named.setdefault((cause.at_a, cause.at_b), []).append(cause.name)
    places = []
    for (a, b), causes in named.items():
        names = joined(list(dict.fromkeys(causes)), "comma")
        if a == b:
            places.append(Message("paragraphs.code.both", at=b, causes=names))
        else:
            places.append(Message("paragraphs.code.two", b=b, a=a, causes=names))
    return [Message("paragraphs.code.see", places=joined(places))] if places else []


def _unexplained(group: Group, pairs: Sequence[PairDiff], dtypes: str) -> str:
    worst = largest(group.pairs, lambda pair: pair.difference if pair.difference is not None else pair.residue)
    size = worst.difference if worst.difference is not None else worst.residue
    by = Message("paragraphs.unexplained.by", size=short(size), allows=_allows(dtypes, worst.allowed))
    if size is not None and not math.isfinite(size):
        by = Message("paragraphs.unexplained.not_finite", size=short(size))
    words: dict[str, str] = {"where": where(group.pairs, pairs), "by": by}
    if stage := lost_stage(worst):
        sentence = Message("paragraphs.unexplained.stage", stage=stage_word(stage), **words)
    else:
        sentence = Message("paragraphs.unexplained.outputs", **words)
    return together([sentence, *_followed(group)])


def _followed(group: Group) -> list[str]:
    if not group.followers:
        return []
    id = "paragraphs.follow.it" if len(group.pairs) == 1 else "paragraphs.follow.these"
    return [Message(id, differences=_differences(group.followers))]


def _differences(members: Sequence[PairDiff]) -> Message:
    sites = listed([place_of(pair) for pair in members])
    return Message("paragraphs.follow.one" if len(members) == 1 else "paragraphs.follow.many", sites=sites)


def is_reached(pair: PairDiff) -> bool:
    """Returns whether a difference comes in with the input and not from an earlier attention."""
    return any(cause.name == "input" for cause in pair.causes)


def reached_by(pairs: Sequence[PairDiff]) -> list[PairDiff]:
    """Returns pairs whose input differs because of a module that is not an attention."""
    first = {place_of(pair) for pair in pairs if is_reached(pair)}
    return [pair for pair in pairs if is_reached(pair) or pair.follows_from in first]


def _unjudged(unjudged: Sequence[PairDiff], total: int) -> Message:
    text = Message("paragraphs.unjudged", number=f"{len(unjudged):,}", count=f"{total:,}")
    reasons = dict.fromkeys(pair.reason for pair in unjudged if pair.reason)
    if len(reasons) == 1:
        text = Message("joins.colon", first=text, second=next(iter(reasons)))
    return Message("paragraphs.stop", text=text)


def _same(same: Sequence[PairDiff], total: int, dtypes: str, stated: bool) -> Message:
    """Returns what agrees, and how closely; with `stated`, a sentence before has stated that all agree."""
    worst = largest(same, _size)
    words = {"size": short(_size(worst)), "allows": _allows(dtypes, worst.allowed)}
    if stated:
        return Message("paragraphs.same.size", **words)
    if len(same) == 1:
        which = Message("paragraphs.same.only" if total == 1 else "paragraphs.same.other")
    elif len(same) < total:
        which = Message("paragraphs.same.others", number=f"{len(same):,}")
    else:
        which = Message("paragraphs.same.both") if total == 2 else Message("paragraphs.same.all", number=f"{total:,}")
    return Message("paragraphs.same.agree", which=which, **words)


def _cancelling(stages: Sequence[str], members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> Message:
    id = "paragraphs.cancelling.one" if len(stages) == 1 else "paragraphs.cancelling.many"
    return Message(id, stages=_stages(stages), where=where(members, pairs))


def _stages(stages: Sequence[str]) -> str:
    *first, last = map(stage_word, stages)
    return Message("joins.side_by_side", first=joined(first, "comma"), second=last) if first else last


def _origin(pair: PairDiff) -> str:
    return pair.follows_from or ROOT


def _alone(of_a: int, of_b: int) -> Message:
    texts = [
        Message("paragraphs.alone.no_partner", count=f"{number:,}", side=side, other=other)
        for number, side, other in ((of_a, "A", "B"), (of_b, "B", "A"))
        if number
    ]
    text = texts[0] if len(texts) == 1 else Message("paragraphs.alone.both_sides", first=texts[0], second=texts[1])
    return Message("paragraphs.stop", text=text)


def _size(pair: PairDiff) -> float | None:
    return pair.residue if pair.difference is None else pair.difference


def excess(pair: PairDiff) -> float:
    """Returns the residue in units of what is allowed; infinite if either is unknown or NaN."""
    residue, allowed = pair.residue, pair.allowed
    if residue is None or allowed is None or math.isnan(residue) or math.isnan(allowed):
        return math.inf
    return residue / allowed if allowed > 0 else 0.0 if residue <= allowed else math.inf


def _unknown(pair: PairDiff) -> bool:
    return not known(pair) or any(cause.name == UNKNOWN for cause in pair.causes)
