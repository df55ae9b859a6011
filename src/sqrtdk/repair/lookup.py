"""Finds the parameters of projections by the names that the trace read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_parameters
from sqrtdk.errors import InvalidValueError
from sqrtdk.repair.ranks import is_sharded
from sqrtdk.repair.rows import HeadRows, Refusal, explained
from sqrtdk.tracing import Projection, Vector

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LEAST_SIMILARITY = 0.5  # share of the squares; a weight moved by training stays far above it, another weight far below
_NOT_A_PARAMETER = "a parametrization, an adapter, or quantised"


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The parameter of a projection.

    Attributes:
        name: of the parameter.
        axis: along which its features lie.
        shift: index in the parameter of the projection's feature 0, as the code may use a slice of it.
        alike: share of the traced weight that the parameter explains.
        fresh: whether it equals the traced weight bit for bit.
    """

    name: str
    axis: int
    shift: int
    alike: float
    fresh: bool


class Parameters:
    """The parameters of a model by name. A shared parameter has several names, and is reported by the first."""

    def __init__(self, model: nn.Module) -> None:
        first: dict[int, str] = {}
        self._named: dict[str, Tensor] = {}
        self._first: dict[str, str] = {}
        # All names, as a plan may use another name of a tied weight than the trace.
        for name, parameter in named_parameters(model, remove_duplicate=False):
            self._named[name] = parameter
            self._first[name] = first.setdefault(id(parameter), name)
        self.ids = frozenset(map(id, self._named.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def first(self, name: str) -> str:
        """Return the first of the names that a parameter has."""
        return self._first[name]

    def get(self, name: str) -> Tensor:
        """Return a parameter itself; of a sharded one, this rank has a part.

        Raises:
            InvalidValueError: The model has no parameter of this name.
        """
        if name not in self._named:
            raise InvalidValueError(
                f"a plan's parameters are the model's; it has no {name!r}",
                hint="Make the plan from a trace of this very model, wrapped as it is now.",
            )
        return self._named[name]

    def whole(self, name: str) -> Float[Tensor, "..."]:
        """Return a parameter as one tensor on the CPU, detached; for a sharded one, every rank must call this."""
        parameter = self._named[name]
        whole = parameter.full_tensor() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]
        return whole.detach().cpu()

    def below(self, site: str) -> Iterator[str]:
        """Return the first names of the parameters of a module and of the modules inside it; "" is the whole model."""
        prefix = f"{site}." if site else ""
        return (name for name in self._named if name.startswith(prefix) and self._first[name] == name)

    def projection_rows(self, side: str, vector: Vector, index: Int[Tensor, "Hq E"]) -> list[HeadRows]:
        """Return the rows of a projection's weight and bias that set given features.

        Args:
            side: "q", "k" or "v".
            vector: The vector, whose projection is known.
            index: (Hq, E) features of each query head, by their index in the projection.

        Raises:
            Refusal: The weight or the bias can't be changed.
        """
        projection = vector.projection
        assert projection is not None
        place = self.find(side, projection)
        index = index + place.shift
        rows = [HeadRows(place.name, side, index, place.axis)]
        if projection.bias is not None:
            rows.append(self._bias(side, vector, index, place))
        return rows

    def find(self, side: str, projection: Projection) -> ParameterSlice:
        """Return the parameter that holds the weight of a projection.

        Args:
            side: "q", "k" or "v", for the reason of a refusal.
            projection: The projection, as the trace found it.

        Raises:
            Refusal: The weight is not a parameter, is quantised, or this rank holds only a part of it.
        """
        whole_weight(side, projection)
        if projection.name in self._named:
            places = self._fit(projection, self._first[projection.name])
            if not places:
                raise Refusal(f"{projection.name} is not the weight that {side} was projected by: {_NOT_A_PARAMETER}")
            # A square weight fits along both axes; the one along which it is the traced weight is right.
            return max(places, key=lambda place: place.alike)
        if projection.name:
            raise Refusal(f"{projection.name}, which projects {side}, is no parameter of the model: {_NOT_A_PARAMETER}")
        raise Refusal(
            f"the weight that projects {side} is no parameter: it is made while the model runs ({_NOT_A_PARAMETER})"
        )

    def why_no_projection(self, side: str, site: str) -> str:
        """Return the reason why a vector comes from no single projection: LoRA adapters, if the module has any."""
        adapters = [name for name in self.below(site) if "lora_" in name]
        if adapters:
            return (
                f"LoRA: {side} is the sum of a projection and its adapters ({adapters[0]}); merge them, or train "
                "without, as scaling the base weight leaves the adapters as they are"
            )
        return f"{side} comes from no single projection that could be followed (a sum, as with LoRA adapters)"

    def quantised_at(self, site: str) -> str:
        """Return a remark on the first quantised parameter of a module, in parentheses; "" if none is quantised."""
        for name in self.below(site):
            if reason := _no_weight(self._named[name]):
                return f" ({name} {reason})"
        return ""

    def _fit(self, projection: Projection, name: str) -> list[ParameterSlice]:
        """Return where in a parameter the projection's weight may be, for each axis along which its features fit."""
        weight, features = projection.weight, projection.features.cpu()
        parameter = self._named[name]
        if reason := _no_weight(parameter):
            raise Refusal(f"{name} {reason}")
        if weight is None or parameter.dim() != 2:
            return []
        axes = [axis for axis in (0, 1) if _fits(parameter, axis, weight.shape[-1], int(features.max()))]
        whole = self.whole(name) if axes else parameter
        places = (_find_slice(name, axis, whole if axis == 0 else whole.mT, weight.cpu(), features) for axis in axes)
        return [place for place in places if place is not None]

    def _bias(self, side: str, vector: Vector, index: Int[Tensor, "Hq E"], place: ParameterSlice) -> HeadRows:
        """Return the rows of the bias beside a weight; nn.MultiheadAttention keeps those of q, k and v in one bias."""
        owner, _, last = place.name.rpartition(".")
        features = self.get(place.name).shape[place.axis]
        # torch's MultiheadAttention has one bias for the packed projections, k's behind q's, but separate weights if
        # kdim differs.
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
        # Only if the weight is still the traced one can the traced bias be compared: training moves both.
        if place.fresh and projection is not None and projection.bias is not None:
            bias = self.whole(name)[projection.features.cpu() + place.shift + shift].to(torch.float64)
            size = bias.abs().max() if vector.projected is None else vector.projected.abs().max()
            eps = torch.finfo(projection.bias.dtype).eps  # rounding of an addition
            if not bool(((bias - projection.bias.cpu()).abs() <= eps * size.cpu()).all()):
                raise Refusal(f"{name} is not the bias that was added to {side}")
        return HeadRows(self._first[name], side, index + shift)


def whole_weight(side: str, projection: Projection) -> None:
    """Check that this rank has the whole weight of a projection.

    Of a tensor-parallel weight it has the rows of some heads only, and sees only their maxima.

    Raises:
        Refusal: The weight is such a part.
    """
    if projection.part:
        raise Refusal(
            f"this rank has a part of {projection.name}, which projects {side} (tensor parallel); plan the model "
            "before it is parallelised, and apply the plan with sqrtdk.repair.clip_ to the maxima of all heads"
        )


def _fits(parameter: Tensor, axis: int, width: int, feature: int) -> bool:
    return parameter.shape[1 - axis] == width and parameter.shape[axis] > feature


def _find_slice(
    name: str, axis: int, rows: Float[Tensor, "F D"], weight: Float[Tensor, "H E D"], features: Int[Tensor, "H E"]
) -> ParameterSlice | None:
    """Return where in a parameter the projection's weight is; a slice is placed by its most similar row."""
    for moved in _shifts(rows, weight[0, 0], int(features[0, 0])):
        index = features + moved
        if int(index.min()) < 0 or int(index.max()) >= len(rows):
            continue
        picked = rows[index[:, : weight.shape[1]]].to(weight.dtype)  # a sketch keeps one row of each head
        fresh = torch.equal(picked, weight)
        alike = 1.0 if fresh else explained(picked, weight)
        if alike > LEAST_SIMILARITY:
            return ParameterSlice(name, axis, moved, alike, fresh)
    return None


def _shifts(rows: Float[Tensor, "F D"], first: Float[Tensor, " D"], feature: int) -> Iterator[int]:
    """Yield shift 0, then the shift that aligns a weight's first row with the most similar row of the parameter."""
    # F.linear(x, self.qkv.weight[E:]) traces a weight whose row 0 is row E of the parameter
    yield 0
    # By direction, not by size: an optimizer step or an earlier clip may have scaled the row since the trace.
    shift = int((torch.nn.functional.normalize(rows.float(), dim=-1) @ first.float()).argmax()) - feature
    if shift:
        yield shift


def _no_weight(parameter: Tensor) -> str | None:
    """Say why a parameter can't be scaled; None if it can."""
    # Subclasses such as bitsandbytes' Params4bit and torchao's tensors hold packed numbers, in which no row can be
    # scaled.
    plain = type(parameter.data) is Tensor or is_sharded(parameter)
    if not plain or not parameter.is_floating_point() or parameter.element_size() < 2:
        kind = str(parameter.dtype).removeprefix("torch.") if plain else type(parameter.data).__name__
        return f"is quantised ({kind}): its numbers can't be scaled without new ones for all"
    return None
