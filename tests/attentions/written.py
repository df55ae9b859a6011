"""Attention whose logits are written part by part, into a larger tensor or over one another."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.attentions.heads import Attend, B, H, L, logits


def larger(fill: float, first: int = 0) -> Attend:
    """Logits beside columns of a number, which the weights leave again."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.full((B, H, L, L + 2), fill, device=q.device, dtype=q.dtype)
        z[..., first : first + L] = logits(m, q, k)
        return z.softmax(-1)[..., first : first + L] @ v

    return attend


def number_first(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_zeros(B, H, L, L + 1)
    z[..., L:] = -1e9
    z[..., :L] = logits(m, q, k)
    return z.softmax(-1)[..., :L] @ v


def number_last(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_empty(B, H, L, L + 1)
    z[..., :L] = logits(m, q, k)
    z[..., L:] = -1e9
    return z.softmax(-1)[..., :L] @ v


def zero_column(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key whose logit is 0, with no value."""
    z = q.new_zeros(B, H, L, L + 1)
    z[..., :L] = logits(m, q, k)
    return z.softmax(-1)[..., :L] @ v


def hidden_by_slice(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(m, q, k)
    z[..., -2:] = -1e9
    return z.softmax(-1) @ v


def hidden_by_tensor(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(m, q, k)
    z[:, :, :, 7:] = torch.full((L, 2), -1e9, device=q.device, dtype=q.dtype)
    return z.softmax(-1) @ v


def rows_at_a_time(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_empty(B, H, L, L)
    for rows in (slice(0, 4), slice(4, L)):
        z[:, :, rows] = logits(m, q[:, :, rows], k)
    return z.softmax(-1) @ v


def heads_at_a_time(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_empty(B, H, L, L)
    for head in range(H):
        z[:, head] = logits(m, q[:, head], k[:, head])
    return z.softmax(-1) @ v


def biased_behind_the_class_token(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MViT v2 (Li et al. 2021, arXiv:2112.01526): relative positions for the patches alone, put back in place."""
    z, n = logits(m, q, k), L - 1
    relative = torch.einsum("bhic,ijc->bhij", q[:, :, 1:], m.table)
    z[:, :, 1:, 1:] = (z[:, :, 1:, 1:].view(B, -1, n, 2, n // 2) + relative.unflatten(-1, (2, -1))).view(B, -1, n, n)
    return z.softmax(-1) @ v


# name -> attend, mask, keys, and whether there is one product, which the logits can be compared with
WRITTEN: dict[str, tuple[Attend, str | None, int, bool]] = {
    "larger": (larger(-math.inf), "padding", L + 2, True),
    "larger, behind": (larger(-1e9, 2), "padding", L + 2, True),
    "number first": (number_first, "padding", L + 1, True),
    "number last": (number_last, "padding", L + 1, True),
    "zero column": (zero_column, None, L, True),
    "hidden by slice": (hidden_by_slice, "padding", L, True),
    "hidden by tensor": (hidden_by_tensor, "padding", L, True),
    "biased in part": (biased_behind_the_class_token, None, L, True),
    "rows at a time": (rows_at_a_time, None, L, False),
    "heads at a time": (heads_at_a_time, None, L, False),
}
