"""Differences of two masks that no band explains: documents, blocks, one mask laid out differently, or single keys.

A structure is named only if it turns one side's mask into the other's, key by key:

* documents that don't see one another, or chunks of one size; blocks that see themselves both ways, such as an image
  in a causal model, or a prefix. `sqrtdk.compare.masks` finds them, `STRETCHES` has the words.
* the same mask laid out differently, a row of `LAID`: on the rows, inverted, transposed, of other samples or heads.

If no structure fits, the rows and keys that differ are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.masks import Parts, pattern, recompose
from sqrtdk.compare.suspect import NONE, Words

MOST = 4  # entries of a list that are written out


# -- the same mask, laid otherwise -------------------------------------------------------------------------------------

Made = Iterator[tuple[Tensor, tuple[str, str]]]  # masks, each with what it was and what it is
Laying = Callable[[Parts, Tensor, Tensor], Made]  # the other side's mask tells which samples or heads to try


def _as(was: str, now: str, *masks: Callable[[Parts, Tensor], Tensor], square: bool = False) -> Laying:
    """Returns the masks made from the parts or the whole mask; `square` requires as many rows as keys."""

    def made(parts: Parts, whole: Tensor, other: Tensor) -> Made:
        if not square or parts.rows == parts.keys:
            yield from ((mask(parts, whole), (was, now)) for mask in masks)

    return made


def _of_others(name: str, axis: int, plain: Callable[[Tensor], bool]) -> Laying:
    """Returns masks of other samples or heads, unless the other side's mask is `plain`: equal for all, or none."""

    def made(parts: Parts, whole: Tensor, other: Tensor) -> Made:
        order = None if plain(other) else _order(whole.transpose(0, axis), other.transpose(0, axis))
        if order is not None:
            yield whole.index_select(axis, torch.tensor(order, device=whole.device)), _moved(order, name)

    return made


def _seen(parts: Parts) -> Tensor:
    return pattern(parts)[:, None]


def _tokens(parts: Parts) -> Tensor:
    return parts.padding[:, None, None]


PADDING_INVERTED = "inverts the padding mask (hides what A shows, and shows what A hides)"
INVERTED = "inverts the mask (hides what A shows, and shows what A hides)"
TURNED = "has the mask transposed, rows for keys"
OTHERS = "gives {b} the mask of {a}", "gives each its own mask, where A gives {b} the mask of {a}"
LAID: tuple[tuple[str, Laying, str, str], ...] = (  # what is laid out, how, words if B's mask is so, words if A's is
    (
        "padding",  # attention_mask[:, None, :, None] for attention_mask[:, None, None, :]
        _as("on the keys", "on the rows", lambda parts, _: _seen(parts) & _tokens(parts).mT, square=True),
        "lays the padding mask on the rows (mask[:, :, None]), not on the keys (mask[:, None, :])",
        "lays the padding mask on the keys, where A lays it on the rows",
    ),
    (
        "padding", _as("as it is", "inverted", lambda parts, _: _seen(parts) & ~_tokens(parts)),
        PADDING_INVERTED, PADDING_INVERTED,
    ),
    (
        "padding", _of_others("sample", 0, lambda mask: bool(mask.any(1).any(-2).all())),
        "gives {b} the padding mask of {a}", "gives every sample its own padding mask, where A gives {b} that of {a}",
    ),
    (
        "mask",
        _as("as it is", "inverted", lambda _, whole: ~whole, lambda parts, _: ~_seen(parts) & _tokens(parts)),
        INVERTED, INVERTED,
    ),
    (
        "mask",
        _as(
            "row by key", "key by row", lambda _, whole: whole.mT, lambda parts, _: _seen(parts).mT & _tokens(parts),
            square=True,
        ),
        TURNED, TURNED,
    ),
    ("mask", _of_others("sample", 0, lambda mask: bool((mask == mask[:1]).all())), *OTHERS),
    (
        "mask",  # mask.repeat(heads, 1, 1) for mask.repeat_interleave(heads, 0), viewed as (batch, heads, ...)
        _as("repeat_interleave", "repeat", lambda _, whole: whole.transpose(0, 1).reshape(whole.shape)),
        "lays the masks of the samples over the heads in another order: repeat, not repeat_interleave",
        "lays the masks of the samples over the heads in another order: repeat_interleave, not repeat",
    ),
    ("mask", _of_others("head", 1, lambda mask: bool((mask == mask[:, :1]).all())), *OTHERS),
)  # fmt: skip


