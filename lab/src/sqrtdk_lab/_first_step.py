"""One head of attention before its first update: softmax, gradients, and how far an update moves its logits.

The input x of n tokens has entries of variance 1, as after a norm; q = W_q x and k = W_k x. The loss is the sum of
output . g over the rows, with a random g of length 1 for each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sqrtdk import AuxRequest, attention
from sqrtdk_lab.claim import Cell, stable_seed

WIDTH = 64  # d_model, and the width of the values
QUERIES = 64  # rows at most; the keys are all tokens

FIRST_STEP_QUANTITIES = (
    "entropy_share",  # mean over the rows of the entropy over log n
    "jacobian",  # norm of the softmax Jacobian; this and the gradients are root mean squares over the rows
    "gradient_q",
    "median_gradient_q",  # of the median row
    "gradient_k",
    "gradient_w_q",  # norm of the whole gradient
    "gradient_w_k",
    "adam_step",  # root mean square of the change of the logits by one step of W_q, over the learning rate
)


def first_step(cell: Cell) -> dict[str, Any]:
    """Measure one head of random weights at several scales; every scale has the same tokens, weights and g.

    Args:
        cell: `d_k`; `keys`, the number of tokens; `sigmas`, the standard deviations of the logits; `folded`, whether
            the weights of q already have the factor 1/sqrt(d_k), so that sigma is the scale itself; `seed`.

    Returns:
        By name in `FIRST_STEP_QUANTITIES`, one number for each sigma.

    Example:
        >>> found = first_step({"d_k": 16, "keys": 32, "sigmas": [0.01, 1.0], "folded": False, "seed": 0})
        >>> [round(share, 2) for share in found["entropy_share"]]
        [1.0, 0.86]
    """
    d_k, keys = cell["d_k"], cell["keys"]
    rng = torch.Generator().manual_seed(stable_seed(["first step", dict(cell)]))
    tokens, value = (torch.randn(keys, WIDTH, generator=rng) for _ in range(2))
    weights = [torch.randn(d_k, WIDTH, generator=rng) / math.sqrt(WIDTH) for _ in range(2)]
    if cell["folded"]:
        weights[0] *= d_k**-0.5
    upstream = torch.nn.functional.normalize(torch.randn(min(keys, QUERIES), WIDTH, generator=rng), dim=1)
    found: dict[str, Any] = {name: [] for name in FIRST_STEP_QUANTITIES}
    for sigma in cell["sigmas"]:
        scale = sigma if cell["folded"] else sigma * d_k**-0.5
        for name, number in _measured(tokens, value, weights, upstream, scale).items():
            found[name].append(number)
    return found


def _measured(tokens: Tensor, value: Tensor, weights: list[Tensor], upstream: Tensor, scale: float) -> dict[str, float]:
    rows = tokens[: len(upstream)]
    w_q, w_k = (weight.clone().requires_grad_() for weight in weights)
    query, key = rows @ w_q.mT, tokens @ w_k.mT
    wanted = AuxRequest(entropy_nats=True, jacobian_norm=True)
    output, aux = attention(query[None], key[None], value[None], scale=scale, return_aux=wanted)
    d_q, d_k, d_w_q, d_w_k = torch.autograd.grad((output[0] * upstream).sum(), (query, key, w_q, w_k))
    assert aux.entropy_nats is not None
    assert aux.jacobian_norm is not None
    # The first step of Adam is the sign of the gradient times the rate. A shift of a whole row changes no weight.
    moved = scale * (rows @ d_w_q.sign().mT) @ key.detach().mT
    moved = moved - moved.mean(1, keepdim=True)
    lengths = d_q.norm(dim=1)
    found = {
        "entropy_share": aux.entropy_nats.detach().mean() / math.log(len(tokens)),
        "jacobian": _root_mean_square(aux.jacobian_norm),
        "gradient_q": _root_mean_square(lengths),
        "median_gradient_q": lengths.median(),
        "gradient_k": _root_mean_square(d_k.norm(dim=1)),
        "gradient_w_q": d_w_q.norm(),
        "gradient_w_k": d_w_k.norm(),
        "adam_step": _root_mean_square(moved),
    }
    return {name: float(number) for name, number in found.items()}


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
