"""From what the recorder saw to an `AttentionCall`: shapes, factors, formula, both readings of the scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.stats import CallStats, head_stats_from_logits, head_stats_from_qk
from sqrtdk.trace import formula, masks, numeric
from sqrtdk.trace.chain import Chain, Step, read_chain, to_logits
from sqrtdk.trace.graph import Node
from sqrtdk.trace.lineage import Side, follow
from sqrtdk.trace.masks import Addend
from sqrtdk.trace.recorder import Fused, Pending
from sqrtdk.trace.records import AttentionCall, Factor, Mask, Scale, Stage

AGREEMENT = 0.01  # the two readings of the scale agree within 1%
LINEAR = 0.99  # below this R^2 a slope alone says nothing about the scale


@dataclass(slots=True)
class Layout:
    """Sizes of one attention."""

    batch: int
    heads: int
    rows: int
    columns: int
    width: int
    value_width: int


@dataclass(slots=True)
class Draft:
    """What both kinds of attention give the record."""

    site: str
    kind: str
    op: str
    layout: Layout
    query: Side
    key: Side
    chain: Chain
    fused_factors: list[Factor]
    implicit_causal: bool
    dtype: torch.dtype
    logits_dtype: torch.dtype
    device: torch.device
    dropout: float = 0.0
    visible: Tensor | None = None  # (broadcastable to) (B, H, L, S)
    mask_names: dict[int, str] = field(default_factory=dict)
    mask: Mask | None = None
    slope: numeric.Slope | None = None
    slope_reason: str | None = None
    stats: CallStats | None = None
    stats_reason: str | None = None
    output_rms: float | None = None
    max_product: float | None = None
    kv_axis: int | None = None  # heads of a key that was not repeated


# -- eager ---------------------------------------------------------------------------------------------------------


def read_eager(
    weighing: Pending, value: Tensor, output: Tensor, *, heads_hint: int | None, measure: bool, regress: bool
) -> Draft | str:
    """A softmax met a value product: read it back. A string says why it is no attention."""
    chain = read_chain(weighing.node)
    if chain.product is None:
        return _without_product(weighing, chain, value)
    left, right = _operands(chain.product)
    logits = weighing.logits.movedim(weighing.dim, -1)
    swapped = _is_swapped(chain, weighing)
    query_node, key_node = (right, left) if swapped else (left, right)
    query, key = follow(query_node, "q"), follow(key_node, "k")
    layout = _layout(logits, query, query_node, swapped, value, heads_hint)
    draft = Draft(
        site=weighing.seen.site,
        kind="flex" if weighing.flex else "eager",
        op=weighing.op,
        layout=layout,
        query=query,
        key=key,
        chain=chain,
        fused_factors=[],
        implicit_causal=False,
        dtype=value.dtype,
        logits_dtype=weighing.stored,
        device=logits.device,
        dropout=weighing.dropout,
    )
    if weighing.op == "aten._safe_softmax" and not weighing.flex:
        _merge_math_scale(draft)
    weights = weighing.weights.movedim(weighing.dim, -1)
    if any(step.kind == "sinks" for step in chain.steps):
        logits, weights = logits[..., :-1], weights[..., :-1]
        layout.columns -= 1
    _read_masks(draft, logits, weights)
    if logits.is_meta:
        draft.slope_reason = draft.stats_reason = "no data on the meta device"
        return draft
    if regress:
        _regress_eager(draft, chain.product, swapped, logits)
    if measure:
        shaped = _heads_first(logits, layout)
        draft.stats = head_stats_from_logits(shaped, draft.visible, future=_looks_ahead(draft))
        if chain.product.max_product is not None:
            draft.max_product = float(chain.product.max_product)
    draft.output_rms = _rms(output)
    return draft


def _without_product(weighing: Pending, chain: Chain, value: Tensor) -> Draft | str:
    node = weighing.node
    while not node.is_root:
        parent = node.main()
        if parent is None:
            break
        node = parent
    if node.op != "additive" and (node.op in ("input", "parameter") or node.width is not None):
        return "its logits come from one projection: a router or a pooling"
    name = "additive" if node.op == "additive" else f"unknown({node.op})"
    logits = weighing.logits.movedim(weighing.dim, -1)
    empty = Side(None, [], [Stage("logits", "unknown", node.op)], None, unknown=[node.op])
    layout = Layout(logits.shape[0], 1, logits.shape[-2] if logits.dim() > 1 else 1, logits.shape[-1], 0, value.shape[-1])
    if logits.dim() >= 4:
        layout.heads = math.prod(logits.shape[1:-2])
    draft = Draft(
        site=weighing.seen.site,
        kind="eager",
        op=weighing.op,
        layout=layout,
        query=empty,
        key=Side(None, [], [], None),
        chain=chain,
        fused_factors=[],
        implicit_causal=False,
        dtype=value.dtype,
        logits_dtype=logits.dtype,
        device=logits.device,
    )
    draft.query.unknown = [name]
    draft.slope_reason = draft.stats_reason = f"the logits are no product of q and k: {name}"
    return draft


def _operands(product: Node) -> tuple[Node, Node]:
    nodes = [arg for arg in product.args if isinstance(arg, Node)]
    return nodes[-2], nodes[-1]


def _coordinates(product: Node, views: list[Node], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each logit the (batch, row, column) of the product's entry it came from, in the softmax's layout."""
    shape = product.shape if len(product.shape) == 3 else (1, *product.shape)
    axes = [torch.arange(n, device=device).view([-1 if d == a else 1 for d in range(3)]) for a, n in enumerate(shape)]
    spread = [axis.expand(shape).reshape(product.shape) for axis in axes]
    n, r, c = (to_logits(axis, views) for axis in spread)
    return n, r, c


