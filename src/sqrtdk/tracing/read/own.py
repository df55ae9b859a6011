"""Reading the project's own kernels, that of CPUs and that of GPUs: every step of the formula is one of the arguments.

The operators take query (B, H, L, E), key (B, Hk, S, E) and value (B, Hv, S, Ev), and the steps in the order of the
vocabulary: scale, softcap, bias, mask, sinks. What has a number a row or a pair is spread to its shape by the
caller, or, on a GPU, by the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sqrtdk.tracing.read import bands
from sqrtdk.tracing.read.factors import tensor_factor
from sqrtdk.tracing.read.fused import CAUSAL
from sqrtdk.tracing.read.masks import read_addend
from sqrtdk.tracing.read.reading import Layout, Reading, Vectors
from sqrtdk.tracing.read.rotations import paired
from sqrtdk.tracing.read.side import Side, follow
from sqrtdk.tracing.records import ROWS, Factor
from sqrtdk.tracing.steps import Hide, Scale, Sink, Softcap, Step
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.graph import Node, is_learned
from sqrtdk.tracing.watch.recorder import KernelCall


def read_own(call: KernelCall) -> Reading:
    """A kernel of ours ran: its arguments are the operands and the steps."""
    q, k = call.arguments["query"], call.arguments["key"]
    query, key = paired(follow(call.nodes["query"], "q"), follow(call.nodes["key"], "k"))
    layout = _layout(call, query)
    scale, scaled = _scale(call, layout)
    softcap = call.arguments["softcap"] or None
    bias = _bias(call, layout)
    hide, too_large = _mask(call, layout, bias)
    return Reading(
        site=call.site,
        kind="compiled",
        op=call.op.replace("::", "."),
        layout=layout,
        query=query,
        key=key,
        steps=(
            scaled,
            *(() if softcap is None else (Softcap(softcap),)),
            *bias,
            *(() if hide is None else (hide,)),
            *(() if call.arguments.get("sinks") is None else (Sink(),)),
        ),
        operands=Vectors(
            q.reshape(layout.batch, layout.heads, *q.shape[-2:]),
            k.reshape(layout.batch, k.shape[0] * k.shape[1] // max(layout.batch, 1), *k.shape[-2:]),
            scale,
            softcap,
            exact=True,
        ),
        dtype=q.dtype,
        logits_dtype=torch.float32,
        device=q.device,
        output=call.output,
        kv_heads=k.shape[1] if layout.batch == q.shape[0] else None,
        no_stats=too_large,
    )


def _layout(call: KernelCall, query: Side) -> Layout:
    """Sizes of the call; batch and heads that the caller gave as one dimension are told apart by the projection."""
    q, k, v = (call.arguments[name] for name in ("query", "key", "value"))
    batch, heads, rows, width = q.shape
    if _dims_of_caller(call.nodes["query"]) == 3 and k.shape[1] == heads:
        split = (query.folded_heads or width) // width
        split = split if split and heads % split == 0 else 1
        batch, heads = batch * heads // split, split
    return Layout(batch, heads, rows, k.shape[-2], width, v.shape[-1])


def _dims_of_caller(node: Node) -> int:
    """Dimensions of the query that the caller passed, which is expanded before it gets its four."""
    while node.op != "expand":
        parent = node.main()
        if parent is None:
            break
        node = parent
    return len(node.shape)


def _spread(call: KernelCall, name: str, columns: int) -> Tensor | None:
    """An argument spread to the logits' rows and so many columns, as the kernel of CPUs gets it."""
    tensor: Tensor | None = call.arguments.get(name)
    return None if tensor is None else tensor.expand(*call.arguments["query"].shape[:3], columns)


def _shaped(tensor: Tensor, layout: Layout) -> Tensor:
    """(B, H, L, S or 1) of an argument that was spread to its shape; dimensions that only repeat have size 1 again."""
    tensor = tensor.detach().reshape(layout.batch, layout.heads, *tensor.shape[-2:])
    for axis in range(3):
        if tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _scale(call: KernelCall, layout: Layout) -> tuple[float | Tensor, Step]:
    """The scale, a number or a tensor in its place, and its step."""
    number, tensor = call.arguments["factor"], _spread(call, "scale", 1)
    if tensor is None:
        return number, Scale(Factor(number, "op", "sqrtdk scale"))
    factor = tensor_factor(call.nodes["scale"], call.arguments["scale"], "op", heads_axis=-3)
    return _shaped(tensor, layout), Scale(factor or Factor(None, "op", ROWS, learned=is_learned(call.nodes["scale"])))


def _bias(call: KernelCall, layout: Layout) -> tuple[Step, ...]:
    """The steps of the bias, which may be a mask as well."""
    bias = _spread(call, "bias", layout.columns)
    if bias is None:
        return ()
    shape = (layout.batch, layout.heads, layout.rows, layout.columns)
    return read_addend(call.nodes["bias"], _shaped(bias, layout), 1.0, (), shape)


def _mask(call: KernelCall, layout: Layout, bias: Sequence[Step]) -> tuple[Hide | None, str | None]:
    """The step of the mask and the window, and why it can't be looked at where it can't."""
    sizes = (layout.rows, layout.columns)
    above, below = call.arguments.get("above"), call.arguments.get("below")
    mask = _spread(call, "visible", layout.columns)
    alone = mask is None and not any(isinstance(step, Hide) for step in bias)
    if alone and above == 0 and (below is None or below >= layout.rows - 1):
        return CAUSAL, None
    if mask is None and above is None and below is None:
        return None, None
    form = "implicit" if mask is None else "bool"
    if mask is not None and mask.is_meta:
        return Hide(form, -math.inf), None
    visible = None if mask is None else _shaped(mask, layout)
    name = bands.kind(*sizes, above, below)
    if name is not None and math.prod(sizes) > bands.LARGEST:
        reason = f"a window of {layout.rows} rows and {layout.columns} keys would have to be held as a mask"
        return Hide(form, -math.inf, name=name if alone else "mask"), reason
    query = call.arguments["query"]
    device = torch.device("cpu") if query.is_meta else query.device
    if name is not None or visible is None:  # a window as wide as the matrix hides nothing
        window = (above, below) if name is not None else (None, None)
        band = bands.mask(*(sizes if name is not None else (1, 1)), *window, device)
        visible = band if visible is None else visible & band
    return Hide(form, -math.inf, Placed(visible, (), (layout.batch, layout.heads, *sizes))), None
