"""Numbers that are not finite: the first such tensor in execution order, and its attention or module.

Bar: 0. The order is that of the step: q and k, then the logits, of each attention in turn; the loss; dL/dq and dL/dk,
    from the last attention to the first. Every later tensor inherits the numbers, so only the first is shown. An
    attention or a loss is shown with the first module whose output is not finite, if that module came earlier
    (`first_nonfinite`). Gradients alone are a note if a GradScaler runs or q is float16: the scaler searches for its
    scale by such steps, and skips them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.numbers import SOURCE
from sqrtdk.messages import Message
from sqrtdk.monitor import samples
from sqrtdk.monitor.samples import Alarm, CallSample, FirstNonfinite, StepSample

_CAUSES = {
    samples.WEIGHT: "its {} holds NaN or infinity",
    samples.AROUND: "the {} holds NaN or infinity",
    samples.INPUTS: "what goes into the model is not finite already",
    samples.BETWEEN: "what goes into it is not finite already, and {} was the last to return before",
    samples.WITHIN: "what the modules within it return is finite, {} is the last of them",
    samples.FROM_MINUS: "what goes into it holds minus infinity",
    samples.FROM_FINITE: "what goes into it is finite",
    samples.UNKNOWN: "whether what goes into it is finite is not known",
}
_AT_ONCE = "what goes into it is not finite already, and no module returned before"
GRADIENTS = {"query_grad_nonfinite": "rows of dL/dq", "key_grad_nonfinite": "keys of dL/dk of one head"}


def nonfinite(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield at most one alarm."""
    found = _forward(now) or _loss(now) or _backward(now)
    if found is not None:
        yield found


def _forward(now: StepSample) -> Alarm | None:
    """Return the alarm of the first attention with logits that are not finite, or with such a q in unmeasured rows."""
    for call in now.calls:
        counts = [sum(pair) for pair in zip(_column(call, "nan_rows"), _column(call, "inf_rows"), strict=True)]
        queries = max(_column(call, "query_nonfinite"), default=0.0)
        if any(counts):
            head = next(head for head, count in enumerate(counts) if count)
            minus = "" if any(_column(call, "nan_rows")) else "minus "
            text = (
                f"{call.name}: {sum(counts):.0f} of {sum(_column(call, 'rows')):.0f} rows of logits hold NaN or {minus}"
                f"infinity at step {now.step}, first in head {head}; {_blame(call)}{_earlier(now, call)}"
            )
            source = Message(SOURCE)
            return Alarm("nonfinite", "critical", now.step, text, source, call.site, call.index, head, sum(counts), 0.0)
        if queries > 0 and not any(_column(call, "blind_rows")):  # a row that sees no key may hold anything
            text = (
                f"{call.name}: {queries:.0f} numbers of q are NaN or infinite at step {now.step}, in rows that rows= "
                f"leaves out{_earlier(now, call)}"
            )
            source = Message(SOURCE)
            return Alarm("nonfinite", "critical", now.step, text, source, call.site, call.index, None, queries, 0.0)
    return None


def _loss(now: StepSample) -> Alarm | None:
    if now.loss is None or math.isfinite(now.loss):
        return None
    text = f"the loss is {now.loss} at step {now.step}; {_where(now)}"
    source = Message(SOURCE)
    return Alarm("nonfinite", "critical", now.step, text, source, value=now.loss, bar=0.0)


def _where(now: StepSample) -> str:
    """Say where a loss that is not finite begins."""
    first = now.first
    if first is not None and first.cause != samples.RULED_OUT:
        return _begins(first)
    attentions = "q, k and logits of every attention that was measured"
    if not now.modules:
        return f"{attentions} are finite" if now.measured else "nothing was measured"
    if first is not None:
        outputs = f"no output of {now.modules} modules holds NaN or plus infinity"
        return f"{outputs}, what the model returns holds minus infinity"
    outputs = f"the outputs of all {now.modules} modules"
    known = f"{outputs} and {attentions} are finite" if now.measured else f"{outputs} are finite"
    return f"{known}, the loss is the first tensor that is not"


def _earlier(now: StepSample, call: CallSample) -> str:
    """Say where it begins, or "" unless that is before this attention."""
    first, places = now.first, [one.place for one in now.calls]
    if first is None or first.before not in places or places.index(first.before) > places.index(call.place):
        return ""
    return f"; {_begins(first)}"


def _begins(first: FirstNonfinite) -> str:
    """Say which output is the first that is not finite, and the known cause."""
    module = f"{first.site} ({first.kind})" if first.site else f"the model ({first.kind})"
    output = f"{first.tensor} of {module}" if first.tensor else f"that of {module}"
    at_once = first.cause == samples.BETWEEN and not first.detail
    cause = _AT_ONCE if at_once else _CAUSES[first.cause].format(first.detail)
    passed = "" if first.returned else "; what the model returns is finite all the same"
    rank = "" if first.rank is None else f" on rank {first.rank}"
    return f"the first output that is not finite{rank} is {output}; {cause}{passed}"


def _backward(now: StepSample) -> Alarm | None:
    """Return the alarm of the last attention with gradients that are not finite, which the backward pass reaches
    first."""
    for call in reversed(now.calls):
        every = {name: [value for value in _column(call, name) if value > 0] for name in GRADIENTS}
        # query heads that share a key head would count its keys several times: take the head with most
        counts = {name: max(some, default=0.0) if name.startswith("key") else sum(some) for name, some in every.items()}
        if not any(counts.values()):
            continue
        name = next(name for name in GRADIENTS if counts[name])
        head = next(head for head, value in enumerate(_column(call, name)) if value > 0)
        known = " and ".join(f"{counts[name]:.0f} {what}" for name, what in GRADIENTS.items() if counts[name])
        searching = now.scaled or call.dtype == "float16"
        text = (
            f"{call.name}: {known} hold NaN or infinity at step {now.step}, first in head {head}; "
            f"{'the forward pass is finite' if now.loss is None else 'the forward pass and the loss are finite'}"
            f"{', so it may be the loss scale, and a scaler skips the step' if searching else ''}"
        )
        severity = "note" if searching else "critical"
        source = Message(SOURCE)
        return Alarm("nonfinite", severity, now.step, text, source, call.site, call.index, head, counts[name], 0.0)
    return None


def _column(call: CallSample, name: str) -> Sequence[float]:
    return call.columns.get(name, [0.0] * call.heads)


def _blame(call: CallSample) -> str:
    """Say which tensor it came from: q and k, or their product."""
    bad = {name: max(_column(call, f"{name}_nonfinite"), default=math.nan) for name in ("query", "key")}
    known = [f"{count:.0f} numbers of {name[0]}" for name, count in bad.items() if count > 0]
    if known:
        return f"not finite before the product: {' and '.join(known)}"
    if any(math.isnan(count) for count in bad.values()):
        return "whether q or k is finite was not measured"
    return "q and k are finite, the logits are the first tensor that is not"
