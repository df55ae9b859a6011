"""Who else computes attention: torch's own operations, and the formula written out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk._subclasses import torch_attention
from sqrtdk.bench.workloads import Case
from sqrtdk.errors import UnsupportedError

Call = Callable[[], Tensor]
LARGEST_EAGER = 2**28  # weights of the formula written out


def sdpa(case: Case) -> Call:
    """Torch's scaled_dot_product_attention."""
    causal, shared = case.workload.is_causal, case.workload.grouped
    return lambda: torch_attention(*case.inputs, is_causal=causal, enable_gqa=shared)


def flex(case: Case) -> Call:
    """Torch's FlexAttention, compiled for this shape alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    workload = case.workload
    with warnings.catch_warnings():  # of torch's own code, and that this call is not compiled
        warnings.simplefilter("ignore")
        query, key, value = (tensor[:, :1, :1] for tensor in case.inputs)
        flex_attention(query, key, value)  # refuses gradients in words of its own, which the compiler would hide
    mask = None
    if workload.is_causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, workload.length, workload.keys, device="cpu")
    torch._dynamo.reset()  # after a few shapes torch would stop compiling, and say so in a log only
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        found: Tensor = compiled(*case.inputs, block_mask=mask, enable_gqa=workload.grouped)
        return found

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        call()
    return call


def eager(case: Case) -> Call:
    """The formula, written out.

    Raises:
        UnsupportedError: it would hold more than 2^28 weights.
    """
    hidden = _hidden(case)
    return lambda: _logits(case, hidden).softmax(-1) @ _grown(case.value, case)


def eager_statistics(case: Case) -> Call:
    """The formula with the statistics of every row beside it.

    Raises:
        UnsupportedError: it would hold more than 2^28 weights.
    """
    hidden = _hidden(case)

    def call() -> Tensor:
        return dense_statistics(_logits(case, hidden), _grown(case.value, case), hidden)[0]

    return call


def dense_statistics(logits: Tensor, value: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, ...]:
    """Output and row statistics as a careful user writes them, with the L x S matrix.

    Args:
        logits: (B, H, L, S), -inf where a key is hidden.
        value: (B, H, S, Ev).
        hidden: (L, S), True where a key is hidden; None: all are visible.

    Returns:
        Output (B, H, L, Ev) of the value's dtype; then, float32 and (B, H, L), lse, largest and smallest logit, mean,
        variance, entropy in nats, sum p^2, largest p, and Frobenius norm of the softmax Jacobian.
    """
    z = logits.float()
    lse, largest, smallest = z.logsumexp(-1), z.amax(-1), z.amin(-1)
    p = (z - lse[..., None]).exp()
    square = p.square()
    collision, cubes = square.sum(-1), (square * p).sum(-1)
    jacobian = (collision - 2 * cubes + collision.square()).clamp_min(0).sqrt()
    if hidden is None:
        variance, mean = torch.var_mean(z, -1, correction=0)
    else:
        smallest, count = z.masked_fill(hidden, math.inf).amin(-1), (~hidden).sum(-1)
        z = z.masked_fill(hidden, 0.0)
        mean = z.sum(-1) / count
        variance = (z - mean[..., None]).masked_fill(hidden, 0.0).square().sum(-1) / count
    entropy = lse - (p * z).sum(-1)
    output = p.to(value.dtype) @ value
    return output, lse, largest, smallest, mean, variance, entropy, collision, p.amax(-1), jacobian


def _hidden(case: Case) -> Tensor | None:
    """The causal mask where there is one, for a case that the formula can hold."""
    workload = case.workload
    if workload.pairs > LARGEST_EAGER:
        raise UnsupportedError(f"it would hold {workload.pairs} weights, more than {LARGEST_EAGER}")
    if not workload.is_causal:
        return None
    return torch.ones(workload.length, workload.keys, dtype=torch.bool).triu(1)


def _logits(case: Case, hidden: Tensor | None) -> Tensor:
    z: Tensor = case.query @ _grown(case.key, case).mT * case.workload.width**-0.5
    return z if hidden is None else z.masked_fill(hidden, -math.inf)


def _grown(tensor: Tensor, case: Case) -> Tensor:
    """Key or value with a head for each of the query's."""
    group = case.workload.heads // case.workload.key_heads
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)
