"""Finds the weights of A that the projections of B hold: of another projection, of another layer, a part of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sqrtdk._wrappers import named_parameters
from sqrtdk.compare.causes.parameters import Holder, holder_of
from sqrtdk.compare.inside.suspect import QKV_LETTERS, Sides, path_of
from sqrtdk.compare.outside.parts import LAYER_NUMBER
from sqrtdk.compare.records import PairDiff
from sqrtdk.compare.rounding.precision import same_rows
from sqrtdk.compare.sides import ModelSide
from sqrtdk.compare.words import site_list
from sqrtdk.messages import Message, joined

_MOST_SENTENCES = 4


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
    """Return sentences on projections of B that hold other weights of A, each verified by all its numbers.

    Args:
        a: side A; without a module, there are no sentences.
        pairs: compared pairs; only those with the cause "weights" are examined.
        programs: programs of each pair, None where unknown.
    """
    if a.module is None:
        return []
    differ = [
        (pair, sides)
        for pair, sides in zip(pairs, programs, strict=False)
        if sides is not None and any(cause.name == "weights" for cause in pair.causes)
    ]
    if not differ:
        return []
    parameters = dict(named_parameters(a.module))
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
