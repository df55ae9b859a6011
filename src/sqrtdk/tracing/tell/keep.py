"""The tensors of an attention that was read, in one layout: what it takes to compute it again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.errors import kind_and_text
from sqrtdk.tracing.read.orient import coordinates, operands
from sqrtdk.tracing.read.patterns import distinct
from sqrtdk.tracing.read.reading import Logits, Reading, Vectors
from sqrtdk.tracing.records import ROWS, AttentionCall, Factor
from sqrtdk.tracing.steps import Beside, Bias, Clamp, Hide, Mix, Offset, Scale, Sink, Softcap, Squares, Step, Unknown
from sqrtdk.tracing.tell.held import held_in
from sqrtdk.tracing.tell.proof import DOUBT, proven
from sqrtdk.tracing.tell.sight import Sight, look, visible_by
from sqrtdk.tracing.tell.sums import at_logits, lse_of, sinks_of
from sqrtdk.tracing.tell.vectors import Place, own, vector
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector
from sqrtdk.tracing.watch.carried import Carried
from sqrtdk.tracing.watch.events import KernelCall
from sqrtdk.tracing.watch.graph import Node

NO_OPERANDS = "its operands are not known"
_EVEN = 0.02  # a factor on rounded weights that is the same for all
_ROUNDED = 2.0**-20  # a factor of float32 this near to 1 is 1
ENLARGED = "its q was enlarged"
BLOCKS_OF_KEYS = "it was computed in blocks of keys"


@dataclass(frozen=True, slots=True, eq=False)
class Used:
    """What met in the attention, beside what its reading has.

    Attributes:
        value: v, as it met the weights.
        node: its node.
        weights: as they met it; None of a kernel.
        lse: that a kernel gave.
        query_node: of a kernel.
        key_node: of a kernel.
        sinks: of a kernel.
        query: of a kernel, as it was given it.
    """

    value: Tensor
    node: Node
    weights: Tensor | None = None
    lse: Tensor | None = None
    query_node: Node | None = None
    key_node: Node | None = None
    sinks: Tensor | None = None
    query: Tensor | None = None


def of_kernel(call: KernelCall) -> Used | None:
    """What met in a kernel whose arguments have the names of SDPA's; None of any other."""
    nodes = [call.nodes.get(name) for name in ("query", "key", "value")]
    query, key, value = nodes
    if query is None or key is None or value is None:
        return None
    sinks = call.arguments.get("sinks")
    lse = None if sinks is not None else call.lse  # theirs is among the sums, and can't be taken off again exactly
    return Used(call.arguments["value"], value, None, lse, query, key, sinks, call.arguments["query"])


def without(call: AttentionCall, reason: str) -> CallTensors:
    """No tensors of a call, and why."""
    nothing = Vector(torch.zeros(0))
    return CallTensors(
        call.site, call.index, nothing, nothing, nothing, nothing.values, None, missing=reason, call=call
    )


def projections_of(kept: CallTensors) -> tuple[Projection | None, Projection | None]:
    """Where q and k come from: names of weights and numbers of features, and no tensor of the run."""

    def bare(one: Vector) -> Projection | None:
        if one.projection is None:
            return None
        return replace(one.projection, input=torch.zeros(0), weight=None, bias=None)

    return bare(kept.query), bare(kept.key)


def keep(reading: Reading, used: Used | None, call: AttentionCall) -> CallTensors:
    """The tensors of a reading; what can't be laid out or is not known is told in `missing`."""
    try:
        kept = _keep(reading, used, call)
        return kept if kept.missing is not None or proven(kept) else without(call, DOUBT)
    except Exception as error:  # what a stranger's layout brings about must not stop the model
        return without(call, f"its tensors could not be laid out: {kind_and_text(error)}")


