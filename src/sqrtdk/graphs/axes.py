"""Axes of a graph's operands and logits, brought to (B, H, L, E) and (B, H, L, S)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.graph import Node


@dataclass(frozen=True, slots=True)
class Axes:
    """How the leading axes of logits are batch and heads.

    Attributes:
        lead: the leading axes of the logits at the product.
        batch: B.
        heads: H.
    """

    lead: tuple[int, ...]
    batch: int
    heads: int

    def operand(self, tensor: Tensor) -> Tensor:
        """(..., L, E) as (B, H, L, E); H of shared key heads stays 1.

        Raises:
            UnsupportedError: its leading axes are not those of the logits.
        """
        lead, rest = tensor.shape[:-2], tensor.shape[-2:]
        if len(lead) == 2 and lead[0] == self.batch and lead[1] in (1, self.heads):
            return tensor
        if len(lead) > len(self.lead):
            raise UnsupportedError(f"an operand {tuple(tensor.shape)} of logits {self.lead}")
        padded = tensor.reshape((1,) * (len(self.lead) - len(lead)) + tuple(tensor.shape))
        return padded.expand(*self.lead, *rest).reshape(self.batch, self.heads, *rest)

    def logits(self, tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
        """What broadcasts to logits (*lead, L, S), as it broadcasts to (B, H, L, S).

        Raises:
            UnsupportedError: the leading axes are no batch and heads.
        """
        tensor = tensor.reshape((1,) * (len(lead) + 2 - tensor.dim()) + tuple(tensor.shape))
        rest = tensor.shape[-2:]
        if len(lead) == 2 and lead == (self.batch, self.heads):
            return tensor
        if math.prod(lead) != self.batch * self.heads:
            raise UnsupportedError(f"logits {lead} of {self.batch} x {self.heads} heads")
        if all(size == 1 for size in tensor.shape[:-2]):
            return tensor.reshape(1, 1, *rest)
        return tensor.expand(*lead, *rest).reshape(self.batch, self.heads, *rest)


def axes_of(lead: tuple[int, ...], others: list[tuple[int, ...]], batch: int | None) -> Axes:
    """Batch and heads.

    Args:
        lead: leading axes of the logits at the product.
        others: shapes of the logits further on, and of the weights.
        batch: of the inputs, where it is known; for logits that have one leading axis.

    Example:
        >>> axes_of((6,), [(2, 3, 5, 5)], None)
        Axes(lead=(6,), batch=2, heads=3)
    """
    if len(lead) >= 2:
        return Axes(lead, lead[0], math.prod(lead[1:]))
    if not lead:
        return Axes(lead, 1, 1)
    for shape in others:
        if len(shape) == 4 and shape[0] * shape[1] == lead[0]:
            return Axes(lead, shape[0], shape[1])
    if batch and lead[0] % batch == 0:
        return Axes(lead, batch, lead[0] // batch)
    return Axes(lead, 1, lead[0])


@dataclass(frozen=True, slots=True)
class Operands:
    """How the operands and the result of a product lie.

    Attributes:
        left: permutation that makes the left operand (..., rows, inner); None: it lies so.
        right: that makes the right one (..., columns, inner) for q and k, (..., inner, columns) for the values.
        result: that makes the result (..., rows, columns).
    """

    left: tuple[int, ...] | None
    right: tuple[int, ...] | None
    result: tuple[int, ...] | None


def operands_of(node: Node, first_is_left: bool, *, of_values: bool) -> Operands:
    """How a product's operands lie.

    Args:
        node: "MatMul", "FusedMatMul" or "Einsum".
        first_is_left: its first input is q, or the weights.
        of_values: it is the product with the values.

    Raises:
        UnsupportedError: an equation, or an attribute, that is not read.
    """
    if node.op == "Einsum":
        return _einsum(str(node.attributes.get("equation", "")), first_is_left, of_values)
    odd = [name for name in ("transA", "transBatchA", "transBatchB") if node.attributes.get(name)]
    if odd or not first_is_left:
        raise UnsupportedError(f"{node.op} with {', '.join(odd) or 'its operands swapped'}")
    swapped = bool(node.attributes.get("transB")) == of_values
    return Operands(None, (-2, -1) if not swapped else (-1, -2), None)


def put(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """A tensor in an order of `Operands`."""
    if order is None or order == (-2, -1):
        return tensor
    return tensor.mT if order == (-1, -2) else tensor.permute(order)


def _einsum(equation: str, first_is_left: bool, of_values: bool) -> Operands:
    """Of labels: batch and heads are in all three, what is summed is in the operands alone.

    Example:
        >>> _einsum("blhe,bshe->bhls", True, False)
        Operands(left=(0, 2, 1, 3), right=(0, 2, 1, 3), result=(0, 1, 2, 3))
    """
    sides, _, result = equation.replace(" ", "").partition("->")
    terms = sides.split(",")
    if len(terms) != 2 or not result or "..." in equation:
        raise UnsupportedError(f"the Einsum {equation[:40]!r}")
    left, right = terms if first_is_left else terms[::-1]
    inner = [label for label in left if label in right and label not in result]
    order = left if of_values else result  # the weights' is that of the logits
    lead = [label for label in order if label in left and label in right and label in result]
    rows = [label for label in left if label not in right]
    columns = [label for label in right if label not in left]
    if not len(inner) == len(rows) == len(columns) == 1 or len(lead) > 2:
        raise UnsupportedError(f"the Einsum {equation[:40]!r}")
    last = [*inner, *columns] if of_values else [*columns, *inner]
    return Operands(
        tuple(left.index(label) for label in (*lead, *rows, *inner)),
        tuple(right.index(label) for label in (*lead, *last)),
        tuple(result.index(label) for label in (*lead, *rows, *columns)),
    )
