"""Finds the weight of A that a weight of B holds: of another projection, of another layer, transposed, a part of one.

A checkpoint is loaded through a table of names, and a wrong row of the table puts a right weight into a wrong place.
Names can't show that: the numbers do. Candidates are found by the first numbers of a row, and compared in full before
anything is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.causes.projections import same_rows
from sqrtdk.compare.records import PairDiff
from sqrtdk.compare.sides import ModelSide
from sqrtdk.compare.suspect import QKV_LETTERS, Sides, path_of
from sqrtdk.compare.words import site_list
from sqrtdk.messages import Message, joined

LAYER_NUMBER = re.compile(r"(?<=[.`])\d+(?=[.`])")  # a layer's number in a path
_FIRST_NUMBERS = 8  # numbers of a row that rule out nearly every candidate
_NEAR_WEIGHT = 2.0**-7  # relative: a bfloat16 copy of a float32 weight begins alike
_ROWS_AT_ONCE = 2**10
_MOST_SENTENCES = 4


@dataclass(frozen=True, slots=True)
class Holder:
    """Where A has the rows of a weight.

    Attributes:
        name: A's parameter.
        rows: first row and the one after the last, of a part of it; None for all of it.
        turned: whether they are its columns.
        permuted: whether they are in another order.
    """

    name: str
    rows: tuple[int, int] | None = None
    turned: bool = False
    permuted: bool = False

    @property
    def text(self) -> Message:
        """The weight in words: "A's `k_proj`, transposed"."""
        name = f"`{self.name.removesuffix('.weight')}`"
        if self.rows is not None:
            return Message("outputs.holds.part", name=name, first=self.rows[0], last=self.rows[1] - 1)
        how = "turned" if self.turned else "permuted" if self.permuted else "whole"
        return Message(f"outputs.holds.{how}", name=name)


def holder_of(wanted: Tensor, parameters: Mapping[str, Tensor], own: str = "") -> Holder | None:
    """Return the parameter that holds the rows of a weight (rows, D); None if none does.

    `own` is the parameter that should hold them. If it is stored as (D, rows), the others are read so too.

    Example:
        >>> q, k = torch.randn(2, 4, 4)
        >>> str(holder_of(k, {"q_proj.weight": q, "k_proj.weight": k}).text)
        "A's `k_proj`"
        >>> str(holder_of(k.mT, {"q_proj.weight": q, "k_proj.weight": k}).text)
        "A's `k_proj`, transposed"
    """
    if wanted.dim() != 2 or wanted.shape[0] < 2 or bool((wanted == wanted[:1, :1]).all()):
        return None  # zeros, or ones, are held by many
    wanted = wanted.double()
    columns = own in parameters and parameters[own].shape == wanted.mT.shape != wanted.shape
    found: list[Holder] = []
    for turned in (False, True):
        for name, parameter in parameters.items():
            if parameter.dim() != 2 or not parameter.is_floating_point():
                continue
            rows = parameter.detach().mT if turned != columns else parameter.detach()
            if rows.shape[1] == wanted.shape[1] and rows.shape[0] >= wanted.shape[0]:
                place = _place(wanted, rows)
                if place is not None:
                    whole = rows.shape[0] == wanted.shape[0]
                    part = None if whole else (place, place + wanted.shape[0])
                    found.append(Holder(name, part, turned, permuted=place < 0))
    # a whole weight before a part of one, as it is before another order
    return min(found, key=lambda one: (one.permuted, one.turned, one.rows is not None), default=None)


def _place(wanted: Tensor, rows: Tensor) -> int | None:
    """Return the first of the rows from which on they are the wanted ones; -1 if all are, in another order."""
    few = wanted[0, :_FIRST_NUMBERS]
    beginnings = rows[:, :_FIRST_NUMBERS].to(few)
    starts = ((beginnings - few).abs() <= _NEAR_WEIGHT * few.abs().max()).all(-1).nonzero().flatten().tolist()
    for start in starts:
        there = rows[start : start + len(wanted)]
        if len(there) == len(wanted) and bool(same_rows(there.to(wanted), wanted).all()):
            return int(start)
    if not starts or len(rows) != len(wanted):
        return None
    parts = torch.split(wanted[:, :_FIRST_NUMBERS], _ROWS_AT_ONCE)
    order = torch.cat([torch.cdist(part, beginnings).argmin(-1) for part in parts])
    permuted = len(set(order.tolist())) == len(order) and bool(same_rows(rows[order].to(wanted), wanted).all())
    return -1 if permuted else None


# -- projections of attentions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """A projection of B that holds another weight of A than its own."""

    pair: PairDiff
    vector: str
    own_b: str
    own_a: str
    holder: Holder

    def elsewhere(self, sites: Sequence[str]) -> str | None:
        """Return the site of A whose projection of this name it holds; None unless it is that of another site."""
        tail = self.own_a.removeprefix(f"{self.pair.site_a}.")
        if self.holder.rows is not None or self.holder.turned or self.holder.permuted or tail == self.own_a:
            return None
        return next((site for site in sites if site != self.pair.site_a and self.holder.name == f"{site}.{tail}"), None)


def held_weights(a: ModelSide, pairs: Sequence[PairDiff], programs: Sequence[Sides | None]) -> list[Message]:
    """Return sentences on projections of B that hold other weights of A, each verified by all its numbers."""
    if a.module is None:
        return []
    differ = [
        (pair, sides)
        for pair, sides in zip(pairs, programs, strict=False)
        if sides is not None and any(cause.name == "weights" for cause in pair.causes)
    ]
    if not differ:
        return []
    parameters = dict(a.module.named_parameters())
    held = [one for pair, sides in differ for one in _of_pair(pair, sides, parameters)]
    places: dict[str, list[_Held]] = {}
    for one in held:
        places.setdefault(one.pair.site_a, []).append(one)
    sites = list(dict.fromkeys(pair.site_a for pair in pairs))
    moved = {site: _moved_to(every, sites) for site, every in places.items()}
    sentences: list[Message] = []
    for site, other in moved.items():
        every = places[site]
        if other is None:
            for one in every:
                name = f"`{one.own_b.removesuffix('.weight')}`"
                sentences.append(Message("outputs.holds.holds", name=name, what=one.holder.text))
        elif moved.get(other) == site and sites.index(other) < sites.index(site):
            continue  # said with the first of the two
        else:
            parts = joined([QKV_LETTERS[one.vector] for one in every], "and")
            words = {"parts": parts, "site_b": f"`{every[0].pair.site_b}`", "site": f"`{other}`"}
            if moved.get(other) == site:
                numbers = [_layer(site), _layer(other)]
                words |= {"site_b_too": f"`{places[other][0].pair.site_b}`", "site_too": f"`{site}`"}
                words |= {"first": numbers[0], "second": numbers[1]}
                sentences.append(Message("outputs.holds.exchanged", **words))
            else:
                sentences.append(Message("outputs.holds.of_layer", **words))
    if len(sentences) > _MOST_SENTENCES:
        listed = site_list(list(places))
        sentences = [*sentences[:_MOST_SENTENCES], Message("outputs.holds.more", sites=listed)]
    return sentences


def _of_pair(pair: PairDiff, sides: Sides, parameters: Mapping[str, Tensor]) -> Iterator[_Held]:
    for vector in QKV_LETTERS:
        own, other = path_of(sides.a, vector).affine, path_of(sides.b, vector).affine
        if own is None or other is None:
            continue
        wanted = other.weight.flatten(0, 1).double()
        if own.weight.shape == other.weight.shape and bool(same_rows(own.weight.flatten(0, 1).double(), wanted).all()):
            continue
        holder = holder_of(wanted, parameters, own.name)
        if holder is not None:
            yield _Held(pair, vector, other.name, own.name, holder)


def _moved_to(held: Sequence[_Held], sites: Sequence[str]) -> str | None:
    """Return the one other site whose weights all projections of a site hold."""
    found = {one.elsewhere(sites) for one in held}
    return found.pop() if len(found) == 1 else None


def _layer(site: str) -> str:
    """Return the number of a layer: "1" of "model.layers.1.self_attn"; the site if it has none."""
    number = LAYER_NUMBER.search(f"`{site}`")
    return number[0] if number is not None else site
