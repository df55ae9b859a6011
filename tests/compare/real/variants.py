"""One module of a released package that computes two things: the same weights, another of its own switches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.compare.real.small import LENGTH, Inputs, randomised

Pair = tuple[nn.Module, nn.Module, Inputs, Inputs]


def hidden(features: int) -> Tensor:
    """Two sequences of hidden states, (2, L, features)."""
    return torch.randn(2, LENGTH, features, generator=torch.Generator().manual_seed(1))


def diffusers_processors(scale_qk: bool = False) -> Pair:
    """`Attention(scale_qk=False)` by `AttnProcessor`, which has no scale then, and by `AttnProcessor2_0`.

    The second calls SDPA without a scale, which takes 1/sqrt(E) whatever `scale_qk` is.
    """
    from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

    sides = []
    for processor in (AttnProcessor(), AttnProcessor2_0()):
        module = Attention(query_dim=64, heads=4, dim_head=16, scale_qk=scale_qk, processor=processor)
        sides.append(randomised(module))
    given = {"hidden_states": hidden(64)}
    return sides[0], sides[1], given, given


def diffusers_scaled() -> Pair:
    """The same two with `scale_qk`: the same."""
    return diffusers_processors(scale_qk=True)


def protenix_efficient() -> Pair:
    """`Attention` with and without `use_efficient_implementation`.

    q is divided by sqrt(E) in both; the second then calls SDPA without a scale, which divides by it again.
    """
    from protenix.model.modules.primitives import Attention

    sides = []
    for efficient in (False, True):
        module = Attention(c_q=64, c_k=64, c_v=64, c_hidden=16, num_heads=4, use_efficient_implementation=efficient)
        sides.append(randomised(module))
    bias = torch.randn(2, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))
    given: dict[str, Tensor] = {"q_x": hidden(64), "kv_x": hidden(64), "attn_bias": bias}
    return sides[0], sides[1], given, given


def repair_diffusers_processors(module: nn.Module) -> None:
    """Takes SDPA's default scale back, 1/sqrt(16), in the weights of q."""
    with torch.no_grad():
        module.to_q.weight.mul_(4)


def repair_protenix_efficient(module: nn.Module) -> None:
    """Takes SDPA's default scale back, 1/sqrt(16), in the weights of q, and of its bias."""
    with torch.no_grad():
        for parameter in module.linear_q.parameters():
            parameter.mul_(4)
