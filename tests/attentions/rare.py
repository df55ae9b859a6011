"""Styles that few models use: a softmax in other words, weights of one matrix a head, masks written by index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.attentions.eager import attend, product
from tests.attentions.positions import ALIBI
from tests.attentions.styles import CAUSAL, DIM, PADDING, ROOT, B, E, H, L, Style

CAUSAL_ADDED = {"mask": "causal", "form": "float", "visible": CAUSAL}
BIASED_MASK = ALIBI.masked_fill(~CAUSAL, -1e4)


def by_logarithm(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (product(q, k) * ROOT).log_softmax(-1).exp() @ v


def by_logsumexp(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = product(q, k) * ROOT
    return torch.exp(z - z.logsumexp(-1, keepdim=True)) @ v


def head_by_head(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three-dimensional products of batch and heads in one."""
    q, k, v = (t.reshape(-1, L, E) for t in (q, k, v))
    return (torch.bmm(q, k.transpose(1, 2)) * ROOT).softmax(-1).bmm(v).view(B, H, L, E)


def matrices(m: Any) -> None:
    m.w = nn.ParameterList(torch.randn(H, DIM, E) * DIM**-0.5 for _ in range(3))


def broadcast(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One matrix a head, repeated over the batch by broadcasting."""
    q, k, v = (x[:, None] @ w.to(x.dtype) for w in m.w)
    return q, k, v


def contracted(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.einsum("bld,hde->bhle", x, w.to(x.dtype)) for w in m.w)
    return q, k, v


def by_index(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A boolean index assigns minus infinity."""
    z = product(q, k) * ROOT
    z[~PADDING.expand(z.shape)] = -math.inf
    return z.softmax(-1) @ v


def projected(project: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    return {"setup": matrices, "project": project, "dense_project": project}


RARE: dict[str, Style] = {
    "log_softmax_exp": Style(by_logarithm),
    "exp_less_logsumexp": Style(by_logsumexp),
    "heads_in_the_batch": Style(head_by_head),
    "matrix_a_head": Style(attend(lambda m, q, k: product(q, k) * ROOT), **projected(broadcast)),
    "matrix_a_head_einsum": Style(attend(lambda m, q, k: product(q, k) * ROOT), **projected(contracted)),
    "mask_by_index": Style(by_index, "softmax(0.25 * q.k + padding)", mask="padding", form="bool", visible=PADDING),
    "finite_mask_with_bias": Style(
        attend(lambda m, q, k: product(q, k) * ROOT + BIASED_MASK),
        "softmax(0.25 * q.k + alibi + causal)",
        bias="alibi",
        addend=lambda m: ALIBI,
        **CAUSAL_ADDED,
    ),
}
