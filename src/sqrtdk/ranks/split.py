"""How the ranks split one attention: from what each tells of its own, which belong together.

    rows    a block of keys is on several ranks: each has its own rows of q and meets the keys of others
    heads   the same input, other weights (tensor parallel); or q, k and v came from all ranks (Ulysses)
    batch   other inputs, the same weights (data parallel, FSDP)
    same    q and k are equal: the ranks do the same
    stages  neither: attentions of other layers under one name
    unlike  other weights of one layer, on ranks that exchange nothing in the forward pass, or that have rows of one
            attention: copies that were never synchronised
    lengths other inputs of other lengths, the same weights: data parallel whose rows make no one batch

Two ways at once are found one after the other: first rows, then heads of these, then their batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqrtdk.ranks.tokens import AttentionPrint, Digests, run_start

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Member:
    """What one rank has of an attention."""

    rank: int
    printed: AttentionPrint


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Ranks that have rows of one attention, or one rank with all its rows.

    Attributes:
        members: In the order of their ranks, which is that of their rows.
        copies: Other ranks that do the same as the first.
        keys: The keys of all rows, as digests; () if they could not be put in order.
        own: Whether the keys lie as the rows do: those of rank r are the keys of its rows.
    """

    members: tuple[Member, ...]
    copies: tuple[int, ...] = ()
    keys: Digests = ()
    own: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in order."""
        return tuple(sorted((*(member.rank for member in self.members), *self.copies)))


@dataclass(frozen=True, slots=True)
class WholeAttention:
    """An attention of several ranks.

    Attributes:
        site: Module path.
        number: 0-based number at the site, on each of its ranks.
        batches: Groups that share rows, by batch and within it by heads.
        stage: Whether other ranks have another attention of the same name.
        unlike: Whether ranks have other weights where they must have the same.
        lengths: Whether other ranks have the same layer, with sequences of another length.
    """

    site: str
    number: int
    batches: tuple[tuple[RowGroup, ...], ...]
    stage: bool = False
    unlike: bool = False
    lengths: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """All its ranks, in order."""
        return tuple(sorted(rank for heads in self.batches for group in heads for rank in group.ranks))

    @property
    def ways(self) -> tuple[str, ...]:
        """How it is split; () if one rank has all of it."""
        groups = [group for heads in self.batches for group in heads]
        blocks = any(member.printed.split for group in groups for member in group.members)
        found = {
            "rows": any(len(group.members) > 1 for group in groups) or (blocks and len(groups) == 1),
            "heads": any(len(heads) > 1 for heads in self.batches),
            "batch": len(self.batches) > 1,
            "same": any(group.copies for group in groups),
            "unlike": self.unlike,
            "lengths": self.lengths,
        }
        return tuple(way for way, holds in found.items() if holds)

    @property
    def joins(self) -> bool:
        """Whether there are parts to be put together."""
        return bool(set(self.ways) - {"same", "unlike", "lengths"})


def whole_attentions(every: Sequence[Sequence[AttentionPrint]], exchange: bool = True) -> list[WholeAttention]:
    """Return the attentions of all ranks, in the order in which they first appear.

    Args:
        every: The attentions of each rank, by rank.
        exchange: Whether ranks exchange tensors in the forward pass. If not, none has some heads or a stage of a model.
    """
    at: dict[tuple[str, int], list[Member]] = {}
    for rank, prints in enumerate(every):
        for printed in prints:
            at.setdefault(printed.key, []).append(Member(rank, printed))
    found = []
    for (site, number), members in at.items():
        groups = [_row_group(found) for found in _joined(_without_copies(members), _share_keys)]
        by_heads = _joined(groups, _are_heads) if exchange else [[group] for group in groups]
        batches = _joined([tuple(heads) for heads in by_heads], _are_batches)
        weights = {member.printed.weights for member in members}
        apart = not exchange and len(weights - {""}) > 1
        lengths = len(batches) > 1 and len(weights) == 1 and "" not in weights
        for one in batches:
            unlike = apart or any(_has_unlike_rows(group) for heads in one for group in heads)
            found.append(
                WholeAttention(site, number, tuple(one), stage=len(batches) > 1, unlike=unlike, lengths=lengths)
            )
    return found


def _has_unlike_rows(group: RowGroup) -> bool:
    """Return whether the rows of one attention are projected by different weights."""
    return len({member.printed.weights for member in group.members} - {""}) > 1


def _joined(parts: Sequence[Part], belong: Callable[[Part, Part], bool]) -> list[list[Part]]:
    """Return the parts in groups: a part is in the group of each that it belongs to."""
    groups: list[list[Part]] = []
    for part in parts:
        near = [group for group in groups if any(belong(part, other) for other in group)]
        merged = [other for other in parts if any(other in group for group in near)] + [part]
        groups = [group for group in groups if group not in near] + [merged]
    return sorted(groups, key=lambda group: parts.index(group[0]))


def _without_copies(members: Sequence[Member]) -> list[tuple[Member, tuple[int, ...]]]:
    """Return the members, each with the ranks that do exactly the same."""
    found: list[tuple[Member, tuple[int, ...]]] = []
    for member in members:
        for place, (first, copies) in enumerate(found):
            a, b = first.printed, member.printed
            alike = a.rows == b.rows and [x.keys for x in a.blocks] == [x.keys for x in b.blocks]
            if alike and a.sizes == b.sizes and not _repeat(a):
                found[place] = first, (*copies, member.rank)
                break
        else:
            found.append((member, ()))
    return found


def _repeat(printed: AttentionPrint) -> bool:
    """Return whether tokens repeat so that equal rows may be rows of other tokens: a prompt of one word."""
    keys = printed.most_keys
    return printed.split and len(set(keys)) <= len(keys) - len(printed.rows)


def _share_keys(one: tuple[Member, tuple[int, ...]], other: tuple[Member, tuple[int, ...]]) -> bool:
    a, b = one[0].printed, other[0].printed
    if not (a.split and b.split and a.sizes == b.sizes):
        return False
    pairs = ((x.keys, y.keys) for x in a.blocks for y in b.blocks)
    return any(run_start(x, y) is not None or run_start(y, x) is not None for x, y in pairs)


def _row_group(found: Sequence[tuple[Member, tuple[int, ...]]]) -> RowGroup:
    """Return the group of rows with the keys of all of them in one order, that of the ranks where it can be seen."""
    members = tuple(member for member, _ in found)
    copies = tuple(rank for _, ranks in found for rank in ranks)
    # In a ring a rank meets its own keys first; behind an all-gather each has those of all.
    own: Digests = sum((member.printed.blocks[0].keys for member in members), ())
    lies_as_rows = all(len(member.printed.blocks[0].keys) == len(member.printed.rows) for member in members)
    longest = max((member.printed.most_keys for member in members), key=len)
    for keys, by_rows in ((own, lies_as_rows and len(set(own)) > 1), (longest, len(members) == 1)):
        if (by_rows or keys is longest) and all(_lies_in(member.printed, keys) for member in members):
            return RowGroup(members, copies, keys, own=by_rows)
    return RowGroup(members, copies)


def _lies_in(printed: AttentionPrint, keys: Digests) -> bool:
    """Return whether each block of an attention has one place among the keys, and no rows meet a place twice."""
    places = set()
    for block in printed.blocks:
        start = run_start(block.keys, keys)
        if start is None or run_start(block.keys, keys[start + 1 :]) is not None:
            return False
        places.add((block.rows, start))
    return len(places) == len(printed.blocks)


def _are_heads(one: RowGroup, other: RowGroup) -> bool:
    a, b = one.members[0].printed, other.members[0].printed
    if len(one.members) != len(other.members) or len(a.rows) != len(b.rows) or len(one.keys) != len(other.keys):
        return False
    if a.sizes[0] != b.sizes[0] or a.sizes[2:] != b.sizes[2:]:
        return False
    if a.inputs and b.inputs:
        both = zip(one.members, other.members, strict=True)
        return a.weights != b.weights and all(x.printed.inputs == y.printed.inputs for x, y in both)
    # Without projections in sight q, k and v came from other ranks, and no key is on two of them.
    return a.split and b.split and not (a.inputs or b.inputs)


def _are_batches(one: Sequence[RowGroup], other: Sequence[RowGroup]) -> bool:
    if len(one) != len(other):
        return False
    return all(map(_are_batches_of_heads, one, other))


def _are_batches_of_heads(one: RowGroup, other: RowGroup) -> bool:
    a, b = one.members[0].printed, other.members[0].printed
    if not a.weights or a.weights != b.weights or a.inputs == b.inputs or a.sizes[1:] != b.sizes[1:]:
        return False
    rows, others = ([len(member.printed.rows) for member in group.members] for group in (one, other))
    return rows == others and len(one.keys) == len(other.keys)