def laid_otherwise(a: Parts, b: Parts, masks: tuple[Tensor, Tensor], of: str) -> Words | None:
    """Returns how one side's mask is the other's laid out differently; None if no row of `LAID` fits.

    Args:
        a: parts of A's mask.
        b: parts of B's mask.
        masks: both masks, (B, H, L, S).
        of: "padding" or "mask": what is laid out differently, while everything else stays.
    """
    one, other = masks
    for what, laying, text, back in LAID:
        if what != of:
            continue
        for made, (was, now) in laying(a, one, other):
            if torch.equal(made.expand_as(other), other):
                return was, now, text.format(a=was, b=now)
        for made, (was, now) in laying(b, other, one):
            if torch.equal(made.expand_as(one), one):
                return now, was, back.format(a=was, b=now)
    return None


def _order(own: Tensor, other: Tensor) -> list[int] | None:
    """Returns the own entry equal to each entry of the other, at the same index if possible; None if one has none."""
    mine, theirs = ([entry.numpy(force=True).tobytes() for entry in masks] for masks in (own, other))
    if not set(theirs) <= set(mine):
        return None
    return [i if mine[i] == entry else mine.index(entry) for i, entry in enumerate(theirs)]


def _moved(order: list[int], name: str) -> tuple[str, str]:
    """Returns whose masks are taken and who has them, as text: ("samples 1, 0", "samples 0, 1")."""
    places = [at for at, source in enumerate(order) if source != at]
    sources = [order[at] for at in places]
    sources = sources if len(set(sources)) > 1 else sources[:1]
    taken, having = (f"{name}{'s' if len(numbers) > 1 else ''} {_listed(numbers)}" for numbers in (sources, places))
    return taken, having


# -- documents and blocks ----------------------------------------------------------------------------------------------

STRETCHES = {  # what a side has, and what B does: without A's, with its own only, with others
    "chunks": (
        "chunks of {} keys", "ignores the chunks of {a} keys, so rows see earlier chunks",
        "has chunks of {b} keys, which A has not", "has chunks of {b} keys in place of {a}",
    ),
    "documents": (
        "boundaries at {}", "ignores the document boundaries at {a}, so rows see other documents",
        "hides keys of other documents (boundaries at {b}), which A shows",
        "has document boundaries at {b} in place of {a}",
    ),
    "prefix": (
        "a prefix of {} keys", "makes a prefix of {a} keys causal, which A does not",
        "lets a prefix of {b} keys see itself both ways, which A does not", "has a prefix of {b} keys in place of {a}",
    ),
    "blocks": (
        "blocks at rows {}", "hides on rows {a} later keys of their block that A shows (as inside an image)",
        "shows on rows {b} later keys of their block that A hides (as inside an image)",
        "shows later keys of their block on rows {b}, not on rows {a}",
    ),
}  # fmt: skip


def _borders(parts: Parts) -> list[list[int]]:
    """Returns where documents begin between the tokens of each sample."""
    seen = recompose(parts)
    if parts.documents is None or seen is None:
        return [[]]
    live = parts.padding & seen.any(1).any(-2)
    starts = parts.documents.diff(dim=-1).bool() & live[:, 1:] & parts.padding[:, :-1]
    return [(sample.nonzero()[:, 0] + 1).tolist() for sample in starts]


def _ranges(parts: Parts) -> list[list[tuple[int, int]]]:
    """Returns the first and last row of each block, by sample."""
    if parts.blocks is None:
        return [[]]
    rows = parts.blocks[:, parts.keys - parts.rows :]
    every = ([(sample == number).nonzero() for number in sample[sample > 0].unique()] for sample in rows)
    return [[(int(at[0]), int(at[-1])) for at in places] for places in every]


