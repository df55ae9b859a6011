"""Judges the scale that a GGUF file declares. The scale that is applied is in an engine's code, and is not seen."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from sqrtdk.audit.configs import as_number
from sqrtdk.audit.explanations import judge_scale
from sqrtdk.audit.model_run import ModelRun
from sqrtdk.audit.records import Finding, ModelInfo, with_health
from sqrtdk.audit.rules.scales import on_scales
from sqrtdk.audit.rules.unmeasured import not_read
from sqrtdk.errors import ModelError
from sqrtdk.frontends.ggml.front import READS_SCALE
from sqrtdk.graphs.gguf import Value, read_metadata
from sqrtdk.graphs.opening import config_beside
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.records import AttentionCall, EffectiveScale, Factor, NotMeasured

_SITE = "blk.*.attn"
_MOST_SIZE = 2**24


def audit_gguf(path: str, model: str) -> tuple[ModelRun, tuple[NotMeasured, ...], tuple[Finding, ...]]:
    """Judge the attention scale and softcap that the metadata of a GGUF file declares, given its head sizes.

    Args:
        path: The file.
        model: The name of the model in the report.

    Returns:
        A static run with at most one judged call; the entry that says what a GGUF file can't show; and the finding on
        it.

    Raises:
        ModelError: The file is not GGUF, or does not name its head sizes.
    """
    entries = read_metadata(path)
    config, notes = config_beside(path)
    family = str(entries.get("general.architecture", ""))[:100]
    call, said = _declared(entries, family, model)
    if call is not None and config is None:
        # Granite's config would declare the same scale under another name.
        config = {"model_type": family}
        config |= {"attention_multiplier": call.scale.effective} if family.startswith("granite") else {}
    judged = () if call is None else (judge_scale(call, None, config),)
    findings = tuple(on_scales(nn.Module(), judged, "static"))
    not_seen = Message("rules.gguf.not_seen")
    missing = NotMeasured(_SITE, Message("rules.gguf.says", reason=not_seen, what=said))
    finding = not_read(missing)
    calls = with_health(judged, (*findings, finding))
    environment = {
        "dtype": "",
        "attn": "",
        "device": "",
        "notes": [*notes, Message("rules.gguf.metadata", what=not_seen)],
    }
    info = ModelInfo(model, f"GGUF {family}", 0)
    run = ModelRun("own", info, "static", environment, calls, (), (), findings)
    return run, (missing,), (finding,)


def _declared(entries: Mapping[str, Value], family: str, model: str) -> tuple[AttentionCall | None, str]:
    """Return the attention that the file declares, or None if it names no scale, and a description in words."""

    def read(name: str) -> float | None:  # GGUF writes 0 for a field that is not set
        return as_number(entries.get(f"{family}.{name}")) or None

    def size(name: str) -> int | None:
        number = read(name)
        return int(number) if number is not None and 0 < number <= _MOST_SIZE and number == int(number) else None

    heads, width = size("attention.head_count"), size("embedding_length")
    key = size("attention.key_length") or (width // heads if width and heads else None)
    if not heads or not key:
        raise ModelError(
            f"{model[:200]!r} names no heads, or no size of them, for its architecture {family!r}",
            hint="Give a file of a language model.",
        )
    shared = size("attention.head_count_kv") or heads
    value = size("attention.value_length") or key
    scale, cap = read("attention.scale"), read("attn_logit_softcapping")
    parts: list[str] = [Message("rules.gguf.heads", number=heads, dims=key)]
    parts += [Message("rules.gguf.key_heads", number=shared)] if shared != heads else []
    parts += [f"attention.scale {scale:.6g}"] if scale else [Message("rules.gguf.no_scale")]
    parts += [f"attn_logit_softcapping {cap:g}"] if cap else []
    said = joined(parts, "comma")
    if scale and family not in READS_SCALE:
        return None, Message("rules.gguf.scale_not_read", what=said, family=family)
    if not scale:
        return None, said
    inner = f"{scale:.4g} * q.k"
    formula = f"softmax({cap:g} * tanh({inner} / {cap:g}))" if cap else f"softmax({inner})"
    factor = Factor(scale, "op", f"{family}.attention.scale")
    call = AttentionCall(
        site=_SITE, index=0, module_class="", kind="kernel", op="gguf", score="dot", batch=1, heads=heads,
        kv_heads=shared, head_dim=key, padded_head_dim=key, value_dim=value, model_dim=width, query_len=1, key_len=1,
        self_attention=True, dtype="", logits_dtype="", device="", stages=(), formula=formula,
        scale=EffectiveScale(scale, scale * math.sqrt(key), scale, None, None, (factor,)), softcap=cap,
        stats_reason=Message("rules.gguf.metadata_alone"),
    )  # fmt: skip
    return call, said