def _keep(reading: Reading, used: Used | None, call: AttentionCall) -> CallTensors:
    dropped = None if used is None else _dropped(reading, used)
    if dropped is not None:
        reading = replace(reading, dropout=dropped, carried=Carried())
    fault = _fault(reading)
    if fault is not None or used is None:
        return without(call, fault or NO_OPERANDS)
    places = _places(reading, used)
    if isinstance(places, str):
        return without(call, places)
    sight = look(reading)
    query, key, value = (vector(place) for place in places)
    if reading.kind == "sdpa" and isinstance(reading.operands, Logits):
        # torch's own decomposition multiplies q and k by a root of the scale each: `terms` have the whole of it
        root = math.sqrt(abs(next((s.factor.value or 1.0 for s in sight.steps if isinstance(s, Scale)), 1.0)))
        query, key = _unscaled(query, root), _unscaled(key, root)
    missing = _changed(reading)
    terms = _terms(reading, sight, used) if missing is None else None
    unknown = next((term for term in terms or () if term.value is None), None)
    if unknown is not None:
        missing = f"{unknown.name} {unknown.detail} is not known".replace("unknown ", "")
    assert reading.output is not None
    kept = None
    if reading.dropout and used.weights is not None:
        kept = (used.weights.reshape(_sizes(reading)) != 0).detach()
    return CallTensors(
        site=call.site,
        index=call.index,
        query=query,
        key=key,
        value=value,
        output=own(_rows(reading, used, reading.output), reading.output),
        terms=terms,
        lse=lse_of(reading, sight, used.lse),
        kept=kept,
        dropout=reading.dropout,
        dtype=call.dtype,
        logits_dtype=_dtype_of_logits(reading, call),
        weights_dtype=call.dtype if used.weights is None else _dtype_of_weights(reading, used.weights),
        missing=missing,
        call=call,
    )


def _dropped(reading: Reading, used: Used) -> float | None:
    """The rate at which weights were set to 0 before they met v, the others being enlarged; None where it is not so."""
    carried = reading.carried
    if not (carried.changes or carried.remasked or carried.thinned) or used.weights is None:
        return None
    if not isinstance(reading.operands, Logits) or reading.dropout:
        return None
    weights = reading.operands.arrange(reading.operands.weights).to(torch.float64)
    met = used.weights.reshape(weights.shape).to(torch.float64)
    kept = (met != 0) & (weights != 0)
    by = (met / weights)[kept]
    if not by.numel() or bool((met != 0).sum() != kept.sum()):
        return None
    rate = 1.0 - 1.0 / float(by.median())
    even = bool(((by * (1.0 - rate) - 1.0).abs() <= _EVEN).all())
    return rate if even and 0.0 < rate < 1.0 else None


def _unscaled(vector: Vector, root: float) -> Vector:
    values = (vector.values.to(torch.float64) / root).to(vector.values.dtype)
    factor = vector.factor / root
    plain = vector.projected is None or (isinstance(factor, float) and abs(factor - 1) <= _ROUNDED)
    return replace(vector, values=values, factor=1.0 if plain else factor)


def _sizes(reading: Reading) -> tuple[int, int, int, int]:
    layout = reading.layout
    return layout.batch, layout.heads, layout.rows, layout.columns


def _changed(reading: Reading) -> str | None:
    """What the weights went through between the softmax and v, where that can't be computed again."""
    carried = reading.carried
    names = [*carried.changes, *(stage.detail or stage.name for stage in carried.stages)]
    if names or carried.remasked or carried.thinned or carried.combined:
        return f"its weights went through {', '.join(names) or 'a second mask'} after the softmax"
    return None


def _dtype_of_logits(reading: Reading, call: AttentionCall) -> str:
    logits = reading.operands
    return held_in(logits.values, call.logits_dtype) if isinstance(logits, Logits) else call.logits_dtype


def _dtype_of_weights(reading: Reading, met: Tensor) -> str:
    name = str(met.dtype).removeprefix("torch.")
    logits = reading.operands
    return held_in(met, held_in(logits.weights, name) if isinstance(logits, Logits) else name)


def _fault(reading: Reading) -> str | None:
    """Why it can't be computed again."""
    if reading.without_data:
        return "no data on the meta device"
    if reading.fault is not None:
        return reading.fault
    if reading.score is not None or reading.distance is not None:
        return "its score is no product of q and k"
    if reading.axis != "positions":
        return f"its keys are {reading.axis}"
    if not isinstance(reading.operands, (Logits, Vectors)) or reading.output is None:
        return NO_OPERANDS
    if reading.blocks:
        return BLOCKS_OF_KEYS
    return None


# -- where q, k and v are ----------------------------------------------------------------------------------------------


