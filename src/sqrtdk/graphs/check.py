"""Whether what was read of a graph gives what the graph gave, in float64 and to rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.tensors import CallTensors, Term, Vector

_SOFTMAX = 4.0  # roundings of an exponential, of its sum, and of the division


def checked(call: CallTensors, *, derived: bool = False) -> CallTensors:
    """The call; with the reason in `missing` where its parts don't give what was recorded after them.

    A reading that is wrong would be told as a difference of the graph from the other side.

    Args:
        call: as it was read.
        derived: q, k and v were computed from what was projected: the graph's own are off by its rounding of them.
    """
    if call.missing is not None or call.terms is None:
        return call
    for name, vector in (("q", call.query), ("k", call.key), ("v", call.value)):
        off = _projection_off(vector)
        if off is not None:
            return replace(call, missing=f"the projection that was read for {name} is off by {off:.2g}")
    off = _output_off(call, derived)
    if off is not None:
        return replace(call, missing=f"what was read of it gives another output than the graph's, off by {off:.2g}")
    return call


def _eps(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0


def _projection_off(vector: Vector) -> float | None:
    """By how much input @ weight.T + bias is more than rounding off what was projected; None where it is not.

    A sum of D products and a bias has an error of at most (D + 2) roundings of |input| |weight| + |bias|.
    """
    projection, projected = vector.projection, vector.projected
    if projection is None or projection.weight is None or projected is None:
        return None
    given, weight = projection.input.double(), projection.weight.double()
    made = torch.einsum("bld,hed->bhle", given, weight)
    size = given.norm(dim=-1)[:, None, :, None] * weight.norm(dim=-1)[:, None]
    if projection.bias is not None:
        made = made + projection.bias.double()[:, None]
        size = size + projection.bias.double().abs()[:, None]
    allowed = (given.shape[-1] + 2) * max(_eps(projected), _eps(projection.input)) * size
    return _beyond((made - projected.double()).abs(), allowed)


def _output_off(call: CallTensors, derived: bool) -> float | None:
    """By how much softmax(terms(q . k)) . v is more than rounding off the output; None where it is not.

    The sum of E products of a logit, and the steps after it, have an error of at most (E + 2 + steps) roundings of
    |q| |k| times its factors, and of what is added; a weight has the relative error of twice the largest of its row,
    and its own roundings; an output is the sum of S weights times values. A row that sees no key is left out: what it
    holds is no one's.
    """
    heads = call.query.values.shape[1]
    key, value = _by_query(call.key.values, heads), _by_query(call.value.values, heads)
    eps = max(_eps(call.query.values), _eps(call.output))
    sums = max((_summed(vector) for vector in (call.query, call.key, call.value)), default=0) if derived else 0
    worst = None
    for row in range(call.output.shape[0]):
        for head in range(heads):
            q, k, v = (tensor[row, head].double() for tensor in (call.query.values, key, value))
            z, size, seen = _logits(call.terms or (), q, k, row, head, heads)
            sink = [float(term.value[head]) for term in call.terms or () if _is_sink(term)]  # type: ignore[index]
            weights = torch.cat((z, z.new_tensor(sink).expand(len(z), -1)), -1).softmax(-1)[:, : k.shape[0]]
            off = (weights @ v - call.output[row, head].double()).abs()
            span = v.abs().amax(0)
            if derived:  # the rounding of a projection goes by the largest of its head, not by each number
                size, span = size.max().expand_as(size), v.norm(dim=-1).max().expand_as(span)
            steps = q.shape[-1] + 2 + 2 * len(call.terms or ())
            relative = eps * (2 * (steps + 2 * sums) * size + k.shape[0] + sums + _SOFTMAX)
            allowed = relative.clamp(max=2.0)[:, None] * span
            found = _beyond(off[seen], allowed[seen])
            worst = found if worst is None else max(worst, found or 0.0)
    return worst


def _summed(vector: Vector) -> int:
    """Roundings of a vector, in units of its own size: of D products, each as large as the input by the weight.

    The sizes of input and weight by that of what they give are taken for the whole of a head, as one number.
    """
    projection = vector.projection
    if projection is None or projection.weight is None:
        return 0
    given, weight = projection.input.double(), projection.weight.double()
    size = float(given.norm(dim=-1).max() * weight.flatten(1).norm(dim=-1).max())
    own = float(vector.values.double().norm(dim=-1).amax())
    return math.ceil((given.shape[-1] + 2) * max(1.0, size / own)) if own else 0


def _is_sink(term: Term) -> bool:
    return term.name == "sinks" and isinstance(term.value, Tensor)


def _logits(
    terms: tuple[Term, ...], q: Tensor, k: Tensor, row: int, head: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one head the logits, the size of what they were summed from in each row, and the rows that see a key."""
    z = q @ k.mT
    size = q.norm(dim=-1) * k.norm(dim=-1).max()
    visible = torch.ones_like(z, dtype=torch.bool)
    for term in terms:
        value = _of_head(term.value, row, head, heads) if term.name != "sinks" else None
        if term.name == "scale" and value is not None:
            z = z * value
            size = size * (value.abs().max() if isinstance(value, Tensor) else abs(value))
        elif term.name == "softcap" and isinstance(value, float):
            z = value * torch.tanh(z / value)
        elif term.name == "bias" and isinstance(value, Tensor):
            z = z + value.double()
            size = size + value.double().abs().max()
        elif term.name == "mask" and isinstance(value, Tensor):
            shown = value.bool().expand_as(z)
            visible = visible & shown
            z = torch.where(shown, z, z + term.fill if term.added else torch.full_like(z, term.fill))
    return z.clamp(min=torch.finfo(z.dtype).min), size, visible.any(-1)


def _of_head(value: Tensor | float | None, row: int, head: int, heads: int) -> Tensor | float | None:
    """What broadcasts to (B, Hq, L, S), for one row of the batch and one head."""
    if not isinstance(value, Tensor):
        return value
    whole = value.reshape((1,) * (4 - value.dim()) + tuple(value.shape))
    whole = _by_query(whole, heads) if whole.shape[1] > 1 else whole
    return whole[row if whole.shape[0] > 1 else 0, head if whole.shape[1] > 1 else 0]


def _by_query(tensor: Tensor, heads: int) -> Tensor:
    """Heads of keys as query heads read them."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _beyond(off: Tensor, allowed: Tensor) -> float | None:
    """The largest of what is not allowed; None where all of it is. What is no number is not allowed."""
    wrong = ~(off <= allowed)
    return float(off[wrong].max()) if bool(wrong.any()) else None