def _is_swapped(chain: Chain, weighing: Pending) -> bool:
    """Whether the right operand is the query: then the product's rows run along the keys."""
    assert chain.product is not None
    if not _replayable(chain.product, chain):
        return False
    if all(view.op in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "slice", "cat") for view in chain.views):
        return weighing.dim not in (-1, weighing.logits.dim() - 1)
    if math.prod(chain.product.shape) > 1 << 24:
        return False
    _, r, c = _coordinates(chain.product, chain.views, torch.device("cpu"))
    r, c = r.movedim(weighing.dim, -1), c.movedim(weighing.dim, -1)
    return bool((r[..., :1] != r).any()) and not bool((c[..., :1] != c).any())


def _layout(
    logits: Tensor, query: Side, node: Node, swapped: bool, value: Tensor, heads_hint: int | None
) -> Layout:
    width = node.shape[-2] if swapped else node.shape[-1]
    rows = logits.shape[-2] if logits.dim() > 1 else 1
    columns = logits.shape[-1]
    if logits.dim() >= 4:
        heads = math.prod(logits.shape[1:-2])
    elif logits.dim() == 3:
        heads = query.folded_heads // width if query.folded_heads and width else heads_hint or 1
        heads = heads if heads and logits.shape[0] % heads == 0 else heads_hint or 1
    else:
        heads = 1
    batch = math.prod(logits.shape[:-2]) // max(heads, 1)
    return Layout(batch, heads, rows, columns, width, value.shape[-1])


def _heads_first(logits: Tensor, layout: Layout) -> Tensor:
    """(B, H, L, S) of logits whose leading dimensions are batch and heads."""
    return logits.reshape(layout.batch, layout.heads, *logits.shape[-2:])


def _merge_math_scale(draft: Draft) -> None:
    """SDPA's unfused path multiplies q and k by the root of its scale each: that is one factor of the call."""
    draft.kind = "sdpa"
    draft.op = "aten._scaled_dot_product_attention_math"
    if draft.query.factors and draft.key.factors:
        left, right = draft.query.factors[-1], draft.key.factors[-1]
        if left.value is not None and left.value == right.value:
            draft.query.factors.pop()
            draft.key.factors.pop()
            for side in (draft.query, draft.key):
                last = max(i for i, stage in enumerate(side.stages) if stage.name == "scale")
                del side.stages[last]
            draft.fused_factors.append(Factor(left.value * right.value, "op", "sdpa scale"))


