"""The plan of a call: which rows of which parameter belong to each head, from the tensors that a trace kept.

A plan holds names and indices, no weights: it is valid as long as the model's layers stay the same, and is applied to
any maxima (`sqrtdk.repair.clip`). Query heads whose rows overlap, on either side, in one call or in several, are scaled
as one: a group of GQA by its key head, all heads of a q/k norm by the gain they share, the calls of a layer that runs
twice.

Calls that must be left alone carry the reason.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.repair.gains import gain_rows, latent_rows
from sqrtdk.repair.lookup import Parameters, whole_weight
from sqrtdk.repair.ranks import reshard
from sqrtdk.repair.rows import CallPlan, HeadRows, Refusal, key_head_features
from sqrtdk.tracing import CallTensors, Trace

if TYPE_CHECKING:
    from jaxtyping import Int

    from sqrtdk.repair.lookup import Parameters

NATIVE_REASON = (
    "it ran as one native operation, whose q and k are not seen; torch.backends.mha.set_fastpath_enabled(False)"
)

_NONFINITE_NOTE = " (q or k holds a NaN or an infinity, behind which this can't be told)"


def plan_of(model: nn.Module, run: Trace) -> tuple[CallPlan, ...]:
    """Return which rows of which parameter belong to each head of every call of a trace.

    Args:
        model: the traced model; its weights may have been trained since.
        run: a finished `sqrtdk.trace(model, keep=True)`.

    Returns:
        One plan per call, in the order of `run.calls`. A call that can't be clipped gives its reason in `refused`.

    Raises:
        InvalidTypeError: `model` is not a module, or `run` no trace.
        InvalidValueError: The trace kept no tensors, saw no attention, or is another model's.

    Example:
        >>> import sqrtdk
        >>> layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> x = torch.randn(1, 6, 32)
        >>> with sqrtdk.trace(layer, keep=True) as run:
        ...     _ = layer(x, x, x)
        >>> [(rows.name, rows.side, rows.index[1, :2].tolist()) for rows in plan_of(layer, run)[0].rows][:2]
        [('in_proj_weight', 'q', [8, 9]), ('in_proj_bias', 'q', [8, 9])]
    """
    check_trace(model, run)
    return plans_from(model, run.tensors)


def plans_from(model: nn.Module, tensors_of_calls: Sequence[CallTensors]) -> tuple[CallPlan, ...]:
    """Return what `plan_of` returns, from tensors of a trace or from sketches of them.

    Args:
        model: The model.
        tensors_of_calls: The tensors of each call; a sketch has shapes and projections without values.
    """
    reshard(model)
    parameters = Parameters(model)
    with torch.no_grad():
        each = [_call_plan(tensors, parameters) for tensors in tensors_of_calls]
        # After all plans are made: whether a row may be scaled depends on who else reads it.
        plans = _without_conflicts(each, tensors_of_calls, parameters)
    rows = (tuple(_beside(rows, parameters) for rows in plan.rows) for plan in plans)
    return grouped([replace(plan, rows=of_call) for plan, of_call in zip(plans, rows, strict=True)])


def grouped(plans: Sequence[CallPlan]) -> tuple[CallPlan, ...]:
    """Return the plans with their groups of heads: heads that share parameter rows, numbered over all plans."""
    numbers = number_groups([plan.rows for plan in plans], [plan.heads for plan in plans])
    device = next((rows.index.device for plan in plans for rows in plan.rows), torch.device("cpu"))
    return tuple(replace(plan, groups=groups.to(device)) for plan, groups in zip(plans, numbers, strict=True))


def check_trace(model: nn.Module, run: Trace) -> None:
    """Check that a trace is of this model and has its tensors.

    Raises:
        InvalidTypeError: The model is not a module, or the trace is not a trace.
        InvalidValueError: The trace is of another model, or was made without `keep=True`.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is an nn.Module; got {type(model).__name__}", hint="Pass the model itself.")
    if not isinstance(run, Trace):
        raise InvalidTypeError(
            f"stats is a trace, or has `plans` and `maxima`; got {type(run).__name__}",
            hint="with sqrtdk.trace(model, keep=True) as run: model(...); then pass `run`.",
        )
    traced = run.model
    if traced is not model:
        got = "no model" if traced is None else f"another {type(traced).__name__}"
        raise InvalidValueError(
            f"the trace is of the {type(model).__name__} that is changed; it is of {got}",
            hint="Trace the model that you pass: sqrtdk.trace(model, keep=True).",
        )
    if not run.calls:
        raise InvalidValueError(
            "the trace saw at least one attention; it saw 0, or has not ended yet",
            hint="Call this after the `with` block, in which the model has run.",
        )
    if len(run.tensors) != len(run.calls):
        raise InvalidValueError(
            f"the trace kept the tensors of its {len(run.calls)} calls; it kept {len(run.tensors)}",
            hint="Trace with keep=True.",
        )