def _places(reading: Reading, used: Used) -> tuple[Place, Place, Place] | str:
    layout = reading.layout
    if isinstance(reading.operands, Vectors):
        if used.query_node is None or used.key_node is None:
            return NO_OPERANDS
        query, key = reading.operands.query, reading.operands.key
        if reading.operands.exists is not None or reading.operands.keys is not None:
            return "its sequences lie end to end"

        def by_head(tensor: Tensor) -> Tensor:
            return tensor.reshape(layout.batch, -1, *tensor.shape[-2:])

        if used.query is None or not _is_plain(used.query, query) or used.value.shape[:-1] != key.shape[:-1]:
            return "the layout of its operands is not known"
        if query.shape[-2] != layout.rows or math.prod(query.shape[:-2]) != layout.batch * layout.heads:
            return "the layout of its operands is not known"
        return (
            Place(used.query_node, query, by_head),
            Place(used.key_node, key, by_head),
            Place(used.node, used.value, by_head),
        )
    assert isinstance(reading.operands, Logits)
    return _of_logits(reading, reading.operands, used)


def _is_plain(operand: Tensor, query: Tensor) -> bool:
    """Whether q was read as the kernel was given it, and not with its axes in another order."""
    return operand.shape == query.shape and operand.stride() == query.stride()


def _of_logits(reading: Reading, logits: Logits, used: Used) -> tuple[Place, Place, Place] | str:
    axes, product = logits.axes, logits.product
    left, right = operands(product)
    if left.value is None or right.value is None or not axes.followed:
        return "the layout of its logits could not be followed"
    if len(product.shape) > 3 or axes.windowed:
        return "the layout of its logits is not known"
    n, row, column = (logits.arrange(at) for at in coordinates(product, logits.views, reading.device))
    if n.shape != _sizes(reading):
        return "the product does not hold all of the logits"
    if axes.swapped:
        row, column = column, row
    if bool((row != row[..., :1]).any()) or bool((column != column[..., :1, :]).any()) or bool((n != n[..., :1]).any()):
        return "its queries have keys of their own"
    values = _values(reading, used)
    if isinstance(values, str):
        return values
    query_node, key_node = (right, left) if axes.swapped else (left, right)
    assert query_node.value is not None
    assert key_node.value is not None
    of_query = _indexed(n[..., 0], row[..., 0], transposed=axes.swapped)
    of_key = _indexed(n[..., 0, :], column[..., 0, :], transposed=not axes.swapped)
    return Place(query_node, query_node.value, of_query), Place(key_node, key_node.value, of_key), values


def _indexed(entries: Tensor, at: Tensor, *, transposed: bool) -> Callable[[Tensor], Tensor]:
    """Picks the rows of an operand of the product."""

    def place(tensor: Tensor) -> Tensor:
        tensor = tensor.mT if transposed else tensor
        whole = tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() != 3 else tensor
        return whole[entries, at]

    return place