def _read_masks(draft: Draft, logits: Tensor, weights: Tensor) -> None:
    """Which keys every row sees, by all masks together, and what the softmax made of the hidden ones."""
    kinds: list[tuple[int, Step, Addend]] = []
    for i, step in enumerate(draft.chain.steps):
        if step.addend is not None and (step.kind == "mask" or step.addend.kind.endswith("mask")):
            kinds.append((i, step, step.addend))
    if not kinds:
        return
    draft.mask_names = {i: "mask" for i, _, _ in kinds}
    if logits.is_meta:
        draft.mask = Mask("mask", kinds[0][2].form, scaled_by=_scaled_by(draft.chain, kinds[0][0]))
        return
    visible: Tensor | None = None
    names: list[str] = []
    for i, _, addend in kinds:
        if addend.visible is None:
            continue
        try:
            seen = to_logits(addend.visible.expand(addend.shape), addend.views)[..., : draft.layout.columns]
        except RuntimeError:  # a layout that can't be followed: what is hidden shows in the logits themselves
            seen = logits > masks.HIDDEN
        name = masks.pattern(seen)
        if name is None:
            draft.mask_names.pop(i, None)
            continue
        draft.mask_names[i] = name
        names.append(name)
        visible = seen if visible is None else visible & seen
    if visible is None:
        return
    draft.visible = _heads_first(visible, draft.layout)
    first = kinds[0][2]
    draft.mask = mask_facts(
        draft,
        names[0] if len(set(names)) == 1 else masks.pattern(visible) or "mask",
        first.form,
        _heads_first(weights, draft.layout),
        first.fill,
        _scaled_by(draft.chain, kinds[0][0]),
    )


def mask_facts(
    draft: Draft, kind: str, form: str, weights: Tensor | None, fill: float | None, scaled_by: float | None
) -> Mask:
    """Counts over (batch, head, row), also where the mask was given once for several of them."""
    assert draft.visible is not None
    layout = draft.layout
    seeing = draft.visible.any(-1)
    blind = int((~seeing.expand(layout.batch, layout.heads, layout.rows)).sum())
    leaked: float | None = None
    if weights is not None and weights.numel():
        hidden = weights.detach().masked_fill(draft.visible[..., : weights.shape[-1]], 0.0).sum(-1)
        leaked = float(hidden.masked_fill(~seeing, 0.0).max())
    finite = fill is not None and math.isfinite(fill)
    return Mask(kind, form, blind, blind if finite else 0, leaked, fill, scaled_by)


def _scaled_by(chain: Chain, position: int) -> float | None:
    """Product of the factors that came after the step at `position`; None when there were none."""
    product, found = 1.0, False
    for step in chain.steps[position + 1 :]:
        if step.kind == "scale" and step.factor is not None and step.factor.value is not None:
            product, found = product * step.factor.value, True
    return product if found and product != 1.0 else None


