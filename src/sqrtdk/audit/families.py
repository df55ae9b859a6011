"""Families whose released weights were trained with a scale that no config field names, in one literal table.

Each rule gives the effective scale from the call and the config. If it gives several values, any of them is right; if
it gives none, the scale is learned and any value is right. Families that declare the scale in a config field are in
`declared.py`. The rule of a family of transformers without an entry is 1/sqrt(head_dim), and a run that departs from it
without a field fails. Surveyed: every `modeling_*.py` of transformers 5.23, and what `tests/hf/check_sweep.py` builds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqrtdk.audit.configs import model_type, number_at
from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

Values = tuple[float, ...]
Rule = tuple[str, Callable[[AttentionCall, Any], Values]]  # a formula or an id, and the values that it admits


@dataclass(frozen=True, slots=True)
class Family:
    """A rule, the values that it admits, its source, and the modules that it covers ("" for all)."""

    rule: str  # a formula, or the id of a sentence
    values: Callable[[AttentionCall, Any], Values]
    source: str  # id
    module: str = ""  # part of the module's class name
    named: Mapping[str, str] = field(default_factory=dict)  # values of the source


def _low_rank(call: AttentionCall, config: Any) -> Values:
    width, rank = number_at(config, "hidden_size"), number_at(config, "q_lora_rank")
    if width is None or rank is None or width <= 0 or rank <= 0:
        return (inverse_root(call.head_dim),)
    return (math.sqrt(width / rank) * inverse_root(call.head_dim),)


_UNSCALED: Rule = ("sources.family.unscaled", lambda call, config: (1.0,))
_PER_DIM_GAIN: Rule = ("sources.family.per_dim_gain", lambda call, config: ())
_DOUBLED: Rule = ("(head_dim/2)^-1/2", lambda call, config: (inverse_root(call.head_dim / 2),))

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop", "pix2struct",
         "pix2struct_text_model", "pix2struct_vision_model"),
        Family(*_UNSCALED, "sources.family.t5"),
    ),
    "gpt_neo": Family(*_UNSCALED, "sources.family.gpt_neo"),
    **dict.fromkeys(("dia", "dia_encoder", "dia_decoder"), Family(*_UNSCALED, "sources.family.dia")),
    "zamba": Family(*_DOUBLED, "sources.family.zamba", named={"model": "Zamba"}),
    "zamba2": Family(*_DOUBLED, "sources.family.zamba", named={"model": "Zamba2"}),
    "longcat_flash": Family(
        "sqrt(hidden_size/q_lora_rank)/sqrt(head_dim)", _low_rank, "sources.family.longcat",
    ),
    "cvt": Family(
        "embed_dim^-1/2", lambda call, config: (inverse_root(call.heads * call.head_dim),), "sources.family.cvt",
    ),
    **dict.fromkeys(
        ("deberta", "deberta-v2", "sew-d"),
        Family(
            "1/sqrt(head_dim * terms)", lambda call, config: (inverse_root(call.head_dim * max(call.terms, 1)),),
            "sources.family.deberta",
        ),
    ),
    **dict.fromkeys(
        ("swinv2", "swin2sr"), Family("sources.family.exp_gain", lambda call, config: (), "sources.family.swin2")
    ),
    **dict.fromkeys(
        ("timesfm", "timesfm2_5", "gemma3n_audio", "gemma4_audio"), Family(*_PER_DIM_GAIN, "sources.family.timesfm")
    ),
    **dict.fromkeys(
        ("videoprism_vision_model", "videoprism"),
        Family(*_PER_DIM_GAIN, "sources.family.timesfm", module="PoolingHead"),
    ),
    "mistral_large4_text": Family(
        "sources.family.position_gain", lambda call, config: (), "sources.family.mistral_large4",
    ),
    "inkling_text": Family(
        "1/head_dim", lambda call, config: (inverse_root(call.head_dim) ** 2,), "sources.family.inkling",
    ),
    "gemma3n_text": Family(*_UNSCALED, "sources.family.gemma", named={"file": "modeling_gemma3n.py"}),
    "gemma4_text": Family(*_UNSCALED, "sources.family.gemma", named={"file": "modeling_gemma4.py"}),
    "gemma4_vision": Family(*_UNSCALED, "sources.family.gemma", named={"file": "modeling_gemma4.py"}),
    "gemma4_unified_text": Family(*_UNSCALED, "sources.family.gemma", named={"file": "modeling_gemma4_unified.py"}),
    "diffusion_gemma_text": Family(*_UNSCALED, "sources.family.gemma", named={"file": "modeling_diffusion_gemma.py"}),
    "embedding_gemma2_text": Family(*_UNSCALED, "sources.family.gemma", named={"file": "modeling_embedding_gemma2.py"}),
    "evolla": Family(
        "heads^-1/2", lambda call, config: (inverse_root(call.heads),), "sources.family.evolla",
        module="SequenceAligner",
    ),
}  # fmt: skip

# Families whose code multiplies the softmax scale itself by the square of YaRN's mscale_all_dim, as DeepSeek does
# (deepseek-ai/DeepSeek-V2, modeling_deepseek.py). Other families read rope_parameters for the rotation only.
MLA_YARN: frozenset[str] = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_k2", "mistral4", "mistral_large4_text",
    "axk1", "axk2", "longcat_flash", "youtu", "bailing_hybrid", "hy_v4", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
})  # fmt: skip

# Families whose bias is multiplied by the scale on purpose: Falcon adds ALiBi before it divides by sqrt(head_dim)
# (Falcon-RW, modeling_falcon.py).
SCALED_BIAS: frozenset[str] = frozenset({"falcon", "RefinedWeb", "RefinedWebModel"})


def family(call: AttentionCall, config: Any) -> Family | None:
    """Return the rule for the scale of a transformers model type, or None if it has none for this call.

    Args:
        call: The attention; the class of its module must be one that the rule covers.
        config: The config, whose `model_type` selects the rule.
    """
    rule = FAMILIES.get(model_type(config))
    return rule if rule is not None and rule.module in call.module_class else None


def by_family(name: str, family: Family) -> str:
    """Return the words of a report that a model family declares this scale, with the rule and its source.

    Args:
        name: The `model_type` of the family.
        family: Its rule.
    """
    rule = Message(family.rule) if family.rule.startswith("sources.family.") else family.rule
    return Message("sources.declared.family", type=name, rule=rule, source=Message(family.source, **family.named))


def by_default_rule(name: str) -> str:
    """Return the words of a report that a model type without a rule of its own has the scale 1/sqrt(head_dim)."""
    source = Message("sources.family.textbook")
    return Message("sources.declared.family", type=name, rule="1/sqrt(head_dim)", source=source)
