"""One tensor, and one formula, of the parts of several ranks, by the places of their rows, keys and heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from sqrtdk.errors import TraceFileError
from sqrtdk.messages import Message
from sqrtdk.recording.decode import band_of_places
from sqrtdk.recording.limits import MAX_MASK, at_most
from sqrtdk.recording.records import Bounds
from sqrtdk.tracing.tensors import CallTensors, Term

COPY_ROUNDING = 2**6  # multiples of the dtype's eps by which copies of one part may differ: of two orders of a sum
_HINT = "Each rank declares its rows, keys and heads: docs/en/trace-file.md, Files of ranks."


def refuse_ranks(rule: str, hint: str = _HINT) -> NoReturn:
    """Raise the error of files that are no whole together.

    Raises:
        TraceFileError: always.
    """
    raise TraceFileError(rule, hint=hint)


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """A call in the file of one rank, and the places of its rows, keys and heads in the whole."""

    name: str
    call: CallTensors
    bounds: tuple[Bounds | None, ...]
    rows: list[int]
    keys: list[int]
    heads: list[int]
    key_heads: list[int]
    sizes: tuple[int, int, int, int]  # query heads, rows, key heads, keys of the whole

    def indices(self, kind: str) -> tuple[list[int], list[int]]:
        """Return the heads and the rows of a query, or the heads and the keys of a key."""
        return (self.heads, self.rows) if kind == "query" else (self.key_heads, self.keys)


def filled(parts: Sequence[tuple[RankPart, Tensor]], kind: str, what: str, site: str) -> Tensor:
    """Return a tensor (B, heads, rows or keys, features) of the whole from those of the ranks.

    Raises:
        TraceFileError: A place is in no file, or in several whose numbers differ.
    """
    first = parts[0][0]
    heads, length = first.sizes[:2] if kind == "query" else first.sizes[2:]
    noun = "row" if kind == "query" else "key"
    places_held = [part.indices(kind) for part, _ in parts]
    if sum(len(own) * len(at) for own, at in places_held) < heads * length:  # before memory for the whole is taken
        held = {place for _, at in places_held for place in at}
        missing = next((place for place in itertools.count() if place not in held), 0)
        lost = f"{noun} {missing}" if missing < length else "some heads"
        refuse_ranks(f"no file holds {lost} of {what} at {site}: {length} {noun}s and {heads} heads in all")
    example = parts[0][1]
    whole = example.new_zeros(example.shape[0], heads, length, example.shape[3])
    owner = torch.full((heads, length), -1)
    for number, (part, tensor) in enumerate(parts):
        places = torch.meshgrid(*(torch.tensor(each) for each in part.indices(kind)), indexing="ij")
        before = owner[places]
        if not tensor.is_meta and bool((before >= 0).any()):
            _compare(parts, whole[:, places[0], places[1]], tensor, before, number, what, site)
        fresh = before < 0
        if not tensor.is_meta:
            whole[:, places[0][fresh], places[1][fresh]] = tensor[:, fresh]
        owner[places[0][fresh], places[1][fresh]] = number
    if bool((owner < 0).any()):
        head, place = (owner < 0).nonzero()[0].tolist()
        refuse_ranks(
            f"no file holds {noun} {place} of head {head} of {what} at {site}: {length} {noun}s, {heads} heads in all"
        )
    return whole


def _compare(
    parts: Sequence[tuple[RankPart, Tensor]],
    known: Tensor,
    tensor: Tensor,
    before: Tensor,
    number: int,
    what: str,
    site: str,
) -> None:
    """Refuse copies of one part that differ by more than two orders of a sum explain."""
    held = (before >= 0)[None, :, :, None]
    a, b = (each.double().masked_fill(~held, 0.0).nan_to_num(0.0) for each in (known, tensor))
    apart = (a - b).abs().amax((0, 3))
    size = float(torch.maximum(a.abs().max(), b.abs().max()))
    if float(apart.max()) > COPY_ROUNDING * torch.finfo(tensor.dtype).eps * size:
        head, place = divmod(int(apart.argmax()), apart.shape[1])
        other, mine = parts[int(before[head, place])][0].name, parts[number][0].name
        refuse_ranks(
            f"{other} and {mine} both hold a part of {what} at {site}, and differ there by {float(apart.max()):.3g} of "
            f"{size:.3g}",
            "What several ranks hold is the same on all; otherwise one of them got or kept another tensor.",
        )


# -- from the product to the softmax -----------------------------------------------------------------------------------


def terms_of_ranks(parts: Sequence[RankPart], site: str, notes: list[str]) -> tuple[Term, ...] | None:
    """Return the steps of the whole; None if a rank does not tell them.

    A rank without a mask sees all its keys.
    """
    known = [(part, part.call.terms) for part in parts if part.call.terms is not None]
    if len(known) < len(parts):
        return None
    ways = [[term.name for term in terms if term.name != "mask"] for _, terms in known]
    for (part, _), way in zip(known, ways, strict=True):
        if way != ways[0]:
            steps = [", ".join(each) or "nothing" for each in (ways[0], way)]
            refuse_ranks(
                f"from the product to the softmax at {site} {parts[0].name} has {steps[0]}, and {part.name} {steps[1]}",
                "Ranks of one model take the same steps: compare the settings of these two.",
            )
    found: list[Term] = []
    for at in range(len(ways[0])):
        each = [[term for term in terms if term.name != "mask"][at] for _, terms in known]
        found.append(_step(parts, each, site, notes))
    if any(term.name == "mask" for _, terms in known for term in terms):
        found.append(_mask(parts, site))
    return tuple(found)


def _step(parts: Sequence[RankPart], terms: Sequence[Term], site: str, notes: list[str]) -> Term:
    values = [term.value for term in terms]
    if any(value is None for value in values):
        return replace(terms[0], value=None)
    if not any(isinstance(value, Tensor) for value in values):
        numbers = [float(value) for value in values]  # type: ignore[arg-type]
        if len(set(numbers)) == 1:
            return terms[0]
        of_ranks = ", ".join(f"{number:g} on {part.name}" for part, number in zip(parts, numbers, strict=True))
        notes.append(Message("recording.ranks_unlike", name=terms[0].name, site=site, ranks=of_ranks))
        each = [
            torch.full((1, len(part.heads), len(part.rows), 1), n, dtype=torch.float64)
            for part, n in zip(parts, numbers, strict=True)
        ]
        return replace(terms[0], value=filled(list(zip(parts, each, strict=True)), "query", terms[0].name, site))
    tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]
    if terms[0].name == "sinks":
        columns = [
            (part, tensor[None, :, None, None].expand(1, -1, len(part.rows), 1))
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        return replace(terms[0], value=filled(columns, "query", "sinks", site)[0, :, 0, 0])
    whole = _pairs(
        parts, [(part, tensor, None) for part, tensor in zip(parts, tensors, strict=True)], terms[0].name, site
    )
    return replace(terms[0], value=whole)


def _mask(parts: Sequence[RankPart], site: str) -> Term:
    """Return the mask of the whole: bounds hold for all keys of a rank's rows, other masks for the keys that it has."""
    (_, rows, _, keys), first = parts[0].sizes, None
    masks: list[tuple[RankPart, Tensor, Bounds | None]] = []
    for part in parts:
        assert part.call.terms is not None
        own = [(term, bound) for term, bound in zip(part.call.terms, part.bounds, strict=True) if term.name == "mask"]
        first = first or next((term for term, _ in own), None)
        if any(not isinstance(term.value, Tensor) for term, _ in own):
            return Term("mask", None, first.detail if first else "")
        shown = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        for term, _ in own:
            assert isinstance(term.value, Tensor)
            shown = shown.to(term.value.device) & term.value
        bounds = own[0][1] if len(own) == 1 else (None, None) if not own else None
        masks.append((part, shown, bounds))
    assert first is not None
    if any(shown.is_meta for _, shown, _ in masks):  # shapes alone
        return replace(first, value=torch.empty(1, 1, rows, keys, dtype=torch.bool, device="meta"))
    at_most(rows * keys, MAX_MASK, f"entries in the mask of {site}")
    plain = []
    for part, shown, bounds in masks:
        plain.append(bounds is not None and _is_band(part, shown, bounds))
        if bounds is not None and not plain[-1] and len(part.keys) < keys:
            refuse_ranks(f"{part.name} has padding at {site}, and lacks keys of other ranks, whose padding is unknown")
    bounds = masks[0][2]
    if bounds is not None and all(plain) and len({bounds for _, _, bounds in masks}) == 1:
        return replace(first, value=band_of_places(range(rows), range(keys), bounds)[None, None])
    return replace(first, value=_pairs(parts, masks, "mask", site))


