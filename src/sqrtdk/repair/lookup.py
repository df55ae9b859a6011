"""The parameters that a projection used, by the name that the trace read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.repair.ranks import is_sharded
from sqrtdk.repair.rows import Refusal, Rows, explained
from sqrtdk.tracing import Projection, Vector

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ALIKE = 0.5  # share of the squares: a tensor that moved by training is far above, an unlike one far below
_MADE = "a parametrization, an adapter, or quantised"


@dataclass(frozen=True, slots=True)
class Place:
    """A projection's parameter.

    Attributes:
        name: of the parameter.
        axis: of its features.
        shift: number in the parameter of the projection's feature 0: the code may multiply by a part of it.
        alike: share of the weight that the trace saw which the parameter explains.
        fresh: it is bit for bit as the trace saw it.
    """

    name: str
    axis: int
    shift: int
    alike: float
    fresh: bool


class Parameters:
    """A model's parameters by all of their names; a shared one has the first of its names."""

    def __init__(self, model: nn.Module) -> None:
        first: dict[int, str] = {}
        self._named: dict[str, Tensor] = {}
        self._first: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._named[name] = parameter
            self._first[name] = first.setdefault(id(parameter), name)
        self.ids = frozenset(map(id, self._named.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def first(self, name: str) -> str:
        """The first name of a parameter that has several."""
        return self._first[name]

    def get(self, name: str) -> Tensor:
        """The parameter itself, of which this rank may hold a part.

        Raises:
            InvalidValueError: the model has none of this name.
        """
        if name not in self._named:
            raise InvalidValueError(
                f"a plan's parameters are the model's; it has no {name!r}",
                hint="Make the plan from a trace of this very model, wrapped as it is now.",
            )
        return self._named[name]

    def whole(self, name: str) -> Float[Tensor, "..."]:
        """All of a parameter; where it is sharded, every rank asks at the same time."""
        parameter = self._named[name]
        whole = parameter.full_tensor() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]
        return whole.detach().cpu()

    def below(self, site: str) -> Iterator[str]:
        """First names of the parameters of a module and those in it."""
        prefix = f"{site}." if site else ""
        return (name for name in self._named if name.startswith(prefix) and self._first[name] == name)

    def projection_rows(self, side: str, vector: Vector, index: Int[Tensor, "Hq E"]) -> list[Rows]:
        """Rows of a projection's weight and bias, of the features in `index`, each query head's own."""
        projection = vector.projection
        assert projection is not None
        place = self.find(side, projection)
        index = index + place.shift
        rows = [Rows(place.name, side, index, place.axis)]
        if projection.bias is not None:
            rows.append(self._bias(side, vector, index, place))
        return rows

    def find(self, side: str, projection: Projection) -> Place:
        """The parameter of a projection.

        Raises:
            Refusal: it is none, or quantised, or on this rank a part.
        """
        whole_weight(side, projection)
        if projection.name in self._named:
            places = self._fit(projection, self._first[projection.name])
            if not places:
                raise Refusal(f"{projection.name} is not the weight that {side} was projected by: {_MADE}")
            return max(places, key=lambda place: place.alike)
        if projection.name:
            raise Refusal(f"{projection.name}, which projects {side}, is no parameter of the model: {_MADE}")
        raise Refusal(f"the weight that projects {side} is no parameter: it is made while the model runs ({_MADE})")

    def why_no_projection(self, side: str, site: str) -> str:
        """Why a vector comes from no one projection."""
        adapters = [name for name in self.below(site) if "lora_" in name]
        if adapters:
            return (
                f"LoRA: {side} is the sum of a projection and its adapters ({adapters[0]}); merge them, or train "
                "without, as scaling the base weight leaves the adapters as they are"
            )
        return f"{side} comes from no single projection that could be followed (a sum, as with LoRA adapters)"

    def quantised_at(self, site: str) -> str:
        """What is quantised at a site, as a remark; "" where nothing is."""
        for name in self.below(site):
            if reason := _no_weight(self._named[name]):
                return f" ({name} {reason})"
        return ""

    def _fit(self, projection: Projection, name: str) -> list[Place]:
        """Where in a parameter a projection's weight may be: which axis its features lie along."""
        weight, features = projection.weight, projection.features.cpu()
        parameter = self._named[name]
        if reason := _no_weight(parameter):
            raise Refusal(f"{name} {reason}")
        if weight is None or parameter.dim() != 2:
            return []
        axes = [axis for axis in (0, 1) if _fits(parameter, axis, weight.shape[-1], int(features.max()))]
        whole = self.whole(name) if axes else parameter
        places = (_place(name, axis, whole if axis == 0 else whole.mT, weight.cpu(), features) for axis in axes)
        return [place for place in places if place is not None]

    def _bias(self, side: str, vector: Vector, index: Int[Tensor, "Hq E"], place: Place) -> Rows:
        """The bias beside a weight; nn.MultiheadAttention has those of q, k and v in one."""
        owner, _, last = place.name.rpartition(".")
        features = self.get(place.name).shape[place.axis]
        name, shift = {
            "weight": ("bias", 0),
            "in_proj_weight": ("in_proj_bias", 0),
            "q_proj_weight": ("in_proj_bias", 0),
            "k_proj_weight": ("in_proj_bias", features),
        }.get(last, ("", 0))
        name = f"{owner}.{name}" if owner else name
        if name not in self._named:
            raise Refusal(f"the bias of {side} beside {place.name} is no parameter")
        projection = vector.projection
        if place.fresh and projection is not None and projection.bias is not None:
            bias = self.whole(name)[projection.features.cpu() + place.shift + shift].to(torch.float64)
            size = bias.abs().max() if vector.projected is None else vector.projected.abs().max()
            eps = torch.finfo(projection.bias.dtype).eps  # what an addition of its own may cost
            if not bool(((bias - projection.bias.cpu()).abs() <= eps * size.cpu()).all()):
                raise Refusal(f"{name} is not the bias that was added to {side}")
        return Rows(self._first[name], side, index + shift)


def whole_weight(side: str, projection: Projection) -> None:
    """Refuse a weight of which each rank has the heads of its part, and sees the maxima of these alone.

    Raises:
        Refusal: it is one.
    """
    if projection.part:
        raise Refusal(
            f"this rank has a part of {projection.name}, which projects {side} (tensor parallel); plan the model "
            "before it is parallelised, and apply the plan with sqrtdk.repair.clip_ to the maxima of all heads"
        )


def _fits(parameter: Tensor, axis: int, width: int, feature: int) -> bool:
    return parameter.shape[1 - axis] == width and parameter.shape[axis] > feature


def _place(
    name: str, axis: int, rows: Float[Tensor, "F D"], weight: Float[Tensor, "H E D"], features: Int[Tensor, "H E"]
) -> Place | None:
    """Where in a parameter a projection's weight is, or None; by its most alike row, where it is a part of it."""
    for moved in _shifts(rows, weight[0, 0], int(features[0, 0])):
        index = features + moved
        if int(index.min()) < 0 or int(index.max()) >= len(rows):
            continue
        picked = rows[index[:, : weight.shape[1]]].to(weight.dtype)  # a sketch has one row of each head
        fresh = torch.equal(picked, weight)
        alike = 1.0 if fresh else explained(picked, weight)
        if alike > ALIKE:
            return Place(name, axis, moved, alike, fresh)
    return None


def _shifts(rows: Float[Tensor, "F D"], first: Float[Tensor, " D"], feature: int) -> Iterator[int]:
    """0, and, where that is not it, the one that brings a weight's first row to the most alike row of a parameter."""
    yield 0
    shift = int((torch.nn.functional.normalize(rows.float(), dim=-1) @ first.float()).argmax()) - feature
    if shift:
        yield shift


def _no_weight(parameter: Tensor) -> str | None:
    """Why a parameter can't be scaled."""
    plain = type(parameter.data) is Tensor or is_sharded(parameter)
    if not plain or not parameter.is_floating_point() or parameter.element_size() < 2:
        kind = str(parameter.dtype).removeprefix("torch.") if plain else type(parameter.data).__name__
        return f"is quantised ({kind}): its numbers can't be scaled without new ones for all"
    return None
