"""The cosine score next to SwinV2's attention in transformers, with copied weights: output, weights, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Swinv2Config
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

import sqrtdk
from sqrtdk import scores
from tests.tolerances import complaint, gradient_complaints

HEADS, HEAD_DIM, SIDE, WINDOWS = 3, 8, 4, 2
TOKENS = SIDE * SIDE


def swin(gains: Tensor) -> Swinv2SelfAttention:
    config = Swinv2Config(qkv_bias=True, attention_probs_dropout_prob=0.0)
    layer = Swinv2SelfAttention(config, HEADS * HEAD_DIM, HEADS, SIDE).double().eval()
    with torch.no_grad():
        layer.logit_scale.copy_(gains.log().view(HEADS, 1, 1))
    return layer


def position_bias(layer: Swinv2SelfAttention) -> Tensor:
    """Its continuous bias, (Hq, L, S), from its own small network."""
    table = layer.continuous_position_bias_mlp(layer.relative_coords_table).view(-1, HEADS)
    return 16 * torch.sigmoid(table[layer.relative_position_index].permute(2, 0, 1))


def ours(layer: Swinv2SelfAttention, states: Tensor, shift_mask: Tensor | None) -> Tensor:
    gain = scores.LearnedGain(HEADS, dtype=torch.float64)
    gain.logit_scale = layer.logit_scale
    q, k, v = (
        part(states).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in (layer.query, layer.key, layer.value)
    )
    bias = position_bias(layer)
    if shift_mask is not None:  # transformers adds it twice; one mask a window
        bias = bias + 2 * shift_mask.unsqueeze(1)
    output = sqrtdk.attention(q, k, v, score=scores.cosine(gain=gain), bias=bias)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("gains", [(10.0, 10.0, 10.0), (1.0, 30.0, 99.0), (99.0, 150.0, 0.1)])
def test_cosine_is_swin_v2s(gains: tuple[float, ...], shifted: bool) -> None:
    layer = swin(torch.tensor(gains))
    states = torch.randn(WINDOWS, TOKENS, HEADS * HEAD_DIM, dtype=torch.float64, requires_grad=True)
    shift_mask = None
    if shifted:
        region = torch.arange(TOKENS) % SIDE < 2
        apart = region.unsqueeze(0) != region.unsqueeze(1)
        shift_mask = torch.stack([torch.zeros(TOKENS, TOKENS), apart * -100.0]).double()
    theirs = layer(states, shift_mask)[0]
    mine = ours(layer, states, shift_mask)
    assert complaint(mine, theirs, torch.float64, length=TOKENS, logit=max(gains)) is None
    leaves = {"states": states} | dict(layer.named_parameters())
    probe = torch.randn_like(theirs)
    found, expected = (
        dict(zip(leaves, torch.autograd.grad((x * probe).sum(), list(leaves.values())), strict=True))
        for x in (mine, theirs)
    )
    rows = WINDOWS * HEADS * TOKENS
    wrong = gradient_complaints(found, expected, torch.float64, length=TOKENS, logit=max(gains), rows=rows)
    assert not wrong, wrong
    above = torch.tensor(gains) > 100.0
    (slope,) = torch.autograd.grad(ours(layer, states, shift_mask).square().sum(), layer.logit_scale)
    assert ((slope.flatten() == 0) == above).all()
