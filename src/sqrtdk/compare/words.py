"""What a comparison found, in sentences: one paragraph for each group of pairs that differ for the same reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from sqrtdk._sites import ROOT, fold_sites
from sqrtdk.compare.records import Cause, PairDiff, SideInfo, Unpaired, lines_of

UNKNOWN = "unknown"  # the name of a cause that is none
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_WEIGHT = re.compile(r"has another weight for ((?:q|k|v)(?:(?:, | and )(?:q|k|v))*)(?=[,:])")
_OFF = re.compile(r"by (\d[\d.e+-]*) of its size in all$")
_MOST_SITES = 4
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Group:
    """Pairs that differ for the same reasons.

    Attributes:
        pairs: each with a difference of its own, in A's order.
        causes: those of the first, without "unknown".
        unknown: a part of the difference, or all of it, has no known cause.
        followers: pairs whose difference comes from one of these.
    """

    pairs: tuple[PairDiff, ...]
    causes: tuple[Cause, ...]
    unknown: bool
    followers: tuple[PairDiff, ...]

    @property
    def worst(self) -> PairDiff:
        """The pair with the largest residue, relative to what rounding allows."""
        return max(self.pairs, key=excess)

    @property
    def resolved(self) -> bool:
        """With all causes applied, the outputs agree within rounding, at every pair."""
        return bool(self.causes) and not self.unknown and all(excess(pair) <= 1 for pair in self.pairs)

    @property
    def only_reached(self) -> bool:
        """All that these pairs have is another input, with which they agree."""
        return self.resolved and all(is_reached(pair) and len(pair.causes) == 1 for pair in self.pairs)

    @property
    def numbers_differ(self) -> bool:
        """The sentences of the causes have other numbers at other sites."""
        return len({tuple(cause.text for cause in known(pair)) for pair in self.pairs}) > 1


class OfOutputs(NamedTuple):
    """Sentences on the models' outputs.

    Attributes:
        before: those that come before what is said of the attentions.
        after: and after it.
        chain: they say where the first difference is, and which attentions it reaches.
        agree: they say that the attentions agree.
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
    """Say what a comparison found, most important first.

    First the differences with their causes, then those without, calls that have no partner, what could not be compared,
    and last what is the same. Sites are A's.

    Example:
        >>> pair = PairDiff("h.0", "h.0", 0, 0, True, None, None, (), 2e-7, 1e-6, difference=2e-7)
        >>> side = SideInfo("demo", "model", dtype="float32")
        >>> paragraphs([pair], (), (), side, side)
        ('The one attention agrees: the largest difference is 2e-7, the rounding of float32 allows 1e-6.',)
    """
    found = groups(pairs)
    own = [group for group in found if group.causes]
    if of_outputs.chain:
        own = [group for group in own if not group.only_reached]
    sentences = [*of_outputs.before, *(_caused(group, pairs, allows(a, b)) for group in own)]
    sentences += [_unexplained(group, pairs, allows(a, b)) for group in found if not group.causes]
    sentences += [
        f"{_differences(lost)} {'follows' if len(lost) == 1 else 'follow'} from {origin}."
        for origin, lost in orphans(pairs, found).items()
    ]
    sentences += of_outputs.after
    if unpaired_a or unpaired_b:
        sentences.append(_alone(len(unpaired_a), len(unpaired_b)))
    if unjudged := [pair for pair in pairs if pair.same is None]:
        reasons = dict.fromkeys(pair.reason for pair in unjudged if pair.reason)
        why = f": {next(iter(reasons))}" if len(reasons) == 1 else ""
        sentences.append(f"{len(unjudged):,} of {counted(len(pairs))} could not be compared{why}.")
    if not pairs:
        sentences.append("No attention of A has a partner in B: nothing was compared.")
    if same := [pair for pair in pairs if pair.same]:
        sentences.append(_same(same, len(pairs), allows(a, b), of_outputs.agree))
    sentences += [_cancelling(stages, members, pairs) for stages, members in cancelling(pairs).items()]
    sentences += [
        f"{rows_without_key(out, rows)} left out {where(members, pairs)}."
        for (out, rows), members in left_out(pairs).items()
    ]
    return tuple(sentences)


