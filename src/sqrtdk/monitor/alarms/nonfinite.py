"""Numbers that are not finite: the first such tensor in execution order, and its attention or module.

Bar: 0. The order is that of the step: q and k, then the logits, of each attention in turn; the loss; dL/dq and dL/dk,
    from the last attention to the first. Every later tensor inherits the numbers, so only the first is shown. An
    attention or a loss is shown with the first module whose output is not finite, if that module came earlier
    (`first_nonfinite`). If that output follows an attention with rows that see no key, and whose logits were stored,
    these rows are named: `masked_fill(hidden, -inf).softmax(-1)` is NaN where everything is hidden. Gradients alone are
    a note if a GradScaler runs or q is float16: the scaler searches for its scale by such steps, and skips them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from sqrtdk.audit.rules.numbers import NAN_SOURCE
from sqrtdk.messages import Message, joined
from sqrtdk.monitor import samples
from sqrtdk.monitor.samples import Alarm, CallSample, FirstNonfinite, StepSample

_CAUSE_MESSAGES = {
    samples.CAUSE_WEIGHT: "alarms.nonfinite.first.weight",
    samples.CAUSE_WEIGHT_AROUND: "alarms.nonfinite.first.weight_around",
    samples.CAUSE_INPUTS: "alarms.nonfinite.first.inputs",
    samples.CAUSE_BETWEEN: "alarms.nonfinite.first.between",
    samples.CAUSE_WITHIN: "alarms.nonfinite.first.within",
    samples.FROM_MINUS: "alarms.nonfinite.first.from_minus",
    samples.FROM_FINITE: "alarms.nonfinite.first.from_finite",
    samples.CAUSE_UNKNOWN: "alarms.nonfinite.first.unknown",
}
_OUTPUT_MESSAGES = {  # by whether a tensor within the output is named, and a rank
    (False, False): "alarms.nonfinite.first.output",
    (False, True): "alarms.nonfinite.first.output_on_rank",
    (True, False): "alarms.nonfinite.first.tensor",
    (True, True): "alarms.nonfinite.first.tensor_on_rank",
}
_FORWARD_MESSAGES = {  # what is finite, by whether there is a loss, and whether a scaler searches for its scale
    (False, False): "alarms.nonfinite.gradient.forward",
    (False, True): "alarms.nonfinite.gradient.forward_scaled",
    (True, False): "alarms.nonfinite.gradient.forward_and_loss",
    (True, True): "alarms.nonfinite.gradient.forward_and_loss_scaled",
}
GRADIENT_COLUMNS = ("query_grad_nonfinite", "key_grad_nonfinite")


def nonfinite_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm if the sample has NaN or infinite numbers: one, for the place where they come from.

    The forward pass is looked at first, then the loss, then the backward pass.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    # In the order in which a step runs: what comes later follows from what came first.
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
            # Without NaN, the rows hold minus infinity alone, at keys that they see.
            minus = not any(_column(call, "nan_rows"))
            text = Message(
                "alarms.nonfinite.minus_logits" if minus else "alarms.nonfinite.logits",
                call=call.name,
                bad=f"{sum(counts):.0f}",
                rows=f"{sum(_column(call, 'rows')):.0f}",
                step=now.step,
                head=head,
                blame=joined([_blame(call), *_earlier(now, call)]),
            )
            return Alarm(
                "nonfinite",
                "critical",
                now.step,
                text,
                Message(NAN_SOURCE),
                call.site,
                call.index,
                head,
                sum(counts),
                0.0,
            )
        if queries > 0 and not any(_column(call, "blind_rows")):  # a row that sees no key may hold anything
            bad = Message("alarms.nonfinite.queries", call=call.name, bad=f"{queries:.0f}", step=now.step)
            where = joined([bad, *_earlier(now, call)])
            return Alarm(
                "nonfinite", "critical", now.step, where, Message(NAN_SOURCE), call.site, call.index, None, queries, 0.0
            )
    return None


def _loss(now: StepSample) -> Alarm | None:
    if now.loss is None or math.isfinite(now.loss):
        return None
    text = Message("alarms.nonfinite.loss", loss=str(now.loss), step=now.step, where=_where(now))
    return Alarm("nonfinite", "critical", now.step, text, Message(NAN_SOURCE), value=now.loss, bar=0.0)


def unsampled_loss(step: int, loss: Tensor | float | None) -> Iterator[Alarm]:
    """Yield an alarm if the loss of a step without a sample is not finite.

    It is less severe than that of a sampled step, which also says where the numbers begin. A loss on another device
    than the CPU is not read, because that would wait for the device.
    """
    if loss is None or (isinstance(loss, Tensor) and loss.device.type != "cpu") or math.isfinite(number := float(loss)):
        return
    where = Message("alarms.nonfinite.where.unsampled")
    text = Message("alarms.nonfinite.loss", loss=str(number), step=step, where=where)
    yield Alarm("nonfinite", "fail", step, text, Message(NAN_SOURCE), value=number, bar=0.0)


def _where(now: StepSample) -> str:
    """Say where a loss that is not finite begins."""
    first = now.first
    if first is not None and first.cause != samples.RULED_OUT:
        return _begins(first, now)
    if not now.modules:
        return Message("alarms.nonfinite.where.attentions" if now.measured else "alarms.nonfinite.where.nothing")
    if first is not None:
        return Message("alarms.nonfinite.where.returned_minus", modules=now.modules)
    if now.measured:
        return Message("alarms.nonfinite.where.modules_and_attentions", modules=now.modules)
    return Message("alarms.nonfinite.where.modules", modules=now.modules)


def _earlier(now: StepSample, call: CallSample) -> Iterator[str]:
    """Say where it begins, if that is before this attention."""
    first, places = now.first, [one.place for one in now.calls]
    if first is not None and first.before in places and places.index(first.before) <= places.index(call.place):
        yield _begins(first, now)


def _begins(first: FirstNonfinite, now: StepSample) -> str:
    """Say which output is the first that is not finite, and the known cause."""
    module = f"{first.site} ({first.kind})" if first.site else Message("alarms.nonfinite.first.model", kind=first.kind)
    values: dict[str, str | int] = {"module": module}
    if first.tensor:
        values["tensor"] = first.tensor
    if first.rank is not None:
        values["rank"] = first.rank
    passed = [] if first.returned else [Message("alarms.nonfinite.first.returned_finite")]
    blind = _blind(first, now)
    output = Message(_OUTPUT_MESSAGES[bool(first.tensor), first.rank is not None], **values)
    return joined([blind, output, *passed] if blind else [output, _cause(first), *passed])


def _blind(first: FirstNonfinite, now: StepSample) -> str | None:
    """Say which attention right before the output has rows that see no key; None if none has.

    A fused kernel gives 0 for such a row, so only stored logits count. Code may set the row to 0 behind the softmax,
    which is not seen here.
    """
    for call in now.calls:
        rows = sum(_column(call, "blind_rows"))
        if call.place in first.behind and call.stored and rows:
            values = {"call": call.name, "blind": f"{rows:.0f}", "rows": f"{sum(_column(call, 'rows')):.0f}"}
            return Message("alarms.nonfinite.first.blind", **values)
    return None


def _cause(first: FirstNonfinite) -> str:
    if first.cause in (
        samples.CAUSE_WEIGHT,
        samples.CAUSE_WEIGHT_AROUND,
    ):  # "parameter bias" or "buffer h.0.running_var"
        kind, _, name = first.detail.partition(" ")
        weight = "alarms.nonfinite.first.parameter" if kind == "parameter" else "alarms.nonfinite.first.buffer"
        return Message(_CAUSE_MESSAGES[first.cause], weight=Message(weight, name=name))
    if first.cause == samples.CAUSE_BETWEEN and not first.detail:
        return Message("alarms.nonfinite.first.at_once")
    if first.cause in (samples.CAUSE_BETWEEN, samples.CAUSE_WITHIN):
        return Message(_CAUSE_MESSAGES[first.cause], module=first.detail)
    return Message(_CAUSE_MESSAGES[first.cause])


def _backward(now: StepSample) -> Alarm | None:
    """Return the alarm of the last attention with gradients that are not finite, which the backward pass reaches
    first."""
    # Backward runs from the last attention to the first, so the last one with bad gradients met them first.
    for call in reversed(now.calls):
        every = {name: [value for value in _column(call, name) if value > 0] for name in GRADIENT_COLUMNS}
        # query heads that share a key head would count its keys several times: take the head with most
        counts = {name: max(some, default=0.0) if name.startswith("key") else sum(some) for name, some in every.items()}
        if not any(counts.values()):
            continue
        name = next(name for name in GRADIENT_COLUMNS if counts[name])
        head = next(head for head, value in enumerate(_column(call, name)) if value > 0)
        # A loss scaler raises its scale until gradients overflow, and then skips the step: a note, not a fault.
        searching = now.scaled or call.dtype == "float16"
        text = Message(
            "alarms.nonfinite.gradients",
            call=call.name,
            which=_gradients(*(f"{counts[name]:.0f}" if counts[name] else "" for name in GRADIENT_COLUMNS)),
            step=now.step,
            head=head,
            forward=_before_backward(now, searching),
        )
        severity = "note" if searching else "critical"
        return Alarm(
            "nonfinite", severity, now.step, text, Message(NAN_SOURCE), call.site, call.index, head, counts[name], 0.0
        )
    return None


def _before_backward(now: StepSample, searching: bool) -> str:
    """Say what the forward pass did: a loss that is not known, or logged as 0, may not have been finite."""
    if now.first is not None and now.first.cause != samples.RULED_OUT:
        return _begins(now.first, now)
    return Message(_FORWARD_MESSAGES[now.loss is not None, searching])


def _gradients(queries: str, keys: str) -> str:
    """Say how many rows of dL/dq and keys of dL/dk are not finite; "" stands for none."""
    if queries and keys:
        return Message("alarms.nonfinite.gradient.both", rows=queries, keys=keys)
    if queries:
        return Message("alarms.nonfinite.gradient.queries", count=queries)
    return Message("alarms.nonfinite.gradient.keys", count=keys)


def _column(call: CallSample, name: str) -> Sequence[float]:
    return call.columns.get(name, [0.0] * call.heads)


def _blame(call: CallSample) -> str:
    """Say which tensor it came from: q and k, or their product."""
    bad = {name: max(_column(call, f"{name}_nonfinite"), default=math.nan) for name in ("query", "key")}
    known = {name: f"{count:.0f}" for name, count in bad.items() if count > 0}
    if known:
        both = "alarms.nonfinite.blame.numbers_of_both"
        which = [Message("alarms.nonfinite.blame.numbers", count=n, name=name[0]) for name, n in known.items()]
        numbers = which[0] if len(which) < 2 else Message(both, queries=known["query"], keys=known["key"])
        return Message("alarms.nonfinite.blame.before", which=numbers)
    if any(math.isnan(count) for count in bad.values()):
        return Message("alarms.nonfinite.blame.unknown")
    half = "float16" in (call.logits_dtype, call.dtype)
    return Message("alarms.nonfinite.blame.product_float16" if half else "alarms.nonfinite.blame.product")
