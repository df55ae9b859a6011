"""Small models of transformers, and GGUF files of them as llama.cpp's own conversion writes them, with faults if asked.

A fault is what a conversion, or a port of one, gets wrong: a key with another value, rows in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

VOCABULARY, WIDTH, HEADS, GROUPS, E, LAYERS, INNER = 97, 64, 4, 2, 32, 2, 128
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": E, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen2": {"head_dim": WIDTH // HEADS},
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0,
        "head_dim": WIDTH // HEADS,
    },
    "gemma2": {
        "sliding_window": 8, "query_pre_attn_scalar": E, "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
    },
    "gemma3_text": {
        "sliding_window": 8, "query_pre_attn_scalar": E, "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"tie_word_embeddings": False, "head_dim": WIDTH // HEADS},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "intermediate_size": WIDTH,
        "layer_types": ["sliding_attention", "full_attention"], "router_aux_loss_coef": 0.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        },
    },
}  # fmt: skip


def original(kind: str, **changes: Any) -> Any:
    """Return a model of transformers, with weights that make a difference."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    values = _BASE | CONFIGS[kind] | changes
    config = AutoConfig.for_model(kind, **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "sinks" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
                if "embed" in name:
                    parameter.mul_(WIDTH**0.5 if "gemma" not in kind else 1)
    return model


def permuted(x: Any, heads: int) -> Any:
    """Return rows of a projection as llama.cpp's interleaved rotation needs them."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


_LINEAR = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "mlp.router": "ffn_gate_inp",
}  # fmt: skip
_NORMS = {
    False: {"post_attention_layernorm": "ffn_norm"},
    True: {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
           "post_feedforward_layernorm": "post_ffw_norm"},
}  # fmt: skip
_ARCHITECTURES = {"gemma3_text": "gemma3", "gpt_oss": "gpt-oss"}


def write_gguf(
    path: Path,
    model: Any,
    dtype: str = "F32",
    *,
    keys: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    permute: bool = True,
    plus: float = 1.0,
    change: Callable[[str, Any], Any] = lambda name, value: value,
) -> Path:
    """Write a model as GGUF.

    Args:
        path: The file.
        model: Of `original`.
        dtype: Of the matrices.
        keys: Keys without the architecture, with values in place of the right ones.
        without: Keys that are left out.
        permute: Whether the rows of q and k of a Llama are put into llama.cpp's order.
        plus: What is added to the gains of a Gemma's norms.
        change: Returns a tensor in place of the one of this name.
    """
    config = model.config
    kind = config.model_type
    architecture = _ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("no_vocab")
    for key, value in (_keys(config) | (keys or {})).items():
        if key in without or value is None:
            continue
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    wanted = getattr(gguf.GGMLQuantizationType, dtype)
    for name, value in tensors_of(model, permute, plus).items():
        value = change(name, value)
        if value is None:
            continue
        value = np.ascontiguousarray(value, np.float32)
        if value.ndim < 2 or "exps.bias" in name or "gate_inp" in name:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    both = rope if "rope_theta" in rope else rope["full_attention"]
    found = {
        "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": _head(config),
        "attention.value_length": _head(config), "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(both["rope_theta"]), "rope.dimension_count": _head(config),
    }  # fmt: skip
    if both.get("rope_type") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(both["factor"])}
    if both.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(both["factor"]),
            "rope.scaling.original_context_length": both["original_max_position_embeddings"],
        }  # fmt: skip
    if getattr(config, "sliding_window", None):
        found["attention.sliding_window"] = config.sliding_window
    if config.model_type == "granite":
        found |= {
            "embedding_scale": config.embedding_multiplier, "attention.scale": config.attention_multiplier,
            "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
        }  # fmt: skip
    if config.model_type == "gemma2":
        found |= {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    if config.model_type == "gemma3_text":
        found["attention.sliding_window_pattern"] = [x == "sliding_attention" for x in config.layer_types]
    if config.model_type == "phi3":
        found["rope.scaling.original_context_length"] = config.max_position_embeddings
    if config.model_type == "gpt_oss":
        found |= {
            "expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
        }  # fmt: skip
    return found


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def tensors_of(model: Any, permute: bool = True, plus: float = 1.0) -> dict[str, Any]:
    """Return the tensors of a GGUF file by their names."""
    config = model.config
    kind = config.model_type
    state = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
    made = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        made["output.weight"] = state["lm_head.weight"]
    norms = _LINEAR | _NORMS["gemma" in kind]
    if kind == "gpt_oss":
        norms["post_attention_layernorm"] = "post_attention_norm"
    for n in range(config.num_hidden_layers):
        for theirs, ours in norms.items():
            for part in ("weight", "bias"):
                value = state.get(f"model.layers.{n}.{theirs}.{part}")
                if value is None:
                    continue
                if kind in ("llama", "granite") and permute and ours in ("attn_q", "attn_k"):
                    value = permuted(value, config.num_attention_heads if ours == "attn_q" else GROUPS)
                made[f"blk.{n}.{ours}.{part}"] = value
        if kind == "gpt_oss":
            made |= _experts(state, n)
    if "gemma" in kind:
        made = {name: x + np.float32(plus) if "norm" in name else x for name, x in made.items()}
    return made


def _experts(state: dict[str, Any], n: int) -> dict[str, Any]:
    before, name = f"model.layers.{n}.mlp.experts.", f"blk.{n}.ffn_"
    both, bias = state[before + "gate_up_proj"].swapaxes(1, 2), state[before + "gate_up_proj_bias"]
    return {
        f"{name}gate_exps.weight": both[:, ::2], f"{name}up_exps.weight": both[:, 1::2],
        f"{name}gate_exps.bias": bias[:, ::2], f"{name}up_exps.bias": bias[:, 1::2],
        f"{name}down_exps.weight": state[before + "down_proj"].swapaxes(1, 2),
        f"{name}down_exps.bias": state[before + "down_proj_bias"],
        f"blk.{n}.attn_sinks.weight": state[f"model.layers.{n}.self_attn.sinks"],
    }  # fmt: skip
