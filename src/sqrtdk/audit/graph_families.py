"""A graph without its config.json that is of a family whose scale is not 1/sqrt(head_dim): the config is asked for.

The scale of T5 is 1 because the factor was folded into the initialisation of q; nothing in an exported graph says so,
and judged by itself each of its attentions lacks a scale. The names of modules and classes that exporters keep tell the
family, and `families.py` its rule. A scale that is not the family's stays a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from sqrtdk.audit.families import FAMILIES, MLA_YARN, Family
from sqrtdk.audit.model_run import ModelRun, without_verdicts
from sqrtdk.audit.records import UNMEASURED, Finding, JudgedCall
from sqrtdk.audit.rules.unmeasured import SOURCE
from sqrtdk.audit.tolerance import matches, scales_of
from sqrtdk.tracing.records import AttentionCall

FIX = "put the model's config.json beside the graph, or name the model with --like"
# Families whose config declares a scale of its own as a rule: which one, the graph does not say.
_DECLARING = ("gemma2", "gemma3", "gemma3_text", "t5gemma", "t5gemma2", "vaultgemma", "granite", "granitemoe",
              "granitemoeshared", "granitemoehybrid", "granite4", "hyperclovax", "helium", *MLA_YARN)  # fmt: skip
_WORDS = r"(Text|Vision|Audio)?(For\w+|PreTrained\w*|\w*(Model|Attention|Layer|Block|Stack|Encoder|Decoder)\w*)"


@dataclass(frozen=True, slots=True)
class _Names:
    """Names that show a family when the graph keeps no class names.

    Attributes:
        family: key of `FAMILIES`.
        sites: what the paths of its attentions end with.
        tensors: what the names of its weights contain; "" for any.
    """

    family: str
    sites: str
    tensors: str = ""


_BY_NAMES = (
    _Names("t5", r"(SelfAttention|EncDecAttention)$", "relative_attention_bias"),  # block.0.layer.0.SelfAttention
    _Names("gpt_neo", r"\bh\.\d+\.attn\.attention$"),  # transformer.h.0.attn.attention
    _Names("deberta-v2", r"attention\.self$", "rel_embeddings"),
    _Names("cvt", r"attention\.attention$", "convolution_projection"),
)


def ask_for_config(run: ModelRun, model: nn.Module) -> ModelRun:
    """The verdicts, but for scales that would be right by the config of the graph's family, which is not there.

    Args:
        run: of a graph without a config.
        model: the modules that the graph names.
    """
    found = _family(run, model)
    if found is None:
        return run
    name, rule = found
    asked = [judged for judged in run.calls if judged.verdict == "unexplained" and _is_right(judged.call, rule)]
    if not asked:
        return run
    looks = f"the graph looks like {name}, whose config says what its scale is"
    reasons = {
        (judged.call.site, judged.call.index): f"{looks}: {judged.call.scale.effective:.4g} here" for judged in asked
    }
    return without_verdicts(run, reasons, _asks)


def _asks(judged: JudgedCall) -> Finding:
    return Finding(UNMEASURED, "warn", judged.call.site, None, None, judged.reason or "", FIX, SOURCE)


def _is_right(call: AttentionCall, rule: Family | None) -> bool:
    """Whether a scale is the family's; any, where its configs differ."""
    if rule is None:
        return True
    values = rule.values(call, None)
    return not values or any(matches(scales_of(call), (value,)) for value in values)


def _family(run: ModelRun, model: nn.Module) -> tuple[str, Family | None] | None:
    """Name and rule of the family: by the classes that the exporter noted, else by the names of modules and weights."""
    classes = {type(module).__name__ for module in model.modules()}
    by_class = {_plain(name): name for name in (*FAMILIES, *_DECLARING)}
    for name in sorted(by_class, key=len, reverse=True):  # "T5Gemma" before "T5"
        if any(re.fullmatch(name + _WORDS, kind, re.IGNORECASE) for kind in classes):
            return by_class[name], FAMILIES.get(by_class[name])
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    sites = [judged.call.site for judged in run.calls]
    for names in _BY_NAMES:
        if _any(names.sites, sites) and (_any(names.tensors, tensors) or (names.family == "t5" and _has_bias(run))):
            return names.family, FAMILIES[names.family]
    return None


def _has_bias(run: ModelRun) -> bool:
    return any(judged.call.bias is not None for judged in run.calls)


def _any(pattern: str, texts: Iterable[str]) -> bool:
    return any(re.search(pattern, text) for text in texts)


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "")
