"""What effective scale does a model declare for a call? Config fields first, then the family table.

The declared scale is a base (a field, else the family's rule, else 1/sqrt(head_dim)) times every declared
multiplier: GPT-2's 1/(layer + 1), muP's key gain (`multipliers.py`), YaRN's length factor (`rope_lengths.py`),
proportional attention (`proportional.py`).
Which object is the config is `governing.py`'s; module attributes, which are weak, are in `attributes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, is_transformers, model_type, number
from sqrtdk.audit.families import family
from sqrtdk.audit.multipliers import LAYER_SWITCH, MULTIPLIERS, Multiplier, by_layer
from sqrtdk.audit.proportional import BASE_LENGTHS, length_factors
from sqrtdk.audit.rope_lengths import ROPE_FIELDS, rope_length
from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.tracing.records import AttentionCall


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declared effective scale.

    `values`: any of them is right; with `interval` anything between the least and the greatest is right as well;
    empty: learned, any value. `length` is the part of it that a length extension (YaRN, longrope) contributes and
    `layer_factor` the part of a per-layer rule; both are 1.0 by default.
    """

    values: tuple[float, ...]
    by: str
    interval: bool = False
    length: float = 1.0
    layer_factor: float = 1.0


# --- base: field -> scale. The value read is a number; (path, formula, function of (value, call), source).
BaseReader = tuple[str, Callable[[float, AttentionCall], float], str]
BASE_FIELDS: tuple[BaseReader, ...] = (
    ("query_pre_attn_scalar", lambda v, call: v**-0.5, "Gemma 2 and 3: scale is its inverse root"),
    ("attention_scores_scalar", lambda v, call: v**-0.5, "litgpt: scale is its inverse root"),
    ("attention_multiplier", lambda v, call: v, "Granite: the scale itself"),
    ("attn_config.softmax_scale", lambda v, call: v, "MPT: the scale itself"),
    ("softmax_scale", lambda v, call: v, "the scale itself"),
    ("attention_scale", lambda v, call: v, "the scale itself"),
    ("qk_scale", lambda v, call: v, "Swin, BEiT, timm: the scale itself"),
)

# --- base: switches; (path, value that switches, scale, source)
BASE_SWITCHES: tuple[tuple[str, bool, Callable[[AttentionCall, Any], float], str], ...] = (
    ("scale_attn_weights", False, lambda call, config: 1.0, "GPT-2: no scale"),
    ("use_scale", False, lambda call, config: 1.0, "Keras: no scale"),
    ("use_attn_scale", False, lambda call, config: 1.0, "TransformerLens: no scale"),
    ("mup_scale_qk_dot_by_d", True, lambda call, config: 1.0 / call.head_dim, "muP, Yang et al. 2022: 1/d"),
    ("scale_qk_dot_by_d", True, lambda call, config: 1.0 / call.head_dim, "muP, Yang et al. 2022: 1/d"),
    (
        "mup_use_scaling",
        True,
        lambda call, config: (number(config, "mup_attn_multiplier") or 1.0) / call.head_dim,
        "Phi-3-small: mup_attn_multiplier/d",
    ),
)

# Switches that mean no scale on one config and something else on another (a forecaster's inputs): they explain a run
# without a scale, and promise nothing about one with it. transformers' own configs have them for the inputs alone.
LOOSE_SWITCHES = ("scaling",)

# What a config has to hold to be the one that governs: see `governing.py`.
KNOWN_FIELDS: tuple[str, ...] = (
    *(path for path, *_ in BASE_FIELDS), *(path for path, *_ in BASE_SWITCHES), *LOOSE_SWITCHES,
    *ROPE_FIELDS, *BASE_LENGTHS, LAYER_SWITCH, *(path for path, _ in MULTIPLIERS),
)  # fmt: skip


def _base(call: AttentionCall, config: Any) -> tuple[tuple[float, ...], str] | None:
    for path, function, source in BASE_FIELDS:
        value = number(config, path)
        if value is not None and value > 0:
            return (function(value, call),), f"config.{path} = {value:g} ({source})"
    for path, switch, scale, source in BASE_SWITCHES:
        if field(config, path) is switch:
            return (scale(call, config),), f"config.{path} = {switch} ({source})"
    divisor = number(config, "attn_scale")
    if field(config, "use_attn_scale") is True and divisor is not None and divisor > 0:
        return (1.0 / divisor,), f"config.attn_scale = {divisor:g} (TransformerLens: divides)"
    rule = family(call, config)
    if rule is not None:
        return rule.values(call, config), f"family {model_type(config)}: {rule.rule} ({rule.source})"
    for path in LOOSE_SWITCHES:
        unscaled = call.scale.effective is not None and close(call.scale.effective, 1.0)
        if field(config, path) is False and unscaled and not is_transformers(config):
            return (1.0,), f"config.{path} = False (no scale)"
    return None


def declared(
    call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None = None
) -> Declaration | None:
    """The effective scale that config and family declare for a call, or None when they say nothing usable.

    Args:
        call: what ran; its sizes, terms and rope are read, and a loose switch looks at the scale.
        module: the module at the call's site, for its layer type and the length that it was trained on.
        config: an object, a mapping, or None.
        layer: 0-based number of the layer, for per-layer rules.
    """
    if call.head_dim < 1:
        return None
    try:
        declaration = _combined(call, module, config, layer)
    except (ArithmeticError, ValueError):  # numbers of the config overflow, divide by zero, or have no logarithm
        return None
    return declaration if declaration is None or all(map(math.isfinite, declaration.values)) else None


def _multipliers(call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None) -> list[Multiplier]:
    """Every factor that config and module declare for a call."""
    lengths = length_factors(call, module, config)
    factors = (
        rope_length(call, module, config, layer),
        by_layer(config, layer),
        Multiplier(*lengths) if lengths is not None else None,
        *(read(call, config) for _, read in MULTIPLIERS),
    )
    return [factor for factor in factors if factor is not None]


def _combined(call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None) -> Declaration | None:
    """The base times every multiplier."""
    base = _base(call, config)
    factors = _multipliers(call, module, config, layer)
    if base is None and not factors:
        return None
    values, by = base if base is not None else ((inverse_root(call.head_dim),), "")
    for factor in factors:
        values = tuple(value * multiple for value in values for multiple in factor.values)
    texts = ([by] if by else []) + [factor.by for factor in factors]
    length = next((factor.values[-1] for factor in factors if factor.kind == "length"), 1.0)
    layered = next((factor.values[0] for factor in factors if factor.kind == "layer"), 1.0)
    interval = any(factor.interval for factor in factors)
    return Declaration(values, " and ".join(texts), interval, length, layered)