def _values(reading: Reading, used: Used) -> Place | str:
    """Where v is, by the layout of the output."""
    layout, output, wide = reading.layout, reading.output, used.value
    assert output is not None
    matrices = layout.batch * layout.heads
    if wide.shape[-2] != layout.columns or not wide.numel():
        return "the layout of its values is not known"
    if math.prod(output.shape[:-1]) != matrices * layout.rows:
        return "the layout of its output is not known"
    if math.prod(output.shape[:-2]) == matrices:
        whole = (*output.shape[:-2], *wide.shape[-2:])
        return Place(used.node, used.value, lambda tensor: _by_head(reading, tensor.expand(whole)))
    shared = math.prod(wide.shape[:-2]) // layout.batch  # heads of v, each for a group of queries along the rows
    if layout.inner != 1 or not shared or layout.heads % shared:
        return "the layout of its values is not known"
    each = torch.arange(shared).repeat_interleave(layout.heads // shared)
    heads = each.view(shared, -1).t().flatten() if _is_turned(reading, used) else each

    def values(tensor: Tensor) -> Tensor:
        return tensor.reshape(layout.batch, shared, *tensor.shape[-2:])[:, heads]

    return Place(used.node, used.value, values)


def _by_head(reading: Reading, tensor: Tensor) -> Tensor:
    """(B, H, ...) of v or the output, whose leading axes are those of the softmax, in its order."""
    layout, logits = reading.layout, reading.operands
    if not isinstance(logits, Logits) or not logits.axes.heads:
        return layout.by_head(tensor)
    axes, shape = logits.axes, list(logits.values.shape)
    keys = axes.keys % len(shape)
    rest = [axis for axis in range(len(shape)) if axis != keys]
    inside = {keys, *(rest[axis] for axis in axes.rows)}
    leading = [1 if axis in inside else size for axis, size in enumerate(shape)]
    numbers = torch.arange(math.prod(leading), device=tensor.device).reshape(leading).expand(shape)
    order = logits.arrange(numbers)[..., 0, 0]
    return tensor.reshape(-1, *tensor.shape[-2:])[order]


def _is_turned(reading: Reading, used: Used) -> bool:
    """Whether the heads of the logits have the number in the group first, where the output has the group first."""
    if not isinstance(reading.operands, Logits) or used.weights is None or reading.output is None:
        return False
    layout, groups = reading.layout, math.prod(reading.output.shape[:-2]) // reading.layout.batch
    if groups in (0, 1, layout.heads) or layout.heads % groups:
        return False
    weights = reading.operands.arrange(reading.operands.weights)
    met = used.weights.reshape(layout.batch, groups, -1, layout.rows, used.weights.shape[-1])
    straight, turned = (
        (x.reshape(weights.shape).to(torch.float64) - weights.to(torch.float64)).abs().sum()
        for x in (met, met.transpose(1, 2))
    )
    return bool(turned < straight)


def _rows(reading: Reading, used: Used, output: Tensor) -> Tensor:
    """(B, Hq, L, Ev) of the output."""
    layout = reading.layout
    if isinstance(reading.operands, Logits) and math.prod(output.shape[:-2]) == layout.batch * layout.heads:
        return _by_head(reading, output).detach()
    sizes = (layout.batch, layout.heads, layout.rows, output.shape[-1])
    if _is_turned(reading, used):
        groups = math.prod(output.shape[:-2]) // layout.batch
        output = output.reshape(layout.batch, groups, -1, *sizes[2:]).transpose(1, 2)
    return output.reshape(sizes).detach()


# -- from the product to the softmax -----------------------------------------------------------------------------------


def _terms(reading: Reading, sight: Sight, used: Used) -> tuple[Term, ...]:
    terms = [_term(step, reading, sight, used) for step in sight.steps]
    return tuple(term for term in terms if term is not None)


def _term(step: Step, reading: Reading, sight: Sight, used: Used) -> Term | None:
    if isinstance(step, Scale):
        return Term("scale", _factor(step.factor, reading), step.factor.source)
    if isinstance(step, Softcap):
        return Term("softcap", step.cap)
    if isinstance(step, Squares):
        return Term("unknown", None, "a squared length")
    if isinstance(step, Bias):
        return Term("bias", None if step.addend is None else _small(at_logits(reading, step.addend)), step.name)
    if isinstance(step, Hide):
        if step.name is None:
            return None
        visible = visible_by(step, reading)
        fill = -math.inf if step.fill is None else step.fill
        return Term("mask", None if visible is None else _small(visible), step.name, fill, step.form == "float")
    if isinstance(step, Sink):
        return Term("sinks", sinks_of(reading, sight, used.sinks), "sinks")
    if isinstance(step, Offset):
        return None
    if isinstance(step, Unknown):
        return Term("unknown", None, step.name)
    names = {Clamp: "a clamp", Mix: "a mixing of the heads", Beside: "logits of several products"}
    return Term("unknown", None, names.get(type(step), type(step).__name__.lower()))


def _factor(factor: Factor, reading: Reading) -> Tensor | float | None:
    """The number, one a head as (Hq, 1, 1), or one a row."""
    if factor.per_head is not None:
        return torch.tensor(factor.per_head, dtype=torch.float64)[:, None, None]
    if factor.value is None and factor.source == ROWS and isinstance(reading.operands, Vectors):
        scale = reading.operands.scale
        return scale.detach().clone() if isinstance(scale, Tensor) else scale
    return factor.value


def _small(tensor: Tensor) -> Tensor:
    """Without the axes that only repeat."""
    tensor = distinct(tensor.detach())
    for axis in range(tensor.dim() - 2):
        if tensor.shape[axis] > 1 and bool((tensor == tensor.narrow(axis, 0, 1)).all()):
            tensor = tensor.narrow(axis, 0, 1)
    return tensor.clone()
