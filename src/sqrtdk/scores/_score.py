"""The interfaces of score functions, their weights, and two scores without weights: dot product, a function.

A score either changes q and k so that their dot product is the score (`FoldedScore`), or scores pairs (`PairScore`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.scales import ScaleRule, none, sqrt_dk

if TYPE_CHECKING:
    from jaxtyping import Float


def store_weight(module: nn.Module, name: str, value: object, what: str, shapes: dict[int, str]) -> None:
    """Store a weight under `name`: a Parameter as such, a plain tensor as a buffer, through which gradients still flow.

    Args:
        module: the owner.
        name: name of the attribute.
        value: the value that the caller passed.
        what: name of the weight, with which the message begins.
        shapes: the permitted shapes as text, by their number of dimensions.
    """
    if not isinstance(value, Tensor):
        raise InvalidTypeError(f"{what} is a tensor; got {type(value).__name__}", hint="torch.as_tensor makes one.")
    check_class(what, value)
    if not value.is_floating_point():
        raise InvalidTypeError(f"{what} has a floating dtype; got {value.dtype}", hint="Convert it first.")
    if value.ndim not in shapes:
        raise InvalidValueError(
            f"{what} is {' or '.join(shapes.values())}; got {tuple(value.shape)}", hint="Reshape it."
        )
    # A parameter is trained with the module, a plain tensor moves with it as a buffer.
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


def heads_of(tensor: Float[Tensor, "... L E"]) -> int:
    """Return the number of heads of a query or a key (..., H, L, E); 1 for a tensor (L, E)."""
    return tensor.shape[-3] if tensor.ndim > 2 else 1


def check_weight_heads(
    weight: Float[Tensor, "..."], dims: int, tensor: Float[Tensor, "... L E"], what: str, kind: str
) -> None:
    """Check that a weight with a dimension of heads has as many as the tensor.

    Args:
        weight: The weight; with fewer dimensions than `dims` it is shared by all heads.
        dims: Number of dimensions of a weight with heads.
        tensor: (..., H, L, E).
        what: What the weight is, for the error.
        kind: "query" or "key", for the error.

    Raises:
        InvalidValueError: The numbers of heads differ.
    """
    if weight.ndim == dims and weight.shape[0] != heads_of(tensor):
        raise InvalidValueError(
            f"{what} has a part for each of {weight.shape[0]} heads; got a {kind} of {heads_of(tensor)} heads",
            hint="Make the weight for these heads, or leave its first dimension out to share it.",
        )


def project_heads(
    tensor: Float[Tensor, "*BH L E"],
    weight: Float[Tensor, "E A"] | Float[Tensor, "H E A"],
    what: str,
    kind: str,
) -> Float[Tensor, "*BH L A"]:
    """Return a tensor times a weight, (..., H, L, A), in the tensor's dtype.

    Args:
        tensor: (..., H, L, E).
        weight: (E, A), shared by all heads, or (H, E, A).
        what: What the weight is, for the error.
        kind: "query" or "key", for the error.

    Raises:
        InvalidValueError: The weight has other features or heads than the tensor.
    """
    if tensor.shape[-1] != weight.shape[-2]:
        raise InvalidValueError(
            f"{what} takes a {kind} of {weight.shape[-2]} features; got {tensor.shape[-1]}",
            hint=f"Its shape is {tuple(weight.shape)}: features in come before features out.",
        )
    check_weight_heads(weight, 3, tensor, what, kind)
    # Under autocast the query may be half while the weight is float32.
    weight = weight.to(tensor.dtype)
    # A tensor without heads has one, and so has the weight that belongs to it.
    return tensor @ (weight[0] if tensor.ndim == 2 and weight.ndim == 3 else weight)


def check_same_features(query: Float[Tensor, "... E"], key: Float[Tensor, "... Ek"], what: str) -> None:
    """Check that query and key have the same number of features.

    Raises:
        InvalidValueError: They have not; `what` names the score in its text.
    """
    if query.shape[-1] != key.shape[-1]:
        raise InvalidValueError(
            f"{what} takes a query and a key of the same features; got {query.shape[-1]} and {key.shape[-1]}",
            hint="Project one of them.",
        )


def widened(tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return the tensor in float32 if it is of a narrower type; float32 and float64 are returned as they are."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@runtime_checkable
class FoldedScore(Protocol):
    """A score that is the dot product of a changed query and a changed key; every kernel can compute it."""

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule that applies if the caller gives no scale."""

    def fold(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"]]:
        """Return the query, (..., Hq, L, A), and the key, (..., H, S, A), whose dot product is the score.

        Args:
            query: (..., Hq, L, E).
            key: (..., H, S, Ek).
        """


@runtime_checkable
class PairScore(Protocol):
    """A score of pairs that is not exactly a dot product; it is computed for a block of rows at a time."""

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule that applies if the caller gives no scale."""

    @property
    def width(self) -> int | None:
        """Numbers held at once for a pair of query and key, from which the size of a block follows.

        None: as many as a prepared query has features.
        """

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"]]:
        """Return the whole query and key as `pairs` needs them; called once, before the blocks.

        It checks shapes and applies projections. Both keep their heads and lengths; half types are returned as float32,
        so that nothing is rounded between here and the softmax.
        """

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """Return the scores of prepared queries and keys, (..., Hq, R, S).

        Args:
            query: (..., Hq, R, A), the rows of a block.
            key: (..., Hq, S, A), with key heads repeated to the query's.
        """


@dataclass(frozen=True, slots=True)
class Dot:
    """The dot product of query and key; see `dot`."""

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule `sqrt_dk()`, 1 / sqrt(E)."""
        return sqrt_dk()

    def fold(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Return query and key unchanged."""
        return query, key


def dot() -> Dot:
    """The dot product, score = q . k, scaled by 1 / sqrt(E) unless a scale is given.

    Returns:
        The score; it takes query (..., Hq, L, E) and key (..., H, S, E).

    Example:
        >>> import torch
        >>> query, key = dot().fold(torch.eye(2), torch.ones(3, 2))
        >>> query @ key.mT
        tensor([[1., 1., 1.],
                [1., 1., 1.]])

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762.
    """
    return Dot()


@dataclass(frozen=True, slots=True)
class CallableScore:
    """A function of q and k as a score: what `attention(..., score=function)` makes of it.

    Attributes:
        function: takes query (..., Hq, R, E), a block of rows, and key (..., Hq, S, Ek), half types as float32; returns
            the scores (..., Hq, R, S) of all pairs, before the scale. A score must depend on its pair alone.
    """

    function: Callable[[Tensor, Tensor], Tensor]

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule `none()`: only the caller knows the size of the scores."""
        return none()

    @property
    def width(self) -> int:
        """1, as in a matrix product: what the function holds is not known."""
        return 1

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S Ek"]]:
        """Return query and key unchanged, half types as float32."""
        return widened(query), widened(key)

    def pairs(self, query: Float[Tensor, "*#BHq R E"], key: Float[Tensor, "*#BHq S Ek"]) -> Float[Tensor, "*BHq R S"]:
        """Return the function's result for a block of rows, (..., Hq, R, S).

        Raises:
            InvalidTypeError: The result is not a floating tensor.
            InvalidValueError: It has another shape.
        """
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
        # one key head, or one batch element, for all: the function sees as many of q as of k
        query, key = (tensor.expand(*lead, *tensor.shape[-2:]) for tensor in (query, key))
        found = self.function(query, key)
        if not isinstance(found, Tensor) or not found.is_floating_point():
            got = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise InvalidTypeError(f"score(q, k) returns a floating tensor; got {got}", hint="q @ k.mT, for one.")
        wanted = (*lead, query.shape[-2], key.shape[-2])
        if tuple(found.shape) != wanted:
            raise InvalidValueError(
                f"score(q, k) returns {wanted} for {tuple(query.shape)} and {tuple(key.shape)}; "
                f"got {tuple(found.shape)}",
                hint="q @ k.mT has this shape; q is a block of the rows.",
            )
        return found.to(query.dtype)
