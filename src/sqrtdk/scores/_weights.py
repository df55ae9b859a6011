"""Weights of a score: what is accepted, how they are kept, and how they fit the heads of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from jaxtyping import Float


def keep(module: nn.Module, name: str, value: object, what: str, shapes: dict[int, str]) -> None:
    """Keep a weight under `name`: a Parameter as such, a plain tensor as a buffer, through which gradients still flow.

    Args:
        module: the owner.
        name: of the attribute.
        value: what the caller passed.
        what: words for it, which begin the message.
        shapes: the shapes that it may have, in words, by their number of dimensions.
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
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


def heads_of(tensor: Float[Tensor, "... L E"]) -> int:
    """Heads of a query or a key; 1 where there is no such dimension."""
    return tensor.shape[-3] if tensor.ndim > 2 else 1


def check_heads(
    weight: Float[Tensor, "..."], dims: int, tensor: Float[Tensor, "... L E"], what: str, kind: str
) -> None:
    """Refuse a weight of `dims` dimensions with another number of heads than the tensor's; fewer dimensions: shared."""
    if weight.ndim == dims and weight.shape[0] != heads_of(tensor):
        raise InvalidValueError(
            f"{what} has a part for each of {weight.shape[0]} heads; got a {kind} of {heads_of(tensor)} heads",
            hint="Make the weight for these heads, or leave its first dimension out to share it.",
        )


def project(
    tensor: Float[Tensor, "*BH L E"],
    weight: Float[Tensor, "E A"] | Float[Tensor, "H E A"],
    what: str,
    kind: str,
) -> Float[Tensor, "*BH L A"]:
    """`tensor` (..., H, n, E) times `weight` (E, A) or (H, E, A), in the tensor's dtype."""
    if tensor.shape[-1] != weight.shape[-2]:
        raise InvalidValueError(
            f"{what} takes a {kind} of {weight.shape[-2]} features; got {tensor.shape[-1]}",
            hint=f"Its shape is {tuple(weight.shape)}: features in come before features out.",
        )
    check_heads(weight, 3, tensor, what, kind)
    weight = weight.to(tensor.dtype)
    return tensor @ (weight[0] if tensor.ndim == 2 and weight.ndim == 3 else weight)


def check_same_features(query: Float[Tensor, "... E"], key: Float[Tensor, "... Ek"], what: str) -> None:
    """Refuse a query and a key of different widths."""
    if query.shape[-1] != key.shape[-1]:
        raise InvalidValueError(
            f"{what} takes a query and a key of the same features; got {query.shape[-1]} and {key.shape[-1]}",
            hint="Project one of them.",
        )


def widened(tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The tensor in float32 where it is of a half type."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
