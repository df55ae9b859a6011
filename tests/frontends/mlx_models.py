"""Models of mlx_lm with weights of transformers' own, small and random."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests.support.optional import optional

mx = optional("mlx.core")

V, D, HEADS, KV, E = 97, 64, 4, 2, 16
_SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": E, "rms_norm_eps": 1e-6,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
    "num_key_value_heads": HEADS, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "max_position_embeddings": 64, "routed_scaling_factor": 1.5,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}


class Family(NamedTuple):
    """A family of models in both libraries.

    Attributes:
        name: beginning of the names in transformers.
        module: file of mlx_lm.models.
        config: what its config has beside the sizes, in transformers.
        args: what its arguments have beside the sizes and the config, in mlx_lm.
        formulas: the formulas of its layers, in order.
    """

    name: str
    module: str
    config: dict[str, Any]
    args: dict[str, Any]
    formulas: tuple[str, ...]


ROPE = "softmax(0.25 * rope(q).rope(k) + causal)"
FAMILIES = {
    "llama": Family("Llama", "llama", {"tie_word_embeddings": False}, {}, (ROPE, ROPE)),
    "qwen3": Family(
        "Qwen3", "qwen3", {"tie_word_embeddings": False}, {"rope_theta": 10000.0, "max_position_embeddings": 64},
        ("softmax(0.25 * rope(rms(q)).rope(rms(k)) + causal)",) * 2,
    ),
    "gemma2": Family(
        "Gemma2", "gemma2", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "sliding_window": 64}, {},
        ("softmax(5 * tanh(0.25 * rope(q).rope(k) / 5) + causal)",) * 2,
    ),
    "gemma3": Family(
        "Gemma3Text", "gemma3_text",
        {"query_pre_attn_scalar": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                             "full_attention": {"rope_type": "default", "rope_theta": 1000000.0}}},
        {"sliding_window_pattern": 2, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window": 5},
        ("softmax(0.25 * rope(rms(q)).rope(rms(k)) + window)", "softmax(0.25 * rope(rms(q)).rope(rms(k)) + causal)"),
    ),
    "gpt_oss": Family(
        "GptOss", "gpt_oss",
        _MIXTURE | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_theta": 10000},
        ("softmax(0.25 * rope(q).rope(k) + window + sinks)", "softmax(0.25 * rope(q).rope(k) + causal + sinks)"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2", "deepseek_v2",
        _LATENT | {"head_dim": 8, "topk_method": "greedy", "norm_topk_prob": False,
                   "rope_parameters": {"rope_theta": 10000.0, "attention_factor": 1.0, **_YARN}},
        {"rope_scaling": _YARN | {"mscale": 0.0}},
        ("softmax(0.2041 * rope(q).rope(k) + causal)",) * 2,
    ),
}  # fmt: skip


def original(family: Family) -> Any:
    """Return the model of transformers, with weights that make a difference."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.name}Config")(**_SIZES | family.config)
    model = getattr(transformers, f"{family.name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model


def port(family: Family, model: Any, change: Callable[[Any], None] | None = None, **args: Any) -> Any:
    """Return the module of mlx_lm with the weights of a model of transformers.

    Args:
        family: The family.
        model: The model of transformers.
        change: Plants a mistake in the module.
        args: Arguments in place of the right ones.
    """
    library = optional(f"mlx_lm.models.{family.module}")
    names = library.ModelArgs.__dataclass_fields__
    every = _SIZES | family.config | {"model_type": family.module, "rope_theta": 10000.0} | family.args | args
    module = library.Model(library.ModelArgs(**{name: value for name, value in every.items() if name in names}))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        weights = {
            name: value for file in Path(folder).glob("*.safetensors") for name, value in mx.load(str(file)).items()
        }
        mx.eval(weights)
    if family.module == "gpt_oss":  # matrices that are not quantised are renamed nowhere, and lie the other way round
        weights = {
            f"{name}.weight" if name.endswith(("experts.down_proj", "experts.gate_up_proj")) else name: value
            for name, value in weights.items()
        }
        weights = {name: value.swapaxes(1, 2) if value.ndim == 3 else value for name, value in weights.items()}
    module.load_weights(list((module.sanitize(weights) if hasattr(module, "sanitize") else weights).items()))
    if change is not None:
        change(module)
    mx.eval(module.parameters())
    return module.eval()


def ids(length: int = 12) -> torch.Tensor:
    """Return ids (2, length)."""
    return torch.randint(0, V, (2, length), generator=torch.Generator().manual_seed(0))
