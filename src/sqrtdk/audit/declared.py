"""The effective scale that a model declares for a call, and the config object that declares it.

The declared scale is a base (a config's field, else the family's rule, else 1/sqrt(head_dim)) times every declared
multiplier (`multipliers.py`). Attributes of a module (`attributes.py`) declare nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, is_transformers, model_type, module_at, number_at, own_fields, present
from sqrtdk.audit.declared_outputs import GATE_MODES
from sqrtdk.audit.families import by_family, family
from sqrtdk.audit.multipliers import (
    FIXED_FACTORS,
    GROWING_FACTORS,
    LAYER_SWITCH,
    ROPE_FIELDS,
    by_config,
    multipliers,
)
from sqrtdk.audit.proportional import BASE_LENGTHS, NO_ARGUMENTS, Arguments
from sqrtdk.audit.tolerance import inverse_root, is_close
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

# Attribute names of a config in released code: transformers, litgpt; Hydra, fairseq, TransformerLens; argparse,
# DeepSeek; Llama; Lightning; Time-Series-Library; OpenNMT. On one module the first with a known field counts.
CONFIG_NAMES = (
    "config", "cfg", "args", "params", "hparams", "configs", "conf", "opt", "model_args", "model_config",
)  # fmt: skip

# Gemma 2's attn_logit_softcapping, litgpt's attention_logit_softcapping, MaxText's attn_logits_soft_cap,
# TransformerLens' attn_scores_soft_cap, Keras' attention_logit_soft_cap, praxis' atten_logit_cap, Gemma 3n's audio.
# A cap whose name does not mention attention belongs to the vocabulary's logits, to a router, or to an MLP's gate.
_CAPPED = (
    "attn", "attn_logit", "attn_logits", "attn_score", "attn_scores", "atten_logit", "atten_logits", "attention",
    "attention_logit", "attention_logits", "attention_score", "attention_scores", "conf_attention_logit", "qk_logit",
    "qk_logits",
)  # fmt: skip
_CAP_WORDS = ("softcapping", "soft_capping", "softcap", "soft_cap", "capping", "cap")
SOFTCAP_FIELDS = tuple(f"{logits}_{cap}" for logits in _CAPPED for cap in _CAP_WORDS)

# An attention module's own attributes need not mention attention: `self.softcap`, `self.logit_cap`.
_LOGIT_WORDS = ("logit", "logits", "score", "scores")
SOFTCAP_ATTRIBUTES = (
    *SOFTCAP_FIELDS,
    *(cap for cap in _CAP_WORDS if cap.startswith("soft")),
    *(f"{logits}_{cap}" for logits in _LOGIT_WORDS for cap in _CAP_WORDS),
)
UNUSED_NAME = "a name that no config has"


def _usable(config: Any) -> bool:
    return (
        config is not None
        and not isinstance(config, nn.Module)
        and (isinstance(config, Mapping) or present(config, "__dict__") or present(config, "__slots__"))
    )


def _sub_config(config: Any, site: str) -> Any:
    """Return the sub-config whose stem ("vision", "text") is part of the path `site`, else the config itself."""
    # "model.vision_tower.layers.0" has the part "vision", so vision_config governs it.
    parts = site.replace("_", ".").split(".")
    for name in config if isinstance(config, Mapping) else own_fields(config):
        stem = name.removesuffix("_config") if isinstance(name, str) else ""
        if stem and stem in parts and (name.endswith("_config") or stem in ("encoder", "decoder")):
            sub = field(config, name)
            if _usable(sub):
                return sub
    return config


def _says(config: Any, fields: Sequence[str]) -> bool:
    """Return whether a config names its model's type or holds one of these fields."""
    if model_type(config):
        return True
    for path in fields:
        value = field(config, path)
        if isinstance(value, bool | Mapping) or number_at(config, path) is not None:
            return True
        if path in GATE_MODES and isinstance(value, str) and value:
            return True
    return False


def _configs(module: nn.Module) -> Iterator[Any]:
    """Yield a module's attributes that are configs by name, as objects or mappings to read fields from."""
    for name in CONFIG_NAMES:
        config = own_fields(module).get(name, field(type(module), name))
        if isinstance(config, property):  # of diffusers and Lightning
            config = field(module, name)
        if not _usable(config) or isinstance(config, type):
            continue
        # A config that answers to any name would seem to declare every field, so only its own `__dict__` is read.
        yield own_fields(config) if not isinstance(config, Mapping) and present(config, UNUSED_NAME) else config


