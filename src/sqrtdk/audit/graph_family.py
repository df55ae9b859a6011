"""The rule of a graph's family, where the graph has no config.json beside it.

A graph of a family whose scale is not 1/sqrt(head_dim) asks for the config. T5's scale is 1 because its factor was
folded into the initialisation of q. Nothing in an exported graph says so, and each attention, judged by itself, would
lack a scale. The names of modules and classes that exporters keep identify the family, and `families.py` has its rule.
A scale that is not the family's stays a mistake.
"""

from __future__ import annotations

import re
import shlex

from torch import nn

from sqrtdk.audit.attributes import Key
from sqrtdk.audit.families import FAMILIES, MLA_YARN, Family
from sqrtdk.audit.model_run import ModelRun, without_verdicts
from sqrtdk.audit.records import UNMEASURED, Finding, JudgedCall
from sqrtdk.audit.rules.unmeasured import UNMEASURED_SOURCE
from sqrtdk.audit.tolerance import are_close, scales_of
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

# Families whose config always declares a scale. The graph does not say which, so any scale may be right.
_DECLARING = ("gemma2", "gemma3", "gemma3_text", "t5gemma", "t5gemma2", "vaultgemma", "granite", "granitemoe",
              "granitemoeshared", "granitemoehybrid", "granite4", "hyperclovax", "helium", *MLA_YARN)  # fmt: skip
_CLASS_ENDING = r"(Text|Vision|Audio)?(For\w+|PreTrained\w*|\w*(Model|Attention|Layer|Block|Stack|Encoder|Decoder)\w*)"

# How a family is recognised if the graph keeps no class names: a pattern for the end of the attentions' paths, and one
# for the names of weights ("" matches any).
_BY_NAMES = (
    ("t5", r"(SelfAttention|EncDecAttention)$", "relative_attention_bias"),  # block.0.layer.0.SelfAttention
    ("gpt_neo", r"\bh\.\d+\.attn\.attention$", ""),  # transformer.h.0.attn.attention
    ("deberta-v2", r"attention\.self$", "rel_embeddings"),
    ("cvt", r"attention\.attention$", "convolution_projection"),
)


def ask_for_config(run: ModelRun, model: nn.Module, graph: str) -> ModelRun:
    """Withdraw verdicts on scales that would be right if the exported graph's model family were known for certain.

    Args:
        run: The run of the graph.
        model: The modules that the graph names.
        graph: Path of the graph's file, quoted in the proposed fix.

    Returns:
        The run, in which each unexplained scale that fits the family's rule is unmeasured and has a warning that asks
        for the config. The run itself if no family is recognised or no scale fits.
    """
    found = _family(run, model)
    if found is None:
        return run
    name, rule = found
    reasons: dict[Key, str] = {
        judged.key: Message("rules.graph.looks_like", family=name, scale=f"{judged.call.scale.effective:.4g}")
        for judged in run.calls
        if judged.verdict == "unexplained" and _is_right(judged.call, rule)
    }

    def asks(judged: JudgedCall) -> Finding:
        fix, source = Message("rules.graph.fix_config", graph=shlex.quote(graph)), Message(UNMEASURED_SOURCE)
        site, index = judged.key
        return Finding(UNMEASURED, "warn", site, None, None, judged.reason or "", fix, source, call=index)

    return without_verdicts(run, reasons, asks) if reasons else run


def _is_right(call: AttentionCall, rule: Family | None) -> bool:
    """Return whether a scale is the family's; always True if the family's configs differ."""
    if rule is None:
        return True
    values = rule.values(call, None)
    return not values or any(are_close(scales_of(call), (value,)) for value in values)


def _family(run: ModelRun, model: nn.Module) -> tuple[str, Family | None] | None:
    """Return the family's name and rule, found by the exporter's class names, else by names of modules and weights."""
    classes = {type(module).__name__ for module in model.modules()}
    by_class = {re.sub("[_-]", "", name): name for name in (*FAMILIES, *_DECLARING)}
    for name in sorted(by_class, key=len, reverse=True):  # "T5Gemma" before "T5"
        if any(re.fullmatch(name + _CLASS_ENDING, kind, re.IGNORECASE) for kind in classes):
            return by_class[name], FAMILIES.get(by_class[name])
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    biased = any(judged.call.bias is not None for judged in run.calls)
    for family, sites, weights in _BY_NAMES:
        named = any(re.search(weights, tensor) for tensor in tensors) or (family == "t5" and biased)
        if named and any(re.search(sites, judged.call.site) for judged in run.calls):
            return family, FAMILIES[family]
    return None
