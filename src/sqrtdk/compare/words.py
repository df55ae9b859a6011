"""Writes the result of a comparison in sentences: a paragraph for each group of pairs with the same causes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from sqrtdk._sites import ROOT, fold_sites
from sqrtdk.compare.records import Cause, PairDiff, SideInfo, Unpaired, lines_of

UNKNOWN = "unknown"  # name of the stand-in for a cause that was not found
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_WEIGHT = re.compile(r"has another weight for ((?:q|k|v)(?:(?:, | and )(?:q|k|v))*)(?=[,:])")
_OFF = re.compile(r"by (\d[\d.e+-]*) of its size in all$")
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
    told = {id(pair) for group in found for pair in group.followers}
    return _by(pairs, lambda pair: None if pair.follows_from is None or id(pair) in told else _origin(pair))


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


def rows_without_key(out: int, rows: int) -> str:
    """Returns the number of rows that are not compared, as subject and verb of a sentence.

    Example:
        >>> rows_without_key(3, 24), rows_without_key(1, 24)
        ('3 of 24 rows, which see no key, are', '1 of 24 rows, which sees no key, is')
    """
    see, are = ("sees", "is") if out == 1 else ("see", "are")
    return f"{out:,} of {rows:,} rows, which {see} no key, {are}"


def known(pair: PairDiff) -> tuple[Cause, ...]:
    """Returns the causes of a pair that have a name."""
    return tuple(cause for cause in pair.causes if cause.name != UNKNOWN)


def told(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Returns causes as shown to a reader: other weights of q, k and v become one cause.

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
    """Returns the stage of a difference without a cause: that of the cause "unknown", else the first that differs."""
    stages = [cause.stage for cause in pair.causes if cause.name == UNKNOWN and cause.stage]
    return stages[0] if stages else pair.first_stage


def place(site: str, index: int) -> str:
    """Returns a site as records name it: "h.0", "h.0#1", "(root)" for the root."""
    return f"{site or ROOT}{f'#{index}' if index else ''}"


def place_of(pair: PairDiff) -> str:
    """Returns the site of A."""
    return place(pair.site_a, pair.index_a)


def where(members: Sequence[PairDiff], pairs: Sequence[PairDiff], on: str = "from {} on", at: str = "at {}") -> str:
    """Returns where pairs are: "at h.3"; "from h.0 on" if all later pairs are included; else their folded sites."""
    last = [id(pair) for pair in pairs][-len(members) :]
    if len(members) > 1 and last == [id(pair) for pair in members]:
        return on.format(place_of(members[0]))
    return at.format(listed([place_of(pair) for pair in members]))


def listed(sites: Iterable[str], more: str = "{} and {} more", comma: str = ", ") -> str:
    """Returns folded sites as text; only the first ones of many."""
    folded = fold_sites(sites)
    names = comma.join(folded[:_MOST_SITES])
    return more.format(names, len(folded) - _MOST_SITES) if len(folded) > _MOST_SITES else names


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


def allows(a: SideInfo, b: SideInfo) -> str:
    """Returns what allows a difference: "the rounding of float32"."""
    names = dict.fromkeys(side.dtype for side in (a, b) if side.dtype)
    return f"the rounding of {' and '.join(names)}" if names else "rounding"


def largest(pairs: Iterable[PairDiff], size: Callable[[PairDiff], float | None]) -> PairDiff:
    """Returns the pair with the largest size; NaN ranks above all numbers, unknown sizes below."""

    def rank(pair: PairDiff) -> float:
        value = size(pair)
        return -1.0 if value is None else math.inf if math.isnan(value) else value

    return max(pairs, key=rank)


def counted(number: int) -> str:
    """Returns a number of attentions as text."""
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
    """Returns whether a difference comes in with the input and not from an earlier attention."""
    return any(cause.name == "input" for cause in pair.causes)


def reached_by(pairs: Sequence[PairDiff]) -> list[PairDiff]:
    """Returns pairs whose input differs because of a module that is not an attention."""
    first = {place_of(pair) for pair in pairs if is_reached(pair)}
    return [pair for pair in pairs if is_reached(pair) or pair.follows_from in first]


def _same(same: Sequence[PairDiff], total: int, rounding: str, said: bool) -> str:
    """Returns what agrees, and how closely; with `said`, a sentence before has stated that all agree."""
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
    """Returns the residue in units of what is allowed; infinite if either is unknown or NaN."""
    residue, allowed = pair.residue, pair.allowed
    if residue is None or allowed is None or math.isnan(residue) or math.isnan(allowed):
        return math.inf
    return residue / allowed if allowed > 0 else 0.0 if residue <= allowed else math.inf


def _unknown(pair: PairDiff) -> bool:
    return not known(pair) or any(cause.name == UNKNOWN for cause in pair.causes)


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
