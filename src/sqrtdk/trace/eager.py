"""Reading an eager attention: a softmax met a value product; its formula lies in the lineage of its logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.stats import head_stats_from_logits
from sqrtdk.trace import masks, numeric
from sqrtdk.trace.additive import summed_by_hand
from sqrtdk.trace.carried import Carried
from sqrtdk.trace.chain import ZERO_ONE_FACTOR, Chain, Step, read_chain, to_logits
from sqrtdk.trace.draft import Draft, Layout, looks_ahead, mask_facts, root_mean_square, scaled_by
from sqrtdk.trace.events import Pending
from sqrtdk.trace.graph import Node
from sqrtdk.trace.lineage import Side, follow
from sqrtdk.trace.masks import Addend
from sqrtdk.trace.orient import Orientation, coordinates, orientation
from sqrtdk.trace.records import Factor, Mask, Stage


def read_eager(
    weighing: Pending, value: Tensor, output: Tensor, *, heads_hint: int | None, measure: bool, regress: bool
) -> Draft | str:
    """A softmax met a value product: read it back. A string says why it is no attention."""
    chain = read_chain(weighing.node)
    if chain.product is None:
        return _without_product(weighing, chain, value)
    left, right = _operands(chain.product)
    axes = orientation(chain.product, chain, weighing.dim, weighing.logits.dim())
    logits, weights = axes.apply(weighing.logits), axes.apply(weighing.weights)
    query_node, key_node = (right, left) if axes.swapped else (left, right)
    query, key = follow(query_node, "q"), follow(key_node, "k")
    layout = _layout(logits, query, query_node, axes.swapped, value, heads_hint)
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
        sinks=weighing.sinks,
        carried=weighing.carried or Carried(),
        kv_axis=chain.product.shape[0] // layout.batch if len(chain.product.shape) == 3 else None,
    )
    if weighing.op == "aten._safe_softmax" and not weighing.flex:
        _merge_math_scale(draft)
    if weighing.fault is not None:
        chain.steps.append(Step("unknown", name=weighing.fault))
        draft.slope_reason = draft.stats_reason = "the weights of a query do not sum to 1"
        return draft
    if any(step.kind == "sinks" for step in chain.steps):
        logits, weights = logits[..., :-1], weights[..., :-1]
        layout.columns -= 1
    joined = next((step.name for step in chain.steps if step.kind == "joined"), None)
    if joined is None:
        _read_masks(draft, axes, logits, weights)
    elif not logits.is_meta:
        draft.visible = _heads_first(logits, layout) > masks.BOTTOM
    if logits.is_meta:
        if draft.mask is not None:  # what the logits hide already can't be told from what the weights lose
            draft.carried = replace(draft.carried, remasked=False)
        draft.slope_reason = draft.stats_reason = "no data on the meta device"
        return draft
    if joined is not None:
        draft.slope_reason = joined
    elif draft.carried.changes:
        draft.slope_reason = "the weights were changed after the softmax"
    elif ZERO_ONE_FACTOR in chain.unknown or (chain.unknown and query.rope):
        draft.slope_reason = "the logits that could be compared do not show what that does to the others"
    elif regress:
        _regress_eager(draft, chain.product, axes, logits)
    if measure:
        shaped = _heads_first(_whole(draft, axes, logits), layout)
        draft.stats = head_stats_from_logits(shaped, draft.visible, future=looks_ahead(draft))
        if chain.product.max_product is not None:
            draft.max_product = float(chain.product.max_product)
    if draft.carried.remasked and draft.stats is not None:
        draft.stats = replace(draft.stats, future_weight=None)
    draft.output_rms = root_mean_square(output)
    return draft


def _without_product(weighing: Pending, chain: Chain, value: Tensor) -> Draft | str:
    node = weighing.node
    while not node.is_root:
        parent = node.main()
        if parent is None:
            break
        node = parent
    additive = node.op == "additive" or summed_by_hand(weighing.node)
    if not additive and (node.op in ("input", "parameter") or node.width is not None):
        return "its logits come from one projection: a router or a pooling"
    name = "additive" if additive else f"unknown({node.op})"
    logits = weighing.logits.movedim(weighing.dim, -1)
    stage = Stage("logits", "score" if additive else "unknown", name)
    empty = Side(None, [], [stage], None, unknown=[] if additive else [name])
    layout = Layout(
        logits.shape[0], 1, logits.shape[-2] if logits.dim() > 1 else 1, logits.shape[-1], 0, value.shape[-1]
    )
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
    draft.score = name
    draft.slope_reason = draft.stats_reason = f"the logits are no product of q and k: {name}"
    return draft


def _operands(product: Node) -> tuple[Node, Node]:
    nodes = [arg for arg in product.args if isinstance(arg, Node)]
    return nodes[-2], nodes[-1]


def _layout(logits: Tensor, query: Side, node: Node, swapped: bool, value: Tensor, heads_hint: int | None) -> Layout:
    width, product_rows = node.shape[-2:] if swapped else node.shape[:-3:-1]
    rows = logits.shape[-2] if logits.dim() > 1 else 1
    columns = logits.shape[-1]
    if logits.dim() >= 4:
        folded = product_rows != rows  # query heads of a group along the product's rows
        heads = math.prod(logits.shape[1:-2]) if folded else logits.shape[-3]
    elif logits.dim() == 3:
        heads = query.folded_heads // width if query.folded_heads and width else heads_hint or 1
        if query.root is not None and query.root.shape[-1:] == (width,):
            heads = 1  # the projection is as wide as the product: one head a module
        heads = heads if heads and logits.shape[0] % heads == 0 else 1
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


def _read_masks(draft: Draft, axes: Orientation, logits: Tensor, weights: Tensor) -> None:
    """Which keys every row sees, by all masks together, and what the softmax made of the hidden ones."""
    kinds: list[tuple[int, Step, Addend]] = []
    for i, step in enumerate(draft.chain.steps):
        hides = step.addend is not None and step.addend.kind.endswith("mask") and step.addend.kind != masks.ZERO_ONE
        if step.addend is not None and (step.kind == "mask" or hides):
            kinds.append((i, step, step.addend))
    if not kinds:
        return
    draft.mask_names = {i: "mask" for i, _, _ in kinds}
    if logits.is_meta and not (axes.followed and all(addend.visible is not None for _, _, addend in kinds)):
        draft.mask = Mask(
            "mask", kinds[0][2].form, fill=kinds[0][2].fill, scaled_by=scaled_by(draft.chain, kinds[0][0])
        )
        return
    visible: Tensor | None = None
    names: list[str] = []
    for i, _, addend in kinds:
        if addend.visible is None and addend.fill is None:
            continue
        if addend.visible is None or not axes.followed:
            seen = logits > max(0.5 * (addend.fill or -math.inf), masks.BOTTOM)
        else:
            seen = axes.apply(to_logits(addend.visible.expand(addend.shape), addend.views))
            seen = seen[..., : draft.layout.columns]
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
    form = masks.given_form(first) if draft.kind == "sdpa" else first.form
    draft.mask = mask_facts(
        draft,
        names[0] if len(set(names)) == 1 else masks.pattern(visible) or "mask",
        form,
        None if weights.is_meta else _heads_first(weights, draft.layout),
        first.fill,
        scaled_by(draft.chain, kinds[0][0]),
    )


def _regress_eager(draft: Draft, product: Node, axes: Orientation, logits: Tensor) -> None:
    query, key = (draft.key.basis, draft.query.basis) if axes.swapped else (draft.query.basis, draft.key.basis)
    if query is None or key is None:
        draft.slope_reason = "the projection's values could not be brought into the product's layout"
        return
    if draft.query.rope != draft.key.rope or (draft.query.rope and draft.layout.rows != draft.layout.columns):
        draft.slope_reason = "q and k are rotated by different positions"
        return
    if not axes.followed:
        draft.slope_reason = "the views between the product and the softmax could not be followed"
        return
    layout = draft.layout
    left = query.reshape(-1, *query.shape[-2:]) if query.dim() != 3 else query
    right = key.reshape(-1, *key.shape[-2:]) if key.dim() != 3 else key
    n, r, c = (
        _heads_first(axes.apply(axis)[..., : layout.columns], layout)
        for axis in coordinates(product, draft.chain, logits.device)
    )
    b, h, i, j = numeric.sample(
        layout.batch, layout.heads, layout.rows, layout.columns, diagonal=draft.query.rope, device=logits.device
    )
    at = (n[b, h, i, j], r[b, h, i, j], c[b, h, i, j])
    rows = left[at[0], at[1]].to(torch.float64)
    columns = right.transpose(-1, -2)[at[0], at[2]].to(torch.float64)
    x = (rows * columns).sum(-1)
    y = _heads_first(logits, layout)[b, h, i, j].to(torch.float64)
    y = _linear_part(draft, axes, y, (b, h, i, j))
    seen = torch.ones_like(y, dtype=torch.bool)
    if draft.visible is not None:
        seen = draft.visible.expand(layout.batch, layout.heads, layout.rows, layout.columns)[b, h, i, j]
    in_rows = numeric.row_count(layout.rows, diagonal=draft.query.rope)
    draft.slope = numeric.regress(x, y, seen, eps=torch.finfo(draft.logits_dtype).eps, rows=in_rows)
    if draft.slope is None:
        draft.slope_reason = numeric.NO_VARIATION


def _whole(draft: Draft, axes: Orientation, logits: Tensor) -> Tensor:
    """The logits before a row's own maximum was taken off: the softmax does not see it, a largest logit does."""
    for i, step in enumerate(draft.chain.steps):
        if step.kind == "offset" and step.addend is not None and step.addend.value is not None and axes.followed:
            taken = axes.apply(to_logits(step.addend.value.expand(step.addend.shape), step.addend.views))
            logits = logits - taken[..., : draft.layout.columns] * (scaled_by(draft.chain, i) or 1.0)
    return logits


def _linear_part(draft: Draft, axes: Orientation, y: Tensor, at: tuple[Tensor, ...]) -> Tensor:
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
            bias = axes.apply(to_logits(what.value.expand(what.shape), what.views))[..., : layout.columns]
            values = _heads_first(bias, layout)[at].to(torch.float64)
            y = y - values * (outer if math.isfinite(outer) else 1.0)
        else:
            y = what * torch.atanh((y / what).clamp(-1 + 1e-12, 1 - 1e-12))
    return y