def _chunk(starts: list[list[int]], parts: Parts) -> str | None:
    """Returns the common size of three or more documents; None if they have no common size."""
    first, size = starts[0], next(iter(starts[0]), 0)
    alike = len(first) > 1 and all(each == first for each in starts)
    return f"{size}" if alike and first == list(range(size, parts.keys, size)) else None


def _prefix(found: list[list[tuple[int, int]]], parts: Parts) -> str | None:
    """Returns the number of keys in the first block of each sample; None if there are other blocks."""
    first = parts.padding.byte().argmax(-1).tolist()
    every = list(zip(found, first * len(found), strict=False))
    inside = (len(each) > 1 or any(at[0] > start for at in each) for each, start in every)
    if parts.rows != parts.keys or any(inside):
        return None
    sizes = sorted({last - start + 1 for each, start in every for _, last in each})
    return " to ".join(dict.fromkeys(f"{size}" for size in (*sizes[:1], *sizes[-1:])))


def stretches(a: Parts, b: Parts) -> Words | None:
    """Returns words for documents and blocks that only one side has or that begin elsewhere; a common size if any."""
    words = []
    for read, regular, size_of, irregular, written in READ:
        every = read(a), read(b)
        found = [each * (max(map(len, every)) // len(each)) for each in every]  # a mask of one sample stands for all
        if found[0] == found[1]:
            continue
        name, said = regular, [size_of(each, x) if any(each) else "" for each, x in zip(found, (a, b), strict=True)]
        if None in said:
            name, said = irregular, [_by_sample(each, written) if any(each) else "" for each in found]
        has, lost, added, both = STRETCHES[name]
        old, new = (has.format(each) if each else NONE for each in said)
        text = both if said[0] and said[1] else added if said[1] else lost
        words.append((old, new, text.format(a=said[0], b=said[1])))
    if not words:
        return None
    olds, news, texts = zip(*words, strict=True)
    return ", ".join(olds), ", ".join(news), "; ".join(texts)


# -- keys without a pattern --------------------------------------------------------------------------------------------


def single_keys(masks: tuple[Tensor, Tensor]) -> Words:
    """Returns the rows and keys that only one side shows, of two masks (B, H, L, S)."""
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
    """Returns the rows and keys of pairs, and their samples and heads unless they are in all."""
    samples, heads = (pairs.transpose(0, axis).flatten(1).any(1) for axis in (0, 1))
    flat = pairs[samples][:, heads]
    rows, keys = flat.any(0).any(0).any(-1), flat.any(0).any(0).any(-2)
    some = "" if bool(flat[:, :, rows][..., keys].all()) else "some of the "
    axes = [_numbered(name, axis) for name, axis in (("sample", samples), ("head", heads)) if not bool(axis.all())]
    return f"{some}{_numbered('key', keys)} on {_numbered('row', rows)}", ", ".join(axes)


# -- words -------------------------------------------------------------------------------------------------------------


def _numbered(name: str, flags: Tensor) -> str:
    """Returns the indices that are True, with consecutive ones as a range.

    Example:
        >>> _numbered("row", torch.arange(8) == 3), _numbered("row", torch.arange(8) > 5)
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
    """Returns what the samples have, once if all have the same."""
    if all(each == found[0] for each in found):
        return written(found[0])
    number = next(number for number, each in enumerate(found) if each)
    return f"{written(found[number])} in sample {number} (others in other samples)"


Read = Callable[[Parts], list[list[Any]]]  # of each sample
Size = Callable[[list[list[Any]], Parts], str | None]
READ: tuple[tuple[Read, str, Size, str, Callable[[list[Any]], str]], ...] = (
    (_borders, "chunks", _chunk, "documents", _listed),
    (_ranges, "prefix", _prefix, "blocks", _spans),  # a prefix is a single block at the start
)
