"""Declared factors on a scale: length extensions (YaRN, longrope), layer numbers, gains, and what follows a length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, is_transformers, mapping, model_type, number
from sqrtdk.audit.families import MLA_YARN
from sqrtdk.audit.proportional import BASE_LENGTHS, length_factors
from sqrtdk.tracing.records import AttentionCall


@dataclass(frozen=True, slots=True)
class Multiplier:
    """One declared factor on the base scale; several values: any is right, or the interval between them."""

    values: tuple[float, ...]
    by: str
    kind: str = "factor"  # "factor", "length", "layer"
    interval: bool = False


# Names of the block of a config that holds the rotary embedding's parameters; the last is litgpt's.
ROPE_BLOCKS = ("rope_parameters", "rope_scaling", "rope_adjustments")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature `0.1 mscale ln(factor) + 1` (Peng et al. 2023, section 3.4).

    >>> round(yarn_mscale(40.0, 1.0), 4)
    1.3689
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_parameters(config: Any, module: nn.Module | None, layer: int | None) -> Mapping[str, Any] | None:
    """The RoPE block of a config; where there is one for each layer type, that of this layer."""
    for name in ROPE_BLOCKS:
        parameters = mapping(config, name)
        if parameters is None:
            continue
        if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
            kinds = field(config, "layer_types")
            kind = field(module, "layer_type")
            if kind is None and isinstance(kinds, list | tuple) and layer is not None and layer < len(kinds):
                kind = kinds[layer]
            return mapping(parameters, kind) if isinstance(kind, str) else None
        return parameters
    # DeepSeek's own inference code keeps them on the arguments themselves
    if number(config, "mscale") is not None:
        names = {"factor": "rope_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
        return {key: number(config, path) for key, path in names.items()} | {"rope_type": "yarn"}
    return None


def _rotation_gain(block: Mapping[str, Any], config: Any) -> float:
    """The factor on cos and sin, as transformers' `modeling_rope_utils` computes it: it enters the logits squared."""
    kind = block.get("rope_type", block.get("type"))
    stated = number(block, "attention_factor")
    original = number(block, "original_max_position_embeddings") or number(config, "original_max_position_embeddings")
    longest = number(config, "max_position_embeddings")
    factor = number(block, "factor") or (longest / original if longest and original else 1.0)
    if kind in ("yarn", "deepseek_yarn"):
        if stated is not None:
            return stated
        mscale, all_dim = number(block, "mscale"), number(block, "mscale_all_dim")
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else yarn_mscale(factor)
    if kind in ("longrope", "su"):
        if stated is not None:
            return stated
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original else 1.0
    return 1.0 if is_transformers(config) or stated is None else stated


def _length(call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None) -> Multiplier | None:
    block = rope_parameters(config, module, layer)
    if not block:
        return None
    name = next(name for name in (*ROPE_BLOCKS, "mscale") if field(config, name) is not None)
    kind = block.get("rope_type", block.get("type"))
    mscale, all_dim, factor = (number(block, key) for key in ("mscale", "mscale_all_dim", "factor"))
    known = is_transformers(config)
    partial = (number(block, "partial_rotary_factor") or number(config, "partial_rotary_factor") or 1.0) < 1.0
    partial = partial or number(config, "qk_nope_head_dim") is not None
    softmax = yarn_mscale(factor, all_dim) ** 2 if factor and all_dim else 1.0
    if known:
        softmax = softmax if model_type(config) in MLA_YARN and kind not in (None, "default") else 1.0
        gain = _rotation_gain(block, config) ** 2 if call.rope else 1.0
        if (short := number(block, "short_mscale")) and (long := number(block, "long_mscale")) and call.rope:
            return Multiplier(
                (short**2, long**2), f"config.{name}: short_mscale {short:g}, long_mscale {long:g}", "length"
            )
        low, high = softmax, softmax * gain
        text = f"config.{name}: {kind}" + (f", factor {factor:g}" if factor is not None else "")
        if all_dim and softmax != 1.0:
            text += f", mscale_all_dim {all_dim:g}: x{softmax:.4g}"
        elif gain != 1.0:
            text += f", attention factor {math.sqrt(gain):.4g} squared"
        if low == high == 1.0:
            return None
        return Multiplier((low, high) if partial and gain != 1.0 else (high,), text, "length", partial and gain != 1.0)
    if mscale is not None or all_dim is not None:
        squares = [yarn_mscale(factor, m) ** 2 if factor else m * m for m in (all_dim, mscale) if m]
        squares = [value for value in squares if value != 1.0]
        if not squares:
            return None
        text = f"config.{name}: mscale {mscale if mscale is not None else all_dim:g}: x{squares[0]:.4g}"
        return Multiplier(tuple(squares), text, "length")
    gain = _rotation_gain(block, config) ** 2
    if gain == 1.0:
        return None
    text = f"config.{name}: {kind}, attention factor {math.sqrt(gain):.4g} squared"
    return Multiplier((1.0, gain) if partial else (gain,), text, "length", interval=partial)


