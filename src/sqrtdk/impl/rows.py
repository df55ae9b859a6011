"""The arithmetic of a block of rows against all keys, in plain torch.

Logits, weights, output and statistics are written once, in `attend_rows`. Half types are widened to float32 here, so
that only the inputs and the output are rounded to a half type. `dense` takes all rows as one block: the reference, and
the choice for small calls; `tiled.py` takes blocks of rows one after the other. `gradients_of_formula` gives a kernel
gradients that can be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk._modes import as_one
from sqrtdk.impl.call import Call, cut_rows, repeat_key_heads
from sqrtdk.impl.extremes import above_infinity
from sqrtdk.stats import RowStats, within_range
from sqrtdk.stats.request import AuxOutput, AuxRequest, aux_output

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from sqrtdk._shapes import Factor, Logits, Output, Value, Visible


def attend_rows(call: Call, start: int, stop: int) -> tuple[Output, AuxOutput]:
    """Compute the rows start..stop - 1 of a call by the plain formula.

    Returns:
        The output (..., Hq, stop - start, Ev), and the requested statistics, (..., Hq, stop - start) each.
    """
    output, aux, _ = weighed_rows(call, start, stop)
    return output, aux


def weighed_rows(call: Call, start: int, stop: int) -> tuple[Output, AuxOutput, Logits]:
    """Compute the rows start..stop - 1 of a call by the plain formula, and return their weights as well.

    Returns:
        The output (..., Hq, stop - start, Ev); the requested statistics, (..., Hq, stop - start) each, of which lse and
        entropy carry gradients; and the weights after dropout, (..., Hq, stop - start, S).
    """
    z, visible = logits_and_mask(call, start, stop)
    shape = (*call.lead, stop - start)
    sink = None if call.sinks is None else sink_column(call, start, stop, z.dtype).expand(*shape, 1)
    count = _count(visible, z)
    top, mass, weights = _softmax(z, sink, count)
    dropped = _dropped(call, weights, start, stop) if call.dropout_p else weights
    output = _weighted(call, dropped, visible)
    if call.aux is None:
        return output, AuxOutput(), dropped
    with torch.no_grad():
        keys = traceable_row_stats(z.detach(), visible, count)
        whole = keys if sink is None else keys.merge(_single(sink.detach().squeeze(-1)))
    lse = entropy = None
    if call.aux.lse or call.aux.entropy_nats:
        blind = mass == 0
        lse = top + mass.masked_fill(blind, 1.0).log()
        if call.aux.entropy_nats:
            shifted = (z - top).masked_fill(weights == 0, 0.0)
            spread = (weights * shifted).sum(-1, keepdim=True)
            if sink is not None:
                spread = spread + (sink - lse).exp() * (sink - top).masked_fill(sink == -math.inf, 0.0)
            entropy = _exact(mass.masked_fill(blind, 1.0).log() - spread, whole.entropy_nats.unsqueeze(-1), blind)
        lse = _exact(lse.masked_fill(blind, -math.inf), whole.lse.unsqueeze(-1), blind)
    aux = aux_output(
        call.aux,
        _shaped(keys, shape),
        _shaped(whole, shape),
        lse=None if lse is None else lse.squeeze(-1).expand(shape),
        entropy=None if entropy is None else entropy.squeeze(-1).expand(shape),
    )
    return output, aux, dropped


def block_stats(call: Call, start: int, stop: int) -> RowStats:
    """Return the statistics of rows start..stop - 1 over their visible keys, (..., Hq, stop - start) each."""
    z, visible = logits_and_mask(call, start, stop, guarded=False)
    return _shaped(traceable_row_stats(z, visible, _count(visible, z)), (*call.lead, stop - start))


def logits_and_mask(call: Call, start: int, stop: int, *, guarded: bool = True) -> tuple[Logits, Visible | None]:
    """Return the logits of rows start..stop, and the keys that they see (None: all).

    Args:
        call: The call.
        start: First row.
        stop: Row after the last one.
        guarded: Whether gradients must not pass through keys with NaN or infinity; see `guarded_logits`.
    """
    visible = call.visible_mask(start, stop)
    return (guarded_logits if call.unclean and guarded else row_logits)(call, start, stop, visible)


def row_logits(
    call: Call, start: int, stop: int, visible: Visible | None, *, guarded: bool = False
) -> tuple[Logits, Visible | None]:
    """Return the logits of rows start..stop, (..., Hq, R, S), -inf at hidden keys, and which keys are seen.

    Args:
        call: The call.
        start: First row.
        stop: Row after the last one.
        visible: Keys that the rows see before a `score_mod`, which may hide more; None: all.
        guarded: Whether gradients must not pass through products of hidden keys.
    """
    query = cut_rows(call.query, start, stop) if call.length != 1 else call.query
    # 0 * NaN is NaN: the zero gradient of a hidden logit would carry the NaN of a row without keys into the keys.
    if guarded and visible is not None:
        query = torch.where(visible.any(-1, keepdim=True), query, 0.0)
    key = repeat_key_heads(call.key, call.heads)
    z: Tensor
    if call.score is not None:
        z = call.score.pairs(query.to(call.dtype), key.to(call.dtype))
    else:
        z = query.to(call.dtype) @ key.to(call.dtype).transpose(-1, -2)
    term = None
    if call.term is not None:
        rows = call.positions(start, stop)
        columns = torch.arange(call.first, call.first + call.keys, device=query.device)
        term = call.term.term(query.to(call.dtype), key.to(call.dtype), rows + call.shift, columns).to(call.dtype)
        if call.term.content:
            z = z + term
    # Before scale and softcap, whose derivatives at an infinite product are NaN.
    if guarded and visible is not None:
        z = z.masked_fill(~visible, 0.0)
    if type(call.scale) is not float or call.scale != 1.0:
        z = z * (cut_rows(call.scale, start, stop).to(call.dtype) if isinstance(call.scale, Tensor) else call.scale)
    # Before bias and mask: c tanh(-inf / c) is -c, and a key with that logit is not hidden.
    if call.softcap is not None:
        z = call.softcap * torch.tanh(z / call.softcap)
    if call.score_mod is not None:
        before, z = z, call.modified(z, start, stop)
        # torch.where(q_idx >= kv_idx, score, -inf) hides keys; a product that overflowed to -inf before does not
        if not above_infinity(z):
            shown = (z.detach() != -math.inf) | (before.detach() == -math.inf)
            visible = shown if visible is None else visible & shown
    if term is not None and call.term is not None and not call.term.content:
        z = z + term
    if call.bias is not None:
        z = z + cut_rows(call.bias, start, stop).to(call.dtype)
    if visible is not None:
        z = z.masked_fill(~visible, -math.inf)
    return z, visible


def guarded_logits(call: Call, start: int, stop: int, visible: Visible | None) -> tuple[Logits, Visible | None]:
    """Return what `row_logits` returns, so that no gradient passes through keys with NaN or infinity, or hidden keys.

    Without that, 0 times NaN would make the gradient of every row NaN.

    Args:
        call: The call.
        start: First row.
        stop: Row after the last one.
        visible: Keys that the rows see before a `score_mod`, which may hide more; None means all.
    """
    bad = ~torch.isfinite(call.key).all(-1)
    clean = replace(call, key=call.key.masked_fill(bad.unsqueeze(-1), 0.0))
    with torch.no_grad():
        raw, shown = row_logits(call, start, stop, visible)
    bad = repeat_key_heads(bad.unsqueeze(-1), call.heads).transpose(-1, -2)
    return torch.where(bad, raw, row_logits(clean, start, stop, visible, guarded=True)[0]), shown


def guarded_sum(weights: Logits, value: Value, visible: Visible | None) -> Output:
    """Return weights times values, (..., Hq, R, Ev); NaN or infinity in a value reaches only the rows that see it.

    In a plain product it would reach every row, as 0 times NaN is NaN. The gradient of a hidden weight is cut as well.

    Args:
        weights: (..., Hq, R, S), 0 at hidden keys.
        value: (..., H, S, Ev).
        visible: Which keys the rows see; None: all.
    """
    if visible is not None:
        weights = weights.masked_fill(~visible, 0.0)
    bad = ~torch.isfinite(value).all(-1, keepdim=True)
    output = weights @ value.masked_fill(bad, 0.0)
    columns = bad.squeeze(-1).flatten(0, -2).any(0) if bad.ndim > 2 else bad.squeeze(-1)
    shown = None if visible is None else visible.expand(weights.shape)
    # Keys with such a value are few; in one product 0 * NaN would bring it to the rows that hide it.
    for j in columns.nonzero().squeeze(-1).tolist():
        at = slice(j, j + 1)
        part = weights[..., at].detach() * value[..., at, :].detach().masked_fill(~bad[..., at, :], 0.0)
        output = output + (part if shown is None else part.masked_fill(~shown[..., at], 0.0))
    return output


def sink_column(call: Call, start: int, stop: int, dtype: torch.dtype) -> Factor:
    """Return the logits of the sinks for the rows start..stop - 1.

    Args:
        call: A call with sinks.
        start: First row.
        stop: Row after the last one.
        dtype: Dtype of the result.

    Returns:
        A column that broadcasts to (..., Hq, stop - start, 1).
    """
    assert call.sinks is not None
    if call.sinks.ndim > 1:
        return cut_rows(call.sinks, start, stop).to(dtype)
    column = call.sinks.to(dtype).unsqueeze(-1)
    return column.unsqueeze(-1) if call.lead else column


def _count(visible: Visible | None, z: Logits) -> Factor:
    """Return the number of visible keys of every row, broadcastable to (..., R, 1)."""
    if visible is None:
        return torch.full((1, 1), float(z.shape[-1]), dtype=z.dtype, device=z.device)
    return visible.expand(*visible.shape[:-1], z.shape[-1]).sum(-1, keepdim=True).to(z.dtype)


def _softmax(z: Logits, sink: Factor | None, count: Factor) -> tuple[Factor, Factor, Logits]:
    """Return (shift, sum of e^(z - shift), weights). A row without keys has weights 0; if all its keys overflowed,
    NaN."""
    if z.shape[-1] == 0:
        top = torch.zeros((*z.shape[:-1], 1), dtype=z.dtype, device=z.device)
    else:
        # Detached, since the shift cancels in the softmax; 0 for a row without keys, where -inf - -inf would be NaN.
        top = z.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
    # The sink takes part in the maximum: over keys at 0, e^100 of a sink overflows float32.
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    e = torch.exp(z - top)
    mass = e.sum(-1, keepdim=True)
    if sink is not None:
        mass = mass + torch.exp(sink - top)
    return top, mass, e / mass.masked_fill((mass == 0) & (count == 0), 1.0)


def _dropped(call: Call, weights: Logits, start: int, stop: int) -> Logits:
    """Return the weights after dropout."""
    if call.kept is None:
        return functional.dropout(weights, call.dropout_p)
    return weights * (cut_rows(call.kept, start, stop) / (1.0 - call.dropout_p) if call.dropout_p < 1.0 else 0.0)


def _weighted(call: Call, weights: Logits, visible: Visible | None) -> Output:
    value = repeat_key_heads(call.value, call.heads).to(call.dtype)
    output = guarded_sum(weights, value, visible) if call.unclean else weights @ value
    return output.expand(*call.lead, *output.shape[-2:]).to(call.value.dtype)


def _exact(
    value: Float[Tensor, "*#rows 1"], forward: Float[Tensor, "*#rows 1"], blind: Bool[Tensor, "*#rows 1"]
) -> Float[Tensor, "*rows 1"]:
    """Return `forward` with the gradient of `value`: near one-hot the short formula loses digits, but its gradient
    does not."""
    forward = torch.where(blind, value.detach(), forward)
    apart = torch.isfinite(value)
    return torch.where(apart, value - value.detach(), value) + forward.masked_fill(~apart, 0.0)


def traceable_row_stats(z: Logits, visible: Visible | None, count: Factor) -> RowStats:
    """Return the statistics of a block of logits in plain tensor operations, which every transform of torch can follow.

    The key that holds the maximum is left out of the sums, see `RowStats`.

    Args:
        z: Logits, -inf at hidden keys, (..., R, S).
        visible: Keys that the rows see, bool; None means all.
        count: Number of keys that each row sees.
    """
    shape = z.shape[:-1]
    if z.shape[-1] == 0:
        return RowStats.empty(tuple(shape), dtype=z.dtype, device=z.device)
    n = count.squeeze(-1).expand(shape)
    top = z.amax(-1, keepdim=True)
    at = torch.arange(z.shape[-1], device=z.device) == z.argmax(-1, keepdim=True)
    shift, unit = top.masked_fill(top == -math.inf, 0.0), within_range(z.shape[-1])
    near = unit * z - unit * shift
    shifted = near / unit
    e = shifted.exp().masked_fill(at, 0.0)
    hidden = torch.zeros_like(at) if visible is None else ~visible
    low = z.masked_fill(hidden, math.inf).amin(-1)
    near = near.masked_fill(hidden, 0.0)
    offset = near.sum(-1) / n.clamp(min=1.0)
    mean = torch.maximum((unit * shift.squeeze(-1) + offset) / unit, low)
    m2 = ((near - offset.unsqueeze(-1)) / unit).masked_fill(hidden, 0.0).square().sum(-1)
    blind, bad = n == 0, ~(top.squeeze(-1) < math.inf)
    overflowed = (low == -math.inf) & ~blind
    rest = e.sum(-1)
    ratio = e / rest.masked_fill(rest == 0, 1.0).unsqueeze(-1)
    sums = {
        "rest": rest,
        "share2": ratio.square().sum(-1),
        "share3": ratio.pow(3).sum(-1),
        "a": (e * shifted.masked_fill(e == 0, 0.0)).sum(-1),
        "mean": mean.masked_fill(overflowed, -math.inf).masked_fill(blind, 0.0),
        "m2": m2.masked_fill(overflowed, math.inf).masked_fill(blind, 0.0),
        "max_logit": top.squeeze(-1),
        "min_logit": low,
    }
    return RowStats(keys=n, **{name: value.masked_fill(bad, math.nan) for name, value in sums.items()})


def joined_with_sink(keys: RowStats, sinks: Float[Tensor, " #Hq"]) -> RowStats:
    """Return the statistics of the keys together with each head's sink, which counts as one more key.

    Args:
        keys: Statistics, (..., Hq, R).
        sinks: (Hq or 1,) logits of the sinks.
    """
    column = (sinks if keys.max_logit.ndim > 1 else sinks[0]).unsqueeze(-1)
    return keys.merge(_single(column.expand(keys.max_logit.shape).contiguous()))


def _single(sink: Float[Tensor, "*rows"]) -> RowStats:
    """Return RowStats of one key whose logit is `sink`."""
    zero, one = torch.zeros_like(sink), torch.ones_like(sink)
    return RowStats(
        keys=one, max_logit=sink, min_logit=sink, rest=zero, share2=zero, share3=zero, a=zero, mean=sink, m2=zero
    )


def _shaped(rows: RowStats, shape: tuple[int, ...]) -> RowStats:
    return rows.map(lambda field: field.expand(shape))


def dense(call: Call) -> tuple[Output, AuxOutput]:
    """Return the output (..., Hq, L, Ev) and the statistics (..., Hq, L); every matrix (L, S) is held in memory.

    This is the reference for all other implementations.
    """
    if call.score is None and (call.aux is None or not call.aux.lse):
        return attend_rows(call, 0, call.length)
    # A trace reads any product by itself. Of a score that it can't read, the call is all that it knows; and blocks of
    # keys whose outputs are merged by their lse are told apart best where each is one call.
    result: tuple[Output, AuxOutput] = as_one(call, lambda call: attend_rows(call, 0, call.length))
    return result


def gradients_of_formula(
    call: Call, leaves: Sequence[Tensor | None], given: Sequence[Float[Tensor, "B Hq L ..."] | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the leaves that are not None, in their places; all weights are held in memory.

    Args:
        call: built from the leaves.
        leaves: tensors whose gradient is requested.
        given: gradients of output, lse and entropy; None: 0.
    """
    output, aux = attend_rows(replace(call, aux=AuxRequest(lse=True, entropy_nats=True)), 0, call.length)
    results = [(r, g) for r, g in zip((output, aux.lse, aux.entropy_nats), given, strict=True) if g is not None]
    outputs, gradients = zip(*results, strict=True)
    inputs = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(outputs, inputs, gradients, create_graph=True, allow_unused=True))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


BLOCK_PAIRS = 2**20  # pairs of a block, times the score's width: 4 MiB for a float32 tensor


def block_rows(call: Call) -> int:
    """Return the number of rows of a block, at least 1, so that a block has about `BLOCK_PAIRS` elements."""
    return max(1, BLOCK_PAIRS * call.length // max(1, call.elements))
