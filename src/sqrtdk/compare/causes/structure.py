"""Differences of two masks that no band explains: documents, blocks, one mask laid out differently, or single keys.

A structure is named only if it turns one side's mask into the other's, key by key:

* documents that don't see one another, or chunks of one size; blocks that see themselves both paths, such as an image
  in a causal model, or a prefix. `sqrtdk.masks.decompose` finds them.
* the same mask laid out differently, a row of `MASK_LAYOUTS`: on the rows, inverted, transposed, of other samples or
  heads.

If no structure fits, the rows and keys that differ are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.inside.suspect import NO_VALUE, DifferenceWords
from sqrtdk.compare.numbers import span
from sqrtdk.masks.parts import Parts, pattern_mask, recompose
from sqrtdk.messages import Message, joined

MOST_ENTRIES_LISTED = 4  # entries of a list that are written out


# -- the same mask, laid otherwise -------------------------------------------------------------------------------------

LaidMasks = Iterator[tuple[Tensor, tuple[str, str]]]  # masks, each with what it was and what it is
MaskLayout = Callable[[Parts, Tensor, Tensor], LaidMasks]  # the other side's mask tells which samples or heads to try


def _as(was: str, now: str, *masks: Callable[[Parts, Tensor], Tensor], square: bool = False) -> MaskLayout:
    """Return the masks made from the parts or the whole mask; `square` requires as many rows as keys."""

    def made(parts: Parts, whole: Tensor, other: Tensor) -> LaidMasks:
        if not square or parts.rows == parts.keys:
            yield from ((mask(parts, whole), (Message(was), Message(now))) for mask in masks)

    return made


def _of_others(name: str, axis: int, plain: Callable[[Tensor], bool]) -> MaskLayout:
    """Return masks of other samples or heads, unless the other side's mask is `plain`: equal for all, or none."""

    def made(parts: Parts, whole: Tensor, other: Tensor) -> LaidMasks:
        order = None if plain(other) else _order(whole.transpose(0, axis), other.transpose(0, axis))
        if order is not None and order != list(range(len(order))):  # as they are: nothing is laid out otherwise
            yield whole.index_select(axis, torch.tensor(order, device=whole.device)), _moved(order, name)

    return made


def _for_heads(of_flat: Callable[[int, int], Tensor], words: Callable[[int, int], tuple[str, str]]) -> MaskLayout:
    """Return masks of samples, the same for all heads, given to heads in another way: the sample of each flat entry.

    The entries (B * H,) are one sample after the other. No other mask is a form of `repeat` or of a broadcast: what is
    said of a layout is said of this one side's mask, which is seen to have it.
    """

    def made(parts: Parts, whole: Tensor, other: Tensor) -> LaidMasks:
        batch, heads = whole.shape[:2]
        own = bool((whole == whole[:, :1]).all()) and not bool((whole == whole[:1]).all())
        if own and batch > 1 and heads > 1:
            sources = of_flat(batch, heads)
            if sources.numel() == batch * heads:
                yield whole[:, 0][sources.to(whole.device)].view_as(whole), words(batch, heads)

    return made


def _repeated(batch: int, heads: int) -> Tensor:
    return torch.arange(batch * heads) % batch