def _regress_eager(draft: Draft, product: Node, swapped: bool, logits: Tensor) -> None:
    query, key = (draft.key.basis, draft.query.basis) if swapped else (draft.query.basis, draft.key.basis)
    if query is None or key is None:
        draft.slope_reason = "the projection's values could not be brought into the product's layout"
        return
    if draft.query.rope != draft.key.rope or (draft.query.rope and draft.layout.rows != draft.layout.columns):
        draft.slope_reason = "q and k are rotated by different positions"
        return
    if not _replayable(product, draft.chain):
        draft.slope_reason = "the views between the product and the softmax could not be followed"
        return
    layout = draft.layout
    left = query.reshape(-1, *query.shape[-2:]) if query.dim() != 3 else query
    right = key.reshape(-1, *key.shape[-2:]) if key.dim() != 3 else key
    n, r, c = (
        _heads_first(axis[..., : layout.columns], layout)
        for axis in _coordinates(product, draft.chain.views, logits.device)
    )
    b, h, i, j = numeric.sample(
        layout.batch, layout.heads, layout.rows, layout.columns, diagonal=draft.query.rope, device=logits.device
    )
    at = (n[b, h, i, j], r[b, h, i, j], c[b, h, i, j])
    rows = left[at[0], at[1]].to(torch.float64)
    columns = right.transpose(-1, -2)[at[0], at[2]].to(torch.float64)
    x = (rows * columns).sum(-1)
    y = _heads_first(logits, layout)[b, h, i, j].to(torch.float64)
    y = _linear_part(draft, y, (b, h, i, j))
    seen = torch.ones_like(y, dtype=torch.bool) if draft.visible is None else draft.visible[..., : layout.columns].expand(
        layout.batch, layout.heads, layout.rows, layout.columns
    )[b, h, i, j]
    draft.slope = numeric.regress(x, y, seen, rows=numeric.row_count(layout.rows, diagonal=draft.query.rope))
    if draft.slope is None:
        draft.slope_reason = "the product of the projections does not vary"