def _is_band(part: RankPart, shown: Tensor, bounds: Bounds) -> bool:
    """Whether a mask of a rank is its bounds alone, without padding."""
    band = band_of_places(part.rows, part.keys, bounds)
    return torch.equal((band & shown).expand_as(shown | band), band.expand_as(shown | band))


def _pairs(
    parts: Sequence[RankPart], each: Sequence[tuple[RankPart, Tensor, Bounds | None]], what: str, site: str
) -> Tensor:
    """Return a tensor (B, Hq, L, S) of the whole from those of the ranks, which broadcast to their rows and keys."""
    all_heads, rows, _, keys = parts[0].sizes
    batch = max(tensor.shape[0] if tensor.dim() == 4 else 1 for _, tensor, _ in each)
    by_head = any(tensor.dim() > 2 and tensor.shape[-3] > 1 for _, tensor, _ in each)
    heads = all_heads if by_head else 1
    if any(tensor.is_meta for _, tensor, _ in each):  # shapes alone
        return torch.empty(batch, heads, rows, keys, device="meta")
    whole = torch.zeros(batch, heads, rows, keys, dtype=each[0][1].dtype)
    known = torch.zeros(heads, rows, keys, dtype=torch.bool)
    for part, tensor, bounds in each:
        own = part.heads if by_head else [0]
        if bounds is not None:  # of all keys, also of those that other ranks hold
            places = torch.meshgrid(torch.tensor(own), torch.tensor(part.rows), torch.arange(keys), indexing="ij")
            whole[:, places[0], places[1], places[2]] = band_of_places(part.rows, range(keys), bounds)
            known[places] = True
        places = torch.meshgrid(*(torch.tensor(at) for at in (own, part.rows, part.keys)), indexing="ij")
        whole[:, places[0], places[1], places[2]] = tensor.expand(batch, len(own), len(part.rows), len(part.keys))
        known[places] = True
    if not bool(known.all()):
        _, row, key = (~known).nonzero()[0].tolist()
        refuse_ranks(
            f"no file tells the {what} of row {row} and key {key} at {site}",
            "A rank that lacks keys gives its mask by bounds, which hold for all keys.",
        )
    return whole
