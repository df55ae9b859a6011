"""Every module once, small, with an input for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk import positions, scales, scores
from sqrtdk.nn import (
    AdditiveAttention,
    BilinearAttention,
    CosineAttention,
    MultiHeadAttention,
    RelativeAttention,
    ScaledDotProductAttention,
    TransformerBlock,
)

HEADS, WIDTH, LENGTH = 4, 8, 6
MODEL = HEADS * WIDTH
INNER = 48  # of the block's network: the longest sum of a row


@dataclass(frozen=True)
class Case:
    """A module's maker (of device and dtype), and the inputs of one call."""

    make: Callable[..., nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


def heads_in() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, HEADS, LENGTH, WIDTH) for _ in range(3))


def model_in() -> tuple[Tensor, ...]:
    return (torch.randn(2, LENGTH, MODEL),) * 3


def one_in() -> tuple[Tensor, ...]:
    return (torch.randn(2, LENGTH, MODEL),)


def _bare(**_: Any) -> nn.Module:
    return ScaledDotProductAttention(WIDTH)


multi_head = partial(MultiHeadAttention, MODEL, HEADS, batch_first=True)
block = partial(TransformerBlock, MODEL, HEADS, INNER, 0.0, batch_first=True)

CASES: dict[str, Case] = {
    "dot": Case(_bare, heads_in),
    "additive": Case(partial(AdditiveAttention, WIDTH, hidden=5), heads_in),
    "additive bias": Case(partial(AdditiveAttention, WIDTH, WIDTH, 5, bias=True), heads_in),
    "bilinear": Case(partial(BilinearAttention, WIDTH), heads_in),
    "bilinear heads": Case(partial(BilinearAttention, WIDTH, heads=HEADS), heads_in),
    "cosine": Case(partial(CosineAttention, HEADS), heads_in),
    "cosine fixed": Case(partial(CosineAttention, learned=False, norm="rms"), heads_in),
    "relative": Case(partial(RelativeAttention, WIDTH, 3), heads_in),
    "relative heads": Case(partial(RelativeAttention, WIDTH, 3, heads=HEADS), heads_in),
    "relative values": Case(partial(RelativeAttention, WIDTH, 3, relative_values=True), heads_in),
    "multi-head": Case(multi_head, model_in),
    "multi-head bare": Case(partial(multi_head, bias=False), model_in),
    "multi-head gqa": Case(partial(multi_head, kv_heads=2, position=positions.rope, qk_norm="rms"), model_in),
    "multi-head mqa": Case(partial(multi_head, kv_heads=1, out_bias=False, qk_norm="layer"), model_in),
    "multi-head wide": Case(partial(multi_head, head_dim=10, value_head_dim=6, kv_heads=2), model_in),
    "multi-head appended": Case(
        partial(multi_head, add_bias_kv=True, add_zero_attn=True, kv_heads=2, value_head_dim=5), model_in
    ),
    "multi-head kdim": Case(
        partial(multi_head, kdim=7, vdim=9),
        lambda: (torch.randn(2, LENGTH, MODEL), torch.randn(2, 5, 7), torch.randn(2, 5, 9)),
    ),
    "multi-head learned": Case(
        lambda **where: multi_head(
            **where,
            score=scores.fresh_bilinear(WIDTH, WIDTH, heads=HEADS, **where),
            scale=scales.learned(HEADS, **where),
            position=positions.t5_bias(HEADS, **where),
            sinks=nn.Parameter(torch.zeros(HEADS, **where)),
        ),
        model_in,
    ),
    "block": Case(block, one_in),
    "block pre-norm": Case(partial(block, norm_first=True, bias=False, kv_heads=2, position=positions.rope), one_in),
}