def _call_plan(tensors: CallTensors, parameters: Parameters) -> CallPlan:
    call = tensors.call
    assert call is not None
    plan = CallPlan(call.site, call.index, call.heads, (), torch.zeros(0))
    try:
        softcap = _softcap(tensors)
        rows = _rows(tensors, parameters)
    except Refusal as refusal:
        return replace(plan, refused=f"{refusal}{_NONFINITE_NOTE if is_broken(tensors) else ''}")
    return replace(plan, rows=rows, softcap=softcap, shared=tuple(filter(None, map(shared_rows, rows))))


def is_broken(tensors: CallTensors) -> bool:
    """Return whether q or k holds a NaN or an infinity, so that its projection can't be recognised by its values."""
    return not all(bool(vector.values.isfinite().all()) for vector in (tensors.query, tensors.key))


def _softcap(tensors: CallTensors) -> float | None:
    """Return the softcap. Refuse logits that are more than a scaled product, as gamma would not scale their maximum."""
    if tensors.missing is not None:
        native = tensors.call is not None and tensors.call.kind == "native"
        raise Refusal(NATIVE_REASON if native else f"it can't be computed again: {tensors.missing}")
    cap: float | None = None
    for term in tensors.terms or ():
        if term.name == "bias":
            raise Refusal(
                f"a bias ({term.detail or 'bias'}) is added to its logits: gamma alone does not scale their maximum"
            )
        if term.name == "softcap" and cap is None and not term.detail and isinstance(term.value, float):
            cap = term.value
        # A scale behind the cap, 5 * cap * tanh(z / cap), puts the maximum elsewhere than the recorded cap says.
        elif term.name not in ("scale", "mask", "sinks") or (cap is not None and term.name == "scale"):
            raise Refusal(f"its logits go through {term.name} {term.detail}".rstrip() + " on their way")
    return cap


def _rows(tensors: CallTensors, parameters: Parameters) -> tuple[HeadRows, ...]:
    latent = latent_rows(tensors, parameters)
    if latent is not None:
        return latent
    return (*side_rows("q", tensors, parameters), *side_rows("k", tensors, parameters))


def side_rows(side: str, tensors: CallTensors, parameters: Parameters) -> list[HeadRows]:
    """Return the rows that set the size of q or k: of its projection, or of the gain of a norm after it.

    Raises:
        Refusal: No such rows can be scaled.
    """
    if tensors.missing is not None:
        raise Refusal(f"it can't be computed again: {tensors.missing}")
    vector, heads = tensors.query if side == "q" else tensors.key, tensors.query.values.shape[1]
    unknown = next((step for step in vector.steps if step.name == "unknown"), None)
    if unknown is not None:
        cause = parameters.quantised_at(tensors.site)
        raise Refusal(f"{side} went through {unknown.detail or 'a step'} that was not followed{cause}")
    if any(step.name == "norm" for step in vector.steps):
        if vector.projection is not None:
            whole_weight(side, vector.projection)
        return gain_rows(side, vector, heads, tensors.site, parameters)
    if vector.projection is None:
        raise Refusal(parameters.why_no_projection(side, tensors.site))
    features = key_head_features(vector.projection.features, heads)
    return parameters.projection_rows(side, vector, features)


def _beside(rows: HeadRows, parameters: Parameters) -> HeadRows:
    """Add the parameter's shape, and move the indices to its device, so that a clip transfers none."""
    parameter = parameters.get(rows.name)
    return replace(rows, index=rows.index.to(parameter.device), shape=tuple(parameter.shape))


def shared_rows(rows: HeadRows) -> str:
    """Return a remark on rows that several heads of a call share; "" if each head has its own."""
    heads, own = len(rows.index), len(torch.unique(rows.index, dim=0))
    if own == heads:
        return ""
    return f"{rows.name}: {heads} heads share {own}, and are scaled by the largest maximum of those that share"


def _without_conflicts(
    plans: Sequence[CallPlan], tensors_of_calls: Sequence[CallTensors], parameters: Parameters
) -> Sequence[CallPlan]:
    """Refuse calls whose rows also belong to another side, to v, or to a refused call."""
    read = readers(tensors_of_calls, parameters)
    # A refusal may rule out further calls: two layers that share a weight, of which one has just been refused.
    while True:
        reasons = [None if plan.refused else conflict(plan, plans, read) for plan in plans]
        if not any(reasons):
            return plans
        plans = [
            plan if reason is None else replace(plan, rows=(), shared=(), refused=reason)
            for plan, reason in zip(plans, reasons, strict=True)
        ]


