"""How two masks differ where no band tells it: documents, blocks, one mask laid otherwise, or keys without a pattern.

A structure is named only if it makes one side's mask of the other's, key by key:

* documents that do not see one another, or chunks of one size; blocks that see themselves both ways, as an image in a
  causal model does, or a prefix. `sqrtdk.compare.masks` takes them apart.
* the same mask laid otherwise, a row of `LAID`: on the rows, inverted, turned round, of other samples or heads.

Where none does, the rows and keys that differ are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.masks import Parts, pattern, recompose

NONE = "none"
Words = tuple[str, str, str]  # what A has, what B has, half a sentence with B as its subject
Made = Iterator[tuple[Tensor, tuple[str, str]]]  # masks, each with what it was and what it is
MOST = 4  # of a list that are written out


# -- the same mask, laid otherwise -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Laid:
    """One way to lay a mask otherwise.

    Attributes:
        of: "padding" or "mask": what is laid so, all else being as it was.
        made: yields what becomes of a mask; the other side's mask says which samples or heads to look for.
        text: what B does, where its mask is made of A's.
        back: what B does, where A's mask is made of B's.
    """

    of: str
    made: Callable[[Parts, Tensor, Tensor], Made]
    text: str
    back: str


def _on_rows(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    if parts.rows == parts.keys:  # attention_mask[:, None, :, None] for attention_mask[:, None, None, :]
        yield pattern(parts)[:, None] & parts.padding[:, None, :, None], ("on the keys", "on the rows")


def _padding_inverted(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    yield pattern(parts)[:, None] & ~parts.padding[:, None, None], ("as it is", "inverted")


def _padding_of_samples(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    order = _order(whole, other)
    if order is not None and not bool(other.any(1).any(-2).all()):  # one that hides nothing is missing
        yield whole[order], _moved(order, "sample")


def _inverted(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    words = ("as it is", "inverted")
    yield ~whole, words
    yield ~pattern(parts)[:, None] & parts.padding[:, None, None], words


def _turned(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    if parts.rows == parts.keys:
        words = ("row by key", "key by row")
        yield whole.mT, words
        yield pattern(parts)[:, None].mT & parts.padding[:, None, None], words


def _of_samples(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    order = _order(whole, other)
    if order is not None and not bool((other == other[:1]).all()):
        yield whole[order], _moved(order, "sample")


def _of_heads(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    order = _order(whole.transpose(0, 1), other.transpose(0, 1))
    if order is not None and not bool((other == other[:, :1]).all()):
        yield whole[:, order], _moved(order, "head")


def _tiled(parts: Parts, whole: Tensor, other: Tensor) -> Made:
    # mask.repeat(heads, 1, 1) for mask.repeat_interleave(heads, 0), of a mask that is viewed as (batch, heads, ...)
    yield whole.transpose(0, 1).reshape(whole.shape), ("repeat_interleave", "repeat")


INVERTED = "inverts the {} (hides what A shows, and shows what A hides)"
TURNED = "has the mask transposed, rows for keys"
OTHERS = "gives {b} the mask of {a}", "gives each its own mask, where A gives {b} the mask of {a}"
LAID = (
    Laid(
        "padding", _on_rows, "lays the padding mask on the rows (mask[:, :, None]), not on the keys (mask[:, None, :])",
        "lays the padding mask on the keys, where A lays it on the rows",
    ),
    Laid("padding", _padding_inverted, INVERTED.format("padding mask"), INVERTED.format("padding mask")),
    Laid(
        "padding", _padding_of_samples, "gives {b} the padding mask of {a}",
        "gives every sample its own padding mask, where A gives {b} that of {a}",
    ),
    Laid("mask", _inverted, INVERTED.format("mask"), INVERTED.format("mask")),
    Laid("mask", _turned, TURNED, TURNED),
    Laid("mask", _of_samples, *OTHERS),
    Laid(
        "mask", _tiled, "lays the masks of the samples over the heads in another order: repeat, not repeat_interleave",
        "lays the masks of the samples over the heads in another order: repeat_interleave, not repeat",
    ),
    Laid("mask", _of_heads, *OTHERS),
)  # fmt: skip


def laid_otherwise(a: Parts, b: Parts, masks: tuple[Tensor, Tensor], of: str) -> Words | None:
    """How one side's mask is made of the other's by laying it otherwise; None where no row of `LAID` does that.

    Args:
        a: of A's mask.
        b: of B's.
        masks: both, (B, H, L, S).
        of: "padding" or "mask".
    """
    one, other = masks
    for laid in LAID:
        if laid.of != of:
            continue
        for made, (was, now) in laid.made(a, one, other):
            if torch.equal(made.expand_as(other), other):
                return was, now, laid.text.format(a=was, b=now)
        for made, (was, now) in laid.made(b, other, one):
            if torch.equal(made.expand_as(one), one):
                return now, was, laid.back.format(a=was, b=now)
    return None


def _order(own: Tensor, other: Tensor) -> list[int] | None:
    """For each entry of the other, which of the own ones it is, its own where that is one; None where one is none."""
    mine, theirs = ([entry.numpy(force=True).tobytes() for entry in masks] for masks in (own, other))
    if not set(theirs) <= set(mine):
        return None
    return [i if mine[i] == entry else mine.index(entry) for i, entry in enumerate(theirs)]


def _moved(order: list[int], name: str) -> tuple[str, str]:
    """Whose masks are taken, and who has them: ("samples 1, 0", "samples 0, 1")."""
    places = [at for at, source in enumerate(order) if source != at]
    sources = [order[at] for at in places]
    sources = sources if len(set(sources)) > 1 else sources[:1]
    taken, having = (f"{name}{'s' if len(numbers) > 1 else ''} {_listed(numbers)}" for numbers in (sources, places))
    return taken, having


# -- documents and blocks ----------------------------------------------------------------------------------------------


def borders(parts: Parts) -> list[list[int]]:
    """Where documents begin between the tokens of each sample."""
    seen = recompose(parts)
    if parts.documents is None or seen is None:
        return [[]]
    live = parts.padding & seen.any(1).any(-2)
    starts = parts.documents.diff(dim=-1).bool() & live[:, 1:] & parts.padding[:, :-1]
    return [(sample.nonzero()[:, 0] + 1).tolist() for sample in starts]


def ranges(parts: Parts) -> list[list[tuple[int, int]]]:
    """First and last row of each block of each sample."""
    if parts.blocks is None:
        return [[]]
    rows = parts.blocks[:, parts.keys - parts.rows :]
    every = ([(sample == number).nonzero() for number in sample[sample > 0].unique()] for sample in rows)
    return [[(int(at[0]), int(at[-1])) for at in places] for places in every]


def _of_both(found: Callable[[Parts], list[list[Any]]], a: Parts, b: Parts) -> tuple[list[list[Any]], ...]:
    """What both sides have, in as many samples: a mask of one sample stands for all."""
    sides = found(a), found(b)
    count = max(map(len, sides))
    return tuple(side * (count // len(side)) for side in sides)


def documents(a: Parts, b: Parts) -> Words | None:
    """Documents that B lets see one another, keeps apart, or begins elsewhere; chunks, where they are of one size."""
    starts = _of_both(borders, a, b)
    if starts[0] == starts[1]:
        return None
    sizes = [_chunk(found, parts.keys) if any(found) else 0 for found, parts in zip(starts, (a, b), strict=True)]
    if None not in sizes:
        old, new = (f"chunks of {size} keys" if size else NONE for size in sizes)
        lost, added = f"ignores the {old}, so rows see earlier chunks", f"has {new}, which A has not"
        return old, new, _one_of(old, new, lost, added, f"has {new} in place of {sizes[0]}")
    old, new = (f"boundaries at {_by_sample(found, _listed)}" if any(found) else NONE for found in starts)
    lost = f"ignores the document {old}, so rows see other documents"
    added = f"hides keys of other documents ({new}), which A shows"
    other = f"has document {new} in place of {old.removeprefix('boundaries at ')}"
    return old, new, _one_of(old, new, lost, added, other)


def blocks(a: Parts, b: Parts) -> Words | None:
    """Blocks whose later keys B hides, or shows, or other ones; a prefix is the one block that comes first."""
    found = _of_both(ranges, a, b)
    if found[0] == found[1]:
        return None
    sizes = [_prefix(each, parts) for each, parts in zip(found, (a, b), strict=True)]
    if None not in sizes:
        old, new = (f"a prefix of {size} keys" if size else NONE for size in sizes)
        lost, added = f"makes {old} causal, which A does not", f"lets {new} see itself both ways, which A does not"
        return old, new, _one_of(old, new, lost, added, f"has {new} in place of {sizes[0]}")
    rows = [_by_sample(each, _spans) if any(each) else "" for each in found]
    lost = f"hides on rows {rows[0]} later keys of their block that A shows (as inside an image)"
    added = f"shows on rows {rows[1]} later keys of their block that A hides (as inside an image)"
    other = f"shows later keys of their block on rows {rows[1]}, not on rows {rows[0]}"
    old, new = (f"blocks at rows {each}" if each else NONE for each in rows)
    return old, new, _one_of(old, new, lost, added, other)


def _chunk(starts: list[list[int]], keys: int) -> int | None:
    """The size of the documents, where there are three or more and all have one."""
    first, size = starts[0], next(iter(starts[0]), 0)
    alike = len(first) > 1 and all(each == first for each in starts)
    return size if alike and first == list(range(size, keys, size)) else None


def _prefix(found: list[list[tuple[int, int]]], parts: Parts) -> str | None:
    """The number of keys in the first block of each sample, "" without one; None where there are others."""
    first = parts.padding.byte().argmax(-1).tolist()
    every = list(zip(found, first * len(found), strict=False))
    inside = (len(each) > 1 or any(at[0] > start for at in each) for each, start in every)
    if parts.rows != parts.keys or any(inside):
        return None
    sizes = sorted({last - start + 1 for each, start in every for _, last in each})
    return " to ".join(dict.fromkeys(f"{size}" for size in (*sizes[:1], *sizes[-1:])))


# -- keys without a pattern --------------------------------------------------------------------------------------------


def single_keys(masks: tuple[Tensor, Tensor]) -> Words:
    """The rows and keys that one side alone shows, of two masks (B, H, L, S)."""
    a, b = masks
    hidden, shown = a & ~b, b & ~a
    texts = []
    for what, pairs, does in (("hides", hidden, "shows"), ("shows", shown, "hides")):
        if bool(pairs.any()):
            where, whose = _where(pairs)
            texts.append(f"{what} {where}, which A {does}{f' (in {whose})' if whose else ''}")
    counts = (int(pairs.any(0).any(0).sum()) for pairs in (hidden, shown))
    old, new = (f"{count} pairs of row and key" if count else NONE for count in counts)
    return old, new, "; ".join(texts)


def _where(pairs: Tensor) -> tuple[str, str]:
    """Rows and keys of pairs, and of which samples and heads they are, where not of all."""
    samples, heads = (pairs.transpose(0, axis).flatten(1).any(1) for axis in (0, 1))
    flat = pairs[samples][:, heads]
    rows, keys = flat.any(0).any(0).any(-1), flat.any(0).any(0).any(-2)
    some = "" if bool(flat[:, :, rows][..., keys].all()) else "some of the "
    axes = [numbered(name, axis) for name, axis in (("sample", samples), ("head", heads)) if not bool(axis.all())]
    return f"{some}{numbered('key', keys)} on {numbered('row', rows)}", ", ".join(axes)


# -- words -------------------------------------------------------------------------------------------------------------


def numbered(name: str, flags: Tensor) -> str:
    """The numbers of what is True, those that follow one another as a range.

    Example:
        >>> numbered("row", torch.arange(8) == 3), numbered("row", torch.arange(8) > 5)
        ('row 3', 'rows 6 to 7')
    """
    runs: list[tuple[int, int]] = []
    for number in flags.nonzero()[:, 0].tolist():
        first = runs.pop()[0] if runs and number == runs[-1][1] + 1 else number
        runs.append((first, number))
    return f"{name}{'s' if int(flags.sum()) > 1 else ''} {_spans(runs)}"


def _spans(runs: list[tuple[int, int]]) -> str:
    return _listed([f"{first}" if first == last else f"{first} to {last}" for first, last in runs])


def _listed(words: Sequence[object]) -> str:
    more = f" and {len(words) - MOST} more" if len(words) > MOST else ""
    return ", ".join(map(str, words[:MOST])) + more


def _by_sample(found: list[list[Any]], written: Callable[[list[Any]], str]) -> str:
    """What the samples have, once where all have the same."""
    if all(each == found[0] for each in found):
        return written(found[0])
    number = next(number for number, each in enumerate(found) if each)
    return f"{written(found[number])} in sample {number} (others in other samples)"


def _one_of(old: str, new: str, lost: str, added: str, both: str) -> str:
    return lost if new == NONE else added if old == NONE else both
