"""Writes the result of a comparison in sentences: a paragraph for each group of pairs with the same causes.

A paragraph is made of sentences of the catalogue (`sqrtdk/messages/words/paragraphs.toml`), so it reads well in each
language: English has "B leaves out the mask at h.0", Chinese the place first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from sqrtdk.compare.records import Cause, PairDiff, SideInfo, Unpaired, cause_word, stage_word
from sqrtdk.compare.words import (
    Group,
    by_cause,
    cancelling,
    excess,
    groups,
    largest_pair,
    left_out,
    lost_stage,
    one_paragraph,
    orphans,
    share_text,
    short,
    shown_causes,
    site_list,
    site_of_pair,
    sites_of_pairs,
)
from sqrtdk.messages import Message, joined


class OfOutputs(NamedTuple):
    """Sentences on the models' outputs.

    Attributes:
        before: sentences before those on the attentions.
        after: sentences after them.
        last: sentences at the end.
        chain: the sentences name the first difference and the attentions that it reaches.
        agree: the sentences state that the attentions agree.
    """

    before: Sequence[str] = ()
    after: Sequence[str] = ()
    last: Sequence[str] = ()
    chain: bool = False
    agree: bool = False


_NO_SENTENCES = OfOutputs()


def paragraphs(
    pairs: Sequence[PairDiff],
    unpaired_a: Sequence[Unpaired],
    unpaired_b: Sequence[Unpaired],
    a: SideInfo,
    b: SideInfo,
    of_outputs: OfOutputs = _NO_SENTENCES,
) -> tuple[str, ...]:
    """Return the result of a comparison in sentences, most important first.

    The order is: differences with causes, differences without, calls without a partner, what could not be compared,
    and what agrees. Sites are A's.

    Example:
        >>> pair = PairDiff("h.0", "h.0", 0, 0, True, None, None, (), 2e-7, 1e-6, difference=2e-7)
        >>> side = SideInfo("demo", "model", dtype="float32")
        >>> paragraphs([pair], (), (), side, side)[0].split(": ")[0]
        'The one attention agrees'
    """
    found, dtypes = groups(pairs), dtypes_of(a, b)
    own = [group for group in found if group.causes]
    if of_outputs.chain:
        own = [group for group in own if not group.only_reached]
    sentences = [*of_outputs.before, *_all_caused(own, pairs, dtypes)]
    sentences += [_unexplained(group, pairs, dtypes) for group in found if not group.causes]
    sentences += [
        Message("paragraphs.follow.origin", differences=_differences(lost), origin=origin)
        for origin, lost in orphans(pairs, found).items()
    ]
    sentences += of_outputs.after
    if unpaired_a or unpaired_b:
        sentences.append(_unpaired_calls(len(unpaired_a), len(unpaired_b)))
    if unjudged := [pair for pair in pairs if pair.same is None]:
        sentences.append(_unjudged(unjudged, len(pairs)))
    if not pairs:
        sentences.append(Message("paragraphs.nothing"))
    if same := [pair for pair in pairs if pair.same]:
        sentences.append(_same(same, len(pairs), dtypes, of_outputs.agree))
    sentences += [_cancelling(*what, members, pairs) for what, members in cancelling(pairs).items()]
    sentences += [
        Message("paragraphs.rows_left_out", count=f"{out:,}", rows=f"{rows:,}", where=sites_of_pairs(members, pairs))
        for (out, rows), members in left_out(pairs).items()
    ]
    return (*sentences, *of_outputs.last)


def dtypes_of(a: SideInfo, b: SideInfo) -> str:
    """Return the dtypes of both sides as text, whose rounding allows a difference: "float32"; "" if unknown."""
    names = list(dict.fromkeys(side.dtype for side in (a, b) if side.dtype))
    return Message("paragraphs.dtypes", first=names[0], second=names[1]) if len(names) > 1 else "".join(names)


def _allows(dtypes: str, allowed: float | None) -> Message:
    if not dtypes:
        return Message("paragraphs.allows", allowed=short(allowed))
    return Message("paragraphs.allows_of", dtypes=dtypes, allowed=short(allowed))


def _all_caused(own: Sequence[Group], pairs: Sequence[PairDiff], dtypes: str) -> list[str]:
    """Return a paragraph for each group; groups that share a cause have one for each cause, and one on all together."""
    shared = by_cause([group for group in own if group.resolved])
    if not shared:
        return [_caused(group, pairs, dtypes) for group in own]
    resolved = [group for group in own if group.resolved]
    sentences = []
    for cause, members, numbers_differ in shared:
        what = cause.text or Message("causes.unknown.by_name", name=cause.name)
        text = Message("paragraphs.caused.differs", what=what, where=sites_of_pairs(members, pairs))
        if numbers_differ:
            text = Message("paragraphs.caused.of_first", text=text)
        sentences.append(one_paragraph([Message("paragraphs.stop", text=text), *_in_code([cause])]))
    worst = max((group.worst for group in resolved), key=excess)
    together = Message("paragraphs.caused.together", left=short(worst.residue), allows=_allows(dtypes, worst.allowed))
    followed = [sentence for group in resolved for sentence in _followed(group)]
    rest = [_caused(group, pairs, dtypes) for group in own if not group.resolved]
    return [*sentences, one_paragraph([together, *followed]), *rest]


def _caused(group: Group, pairs: Sequence[PairDiff], dtypes: str) -> str:
    worst = group.worst
    text = Message("paragraphs.caused.differs", what=_what_differs(group), where=sites_of_pairs(group.pairs, pairs))
    if group.numbers_differ:
        text = Message("paragraphs.caused.of_first", text=text)
    words: dict[str, str] = {"text": text, "all": _all_of(group), "allows": _allows(dtypes, worst.allowed)}
    left = short(worst.residue)
    if group.resolved:
        sentences: list[str] = [Message("paragraphs.caused.gone", left=left, **words)]
    else:
        words |= {"share": share_text(worst.explained), "left": f"{left[:1].upper()}{left[1:]}"}  # it begins a sentence
        if (stage := lost_stage(worst)) and group.unknown:
            sentences = [Message("paragraphs.caused.less_at", stage=stage_word(stage), **words)]
        else:
            sentences = [Message("paragraphs.caused.less", **words)]
    return one_paragraph([*sentences, *_in_code(group.causes), *_followed(group)])


def _what_differs(group: Group) -> str:
    texts = [cause.text or Message("causes.unknown.by_name", name=cause.name) for cause in shown_causes(group.causes)]
    if len(texts) == 1:
        return texts[0]
    first = reduce(lambda one, next: Message("paragraphs.causes.comma", first=one, second=next), texts[:-1])
    return Message("paragraphs.causes.last", first=first, second=texts[-1])


def _all_of(group: Group) -> Message:
    """Return all causes as the object of a sentence; causes that are told as one may still be several."""
    number = len(shown_causes(group.causes))
    if number == 1:
        return Message("paragraphs.all.it" if len(group.causes) == 1 else "paragraphs.all.them")
    return Message("paragraphs.all.both") if number == 2 else Message("paragraphs.all.all", number=number)


def _in_code(causes_of_group: Sequence[Cause]) -> list[str]:
    """Return the sentence on the lines of code where the causes are; [] if no line is known."""
    named: dict[tuple[str, str], list[str]] = {}
    for cause in causes_of_group:
        if cause.at_a and cause.at_b:
            named.setdefault((cause.at_a, cause.at_b), []).append(cause_word(cause.name))
    places = []
    for (a, b), causes in named.items():
        names = joined(list(dict.fromkeys(causes)), "comma")
        if a == b:
            places.append(Message("paragraphs.code.both", at=b, causes=names))
        else:
            places.append(Message("paragraphs.code.two", b=b, a=a, causes=names))
    return [Message("paragraphs.code.see", places=joined(places))] if places else []


def _unexplained(group: Group, pairs: Sequence[PairDiff], dtypes: str) -> str:
    worst = largest_pair(group.pairs, lambda pair: pair.difference if pair.difference is not None else pair.residue)
    size = worst.difference if worst.difference is not None else worst.residue
    by = Message("paragraphs.unexplained.by", size=short(size), allows=_allows(dtypes, worst.allowed))
    if size is not None and not math.isfinite(size):
        by = Message("paragraphs.unexplained.not_finite", size=short(size))
    words: dict[str, str] = {"where": sites_of_pairs(group.pairs, pairs), "by": by}
    if stage := lost_stage(worst):
        sentence = Message("paragraphs.unexplained.stage", stage=stage_word(stage), **words)
    else:
        sentence = Message("paragraphs.unexplained.outputs", **words)
    return one_paragraph([sentence, *_followed(group)])


def _followed(group: Group) -> list[str]:
    if not group.followers:
        return []
    id = "paragraphs.follow.it" if len(group.pairs) == 1 else "paragraphs.follow.these"
    return [Message(id, differences=_differences(group.followers))]


def _differences(members: Sequence[PairDiff]) -> Message:
    sites = site_list([site_of_pair(pair) for pair in members])
    return Message("paragraphs.follow.one" if len(members) == 1 else "paragraphs.follow.many", sites=sites)


def _unjudged(unjudged: Sequence[PairDiff], total: int) -> Message:
    text = Message("paragraphs.unjudged", number=f"{len(unjudged):,}", count=f"{total:,}")
    reasons = dict.fromkeys(pair.reason for pair in unjudged if pair.reason)
    if len(reasons) == 1:
        text = Message("joins.colon", first=text, second=next(iter(reasons)))
    return Message("paragraphs.stop", text=text)


def _same(same: Sequence[PairDiff], total: int, dtypes: str, stated: bool) -> Message:
    """Return what agrees, and how closely; with `stated`, a sentence before has stated that all agree."""
    worst = largest_pair(same, _size)
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


def _cancelling(stages: Sequence[str], beside: bool, members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> Message:
    """Return the sentence on stages that cancel; `beside` another difference, both sides are not the same."""
    id = "paragraphs.cancelling.one" if len(stages) == 1 else "paragraphs.cancelling.many"
    if beside:
        id = "paragraphs.cancelling.one_beside" if len(stages) == 1 else "paragraphs.cancelling.many_beside"
    return Message(id, stages=_stages(stages), where=sites_of_pairs(members, pairs))


def _stages(stages: Sequence[str]) -> str:
    *first, last = map(stage_word, stages)
    return Message("joins.side_by_side", first=joined(first, "comma"), second=last) if first else last


def _unpaired_calls(of_a: int, of_b: int) -> Message:
    texts = [
        Message("paragraphs.alone.no_partner", count=f"{number:,}", side=side, other=other)
        for number, side, other in ((of_a, "A", "B"), (of_b, "B", "A"))
        if number
    ]
    text = texts[0] if len(texts) == 1 else Message("paragraphs.alone.both_sides", first=texts[0], second=texts[1])
    return Message("paragraphs.stop", text=text)


def _size(pair: PairDiff) -> float | None:
    return pair.residue if pair.difference is None else pair.difference