def groups(pairs: Iterable[PairDiff]) -> tuple[Group, ...]:
    """Group the pairs that differ by themselves by their causes, each with the pairs that follow from one of them."""
    every = list(pairs)

    def causes(pair: PairDiff) -> tuple[object, ...] | None:
        if pair.same is not False or pair.follows_from is not None:
            return None
        named = [(cause.name, cause.stage, _NUMBER.sub("#", cause.text)) for cause in known(pair)]
        return (*named, pair.first_stage) if _unknown(pair) else tuple(named)

    found = []
    for members in _by(every, causes).values():
        places = {place_of(pair) for pair in members}
        followers = tuple(pair for pair in every if pair.follows_from is not None and _origin(pair) in places)
        found.append(Group(tuple(members), known(members[0]), _unknown(members[0]), followers))
    return tuple(found)


def orphans(pairs: Iterable[PairDiff], found: Iterable[Group]) -> dict[str, list[PairDiff]]:
    """Pairs whose difference comes from one that is in no group, by that one's site."""
    told = {id(pair) for group in found for pair in group.followers}
    return _by(pairs, lambda pair: None if pair.follows_from is None or id(pair) in told else _origin(pair))


def cancelling(pairs: Iterable[PairDiff]) -> dict[tuple[str, ...], list[PairDiff]]:
    """Pairs with stages that differ and make no difference, by these stages."""
    return _by(pairs, lambda pair: pair.cancelling or None)


def left_out(pairs: Iterable[PairDiff]) -> dict[tuple[int, int], list[PairDiff]]:
    """Pairs with rows that are not compared as they see no key, by how many of how many they are."""
    return _by(pairs, lambda pair: (pair.rows_left_out, pair.rows) if pair.rows_left_out else None)


def _by(pairs: Iterable[PairDiff], key: Callable[[PairDiff], Key | None]) -> dict[Key, list[PairDiff]]:
    """Pairs by a key; those that have none are left out."""
    found: dict[Key, list[PairDiff]] = {}
    for pair in pairs:
        if (name := key(pair)) is not None:
            found.setdefault(name, []).append(pair)
    return found


def rows_without_key(out: int, rows: int) -> str:
    """Rows that are not compared, as the subject of a sentence with its verb.

    Example:
        >>> rows_without_key(3, 24), rows_without_key(1, 24)
        ('3 of 24 rows, which see no key, are', '1 of 24 rows, which sees no key, is')
    """
    see, are = ("sees", "is") if out == 1 else ("see", "are")
    return f"{out:,} of {rows:,} rows, which {see} no key, {are}"


def known(pair: PairDiff) -> tuple[Cause, ...]:
    """The causes that have a name."""
    return tuple(cause for cause in pair.causes if cause.name != UNKNOWN)


