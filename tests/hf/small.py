"""Every model type of transformers, small enough to run: its config shrunk by the names of its fields, its inputs.

Nothing here knows a model by name but `SPECIAL`; a type that can't be shrunk so is not built, with the reason.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sqrtdk.models.build import AUTO_CLASSES
from sqrtdk.models.inputs import make_inputs, move_inputs
from tests.support.needs import at_least

LENGTH = 9
MOST_PARAMETERS = 20_000_000
GENERATING = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForMaskedLM",
)
WIDTH = "hidden_size d_model n_embd dim embed_dim hidden_dim text_hidden_size projection_dim word_embed_proj_dim"
FEED = """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dim_ff mlp_dim
    shared_expert_intermediate_size shared_experts_intermediate_size dense_intermediate_size
    shared_intermediate_size feed_forward_hidden_size"""
LAYERS = """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth
    num_encoder_layers encoder_num_layers decoder_num_layers enc_num_layers dec_num_layers num_main_layers"""
HEADS = """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
    encoder_num_attention_heads decoder_num_attention_heads attention_heads swa_num_attention_heads"""
SIZES = {
    **dict.fromkeys(WIDTH.split(), 64),
    **dict.fromkeys(FEED.split(), 96),
    **dict.fromkeys(HEADS.split(), 4),
    **dict.fromkeys(["num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num"], 2),
    **dict.fromkeys(["swa_num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "attention_head_dim", "swa_head_dim", "kv_channels", "global_head_dim"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "v_head_dim", "q_head_dim"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "rotary_dim", "index_head_dim"], 8),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank"], 24),
    **dict.fromkeys(["moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_dim"], 32),
    **dict.fromkeys(["encoder_expert_capacity", "decoder_expert_capacity"], 64),
    **dict.fromkeys(
        ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"], 4
    ),
    **dict.fromkeys(["num_experts_per_tok", "top_k", "moe_topk", "moe_top_k", "top_k_experts", "moe_k"], 2),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"], 1),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"], 512),
    **dict.fromkeys(["max_source_positions"], 24),
    **dict.fromkeys(["vocab_size", "unpadded_vocab_size", "text_vocab_size", "vocab_size_per_layer_input"], 160),
    **dict.fromkeys(["sliding_window", "attention_window_size", "sliding_window_size", "rel_extent"], 4),
    **dict.fromkeys(["mamba_d_state", "mamba_n_heads", "mamba_d_head", "ssm_state_size", "index_topk", "d_rel"], 8),
    **dict.fromkeys(["index_n_heads", "index_kpool"], 2),
    **dict.fromkeys(["linear_num_value_heads", "linear_num_key_heads", "linear_num_heads"], 4),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 16),
    **dict.fromkeys(["hidden_size_per_layer_input"], 16),
}
MOST_LAYERS = 4
BY_LAYER = ("per_layer_config", "stage_names", "out_features", "out_indices")  # name layers that are cut
# What the default config of a type lacks, or what its few layers have to be, in full width and small alike. None of it
# sets a scale: a head_dim is the default hidden_size divided by the heads.
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
LACKING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "clip_qkv": 8, "kv_n_heads": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "dots1": {
        "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_text": {"rope_parameters": GLM_ROPE},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 64,
        "vocab_size": 160,
    },
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"hybrid_layer_ids": [1]},
}  # fmt: skip
STAGED = {
    "embed_dim": 32, "hidden_size": 256, "depths": [2] * 4, "num_heads": [2, 4, 8, 16], "image_size": 64,
    "window_size": 2,
}  # fmt: skip
# What a type wants beyond its own default: fields of its config, set after the shrinking.
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2, "topk_group": 1, "num_experts_per_token": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "clip_qkv": 8, "kv_n_heads": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": STAGED,
    # The sizes of the sliding layers are no fields; `per_layer_config` is made of them.
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "flaubert": {"n_words": 160, "emb_dim": 64},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "hiera": {"embed_dim": 32, "hidden_size": 256, "depths": [1] * 4, "num_heads": [2, 4, 8, 16]},
    # With a window shorter than the prompt, transformers' own static cache fails in eager and sdpa alike.
    "inkling2_text": {"sliding_window_size": 16, "rel_extent": 16},
    "kimi_linear": {"num_experts_per_token": 2},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10},
    "lilt": {"hidden_size": 96},  # six coordinates, a sixth of the width each
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 24},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 64},
    "maskformer-swin": STAGED,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 1,
    },
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "squeezebert": {"embedding_size": 64},
    "swin": STAGED,
    "swin2sr": {**STAGED, "hidden_size": 64, "depths": [2, 2], "num_heads": [2, 2], "image_size": 16},
    "swinv2": STAGED,
    "timesfm2_5": {"context_length": 128},
    "xlm": {"n_words": 160, "emb_dim": 64},
    "xlnet": {"d_head": 16},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16},
}


class NotBuiltError(Exception):
    """Why a type is not there to be compared."""


def needs(model_type: str) -> None:
    """Skip a test of a type that the installed transformers does not have."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {model_type}")


