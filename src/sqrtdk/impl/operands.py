"""A call in the form that kernels take: four dimensions, one dtype, a band of keys, position terms as a bias."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.impl.call import Call, repeat_key_heads
from sqrtdk.positions import DistanceTerm

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

    from sqrtdk._shapes import Key, Output, Query, Value

SMALLEST_SOFTCAP = torch.finfo(torch.float32).tiny


def only_by_blocks(call: Call) -> str | None:
    """Return the reason, in English, why the logits of a call are not dot products plus a bias; None if they are.

    Kernels can compute nothing else; other calls are run block by block.
    """
    if call.score is not None:
        return call.exact or "the score is no dot product"
    if call.term is not None and call.term.content:
        return "a position term that depends on q and k is computed block by block"
    return "score_mod and mask_mod are computed block by block" if call.has_mods else None


def operands(
    call: Call, dtype: torch.dtype
) -> tuple[Float[Tensor, "B Hq L E"], Float[Tensor, "B H S E"], Float[Tensor, "B H S Ev"]]:
    """Return query (B, Hq, L, E), key (B, H, S, E) and value (B, H, S, Ev) in a dtype, as kernels take them.

    Key and value have the same number of heads.
    """
    lead = call.lead
    heads = lead[-1] if lead else 1
    key, value = call.key, call.value
    if _heads(key) != _heads(value):
        key, value = repeat_key_heads(key, call.heads), repeat_key_heads(value, call.heads)
    shared = max(_heads(key), _heads(value))

    def four(tensor: Float[Tensor, "... S E"], count: int) -> Float[Tensor, "B {count} S E"]:
        tensor = tensor.to(dtype).expand(*lead[:-1], count, *tensor.shape[-2:])
        return tensor.reshape(math.prod(lead[:-1]), *tensor.shape[-3:])

    return four(call.query, heads), four(key, shared), four(value, shared)


def _heads(tensor: Key | Value) -> int:
    return tensor.shape[-3] if tensor.ndim > 2 else 1


def expand_heads(tensor: Tensor, shape: tuple[int, ...]) -> Shaped[Tensor, "B Hq L C"]:
    """Return a tensor expanded to a shape, as a tensor with four dimensions, (B, Hq, R, C).

    Args:
        tensor: Broadcastable to `shape`.
        shape: (..., Hq, R, C), whose leading dimensions become one; or (R, C), for which B and Hq are 1.
    """
    tensor = tensor.expand(shape)
    if len(shape) == 2:
        return tensor.unsqueeze(0).unsqueeze(0)
    return tensor.reshape(math.prod(shape[:-3]), *shape[-3:])


def above_and_below(call: Call) -> tuple[int | None, int | None]:
    """Return which keys the diagonal and the window leave to each row, as kernels take it.

    Returns:
        (above, below): row i sees the keys i - below to i + above; None stands for no bound.
    """
    least, greatest = call.band
    return None if least is None else -least, greatest


def broadcastable(tensor: Tensor, lead: tuple[int, ...]) -> Shaped[Tensor, "#B #Hq #L #C"]:
    """Return a tensor as one with four dimensions that broadcasts to (B, Hq, L, C).

    Sizes of 1 stay 1, except that of the batch dimensions one is 1 and another is not: then they are expanded.

    Args:
        tensor: Broadcastable to (*lead, L, C).
        lead: Leading dimensions of the call, (..., Hq); all but the last become B.
    """
    tensor = tensor.reshape((1,) * (len(lead) + 2 - tensor.ndim) + tuple(tensor.shape))
    if len(lead) < 2:
        return tensor.reshape((1,) * (2 - len(lead)) + tuple(tensor.shape))
    batch = tuple(tensor.shape[: len(lead) - 1])
    if any(size != 1 for size in batch):
        tensor = tensor.expand(*lead[:-1], *tensor.shape[len(batch) :])
        return tensor.reshape(math.prod(lead[:-1]), *tensor.shape[len(batch) :])
    return tensor.reshape(1, *tensor.shape[len(batch) :])


def with_bias(call: Call) -> Call:
    """Return the call with its position term computed as a bias (Hq, L, S) and added to the bias that it has.

    A call without a term is returned as it is.
    """
    if call.term is None:
        return call
    rows, columns = call.positions(0, call.length) + call.shift, torch.arange(call.keys, device=call.query.device)
    term = call.term.term(call.query, repeat_key_heads(call.key, call.heads), rows, columns)
    return replace(call, bias=term if call.bias is None else call.bias + term, term=None)


def with_table(call: Call) -> tuple[Call, Float[Tensor, "#Hq 1 distances"] | None]:
    """Return the call with its position term as a table of distances, where the term depends on nothing else.

    Returns:
        The call without the term, and the table, (Hq or 1, 1, L + S - 1), by the distance j - i from 1 - L on. For
        another term: the call with a bias, and None.
    """
    if not by_distance(call) or not call.length or not call.keys:
        return with_bias(call), None
    assert isinstance(call.term, DistanceTerm)
    last = call.length - 1 + call.shift
    distance = torch.arange(last, last - (call.length + call.keys - 1), -1, device=call.query.device)
    check_term(call)
    table = call.term.of_distance(distance, call.query)
    if tuple(table.shape) not in ((call.heads, len(distance)), (1, len(distance))):
        raise InvalidValueError(
            f"of_distance of {len(distance)} distances returns ({call.heads}, {len(distance)}), one number a head, or "
            f"(1, {len(distance)}); got {tuple(table.shape)}",
            hint="Heads come first, and the shape of the distances after them.",
        )
    return replace(call, term=None), table.unsqueeze(-2)


def by_distance(call: Call) -> bool:
    """Return whether the call has a position term that depends on the distance of row and key alone.

    It is False for a sample of rows, which need not follow each other.
    """
    if not isinstance(call.term, DistanceTerm) or call.term.content or call.places is not None:
        return False
    # of a class that overrides one of the two, the other may be another bias
    return _defined_together(type(call.term))


def _defined_together(kind: type[DistanceTerm]) -> bool:
    names = {"term", "of_distance"}
    owner = next((owner for owner in kind.__mro__ if names & vars(owner).keys()), None)
    return owner is not None and names <= vars(owner).keys()


def of_pairs(table: Float[Tensor, "... distances"], rows: int) -> Float[Tensor, "... L S"]:
    """Return the bias (..., L, S) for which a table of distances j - i, from 1 - L on, stands.

    Example:
        >>> of_pairs(torch.tensor([-1.0, 0.0, 1.0]), rows=2)
        tensor([[ 0.,  1.],
                [-1.,  0.]])
    """
    return table.unfold(-1, table.shape[-1] - rows + 1, 1).flip(-2)


def in_order_of(query: Query, output: Output) -> Output:
    """Return the output with its dimensions in the query's order in memory, as torch's own function does.

    A query of (B, L, H, E), transposed, gives an output whose transposition is contiguous. Nothing is copied if the
    order is the same; a query that is expanded, or has a dimension that the output lacks, has no order.

    Args:
        query: (..., Hq, L, E).
        output: (..., Hq, L, Ev).
    """
    if query.ndim != output.ndim or output.stride() == query.stride():
        return output
    long = [dim for dim in range(output.ndim) if output.shape[dim] > 1]
    if any(query.shape[dim] == 1 or query.stride(dim) == 0 for dim in long if dim != output.ndim - 1):
        return output
    if _ranks(query, long) == _ranks(output, long):
        return output
    ranks = _ranks(query, list(range(output.ndim)))
    dims = [ranks.index(rank) for rank in range(output.ndim)]
    return output.permute(dims).contiguous().permute(ranks)


def _ranks(tensor: Tensor, dims: list[int]) -> list[int]:
    """Return the rank of each dimension's stride, 0 for the largest, by comparisons, which torch.compile follows."""
    steps = [tensor.stride(dim) for dim in dims]
    places = range(len(dims))
    return [len([b for b in places if steps[b] > steps[a] or (steps[b] == steps[a] and b < a)]) for a in places]


def check_term(call: Call) -> None:
    """Check that a position term fits the call, by computing it for the first row and key.

    Raises:
        InvalidValueError: Its heads or widths don't fit, or what the term itself raises.
    """
    query, key, value = (x[..., :1, :] for x in (call.query, call.key, call.value))
    first = Call(query, key, value, 1.0, term=call.term, shift=call.shift)
    with torch.no_grad():
        try:
            with_bias(first)
        except SqrtdkError:
            with_bias(call)  # raises the error with the sizes of the whole call
            raise


def learns_term(call: Call) -> bool:
    """Return whether the position term holds a tensor that requires a gradient.

    It is False without a term, and True for a term that is neither a module nor a dataclass, as that may hold any.
    """
    term: object = call.term
    if term is None:
        return False
    held: list[object] = []
    if isinstance(term, nn.Module):  # a caller may have replaced a parameter by a tensor that requires a gradient
        held = [value for part in term.modules() for value in (*part.parameters(recurse=False), *vars(part).values())]
    elif is_dataclass(term):
        held = [getattr(term, field.name) for field in fields(term)]
    else:
        return True  # an unknown class may hold anything
    return any(isinstance(value, Tensor) and value.requires_grad for value in held)
