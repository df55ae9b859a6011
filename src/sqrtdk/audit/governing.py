"""Which object is the configuration of a module: one of the usual names, on the module itself or on a parent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, held, model_type, module_at, number, present
from sqrtdk.audit.declared import KNOWN_FIELDS

# What released code calls it: transformers, litgpt; Hydra, fairseq, TransformerLens; argparse, DeepSeek; Llama;
# Lightning; Time-Series-Library; OpenNMT. On one module the first that says something counts.
CONFIG_NAMES = (
    "config", "cfg", "args", "params", "hparams", "configs", "conf", "opt", "model_args", "model_config",
)  # fmt: skip

# Gemma 2's attn_logit_softcapping, litgpt's attention_logit_softcapping, MaxText's attn_logits_soft_cap,
# TransformerLens' attn_scores_soft_cap, Keras' attention_logit_soft_cap, praxis' atten_logit_cap, Gemma 3n's audio.
# A cap without a word of attention is that of the vocabulary's logits, of a router, or of an MLP's gate.
_CAPPED = (
    "attn", "attn_logit", "attn_logits", "attn_score", "attn_scores", "atten_logit", "atten_logits", "attention",
    "attention_logit", "attention_logits", "attention_score", "attention_scores", "conf_attention_logit", "qk_logit",
    "qk_logits",
)  # fmt: skip
_CAPS = ("softcapping", "soft_capping", "softcap", "soft_cap", "capping", "cap")
SOFTCAP_FIELDS = tuple(f"{logits}_{cap}" for logits in _CAPPED for cap in _CAPS)

# On the module of an attention itself that word is left out: `softcap`, `logit_cap`.
_OWN = ("logit", "logits", "score", "scores")
SOFTCAP_ATTRIBUTES = (
    *SOFTCAP_FIELDS,
    *(cap for cap in _CAPS if cap.startswith("soft")),
    *(f"{logits}_{cap}" for logits in _OWN for cap in _CAPS),
)
UNUSED_NAME = "a name that no config has"


def _usable(config: Any) -> bool:
    return (
        config is not None
        and not isinstance(config, nn.Module)
        and (isinstance(config, Mapping) or present(config, "__dict__") or present(config, "__slots__"))
    )


def _sub_config(config: Any, site: str) -> Any:
    """The sub-config of a composite that governs `site`: the one whose stem ("vision", "text") is in the path."""
    if isinstance(config, Mapping):
        names = [name for name in config if isinstance(name, str)]
    else:
        names = [name for name in held(config) if isinstance(name, str)]
    for name in names:
        stem = name.removesuffix("_config")
        sub = field(config, name)
        if stem and _usable(sub) and (name.endswith("_config") or stem in ("encoder", "decoder")):
            parts = site.replace("_", ".").split(".")
            if stem in parts:
                return sub
    return config


def _says(config: Any) -> bool:
    """Whether a config names its model's type, or holds a field of known meaning."""
    if model_type(config):
        return True
    for path in (*KNOWN_FIELDS, *SOFTCAP_FIELDS):
        value = field(config, path)
        if isinstance(value, bool | Mapping) or number(config, path) is not None:
            return True
    return False


def _configs(module: nn.Module) -> Iterator[Any]:
    """The objects on a module that are configs by their name, as something to read fields of."""
    for name in CONFIG_NAMES:
        config = held(module).get(name, field(type(module), name))
        if isinstance(config, property):  # diffusers' and Lightning's
            config = field(module, name)
        if not _usable(config) or isinstance(config, type):
            continue
        # One that answers to any name says nothing by it: what it holds itself counts.
        yield held(config) if not isinstance(config, Mapping) and present(config, UNUSED_NAME) else config


def config_at(model: nn.Module, site: str) -> Any:
    """The config that governs the module at `site`: the nearest that says something about a scale or its model's type.

    Its own config comes first, then its parents'. If no config says anything, the nearest is returned.
    A composite (text_config, vision_config, decoder, ...) gives way to the part that the path names.
    """
    parts = site.split(".") if site else []
    nearest = None
    for depth in range(len(parts), -1, -1):
        module = module_at(model, ".".join(parts[:depth]))
        if module is None:
            continue
        for config in _configs(module):
            part = _sub_config(config, ".".join(parts[depth:]) if depth < len(parts) else site)
            if _says(part):
                return part
            nearest = part if nearest is None else nearest
    return nearest
