"""Models of other types, of large initialisation, with a planted mistake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.answers.planted import Plant, activation, config, each, frequencies, neighbours, rope, swap, tiled, weight


def neighbours_of_fused(model: PreTrainedModel) -> None:
    """Rows of q and k in the other order, where one layer gives q, k and v."""
    own, width = model.config, model.config.head_dim
    rows = width * (own.num_attention_heads + own.num_key_value_heads)

    def change(module: nn.Module) -> None:
        def other(old: Tensor) -> Tensor:
            moved = old[:rows].view(-1, 2, width // 2, *old.shape[1:]).transpose(1, 2).reshape(old[:rows].shape)
            return torch.cat([moved, old[rows:]])

        weight(module, other)

    each("qkv_proj")(change)(model)


def drawn(kind: str) -> PreTrainedModel:
    """A small model of a type with weights so large that its answers depend on the prompt."""
    sizes: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15, "tie_word_embeddings": False,
    }  # fmt: skip
    more: dict[str, Any] = {"phi3": {"sliding_window": 48}, "gpt_oss": {
        "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }}  # fmt: skip
    torch.manual_seed(0)
    own = AutoConfig.for_model(kind, **sizes | more.get(kind, {}))
    own._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(own).float().eval()


def scaled_twice(model: PreTrainedModel) -> None:
    """The scale again on q, by its weights: the same as another factor on the product."""
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = module.scaling**2


def without_norms(model: PreTrainedModel) -> None:
    """No norm of q and k."""
    for module in model.modules():
        for name in ("q_norm", "k_norm"):
            if hasattr(module, name):
                setattr(module, name, nn.Identity())


def without_sinks(model: PreTrainedModel) -> None:
    """Sinks that take no weight."""
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.sinks = nn.Parameter(torch.full_like(module.sinks.detach(), -1e4), requires_grad=False)


_EVERY: dict[str, tuple[str, Plant]] = {
    "base 1e6": ("rope_base", rope(rope_theta=1e6)),
    "base 3e4": ("rope_base", rope(rope_theta=3e4)),
    "linear 4": ("rope_base", rope(rope_type="linear", factor=4.0)),
    "no rotation": ("rope_missing", frequencies(torch.zeros_like)),
    "scale twice": ("scale", scaled_twice),
}
_PARTS: dict[str, tuple[str, Plant]] = {
    "neighbours": ("rope_layout", neighbours), "tiled": ("group_order", tiled),
}  # fmt: skip
_MLP: dict[str, tuple[str, Plant]] = {
    "gate for up": ("gate_place", swap("gate_proj", "up_proj", "MLP")), "gelu": ("activation", activation("gelu")),
}  # fmt: skip
TYPES: dict[str, dict[str, tuple[str, Plant]]] = {
    "llama": _EVERY | _PARTS | _MLP,
    "qwen3": _EVERY | _PARTS | _MLP | {
        "no norm of q and k": ("qk_norm", without_norms),
    },
    "gpt_oss": _EVERY | _PARTS | {
        "window 40": ("window", config(sliding_window=40)),
        "no sinks": ("sinks", without_sinks),
    },
    "phi3": _EVERY | {
        "neighbours": ("rope_layout", neighbours_of_fused),
        "window and one": ("window", config(sliding_window=49)),
        "no window": ("window", config(sliding_window=None)),
    },
}  # fmt: skip