def _layer_index(config: Any, layer: int | None) -> Multiplier | None:
    if layer is None or field(config, "scale_attn_by_inverse_layer_idx") is not True:
        return None
    return Multiplier((1.0 / (layer + 1),), f"config.scale_attn_by_inverse_layer_idx: 1/{layer + 1}", "layer")


def _fixed(path: str, source: str) -> Callable[[AttentionCall, Any], Multiplier | None]:
    def read(call: AttentionCall, config: Any) -> Multiplier | None:
        value = number(config, path)
        return (
            None
            if value is None or value in (0.0, 1.0)
            else Multiplier((value,), f"config.{path} = {value:g} ({source})")
        )

    return read


def _temperature_tuning(call: AttentionCall, config: Any) -> Multiplier | None:
    strength, floor = number(config, "attn_scale"), number(config, "floor_scale")
    if not field(config, "attn_temperature_tuning") or strength is None or not floor:
        return None
    high = 1.0 + strength * math.log1p(call.key_len // floor)
    return None if high == 1.0 else Multiplier((1.0, high), "config.attn_temperature_tuning (Llama 4)", interval=True)


def _position_beta(call: AttentionCall, config: Any) -> Multiplier | None:
    beta = number(config, "rope_parameters.llama_4_scaling_beta")
    original = number(config, "rope_parameters.original_max_position_embeddings")
    if not beta or not original:
        return None
    high = 1.0 + beta * math.log1p(call.key_len // original)
    return (
        None if high == 1.0 else Multiplier((1.0, high), "config.rope_parameters.llama_4_scaling_beta", interval=True)
    )


def _log_scaling(call: AttentionCall, config: Any) -> Multiplier | None:
    floor, alpha = number(config, "log_scaling_n_floor"), number(config, "log_scaling_alpha")
    if not floor or not alpha:
        return None
    high = 1.0 + alpha * math.log(max(call.key_len / floor, 1.0))
    return None if high == 1.0 else Multiplier((1.0, high), "config.log_scaling_alpha", interval=True)


def _log_n(call: AttentionCall, config: Any) -> Multiplier | None:
    trained = number(config, "seq_length")
    if field(config, "use_logn_attn") is not True or trained is None or trained <= 1 or call.key_len <= trained:
        return None
    high = math.log(call.key_len) / math.log(trained)
    return Multiplier((1.0, high), "config.use_logn_attn (Qwen: log_seq_length of the position)", interval=True)


# The field that each reads first, and the reader.
MULTIPLIERS: tuple[tuple[str, Callable[[AttentionCall, Any], Multiplier | None]], ...] = (
    ("key_multiplier", _fixed("key_multiplier", "Falcon-H1: on the keys, muP")),
    ("qk_scale_factor", _fixed("qk_scale_factor", "gain on the normalised queries")),
    ("attn_temperature_tuning", _temperature_tuning),
    ("rope_parameters.llama_4_scaling_beta", _position_beta),
    ("log_scaling_alpha", _log_scaling),
    ("use_logn_attn", _log_n),
)
MULTIPLIER_FIELDS = (
    *ROPE_BLOCKS, *BASE_LENGTHS, "mscale", "scale_attn_by_inverse_layer_idx", *(name for name, _ in MULTIPLIERS),
)  # fmt: skip


def multipliers(call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None) -> list[Multiplier]:
    """Every factor that config and module declare for a call."""
    lengths = length_factors(call, module, config)
    factors = (
        _length(call, module, config, layer),
        _layer_index(config, layer),
        Multiplier(*lengths) if lengths is not None else None,
        *(read(call, config) for _, read in MULTIPLIERS),
    )
    return [factor for factor in factors if factor is not None]