def number_groups(rows: Sequence[Sequence[HeadRows]], heads: Sequence[int]) -> list[Int[Tensor, " Hq"]]:
    """Number heads so that all heads that share a row, directly or through others, have one number.

    Args:
        rows: of each call.
        heads: query heads of each call.

    Returns:
        (Hq,) for each call; numbers are dense, from 0.

    Example:
        >>> own, group = torch.tensor([[0], [1], [2]]), torch.tensor([[0], [0], [1]])
        >>> number_groups([[HeadRows("q", "q", own), HeadRows("k", "k", group)]], [3])
        [tensor([0, 0, 1])]
    """
    starts = [sum(heads[:number]) for number in range(len(heads) + 1)]
    pairs: dict[str, list[Tensor]] = defaultdict(list)
    for number, of_call in enumerate(rows):
        nodes = torch.arange(starts[number], starts[number + 1])
        for entry in of_call:
            index = entry.index.cpu()
            pairs[entry.name].append(torch.stack([index, nodes[:, None].expand_as(index)], -1).flatten(0, 1))
    # Union-find over all heads of all calls: heads are one group if they share a parameter row, directly or by way of
    # others.
    root = list(range(starts[-1]))

    def find(node: int) -> int:
        while root[node] != node:
            # Path halving keeps the trees flat, so that thousands of heads take no noticeable time.
            root[node] = root[root[node]]
            node = root[node]
        return node

    for of_parameter in pairs.values():
        table = torch.unique(torch.cat(of_parameter), dim=0)  # sorted by feature, then by head
        # heads that share a feature follow one another in the table, so joining neighbours joins them all
        beside = table[1:, 0] == table[:-1, 0]
        neighbours = torch.stack([table[:-1, 1], table[1:, 1]], -1)[beside]
        for one, other in torch.unique(neighbours, dim=0).tolist():
            root[find(other)] = find(one)
    roots = torch.tensor([find(node) for node in range(starts[-1])], dtype=torch.long)
    _, numbers = torch.unique(roots, return_inverse=True)
    return [numbers[starts[i] : starts[i + 1]] for i in range(len(heads))]


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """The parameters that each call reads, and those of v: scaling them for one call would change the others."""

    names: tuple[frozenset[str], ...]  # for each call, the parameters of its q and k
    values: tuple[HeadRows, ...]


def readers(tensors_of_calls: Sequence[CallTensors], parameters: Parameters) -> Readers:
    """Return the parameters that each call reads; if q or k is unknown, these are all parameters of its module."""
    return Readers(
        tuple(_read(tensors, parameters) for tensors in tensors_of_calls),
        tuple(rows for tensors in tensors_of_calls for rows in rows_of_v(tensors, parameters)),
    )


def conflict(plan: CallPlan, plans: Sequence[CallPlan], read: Readers) -> str | None:
    """Return the reason why the rows of a call can't be scaled although they are known: something else uses them.

    Args:
        plan: The plan of the call.
        plans: The plans of all calls.
        read: Result of `readers`.

    Returns:
        The reason, or None if nothing else uses the rows.
    """
    for entry in plan.rows:
        for other, names in zip(plans, read.names, strict=True):
            if other.refused is not None and entry.name in names:
                return f"{entry.name} is also used by {other.site or 'the root'}, call {other.index}: {other.refused}"
    beside = [rows for other in plans for rows in other.rows] + list(read.values)
    for entry in plan.rows:
        for rows in beside:
            if rows.name == entry.name and (rows.axis, rows.offset) != (entry.axis, entry.offset):
                return f"{entry.name} is used both as it is and transposed, or as a gain in two ways"
            if _role(rows) != _role(entry) and overlaps(entry, rows):
                return f"{entry.name} gives both {_role(entry)} and {_role(rows)}: scaled for one, it changes the other"
    return None


def overlaps(one: HeadRows, other: HeadRows) -> bool:
    """Return whether two sets of rows are of one parameter and have a row in common."""
    return one.name == other.name and bool(torch.isin(one.index, other.index).any())


def _role(rows: HeadRows) -> str:
    # "whole" is q's share for channels that k shares between heads, see `latent_rows`.
    return rows.side.replace("whole", "q")


def rows_of_v(tensors: CallTensors, parameters: Parameters) -> list[HeadRows]:
    """Return the known parameter rows that set v: those of its projection, and the gain of a norm after it."""
    value, rows = tensors.value, list[HeadRows]()
    with contextlib.suppress(Refusal):
        if value.projection is not None:
            place = parameters.find("v", value.projection)
            rows.append(HeadRows(place.name, "v", value.projection.features.cpu() + place.shift, place.axis))
    with contextlib.suppress(Refusal):
        if any(step.name == "norm" for step in value.steps):
            rows += gain_rows("v", value, tensors.query.values.shape[1], tensors.site, parameters)
    return rows


def _read(tensors: CallTensors, parameters: Parameters) -> frozenset[str]:
    names = set()
    for vector in (tensors.query, tensors.key):
        # Behind a norm the gain is what counts, and which one it is may be unknown here; so any parameter of the site
        # counts.
        if vector.projection is None or any(step.name == "norm" for step in vector.steps):
            return frozenset(parameters.below(tensors.site))
        try:
            names.add(parameters.find("", vector.projection).name)
        except Refusal:
            return frozenset(parameters.below(tensors.site))
    return frozenset(names)
