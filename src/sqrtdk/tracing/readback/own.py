"""Reads a call of `sqrtdk.attention` that ran in blocks of rows as one attention.

The call knows its operands, masks and positions, so no block has to be read. If its logits are products plus a bias, it
is read as one of our kernels. Otherwise the score is a function that only a tape can read (a distance, `score_mod`, a
function of the caller): the first rows are computed again under the tape, and all rows share their formula.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.impl.call import UNBOUNDED, Call
from sqrtdk.impl.choice import LARGEST_DENSE
from sqrtdk.impl.operands import above_and_below, broadcastable, expand_heads, only_by_blocks, operands, with_bias
from sqrtdk.impl.rows import attend_rows, block_rows
from sqrtdk.messages import Message
from sqrtdk.tracing.readback.addends import MOST_MASK_ELEMENTS, bias_name
from sqrtdk.tracing.readback.fused import IMPLICIT_CAUSAL
from sqrtdk.tracing.readback.lineage import follow_side
from sqrtdk.tracing.readback.reading import Layout, Reading, Vectors
from sqrtdk.tracing.steps import Bias, Hide, LearnedSinks, Step
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape.recorder import WholeCall

OPERATION = "sqrtdk::attention"
_SAMPLE_ROWS = 16  # first rows that are computed again; a block of a wide score has as few as 1


def kernel_arguments(call: Call) -> dict[str, Any] | None:
    """Return the arguments of a call of `sqrtdk.attention` as those of one of our fused kernels.

    Returns:
        The arguments by name; None if no kernel computes such logits, or if its mask or bias would take too much
        memory.
    """
    sinks = call.sinks
    if only_by_blocks(replace(call, mask_mods=())) is not None or (sinks is not None and sinks.ndim > 1):
        return None
    pairs = math.prod(call.lead) * call.length * call.keys
    if (call.term is not None or call.mask_mods) and pairs > LARGEST_DENSE:
        return None
    call, lead = with_bias(call), call.lead
    above, below = above_and_below(call)
    visible = call.visible
    if call.mask_mods:
        visible, above, below = call.visible_mask(0, call.length), None, None
    scale = call.scale
    return {
        **arguments_of_product(call),
        "factor": 1.0 if isinstance(scale, Tensor) else scale,
        "scale": expand_heads(scale, (*lead, call.length, 1)) if isinstance(scale, Tensor) else None,
        "softcap": call.softcap or 0.0,
        "bias": None if call.bias is None else broadcastable(call.bias, lead),
        "visible": None if visible is None else expand_heads(visible, (*lead, call.length, call.keys)),
        "sinks": None if sinks is None else sinks.expand(lead[-1] if lead else 1),
        "above": above,
        "below": below,
        "p": call.dropout_p,
    }


def arguments_of_product(call: Call) -> dict[str, Tensor]:
    """Return {"query": q, "key": k, "value": v} of a call, each with four axes, (B, H, L, E)."""
    same = {call.query.dtype, call.key.dtype} == {call.value.dtype}
    three = operands(call, call.value.dtype if same else call.dtype)
    return dict(zip(("query", "key", "value"), three, strict=True))


def first_rows(call: Call) -> None:
    """Compute the first rows of a call again, without dropout, for a tape that records them.

    The result is dropped.
    """
    rows = min(call.length, max(_SAMPLE_ROWS, block_rows(call)))
    attend_rows(replace(call, dropout_p=0.0, kept=None, aux=None), 0, rows)


def is_all_of(call: Call, sample: Reading) -> bool:
    """Return whether the rows of `first_rows` are the whole call as it ran: in one block, without dropout.

    Args:
        call: the call.
        sample: the reading of these rows.
    """
    return call.dropout_p == 0.0 and sample.layout.rows == call.length and call.length <= block_rows(call)


def whole_reading(ran: WholeCall, sample: Reading | None, query: Tensor, key: Tensor) -> Reading:
    """Return the reading of all rows.

    Args:
        ran: the call.
        sample: the reading of its first rows; None if the tape could not read them.
        query: of the call, (B, Hq, L, E).
        key: of the call, (B, H, S, E).
    """
    call, lead = ran.call, ran.call.lead
    layout = Layout(
        math.prod(lead[:-1]),
        lead[-1] if lead else 1,
        call.length,
        call.keys,
        call.query.shape[-1],
        call.value.shape[-1],
    )
    if sample is None:
        score = Message("trace.step.own_score")
        sides = (follow_side(ran.nodes[name], name[0]) for name in ("query", "key"))
        q, k = (replace(side, unknown=(), skewed=False) for side in sides)
        steps: tuple[Step, ...] = () if call.sinks is None else (LearnedSinks(column=False),)
        q, dtype = replace(q, unknown=(score,)), call.dtype
        sample = Reading(ran.site, "", "", layout, q, k, steps, None, dtype, dtype, key.device)
    elif sample.offset is None and call.length == call.keys and call.shift == 0:
        sample = replace(sample, offset=0)  # row i is at the position of key i
    steps = tuple(_for_all_rows(step, call, layout) for step in sample.steps if not isinstance(step, Hide))
    hides, no_mask = _hides(call, layout)
    last = len(steps) - sum(isinstance(step, LearnedSinks) for step in steps)
    return replace(
        sample,
        site=ran.site,
        kind="compiled",
        op=OPERATION.replace("::", "."),
        layout=layout,
        steps=(*steps[:last], *hides, *steps[last:]),
        operands=Vectors(query, key, 1.0, exact=True),
        dtype=call.value.dtype,
        logits_dtype=call.dtype,
        device=key.device,
        output=ran.output,
        kv_heads=min(layout.heads, int(key.shape[1]) * sample.key.growth),  # the score may have got them repeated
        dropout=call.dropout_p,
        fault=None,
        no_stats=no_mask,
        whole=call,
        sample=sample if sample.operands is not None else None,
    )


def _for_all_rows(step: Step, call: Call, layout: Layout) -> Step:
    """Return a step of the first rows as one of all rows: a bias has values for all pairs, or none."""
    if not isinstance(step, Bias):
        return step
    known = call.score is None and call.term is None and call.bias is None and call.score_mod is not None
    if step.content or not known or math.prod(layout.shape) > LARGEST_DENSE or call.query.is_meta:
        return replace(step, addend=None)
    # score + slope * (j - i): what a function adds to 0 is what it adds to any score, if it only adds
    added = call.modified(torch.zeros(layout.shape, dtype=call.dtype, device=call.query.device), 0, call.length)
    added = added.masked_fill(added == -math.inf, 0.0)
    return replace(step, name=bias_name(added, None) or step.name, addend=StepTensor(added, (), layout.shape))


def _hides(call: Call, layout: Layout) -> tuple[tuple[Hide, ...], str | None]:
    """Return the step of all masks together, and why its values are not known, None if they are."""
    if not call.hides:
        return (), None
    others = call.visible is not None or call.window != UNBOUNDED or call.has_mods
    if call.diagonal == 0 and not others:
        return (IMPLICIT_CAUSAL,), None
    unknown = Hide("bool", -math.inf, name="mask")
    if call.query.is_meta:
        return (unknown,), None
    pairs = math.prod(layout.shape) if call.score_mod is not None else layout.rows * layout.columns
    if pairs > MOST_MASK_ELEMENTS:
        return (unknown,), Message("trace.statistics.window", rows=layout.rows, keys=layout.columns)
    visible = call.visible_mask(0, call.length)
    if call.score_mod is not None:
        # a function hides a key by -inf, whatever the score was
        zeros = torch.zeros(layout.shape, dtype=call.dtype, device=call.query.device)
        shown = call.modified(zeros, 0, call.length) != -math.inf
        visible = shown if visible is None else visible & shown.reshape(*call.lead, *shown.shape[-2:])
    if visible is None or bool(visible.all()):
        return (), None
    four = broadcastable(visible, call.lead)
    return (Hide("bool", -math.inf, StepTensor(four, (), tuple(four.shape))),), None