def told(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """The causes as a reader is told them: other weights of q, k and v in one, by their letters.

    Example:
        >>> text = "has another weight for {}, h.{}.weight: 8 of 8 rows differ, by {} of its size in all"
        >>> sizes = {"q": 0.5, "k": 0.2}
        >>> causes = [Cause("weights", x, x, 0.5, text.format(x, x, size), "query") for x, size in sizes.items()]
        >>> [(cause.a, cause.text) for cause in told(causes)]
        [('q, k', 'has other weights for q and k (off by 0.2 to 0.5 of their size)')]
    """
    every = list(causes)
    parts = [(cause, match) for cause in every if cause.name == "weights" and (match := _WEIGHT.match(cause.text))]
    if not parts:
        return tuple(every)
    letters = [letter for _, match in parts for letter in re.split(", | and ", match[1])]
    text = parts[0][0].text
    if len(parts) > 1:
        sizes = sorted(float(size[1]) for cause, _ in parts if (size := _OFF.search(cause.text)))
        by = " to ".join(dict.fromkeys(short(size) for size in (sizes[0], sizes[-1]))) if sizes else ""
        text = f"has other weights for {_joined(letters)}" + (f" (off by {by} of their size)" if by else "")
    joined = ", ".join(letters)
    one = replace(parts[0][0], a=joined, b=joined, text=text, explained=max(cause.explained for cause, _ in parts))
    first, *others = [id(cause) for cause, _ in parts]
    return tuple(one if id(cause) == first else cause for cause in every if id(cause) not in others)


def lost_stage(pair: PairDiff) -> str | None:
    """The stage of a difference without a cause: that of the cause "unknown", else the first that differs."""
    stages = [cause.stage for cause in pair.causes if cause.name == UNKNOWN and cause.stage]
    return stages[0] if stages else pair.first_stage


def place(site: str, index: int) -> str:
    """A site as the records name it: "h.0", "h.0#1", of the root "(root)"."""
    return f"{site or ROOT}{f'#{index}' if index else ''}"


def place_of(pair: PairDiff) -> str:
    """The site of A."""
    return place(pair.site_a, pair.index_a)


def where(members: Sequence[PairDiff], pairs: Sequence[PairDiff], on: str = "from {} on", at: str = "at {}") -> str:
    """Where pairs stand: "at h.3", "from h.0 on" where all that come after are meant too, else their sites, folded."""
    last = [id(pair) for pair in pairs][-len(members) :]
    if len(members) > 1 and last == [id(pair) for pair in members]:
        return on.format(place_of(members[0]))
    return at.format(listed([place_of(pair) for pair in members]))


def listed(sites: Iterable[str], more: str = "{} and {} more", comma: str = ", ") -> str:
    """Sites, folded; of many the first ones."""
    folded = fold_sites(sites)
    names = comma.join(folded[:_MOST_SITES])
    return more.format(names, len(folded) - _MOST_SITES) if len(folded) > _MOST_SITES else names


def short(value: float | None) -> str:
    """A difference in two digits.

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
    """A share in percent, rounded down: what is not explained does not vanish.

    Example:
        >>> share(1.0), share(0.99999), share(0.8738), share(None)
        ('100%', '99.99%', '87.3%', '-')
    """
    if value is None or not math.isfinite(value):
        return short(value)
    digits = 100 if value >= 0.99 else 10
    return f"{math.floor(100 * digits * value + 1e-9) / digits:g}%"


def allows(a: SideInfo, b: SideInfo) -> str:
    """What allows a difference: "the rounding of float32"."""
    names = dict.fromkeys(side.dtype for side in (a, b) if side.dtype)
    return f"the rounding of {' and '.join(names)}" if names else "rounding"


def largest(pairs: Iterable[PairDiff], size: Callable[[PairDiff], float | None]) -> PairDiff:
    """The pair with the largest size; NaN is larger than any number, and what is not known less."""

    def rank(pair: PairDiff) -> float:
        value = size(pair)
        return -1.0 if value is None else math.inf if math.isnan(value) else value

    return max(pairs, key=rank)


def counted(number: int) -> str:
    """How many attentions."""
    return f"{number:,} attention{'' if number == 1 else 's'}"


def _caused(group: Group, pairs: Sequence[PairDiff], rounding: str) -> str:
    worst = group.worst
    texts = [cause.text or f"differs by the cause {cause.name}" for cause in told(group.causes)]
    first = f"B {_joined(texts)} {where(group.pairs, pairs)}"
    if group.numbers_differ:
        first += " (the numbers are those of the first; they differ from site to site)"
    one = "it" if len(group.causes) == 1 else "them"
    with_all = f"{first}; with { ({1: one, 2: 'both'}.get(len(texts), f'all {len(texts)}')) }"
    allowed = f"{rounding} allows {short(worst.allowed)}"
    if group.resolved:
        agree = f"the outputs agree to {short(worst.residue)}, {allowed}"
        return f"{with_all} {agree}.{_in_code(group)}{_followed(group)}"
    stage = f", at the stage {lost}" if (lost := lost_stage(worst)) and group.unknown else ""
    left = f"{short(worst.residue)} is left, {allowed}: the cause of the rest is unknown{stage}"
    gone = f"{with_all} {share(worst.explained)} of the difference goes away"
    return f"{gone}. {left[:1].upper()}{left[1:]}.{_in_code(group)}{_followed(group)}"


def _in_code(group: Group) -> str:
    places = [f"{place} ({name})" for place, name in lines_of(group.causes, "{} in B, {} in A", "{} in both")]
    return f" See {'; '.join(places)}." if places else ""


def _unexplained(group: Group, pairs: Sequence[PairDiff], rounding: str) -> str:
    worst = largest(group.pairs, lambda pair: pair.difference if pair.difference is not None else pair.residue)
    size = worst.difference if worst.difference is not None else worst.residue
    stage = f", first at the stage {lost}" if (lost := lost_stage(worst)) else ""
    text = f"The outputs differ {where(group.pairs, pairs)}{stage}, and the cause is unknown"
    by = f"by {short(size)}, where {rounding} allows {short(worst.allowed)}"
    if size is not None and not math.isfinite(size):
        by = f"the difference is {short(size)}, as a side holds values that are not finite"
    return f"{text}: {by}.{_followed(group)}"


def _followed(group: Group) -> str:
    if not group.followers:
        return ""
    follow = "follows" if len(group.followers) == 1 else "follow"
    return f" {_differences(group.followers)} {follow} from {'it' if len(group.pairs) == 1 else 'these'}."


def _differences(members: Sequence[PairDiff]) -> str:
    return f"The difference{'' if len(members) == 1 else 's'} at {listed([place_of(pair) for pair in members])}"


def is_reached(pair: PairDiff) -> bool:
    """Whether a difference comes in with the input, and from no attention before."""
    return any(cause.name == "input" for cause in pair.causes)


def reached_by(pairs: Sequence[PairDiff]) -> list[PairDiff]:
    """The pairs that get another input because of what is no attention."""
    first = {place_of(pair) for pair in pairs if is_reached(pair)}
    return [pair for pair in pairs if is_reached(pair) or pair.follows_from in first]


def _same(same: Sequence[PairDiff], total: int, rounding: str, said: bool) -> str:
    """What agrees, and how well; with `said`, the sentence before has said that all do."""
    worst = largest(same, _size)
    figures = f"largest difference is {short(_size(worst))}, {rounding} allows {short(worst.allowed)}."
    if said:
        return f"The {figures.replace('difference', 'difference of the attentions', 1)}"
    if len(same) == 1:
        return f"{'The one' if total == 1 else 'The other'} attention agrees: the {figures}"
    all_of_them = "Both attentions" if total == 2 else f"All {counted(total)}"
    return f"{all_of_them if len(same) == total else f'The other {counted(len(same))}'} agree: the {figures}"


def _cancelling(stages: Sequence[str], members: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> str:
    name = f"The {'stage' if len(stages) == 1 else 'stages'} {_joined(stages)}"
    differs, makes = ("differs", "makes") if len(stages) == 1 else ("differ", "make")
    return (
        f"{name} {differs} {where(members, pairs)} and {makes} no difference: from the input to the output both sides "
        "are the same."
    )


def _origin(pair: PairDiff) -> str:
    return pair.follows_from or ROOT


def _alone(of_a: int, of_b: int) -> str:
    parts = [(of_a, "A", "B"), (of_b, "B", "A")]
    told = [
        f"{counted(n)} of {side} {'has' if n == 1 else 'have'} no partner in {other}" for n, side, other in parts if n
    ]
    return f"{', '.join(told)}."


def _size(pair: PairDiff) -> float | None:
    return pair.residue if pair.difference is None else pair.difference


def excess(pair: PairDiff) -> float:
    """The residue in units of what is allowed; infinite where either is not known, or NaN."""
    residue, allowed = pair.residue, pair.allowed
    if residue is None or allowed is None or math.isnan(residue) or math.isnan(allowed):
        return math.inf
    return residue / allowed if allowed > 0 else 0.0 if residue <= allowed else math.inf


def _unknown(pair: PairDiff) -> bool:
    return not known(pair) or any(cause.name == UNKNOWN for cause in pair.causes)


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
