"""From a draft to a frozen record: the formula in words, and the effective scale by both readings."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from sqrtdk.trace import formula
from sqrtdk.trace.draft import Draft, scaled_by
from sqrtdk.trace.graph import Node
from sqrtdk.trace.lineage import Side
from sqrtdk.trace.masks import BESIDES_MASK, Addend
from sqrtdk.trace.numeric import Slope
from sqrtdk.trace.records import AttentionCall, Factor, Scale, Stage

AGREEMENT = 0.01  # the two readings of the scale agree within 1%
LINEAR = 0.99  # below this R^2 a slope alone says nothing about the scale


def finish(draft: Draft, index: int, module_class: str) -> AttentionCall:
    """Put the draft into a frozen record."""
    layout, query, key = draft.layout, draft.query, draft.key
    factors = [*query.factors, *key.factors, *draft.fused_factors]
    inner = [step.factor for step in draft.chain.steps if step.kind == "scale" and step.factor is not None]
    unknown = tuple(dict.fromkeys([*query.unknown, *key.unknown, *draft.chain.unknown, *_changes(draft)]))
    width = layout.width - max(query.padding, key.padding)
    scale = _scale(draft, [*factors, *inner], unknown, width)
    addends = [step.addend for step in draft.chain.steps if step.addend is not None and step.kind != "offset"]
    terms = 1 + sum(a.terms for a in addends if a.content)
    extra = [draft.mask.kind] if draft.implicit_causal and draft.mask is not None else []
    if draft.sinks or any(step.kind == "sinks" for step in draft.chain.steps):
        extra.append("sinks")
    root = query.root
    bias_steps = [i for i, s in enumerate(draft.chain.steps) if s.kind == "bias" and s.addend and not s.addend.content]
    return AttentionCall(
        site=draft.site,
        index=index,
        module_class=module_class,
        kind=draft.kind,
        op=draft.op,
        score=draft.score or _score(query, key, addends),
        batch=layout.batch,
        heads=layout.heads,
        kv_heads=_kv_heads(draft),
        head_dim=width,
        padded_head_dim=layout.width,
        value_dim=layout.value_width,
        model_dim=root.width if root is not None else None,
        query_len=layout.rows,
        key_len=layout.columns,
        self_attention=_same_source(query.root, key.root),
        dtype=_name(draft.dtype),
        logits_dtype=_name(draft.logits_dtype),
        device=str(draft.device),
        stages=tuple(_stages(draft)),
        formula=("mask * " if draft.carried.remasked else "")
        + formula.write(
            f"{draft.score}(q, k)" if draft.score else formula.product_text(query, key),
            factors,
            draft.chain.steps,
            draft.mask_names,
            extra,
        ),
        scale=scale,
        terms=terms,
        norm=query.norm or key.norm,
        rope=query.rope or key.rope,
        softcap=next((step.cap for step in draft.chain.steps if step.kind == "softcap"), None),
        bias=next((a.kind.removesuffix(BESIDES_MASK) for a in addends if a.kind != "mask"), None),
        bias_scaled_by=next((by for i in bias_steps if (by := scaled_by(draft.chain, i)) is not None), None),
        mask=draft.mask,
        sinks="sinks" in extra,
        dropout=draft.dropout,
        future_weight=draft.stats.future_weight if draft.stats is not None else None,
        output_rms=draft.output_rms,
        max_product=draft.max_product,
        unknown=unknown,
        stats=draft.stats.heads if draft.stats is not None else None,
        stats_reason=draft.stats_reason,
        shared_qk=_shared(draft, query, key, width),
    )


def _changes(draft: Draft) -> list[str]:
    return [f"{name} on the weights" for name in draft.carried.changes]


def _score(query: Side, key: Side, addends: Iterable[Addend]) -> str:
    content = next((a.kind for a in addends if a.content), None)
    if content is not None:
        return content
    return "cosine" if query.norm == key.norm == "l2" else "dot"


def _kv_heads(draft: Draft) -> int:
    heads = draft.kv_axis or draft.layout.heads
    growth = draft.key.growth
    return heads // growth if heads % growth == 0 else heads


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_source(query: Node | None, key: Node | None) -> bool | None:
    if query is None or key is None:
        return None
    if query is key:
        return True
    if query.source is None or key.source is None:
        return None
    return bool(query.lineage & key.lineage)


def _shared(draft: Draft, query: Side, key: Side, width: int) -> bool:
    """Whether q and k are the whole of one projection each: a fused one holds the other beside."""
    root, layout = query.root, draft.layout
    if root is None or root is not key.root:
        return False
    return math.prod(root.shape) == layout.batch * layout.heads * layout.rows * width


def _stages(draft: Draft) -> list[Stage]:
    stages = [*draft.query.stages, *draft.key.stages, Stage("logits", "product")]
    stages += [Stage("logits", "scale", f"{f.value:.4g} ({f.source})") for f in draft.fused_factors]
    stages += draft.chain.stages()
    if draft.implicit_causal:
        stages.append(Stage("logits", "mask", "causal"))
    if draft.carried.remasked:
        stages.append(Stage("weights", "mask", "after the softmax"))
    if draft.carried.thinned:
        stages.append(Stage("weights", "thin", "by their own size"))
    stages += [Stage("weights", "unknown", name) for name in draft.carried.changes]
    if draft.carried.renormalised:
        stages.append(Stage("weights", "normalise", "divided by their sum"))
    return stages


def _scale(draft: Draft, factors: list[Factor], unknown: tuple[str, ...], width: int) -> Scale:
    symbolic: float | None = None
    reason: str | None = None
    per_head: tuple[float, ...] | None = None
    missing = next((f for f in factors if f.value is None), None)
    if draft.score == "additive":
        reason = "an additive score has no product of q and k to scale"
    elif unknown:
        reason = "the lineage could not follow " + ", ".join(unknown)
    elif missing is not None:
        reason = f"the value of a factor ({missing.source}) could not be read"
    else:
        symbolic = math.prod(f.value for f in factors if f.value is not None)
        per_head = _per_head(factors, symbolic, draft.layout.heads)
    value = draft.slope.value if draft.slope is not None else None
    agree: bool | None = None
    if symbolic is not None and draft.slope is not None:
        agree = _agree(symbolic, per_head, draft.slope)
        if not agree:
            reason = f"the two readings disagree: {symbolic:.4g} by the factors, {draft.slope.value:.4g} by the logits"
    effective = symbolic
    if symbolic is None and draft.slope is not None:
        if draft.slope.r_squared >= LINEAR:
            effective = value
        else:
            reason = f"{reason}; the logits are not linear in q.k (R^2 = {draft.slope.r_squared:.3f})"
    if effective is None and draft.slope_reason is not None and draft.score is None:
        reason = f"{reason}; {draft.slope_reason}" if reason else draft.slope_reason
    return Scale(
        effective=effective,
        ratio=effective * math.sqrt(width) if effective is not None else None,
        symbolic=symbolic,
        numeric=value,
        r_squared=draft.slope.r_squared if draft.slope is not None else None,
        factors=tuple(factors),
        per_head=per_head,
        agree=agree,
        reason=reason or (draft.slope_reason if draft.slope is None else None),
    )


def _per_head(factors: list[Factor], symbolic: float, heads: int) -> tuple[float, ...] | None:
    several = [f.per_head for f in factors if f.per_head is not None]
    if not several:
        return None
    rest = math.prod(f.value for f in factors if f.per_head is None and f.value is not None)
    return tuple(rest * math.prod(values[h % len(values)] for values in several) for h in range(heads))


def _agree(symbolic: float, per_head: tuple[float, ...] | None, slope: Slope) -> bool:
    if per_head is not None:
        return all(
            abs(read - wanted) <= AGREEMENT * abs(wanted) for read, wanted in zip(slope.per_head, per_head, strict=True)
        )
    return abs(slope.value - symbolic) <= AGREEMENT * abs(symbolic)
