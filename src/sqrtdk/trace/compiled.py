"""Reading the project's own compiled attention: every step of its formula is one of its arguments.

The operator takes query (B, H, L, E), key (B, Hk, S, E) and value (B, Hv, S, Ev), and the steps in the order of the
vocabulary: scale, softcap, bias, mask, sinks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.stats import head_stats_from_qk
from sqrtdk.trace import bands, masks, ops
from sqrtdk.trace.chain import Chain, Step
from sqrtdk.trace.draft import Draft, Layout, causal_mask, looks_ahead, mask_facts, root_mean_square
from sqrtdk.trace.events import Compiled
from sqrtdk.trace.factors import tensor_factor
from sqrtdk.trace.fused import added_bias, regress_product
from sqrtdk.trace.graph import Node
from sqrtdk.trace.lineage import Side, follow
from sqrtdk.trace.masks import Addend
from sqrtdk.trace.records import Factor, Mask


def read_compiled(call: Compiled, *, measure: bool, regress: bool) -> Draft:
    """The compiled kernel ran: its arguments are the operands and the steps."""
    q, k = call.arguments["query"], call.arguments["key"]
    query, key = follow(call.nodes["query"], "q"), follow(call.nodes["key"], "k")
    layout = _layout(call, query)
    scale: float | Tensor = call.arguments["factor"]
    factor: Factor | None = Factor(call.arguments["factor"], "op", "sqrtdk scale")
    if (tensor := call.arguments.get("scale")) is not None:  # in place of the number
        scale, factor = tensor, tensor_factor(call.nodes["scale"], tensor, "op", heads_axis=-3)
    chain = Chain(None, [] if factor is not None else [Step("unknown", name="mul by a tensor")])
    draft = Draft(
        site=call.site,
        kind="compiled",
        op=ops.COMPILED.replace("::", "."),
        layout=layout,
        query=query,
        key=key,
        chain=chain,
        fused_factors=[factor] if factor is not None else [],
        implicit_causal=False,
        dtype=q.dtype,
        logits_dtype=torch.float32,
        device=q.device,
        kv_axis=k.shape[1] if layout.batch == q.shape[0] else None,
    )
    softcap = call.arguments["softcap"] or None
    if softcap is not None:
        chain.steps.append(Step("softcap", cap=softcap))
    bias = _read_bias(draft, call)
    _read_masks(draft, call)
    if call.arguments.get("sinks") is not None:
        chain.steps.append(Step("sinks", name="sinks"))
    if regress:
        scaled = (q * scale, 1.0) if isinstance(scale, Tensor) else (q, scale)
        regress_product(draft, scaled[0], k, scaled[1])
    if measure and draft.stats_reason is None:
        draft.stats = head_stats_from_qk(
            q.reshape(layout.batch, layout.heads, *q.shape[-2:]),
            k.reshape(layout.batch, k.shape[0] * k.shape[1] // max(layout.batch, 1), *k.shape[-2:]),
            scale=_shaped(scale, layout) if isinstance(scale, Tensor) else scale,
            softcap=softcap,
            bias=bias,
            visible=draft.visible,
            is_causal=draft.implicit_causal,
            future=looks_ahead(draft),
        )
        draft.max_product = draft.stats.max_product
    draft.output_rms = root_mean_square(call.output)
    return draft


def _layout(call: Compiled, query: Side) -> Layout:
    """Sizes of the call; batch and heads that the caller gave as one dimension are told apart by the projection."""
    q, k, v = (call.arguments[name] for name in ("query", "key", "value"))
    batch, heads, rows, width = q.shape
    if _given_dims(call.nodes["query"]) == 3 and k.shape[1] == heads:
        split = (query.folded_heads or width) // width
        split = split if split and heads % split == 0 else 1
        batch, heads = batch * heads // split, split
    return Layout(batch, heads, rows, k.shape[-2], width, v.shape[-1])


def _given_dims(node: Node) -> int:
    """Dimensions of the query that the caller passed, which is expanded before it gets its four."""
    while node.op != "expand":
        parent = node.main()
        if parent is None:
            break
        node = parent
    return len(node.shape)


def _shaped(tensor: Tensor, layout: Layout) -> Tensor:
    """(B, H, L, S or 1) of an argument that was spread to its shape; dimensions that only repeat have size 1 again."""
    tensor = tensor.detach().reshape(layout.batch, layout.heads, *tensor.shape[-2:])
    for axis in range(3):
        if tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _read_bias(draft: Draft, call: Compiled) -> Tensor | None:
    """Note the step of the bias, which may be a mask as well; what the statistics have to add is returned."""
    given, layout = call.arguments.get("bias"), draft.layout
    if given is None:
        return None
    shape = (layout.batch, layout.heads, layout.rows, layout.columns)
    addend = masks.read_addend(call.nodes["bias"], _shaped(given, layout), 1.0, [], shape)
    if addend is None:
        return None
    draft.chain.steps.append(Step("mask" if addend.kind == "mask" else "bias", addend=addend))
    return added_bias(addend)


def _read_masks(draft: Draft, call: Compiled) -> None:
    """Note which keys each row sees by all masks together: a bias that hides, the mask, and the band."""
    layout, steps = draft.layout, draft.chain.steps
    sizes = (layout.rows, layout.columns)
    band = (call.arguments.get("above"), call.arguments.get("below"))
    given = call.arguments.get("visible")
    hiding = any(step.addend is not None and step.addend.visible is not None for step in steps)
    if given is None and not hiding and band[0] == 0 and (band[1] is None or band[1] >= layout.rows - 1):
        draft.implicit_causal = True
        draft.mask = causal_mask(layout.rows)
        return
    seen = None if given is None else _shaped(given, layout)
    name = bands.kind(*sizes, *band)
    whole = (layout.batch, layout.heads, *sizes)
    addend = Addend("mask", "bool" if given is not None else "implicit", None, seen, -math.inf, [], whole, False)
    if name is not None and math.prod(sizes) > bands.LARGEST:
        draft.mask = Mask("mask" if given is not None or hiding else name, addend.form, fill=addend.fill)
        draft.mask_names[len(steps)] = draft.mask.kind
        draft.stats_reason = f"a window of {layout.rows} rows and {layout.columns} keys would have to be held as a mask"
        addend.visible = None
    elif name is not None:
        mask = bands.mask(*sizes, *band, draft.device)
        addend.visible = mask if seen is None else seen & mask
        if seen is None:
            draft.mask_names[len(steps)] = name
    if given is not None or band != (None, None):
        steps.append(Step("mask", addend=addend))
    if draft.stats_reason is None:
        _join(draft)


def _join(draft: Draft) -> None:
    """Name every mask among the steps, and count what they hide together."""
    found: list[tuple[Addend, Tensor, str]] = []
    for i, step in enumerate(draft.chain.steps):
        seen = step.addend.visible if step.addend is not None else None
        name = (draft.mask_names.get(i) or masks.pattern(seen)) if seen is not None else None
        if step.addend is not None and seen is not None and name is not None:
            draft.mask_names[i] = name
            found.append((step.addend, seen, name))
    if not found:
        return
    for _, seen, _ in found:
        draft.visible = seen if draft.visible is None else draft.visible & seen
    assert draft.visible is not None
    names = {name for _, _, name in found}
    kind = names.pop() if len(names) == 1 else masks.pattern(draft.visible) or "mask"
    draft.mask = mask_facts(draft, kind, found[0][0].form, None, found[0][0].fill, None)
    if all(addend.fill == -math.inf for addend, _, _ in found):
        draft.mask = replace(draft.mask, masked_weight=0.0)  # by the meaning of the operation