def _along_heads(batch: int, heads: int) -> Tensor:
    """Return the samples of a mask (B, 1, L, S) whose samples meet B heads of keys: logits (B, B, H / B, L, S)."""
    if heads % batch:
        return torch.zeros(0, dtype=torch.long)
    return torch.arange(batch).repeat_interleave(heads // batch).repeat(batch)


def _heads_words(batch: int, heads: int) -> tuple[str, str]:
    """Return whose mask heads have that is not sample 0's, and which heads these are."""
    samples, every = torch.arange(batch), torch.arange(batch).repeat_interleave(heads // batch)
    return _numbered("sample", samples > 0), _numbered("head", every > 0)


def _seen_keys(parts: Parts) -> Tensor:
    return pattern_mask(parts)[:, None]


def _tokens(parts: Parts) -> Tensor:
    return parts.padding[:, None, None]


AS_IT_IS, INVERTED = "causes.mask.as_it_is", "causes.mask.inverted"
OTHERS_MASKS = "causes.mask.of_others", "causes.mask.own"
# what is laid out, how, words if B's mask is so, words if A's is
MASK_LAYOUTS: tuple[tuple[str, MaskLayout, str, str], ...] = (
    (
        "padding",  # attention_mask[:, None, :, None] for attention_mask[:, None, None, :]
        _as(
            "causes.padding.the_keys", "causes.padding.the_rows",
            lambda parts, _: _seen_keys(parts) & _tokens(parts).mT, square=True,
        ),
        "causes.padding.on_rows", "causes.padding.on_keys",
    ),
    (
        "padding", _as(AS_IT_IS, INVERTED, lambda parts, _: _seen_keys(parts) & ~_tokens(parts)),
        "causes.padding.inverts", "causes.padding.inverts",
    ),
    (
        "padding", _of_others("sample", 0, lambda mask: bool(mask.any(1).any(-2).all())),
        "causes.padding.of_others", "causes.padding.own",
    ),
    (
        "mask", _as(AS_IT_IS, INVERTED, lambda _, whole: ~whole, lambda parts, _: ~_seen_keys(parts) & _tokens(parts)),
        "causes.mask.inverts", "causes.mask.inverts",
    ),
    (
        "mask",
        _as(
            "causes.mask.row_by_key", "causes.mask.key_by_row",
            lambda _, whole: whole.mT, lambda parts, _: _seen_keys(parts).mT & _tokens(parts), square=True,
        ),
        "causes.mask.transposed", "causes.mask.transposed",
    ),
    ("mask", _of_others("sample", 0, lambda mask: bool((mask == mask[:1]).all())), *OTHERS_MASKS),
    (
        "mask",  # mask (B, 1, L, S) against logits (B, kv heads, groups, L, S), or mask (B, L, S) against (B, H, L, S)
        _for_heads(_along_heads, _heads_words), "causes.mask.on_heads", "causes.mask.off_heads",
    ),
    (
        "mask",  # mask.repeat(heads, 1, 1) for mask.repeat_interleave(heads, 0), viewed as (batch, heads, ...)
        _for_heads(
            _repeated, lambda *_: (Message("causes.mask.repeat_interleave"), Message("causes.mask.repeat"))
        ),
        "causes.mask.repeated", "causes.mask.interleaved",
    ),
    ("mask", _of_others("head", 1, lambda mask: bool((mask == mask[:, :1]).all())), *OTHERS_MASKS),
)  # fmt: skip


def layout_words(a: Parts, b: Parts, masks: tuple[Tensor, Tensor], of: str) -> DifferenceWords | None:
    """Return how one side's mask is the other's laid out differently; None if no row of `MASK_LAYOUTS` fits.

    Args:
        a: parts of A's mask.
        b: parts of B's mask.
        masks: both masks, (B, H, L, S).
        of: "padding" or "mask": what is laid out differently, while everything else stays.
    """
    one, other = masks
    for what, laying, text, back in MASK_LAYOUTS:
        if what != of:
            continue
        for made, (was, now) in laying(a, one, other):
            if torch.equal(made.expand_as(other), other):
                return DifferenceWords(was, now, text, {"whose": was, "which": now})
        for made, (was, now) in laying(b, other, one):
            if torch.equal(made.expand_as(one), one):
                return DifferenceWords(now, was, back, {"whose": was, "which": now})
    return None


def _order(own: Tensor, other: Tensor) -> list[int] | None:
    """Return the own entry equal to each entry of the other, at the same index if possible; None if one has none."""
    mine, theirs = ([entry.numpy(force=True).tobytes() for entry in masks] for masks in (own, other))
    if not set(theirs) <= set(mine):
        return None
    return [i if mine[i] == entry else mine.index(entry) for i, entry in enumerate(theirs)]


def _moved(order: list[int], name: str) -> tuple[str, str]:
    """Return whose masks are taken and who has them, as text: ("samples 1, 0", "samples 0, 1")."""
    places = [at for at, source in enumerate(order) if source != at]
    sources = [order[at] for at in places]
    sources = sources if len(set(sources)) > 1 else sources[:1]
    taken, having = (_numbers_text(name, len(numbers), _list_text(numbers)) for numbers in (sources, places))
    return taken, having


def _numbers_text(name: str, count: int, numbers: str) -> Message:
    """Return numbers with the name of what they count, a row of `causes.numbered`: "samples 0, 1"."""
    return Message(f"causes.numbered.{name}{'s' if count > 1 else ''}", numbers=numbers)


# -- documents and blocks ----------------------------------------------------------------------------------------------


def _borders(parts: Parts) -> list[list[int]]:
    """Return where documents begin between the tokens of each sample."""
    seen = recompose(parts)
    if parts.documents is None or seen is None:
        return [[]]
    live = parts.padding & seen.any(1).any(-2)
    starts = parts.documents.diff(dim=-1).bool() & live[:, 1:] & parts.padding[:, :-1]
    return [(sample.nonzero()[:, 0] + 1).tolist() for sample in starts]


def _ranges(parts: Parts) -> list[list[tuple[int, int]]]:
    """Return the first and last row of each block, by sample."""
    if parts.blocks is None:
        return [[]]
    rows = parts.blocks[:, parts.keys - parts.rows :]
    every = ([(sample == number).nonzero() for number in sample[sample > 0].unique()] for sample in rows)
    return [[(int(at[0]), int(at[-1])) for at in places] for places in every]


def _chunk(starts: list[list[int]], parts: Parts) -> str | None:
    """Return the common size of three or more documents; None if they have no common size."""
    first, size = starts[0], next(iter(starts[0]), 0)
    alike = len(first) > 1 and all(each == first for each in starts)
    return f"{size}" if alike and first == list(range(size, parts.keys, size)) else None


def _prefix(found: list[list[tuple[int, int]]], parts: Parts) -> str | None:
    """Return the number of keys in the first block of each sample; None if there are other blocks."""
    first = parts.padding.byte().argmax(-1).tolist()
    every = list(zip(found, first * len(found), strict=False))
    inside = (len(each) > 1 or any(at[0] > start for at in each) for each, start in every)
    if parts.rows != parts.keys or any(inside):
        return None
    sizes = sorted({last - start + 1 for each, start in every for _, last in each})
    return f"{sizes[0]}" if len(sizes) == 1 else span(sizes[0], sizes[-1])


def stretches_words(a: Parts, b: Parts) -> DifferenceWords | None:
    """Return what to say about documents and blocks that differ; None if they are the same.

    Documents of one size are called chunks, and a single block at the start a prefix; others are listed by where they
    begin.
    """
    words: list[DifferenceWords] = []
    for read, regular, size_of, irregular, written in STRETCH_READINGS:
        every = read(a), read(b)
        found = [each * (max(map(len, every)) // len(each)) for each in every]  # a mask of one sample stands for all
        if found[0] == found[1]:
            continue
        name, where = regular, [size_of(each, x) if any(each) else "" for each, x in zip(found, (a, b), strict=True)]
        if None in where:
            name, where = irregular, [_by_sample(each, written) if any(each) else "" for each in found]
        words.append(_stretch_words(name, where[0] or "", where[1] or ""))
    if not words:
        return None
    old, new = joined([one.a for one in words], "comma"), joined([one.b for one in words], "comma")
    return DifferenceWords(old, new, joined([one.text for one in words]))


def _stretch_words(name: str, old: str, new: str) -> DifferenceWords:
    """Return the words for chunks, documents, a prefix or blocks; a side without any has ""."""
    was, now = (Message(f"causes.mask.{name}.has", where=where) if where else Message(NO_VALUE) for where in (old, new))
    if old and new:
        text = Message(f"causes.mask.{name}.moved", new=new, old=old)
    else:
        text = Message(f"causes.mask.{name}.{'added' if new else 'lost'}", where=new or old)
    return DifferenceWords(was, now, text)


# -- keys without a pattern --------------------------------------------------------------------------------------------


def single_keys_words(masks: tuple[Tensor, Tensor]) -> DifferenceWords:
    """Return what to say about the rows and keys that are visible on one side only.

    Args:
        masks: both masks as booleans (B, H, L, S), True where a key is visible.
    """
    a, b = masks
    hidden, shown = a & ~b, b & ~a
    texts = []
    for id, pairs in (("causes.mask.hides", hidden), ("causes.mask.shows", shown)):
        if bool(pairs.any()):
            where, axes = _rows_and_keys_text(pairs)
            text = Message(id, pairs=where)
            whose = joined(axes, "comma") if axes else ""
            texts.append(Message("causes.mask.in_whose", text=text, whose=whose) if whose else text)
    counts = (int(pairs.any(0).any(0).sum()) for pairs in (hidden, shown))
    old, new = (Message("causes.mask.pairs_counted", number=count) if count else Message(NO_VALUE) for count in counts)
    return DifferenceWords(old, new, joined(texts))


def _rows_and_keys_text(pairs: Tensor) -> tuple[Message, list[Message]]:
    """Return the rows and keys of pairs, and their samples and heads unless they are in all."""
    samples, heads = (pairs.transpose(0, axis).flatten(1).any(1) for axis in (0, 1))
    flat = pairs[samples][:, heads]
    rows, keys = flat.any(0).any(0).any(-1), flat.any(0).any(0).any(-2)
    axes = [_numbered(name, axis) for name, axis in (("sample", samples), ("head", heads)) if not bool(axis.all())]
    where = Message("causes.mask.pairs", keys=_numbered("key", keys), rows=_numbered("row", rows))
    every = bool(flat[:, :, rows][..., keys].all())
    return where if every else Message("causes.mask.some_pairs", pairs=where), axes


# -- words -------------------------------------------------------------------------------------------------------------


def _numbered(name: str, flags: Tensor) -> Message:
    """Return the indices that are True, with consecutive ones as a range.

    Example:
        >>> _numbered("row", torch.arange(8) == 3), _numbered("row", torch.arange(8) > 5)
        ('row 3', 'rows 6 to 7')
    """
    runs: list[tuple[int, int]] = []
    for number in flags.nonzero()[:, 0].tolist():
        first = runs.pop()[0] if runs and number == runs[-1][1] + 1 else number
        runs.append((first, number))
    return _numbers_text(name, int(flags.sum()), _spans(runs))


def _spans(runs: list[tuple[int, int]]) -> str:
    return _list_text([f"{first}" if first == last else span(first, last) for first, last in runs])


def _list_text(words: Sequence[str | int]) -> str:
    some = joined([word if isinstance(word, str) else str(word) for word in words[:MOST_ENTRIES_LISTED]], "comma")
    more = len(words) - MOST_ENTRIES_LISTED
    return Message("causes.numbered.more", numbers=some, count=more) if more > 0 else some


def _by_sample(found: list[list[Any]], written: Callable[[list[Any]], str]) -> str:
    """Return what the samples have, once if all have the same."""
    if all(each == found[0] for each in found):
        return written(found[0])
    number = next(number for number, each in enumerate(found) if each)
    return Message("causes.mask.of_sample", where=written(found[number]), number=number)


ReadStretches = Callable[[Parts], list[list[Any]]]  # of each sample
StretchSize = Callable[[list[list[Any]], Parts], str | None]
STRETCH_READINGS: tuple[tuple[ReadStretches, str, StretchSize, str, Callable[[list[Any]], str]], ...] = (
    (_borders, "chunks", _chunk, "documents", _list_text),
    (_ranges, "prefix", _prefix, "blocks", _spans),  # a prefix is a single block at the start
)