def _replayable(product: Node, chain: Chain) -> bool:
    try:
        to_logits(torch.empty(product.shape, device="meta"), chain.views)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _linear_part(draft: Draft, y: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """Undo what is known and is no factor, outermost step first: biases are subtracted, a softcap is inverted."""
    layout = draft.layout
    after = 1.0
    undo: list[tuple[str, Any, float]] = []
    for step in reversed(draft.chain.steps):
        if step.kind == "scale" and step.factor is not None:
            after *= step.factor.value if step.factor.value is not None else math.nan
        elif step.kind in ("bias", "mask", "offset") and step.addend is not None and step.addend.value is not None:
            undo.append(("bias", step.addend, after))
        elif step.kind == "softcap" and step.cap:
            undo.append(("cap", step.cap, after))
    for kind, what, outer in undo:
        if kind == "bias":
            bias = to_logits(what.value.expand(what.shape), what.views)[..., : layout.columns]
            values = _heads_first(bias, layout)[at].to(torch.float64)
            y = y - values * (outer if math.isfinite(outer) else 1.0)
        else:
            y = what * torch.atanh((y / what).clamp(-1 + 1e-12, 1 - 1e-12))
    return y


# -- fused ---------------------------------------------------------------------------------------------------------


def read_fused(call: Fused, *, measure: bool, regress: bool) -> Draft:
    """A fused kernel ran: its arguments are the operands, its scale argument is one more factor."""
    q, k = call.query, call.key
    query, key = follow(call.query_node, "q"), follow(call.key_node, "k")
    width = q.shape[-1]
    heads = q.shape[-3] if q.dim() >= 4 else (query.folded_heads or width) // width if q.dim() == 3 else 1
    heads = heads if heads and math.prod(q.shape[:-2]) % heads == 0 else 1
    layout = Layout(
        math.prod(q.shape[:-2]) // max(heads, 1), heads, q.shape[-2], k.shape[-2], width, call.value.shape[-1]
    )
    scale = width**-0.5 if call.scale is None else float(call.scale)
    factor = Factor(scale, "op", "sdpa default 1/sqrt(E)" if call.scale is None else "sdpa scale")
    chain = Chain(None)
    draft = Draft(
        site=call.site,
        kind="sdpa",
        op=call.op,
        layout=layout,
        query=query,
        key=key,
        chain=chain,
        fused_factors=[factor],
        implicit_causal=call.is_causal,
        dtype=q.dtype,
        logits_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        device=q.device,
        dropout=call.dropout,
        kv_axis=k.shape[-3] if k.dim() >= 4 else None,
    )
    bias = _read_fused_mask(draft, call)
    if q.is_meta:
        draft.slope_reason = draft.stats_reason = "no data on the meta device"
        return draft
    if regress:
        _regress_fused(draft, call, scale)
    if measure:
        draft.stats = head_stats_from_qk(
            q,
            k,
            scale=scale,
            bias=bias,
            visible=draft.visible,
            is_causal=call.is_causal,
            future=_looks_ahead(draft),
        )
        draft.max_product = draft.stats.max_product
    draft.output_rms = _rms(call.output)
    return draft


def _looks_ahead(draft: Draft) -> bool:
    """Whether rows may see keys after their own: as many rows as keys, and no causal mask."""
    causal = draft.mask is not None and draft.mask.kind in ("causal", "causal_lower_right")
    return draft.layout.rows == draft.layout.columns and not causal


def _read_fused_mask(draft: Draft, call: Fused) -> Tensor | None:
    """Set the mask of the draft; the additive part of a float mask, where it is more than a mask, is returned."""
    if call.is_causal:
        draft.mask = Mask("causal", "implicit", 0 if draft.layout.rows <= draft.layout.columns else None, 0, 0.0, -math.inf)
    if call.mask is None or call.mask_node is None:
        return None
    shape = (*call.query.shape[:-1], call.key.shape[-2])
    if call.mask.dtype == torch.bool:
        visible = None if call.mask.is_meta else call.mask
        addend: Addend | None = Addend("mask", "bool", None, visible, -math.inf, [], shape, False)
    else:
        value = None if call.mask.is_meta else call.mask.detach()
        addend = masks.read_addend(call.mask_node, value, 1.0, [], shape)
    if addend is None:
        return None
    step = Step("mask" if addend.kind == "mask" else "bias", addend=addend)
    draft.chain.steps.append(step)
    if addend.visible is not None:
        name = masks.pattern(addend.visible)
        if name is not None:
            draft.mask_names[0] = name
            draft.visible = _four(addend.visible)
            draft.mask = mask_facts(draft, name, addend.form, None, addend.fill, None)
    elif call.mask.is_meta and addend.kind.endswith("mask"):
        draft.mask_names[0] = "mask"
        draft.mask = Mask("mask", addend.form)
    if step.kind == "bias" and addend.value is not None:
        hidden = addend.visible
        return addend.value if hidden is None else addend.value.masked_fill(~hidden, 0.0)
    return None


def _four(mask: Tensor) -> Tensor:
    """(B, H, L, S), any of them 1, of a mask that broadcasts to it."""
    if mask.dim() < 4:
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.flatten(0, mask.dim() - 4)


def _regress_fused(draft: Draft, call: Fused, scale: float) -> None:
    if draft.query.basis is None or draft.key.basis is None:
        draft.slope_reason = "the projection's values could not be brought into the product's layout"
        return
    layout = draft.layout
    if draft.query.rope != draft.key.rope or (draft.query.rope and layout.rows != layout.columns):
        draft.slope_reason = "q and k are rotated by different positions"
        return
    sizes = (layout.batch, layout.heads, layout.rows, layout.columns)
    x = numeric.products(draft.query.basis, draft.key.basis, *sizes, diagonal=draft.query.rope)
    y = scale * numeric.products(call.query, call.key, *sizes, diagonal=draft.query.rope)
    every = torch.ones_like(x, dtype=torch.bool)
    draft.slope = numeric.regress(x, y, every, rows=numeric.row_count(layout.rows, diagonal=draft.query.rope))
    if draft.slope is None:
        draft.slope_reason = "the product of the projections does not vary"


def _rms(output: Tensor) -> float | None:
    if output.is_meta or not output.numel() or output.is_nested:
        return None
    return float(output.detach().to(torch.float32).square().mean().sqrt())


# -- the record ----------------------------------------------------------------------------------------------------


def finish(draft: Draft, index: int, module_class: str) -> AttentionCall:
    """Put the draft into a frozen record."""
    layout, query, key = draft.layout, draft.query, draft.key
    factors = [*query.factors, *key.factors, *draft.fused_factors]
    inner = [step.factor for step in draft.chain.steps if step.kind == "scale" and step.factor is not None]
    unknown = tuple(dict.fromkeys([*query.unknown, *key.unknown, *draft.chain.unknown]))
    width = layout.width - max(query.padding, key.padding)
    scale = _scale(draft, [*factors, *inner], unknown, width)
    addends = [step.addend for step in draft.chain.steps if step.addend is not None and step.kind != "offset"]
    terms = 1 + sum(a.terms for a in addends if a.content)
    extra = [draft.mask.kind] if draft.implicit_causal and draft.mask is not None else []
    if any(step.kind == "sinks" for step in draft.chain.steps):
        extra.append("sinks")
    named = query.unknown[0] if query.unknown and query.root is None and query.unknown[0] == "additive" else None
    root = query.root
    bias_steps = [i for i, s in enumerate(draft.chain.steps) if s.kind == "bias" and s.addend and not s.addend.content]
    return AttentionCall(
        site=draft.site,
        index=index,
        module_class=module_class,
        kind=draft.kind,
        op=draft.op,
        score=named or _score(query, key, addends, unknown, draft),
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
        formula=formula.write(
            formula.side_text(query, "q"),
            formula.side_text(key, "k"),
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
        bias=next((a.kind.removesuffix(" + mask") for a in addends if a.kind != "mask"), None),
        bias_scaled_by=next((by for i in bias_steps if (by := _scaled_by(draft.chain, i)) is not None), None),
        mask=draft.mask,
        sinks="sinks" in extra,
        dropout=draft.dropout,
        future_weight=draft.stats.future_weight if draft.stats is not None else None,
        output_rms=draft.output_rms,
        max_product=draft.max_product,
        unknown=unknown,
        stats=draft.stats.heads if draft.stats is not None else None,
        stats_reason=draft.stats_reason,
    )


def _score(query: Side, key: Side, addends: Iterable[Addend], unknown: tuple[str, ...], draft: Draft) -> str:
    content = next((a.kind for a in addends if a.content), None)
    if content is not None:
        return content
    if draft.chain.product is None and draft.kind == "eager":
        return unknown[0] if unknown else "unknown"
    return "cosine" if query.norm == key.norm == "l2" else "dot"


def _kv_heads(draft: Draft) -> int:
    heads = draft.layout.heads
    growth = draft.key.growth
    if draft.kv_axis:
        heads = draft.kv_axis
    return heads // growth if growth and heads % growth == 0 else heads


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_source(query: Node | None, key: Node | None) -> bool | None:
    if query is None or key is None:
        return None
    if query is key:
        return True
    if query.source is None or key.source is None:
        return None
    return query.source == key.source


def _stages(draft: Draft) -> list[Stage]:
    stages = [*draft.query.stages, *draft.key.stages, Stage("logits", "product")]
    stages += [Stage("logits", "scale", f"{f.value:.4g} ({f.source})") for f in draft.fused_factors]
    stages += draft.chain.stages()
    if draft.implicit_causal:
        stages.append(Stage("logits", "mask", "causal"))
    return stages


def _scale(draft: Draft, factors: list[Factor], unknown: tuple[str, ...], width: int) -> Scale:
    symbolic: float | None = None
    reason: str | None = None
    per_head: tuple[float, ...] | None = None
    missing = next((f for f in factors if f.value is None), None)
    if unknown:
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
    if effective is None and draft.slope_reason is not None:
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


def _agree(symbolic: float, per_head: tuple[float, ...] | None, slope: numeric.Slope) -> bool:
    if per_head is not None:
        return all(
            abs(read - wanted) <= AGREEMENT * abs(wanted) for read, wanted in zip(slope.per_head, per_head, strict=True)
        )
    return abs(slope.value - symbolic) <= AGREEMENT * abs(symbolic)
