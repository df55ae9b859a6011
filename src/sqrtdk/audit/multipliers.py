"""Declared factors on a scale: layer numbers, gains, and what follows a length. Rope types are in `rope_lengths.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqrtdk.audit.configs import field, number
from sqrtdk.tracing.records import AttentionCall


@dataclass(frozen=True, slots=True)
class Multiplier:
    """One declared factor on the base scale; several values: any is right, or the interval between them."""

    values: tuple[float, ...]
    by: str
    kind: str = "factor"  # "factor", "length", "layer"
    interval: bool = False


LAYER_SWITCH = "scale_attn_by_inverse_layer_idx"  # GPT-2's


def by_layer(config: Any, layer: int | None) -> Multiplier | None:
    """The factor 1/(layer + 1), where the config switches it on."""
    if layer is None or field(config, LAYER_SWITCH) is not True:
        return None
    return Multiplier((1.0 / (layer + 1),), f"config.{LAYER_SWITCH}: 1/{layer + 1}", "layer")


def _up_to(high: float, by: str) -> Multiplier | None:
    """A factor that grows with the position, from 1 at the first rows to `high` at the last."""
    return None if high == 1.0 else Multiplier((1.0, high), by, interval=True)


def _fixed(path: str, source: str) -> Callable[[AttentionCall, Any], Multiplier | None]:
    def read(call: AttentionCall, config: Any) -> Multiplier | None:
        value = number(config, path)
        if value is None or value in (0.0, 1.0):
            return None
        return Multiplier((value,), f"config.{path} = {value:g} ({source})")

    return read


def _temperature_tuning(call: AttentionCall, config: Any) -> Multiplier | None:
    strength, floor = number(config, "attn_scale"), number(config, "floor_scale")
    if not field(config, "attn_temperature_tuning") or strength is None or not floor:
        return None
    high = 1.0 + strength * math.log1p(call.key_len // floor)
    return _up_to(high, "config.attn_temperature_tuning (Llama 4)")


def _position_beta(call: AttentionCall, config: Any) -> Multiplier | None:
    beta = number(config, "rope_parameters.llama_4_scaling_beta")
    original = number(config, "rope_parameters.original_max_position_embeddings")
    if not beta or not original:
        return None
    high = 1.0 + beta * math.log1p(call.key_len // original)
    return _up_to(high, "config.rope_parameters.llama_4_scaling_beta")


def _log_scaling(call: AttentionCall, config: Any) -> Multiplier | None:
    floor, alpha = number(config, "log_scaling_n_floor"), number(config, "log_scaling_alpha")
    if not floor or not alpha:
        return None
    high = 1.0 + alpha * math.log(max(call.key_len / floor, 1.0))
    return _up_to(high, "config.log_scaling_alpha")


def _log_n(call: AttentionCall, config: Any) -> Multiplier | None:
    trained = number(config, "seq_length")
    if field(config, "use_logn_attn") is not True or trained is None or trained <= 1 or call.key_len <= trained:
        return None
    high = math.log(call.key_len) / math.log(trained)
    return _up_to(high, "config.use_logn_attn (Qwen: log_seq_length of the position)")


# The field that each reads first, and the reader.
MULTIPLIERS: tuple[tuple[str, Callable[[AttentionCall, Any], Multiplier | None]], ...] = (
    ("key_multiplier", _fixed("key_multiplier", "Falcon-H1: on the keys, muP")),
    ("qk_scale_factor", _fixed("qk_scale_factor", "gain on the normalised queries")),
    ("attn_temperature_tuning", _temperature_tuning),
    ("rope_parameters.llama_4_scaling_beta", _position_beta),
    ("log_scaling_alpha", _log_scaling),
    ("use_logn_attn", _log_n),
)