def config_at(model: nn.Module, site: str, fields: Sequence[str] = ()) -> Any:
    """Return the config that governs the module at `site`; None if neither it nor a module around it has a config.

    Configs are searched from the module outwards to the model. The first that holds one of the fields or a `model_type`
    is returned, and if none does, the innermost. Of a composite config (text_config, vision_config, decoder, ...) it is
    the part that the path names.

    Args:
        model: The model.
        site: Dotted path of the module; "" is the model itself.
        fields: Names of fields; by default those that declare a scale or a softcap.
    """
    parts = site.split(".") if site else []
    nearest = None
    for depth in range(len(parts), -1, -1):
        module = module_at(model, ".".join(parts[:depth]))
        if module is None:
            continue
        for config in _configs(module):
            part = _sub_config(config, ".".join(parts[depth:]) if depth < len(parts) else site)
            if _says(part, fields or (*KNOWN_FIELDS, *SOFTCAP_FIELDS)):
                return part
            nearest = part if nearest is None else nearest
    return nearest


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declared effective scale.

    Any of `values` is right; with `interval`, so is anything between the smallest and the largest. Empty `values` stand
    for a learned scale, where any value is right. `length` is the factor that comes from a length extension (YaRN,
    longrope) and `layer_factor` the factor that comes from a per-layer rule; both are 1.0 by default.
    `of_family` says that the family alone declares it.
    """

    values: tuple[float, ...]
    by: str
    interval: bool = False
    length: float = 1.0
    layer_factor: float = 1.0
    of_family: bool = False


# --- base: field -> scale. The value read is a number; (path, function of (value, call), id of the source).
BaseReader = tuple[str, Callable[[float, AttentionCall], float], str]
BASE_FIELDS: tuple[BaseReader, ...] = (
    ("query_pre_attn_scalar", lambda v, call: v**-0.5, "sources.field.gemma"),
    ("attention_scores_scalar", lambda v, call: v**-0.5, "sources.field.litgpt"),
    ("attention_multiplier", lambda v, call: v, "sources.field.granite"),
    ("attn_config.softmax_scale", lambda v, call: v, "sources.field.mpt"),
    ("softmax_scale", lambda v, call: v, "sources.field.scale"),
    ("attention_scale", lambda v, call: v, "sources.field.scale"),
    ("qk_scale", lambda v, call: v, "sources.field.swin"),
)

# --- base: switches; (path, value that switches, scale, id of the source)
BASE_SWITCHES: tuple[tuple[str, bool, Callable[[AttentionCall, Any], float], str], ...] = (
    ("scale_attn_weights", False, lambda call, config: 1.0, "sources.field.gpt2"),
    ("use_scale", False, lambda call, config: 1.0, "sources.field.keras"),
    ("use_attn_scale", False, lambda call, config: 1.0, "sources.field.transformer_lens"),
    ("mup_scale_qk_dot_by_d", True, lambda call, config: 1.0 / call.head_dim, "sources.field.mup"),
    ("scale_qk_dot_by_d", True, lambda call, config: 1.0 / call.head_dim, "sources.field.mup"),
    (
        "mup_use_scaling",
        True,
        lambda call, config: (number_at(config, "mup_attn_multiplier") or 1.0) / call.head_dim,
        "sources.field.phi3_small",
    ),
)

# Switches that mean "no scale" in some configs and something else in others (a forecaster's `scaling = True` of its
# inputs). They explain a run without a scale, but do not make one with a scale wrong. In transformers' own configs
# they always concern the inputs.
LOOSE_SWITCHES = ("scaling",)

# A config with one of these fields says something, see `config_at`.
KNOWN_FIELDS: tuple[str, ...] = (
    *(path for path, *_ in BASE_FIELDS), *(path for path, *_ in BASE_SWITCHES), *LOOSE_SWITCHES,
    *ROPE_FIELDS, *BASE_LENGTHS, LAYER_SWITCH, *FIXED_FACTORS, *GROWING_FACTORS,
)  # fmt: skip


def _base(call: AttentionCall, config: Any) -> Declaration | None:
    for path, function, source in BASE_FIELDS:
        value = number_at(config, path)
        if value is not None and value > 0:
            return Declaration((function(value, call),), by_config(path, f"{value:g}", source))
    for path, switch, scale, source in BASE_SWITCHES:
        if field(config, path) is switch:
            return Declaration((scale(call, config),), by_config(path, str(switch), source))
    divisor = number_at(config, "attn_scale")
    if field(config, "use_attn_scale") is True and divisor is not None and divisor > 0:
        by = by_config("attn_scale", f"{divisor:g}", "sources.field.transformer_lens_divisor")
        return Declaration((1.0 / divisor,), by)
    rule = family(call, config)
    if rule is not None:
        return Declaration(rule.values(call, config), by_family(model_type(config), rule), of_family=True)
    for path in LOOSE_SWITCHES:
        unscaled = call.scale.effective is not None and is_close(call.scale.effective, 1.0)
        if field(config, path) is False and unscaled and not is_transformers(config):
            return Declaration((1.0,), by_config(path, "False", "sources.field.no_scale"))
    return None


def declared_scale(
    call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None = None,
    arguments: Arguments = NO_ARGUMENTS,
) -> Declaration | None:  # fmt: skip
    """Return the scale that config and model family declare for a call: a base scale times every declared multiplier.

    Args:
        call: The attention. Its scale that ran is only used to interpret ambiguous switches.
        module: Its module, or None.
        config: The config that governs it, see `config_at`.
        layer: 0-based number of its layer, or None if unknown.
        arguments: The base lengths of proportional attention that the module was called with, by argument name.

    Returns:
        The declaration, or None if nothing is declared or the declared numbers give no finite scale.
    """
    if call.head_dim <= 0:
        return None
    try:
        base, factors = _base(call, config), list(multipliers(call, module, config, layer, arguments))
    except (ArithmeticError, ValueError):  # the config's numbers overflow, divide by zero, or have no logarithm
        return None
    values = base.values if base is not None else (inverse_root(call.head_dim),)
    for factor in factors:
        values = tuple(value * multiple for value in values for multiple in factor.values)
    if (base is None and not factors) or not all(map(math.isfinite, values)):
        return None
    texts = ([base.by] if base is not None else []) + [factor.by for factor in factors]
    length = next((factor.values[-1] for factor in factors if factor.kind == "length"), 1.0)
    layered = next((factor.values[0] for factor in factors if factor.kind == "layer"), 1.0)
    interval = any(factor.interval for factor in factors)
    by = functools.reduce(lambda first, second: Message("sources.declared.and", first=first, second=second), texts)
    of_family = base is not None and base.of_family and not factors
    return Declaration(values, by, interval, length, layered, of_family)