def default_config(model_type: str) -> hf.PretrainedConfig:
    """The default config of a type with few layers, all widths as they are."""
    return _config(model_type, _few(model_type))


def small_config(model_type: str) -> hf.PretrainedConfig:
    """The default config of a type, shrunk."""
    return _config(model_type, _shrunk(_few(model_type)) | SPECIAL.get(model_type, {}))


def _few(model_type: str) -> dict[str, Any]:
    return few_layers(_defaults(model_type)) | LACKING.get(model_type, {})


def _defaults(model_type: str) -> dict[str, Any]:
    try:
        return CONFIG_MAPPING[model_type]().to_dict()
    except Exception as error:
        raise NotBuiltError(f"no default config: {_first_line(error)}") from error


def _config(model_type: str, fields: dict[str, Any]) -> hf.PretrainedConfig:
    for name in ("model_type", "transformers_version", "architectures", "_name_or_path", "dtype"):
        fields.pop(name, None)
    try:
        return CONFIG_MAPPING[model_type](**fields)
    except Exception as error:
        raise NotBuiltError(f"its config can't be shrunk: {_first_line(error)}") from error


def few_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with few layers; lists with one entry a layer are cut to layers of every kind."""
    old = {name: fields[name] for name in LAYERS.split() if isinstance(fields.get(name), int)}
    chosen = {count: _layers_to_keep(fields, count) for count in set(old.values()) if count > 2}
    cut: dict[str, Any] = {}
    for name, value in fields.items():
        if name in BY_LAYER:
            continue
        if name in old:
            cut[name] = len(chosen.get(value, range(value)))
        elif isinstance(value, list) and len(value) in chosen and not isinstance(value[0], dict):
            cut[name] = [value[i] for i in chosen[len(value)]]
        elif _is_section(value):
            cut[name] = few_layers(value)
        else:
            cut[name] = value
    return cut


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with small sizes."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if _is_section(value):
            small[name] = _shrunk(value)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, SIZES[name])
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= 100:
            small[name] = 100 + value % 50
        else:
            small[name] = value
    if small.get("kv_lora_rank") and "num_key_value_heads" in small and "num_attention_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]  # latent attention groups no heads
    if isinstance(small.get("image_size"), int) and isinstance(small.get("patch_size"), int):
        small["image_size"] = 4 * small["patch_size"]
    if small.get("head_dim", 0) is None:
        small["head_dim"] = 16
    if fields.get("qk_rope_head_dim") and fields["qk_rope_head_dim"] == fields.get("head_dim"):
        small["head_dim"] = small["qk_rope_head_dim"]
    if "rope_type" in small:
        small.setdefault("mrope_section", [16, 24, 24])  # some have it in the code only, for a width that is shrunk
    section = small.get("mrope_section")
    if isinstance(section, list) and sum(section) > 8:
        half = int(8 * (small.get("partial_rotary_factor") or 1.0))
        small["mrope_section"] = [half // len(section)] * (len(section) - 1)
        small["mrope_section"].append(half - sum(small["mrope_section"]))
    return small


def _layers_to_keep(fields: dict[str, Any], count: int) -> list[int]:
    """Indices of layers: the first of each kind, at least two."""
    kinds = [value for value in fields.values() if isinstance(value, list) and len(value) == count]
    kinds = [value for value in kinds if not isinstance(value[0], (dict, list))]
    seen: set[Any] = set()
    keep = []
    for i in range(count):
        kind = tuple(value[i] for value in kinds)
        if kind not in seen and len(keep) < MOST_LAYERS:
            seen.add(kind)
            keep.append(i)
    rest = [i for i in range(count) if i not in keep]
    return sorted(keep + rest[: max(0, 2 - len(keep))])


def model_classes(config: hf.PretrainedConfig, first: tuple[str, ...] = GENERATING) -> list[Any]:
    """Classes for a config, those first that generate."""
    classes: list[Any] = []
    for name in (*first, *reversed(AUTO_CLASSES)):
        mapping = getattr(hf, name)._model_mapping if hasattr(hf, name) else {}
        if type(config) in mapping:
            try:
                found = mapping[type(config)]
            except ValueError as error:  # a table that names a class that transformers lacks
                raise NotBuiltError(_first_line(error)) from error
            classes += list(found) if isinstance(found, (list, tuple)) else [found]
    if not classes:
        raise NotBuiltError("transformers has no model class for it")
    return list(dict.fromkeys(classes))


def build(
    config: hf.PretrainedConfig,
    attn: str,
    dtype: torch.dtype = torch.float64,
    first: tuple[str, ...] = GENERATING,
) -> nn.Module:
    """A model with random weights, the same for every implementation; logits large enough to matter.

    It is of the first class that can be built, of the kinds of `first` before all others.
    """
    reasons = []
    for cls in model_classes(config, first):
        try:
            return _build(cls, config, attn, dtype)
        except NotBuiltError as error:
            reasons.append(error)
    raise reasons[0]


def _build(cls: Any, config: hf.PretrainedConfig, attn: str, dtype: torch.dtype) -> nn.Module:
    wanted: Any = attn
    if "backbone_config" in type(config).sub_configs:
        wanted = {"": attn} | {name: attn for name in type(config).sub_configs if name != "backbone_config"}
    options = {"attn_implementation": wanted}
    if at_least("transformers", "5.0"):
        options["experts_implementation"] = "eager"  # the default takes no float64
    config = type(config).from_dict(config.to_dict())
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in cls._from_config(config, **options).parameters())
    except Exception as error:
        raise NotBuiltError(f"{cls.__name__}: {_first_line(error)}") from error
    if count > MOST_PARAMETERS:
        raise NotBuiltError(f"{cls.__name__}: {count} parameters after shrinking")
    config = type(config).from_dict(config.to_dict())
    torch.manual_seed(0)
    try:
        model = cls._from_config(config, **options).to(dtype).eval()
    except Exception as error:
        raise NotBuiltError(f"{cls.__name__}: {_first_line(error)}") from error
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # a table that the code computes, as the sines of RoFormer
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1 and parameter.numel() and not name.endswith(("A_log", "dt_bias")):
                fan = parameter[0].numel()
                parameter.copy_(noise * (1.5 / fan**0.5))
            elif parameter.is_floating_point():
                parameter.add_(0.1 * noise)
            if name.endswith("sinks"):
                parameter.copy_(noise)
    return model


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """Inputs of two rows, as `sqrtdk check` makes them."""
    made, _ = make_inputs(model, model.config, batch=2, seq_len=LENGTH, seed=1)
    placed = move_inputs(made, model)
    assert isinstance(placed, dict)
    return placed


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def tensors_of(thing: Any, path: str = "") -> dict[str, Tensor]:
    """All floating tensors of an output by their path; caches are left out."""
    if isinstance(thing, Tensor):
        return {path: thing} if thing.is_floating_point() else {}
    if isinstance(thing, dict):
        items: Any = thing.items()
    elif isinstance(thing, (list, tuple)):
        items = enumerate(thing)
    else:
        return {}
    found: dict[str, Tensor] = {}
    for name, value in items:
        if name not in (
            "past_key_values",
            "cache",  # the same from transformers 5.24 on
            "attentions",
            "encoder_attentions",
            "decoder_attentions",
            "cross_attentions",
        ):
            found |= tensors_of(value, f"{path}.{name}" if path else str(name))
    return found
