"""The part of law `configured` about outputs: the factor on v, and the gate on the output, as the config declares them.

The traced run gives v before and after its factor, the output of each attention, and what the modules beside it take
and give. A factor counts wherever it stands: on v, on the output, or behind the output's projection. A gate stands in
front of that projection or behind it. Not asked: what can't be read so, such as a gate in a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from sqrtdk.audit.declared import config_at
from sqrtdk.audit.declared_outputs import DeclaredGate, declared_gate, declared_value_scale
from sqrtdk.audit.records import LawAnswer
from sqrtdk.audit.tolerance import is_close
from sqrtdk.laws.answers import law_broken, law_holds, law_not_asked
from sqrtdk.laws.declared_masks import LAW
from sqrtdk.laws.subject import Subject
from sqrtdk.laws.traced import Traced, first_tensor, traced, upwards
from sqrtdk.messages import Message
from sqrtdk.tracing.probe.gates import Gate, Numbers, activation_text, gates_of, merged_heads, multiple_of
from sqrtdk.tracing.tensors import CallTensors

VALUE_SCALE, GATE = "laws.configured.about.value_scale", "laws.configured.about.gate"


@dataclass(frozen=True, slots=True, eq=False)
class _Behind:
    """What is behind an attention, inside the module around it.

    Attributes:
        inner: calls inside the module, by path within it: the first tensor that each gave.
        taken: what the output's projection takes, (B, L, D).
        projected: what it gives.
        left: what leaves the module.
    """

    inner: tuple[tuple[str, Tensor], ...]
    taken: Tensor
    projected: Tensor | None
    left: Tensor | None


def of_gates(subject: Subject) -> Iterator[LawAnswer]:
    """Yield an answer for each attention and each declared field that its run shows."""
    for judged in subject.calls:
        call = judged.call
        config = config_at(subject.module, call.site)
        scale, gate = declared_value_scale(config), declared_gate(config)
        if call.index or (scale is None and gate is None):
            continue
        run = traced(subject)
        tensors = run.calls.get((call.site, 0))
        if tensors is None:
            continue
        readings = list(_behind(run, tensors))
        if scale is not None:
            yield _value_scale(tensors, readings, *scale)
        if gate is not None:
            yield _gate(tensors, readings, gate)


def _behind(run: Traced, call: CallTensors) -> Iterator[_Behind]:
    """Yield what is behind an attention, for each module that takes numbers of the shape of its output."""
    shape, own = merged_heads(call.output).shape, upwards(call.site)
    for path in own[:2]:
        inside = path + "." if path else ""
        inner = {
            name.removeprefix(inside): passage
            for name, passage in run.passages.items()
            if name.startswith(inside) and name not in own
        }
        tensors = ((name, first_tensor(passage.gives)) for name, passage in inner.items())
        given = tuple((name, tensor) for name, tensor in tensors if tensor is not None)
        left = first_tensor(run.passages[path].gives) if path in run.passages else None
        behind = [
            _Behind(given, passage.takes, first_tensor(passage.gives), left)
            for passage in inner.values()
            if passage.takes is not None and passage.takes.shape == shape
        ]
        yield from behind
        if behind:
            return


def _value_scale(call: CallTensors, readings: list[_Behind], by: str, declared: float) -> LawAnswer:
    value, about, unread = call.value, Message(VALUE_SCALE), Message("laws.configured.value_scale_not_read")
    on_v = multiple_of(value.values, value.projected) if value.projected is not None else None
    if on_v is None:
        return law_not_asked(LAW, about, unread)
    merged = merged_heads(call.output)
    for behind in readings:
        on_output = multiple_of(behind.taken, merged)
        if on_output is None and _gates_in_front(call, behind):
            on_output = 1.0  # what is taken is the product with a gate, and nothing else
        late = None
        if on_output is not None and behind.left is not None and behind.projected is not None:
            late = multiple_of(behind.left, behind.projected)
        if on_output is not None and late is not None:
            factor = on_v * on_output * late
            if is_close(factor, declared):
                return law_holds(LAW, about)
            message = Message("laws.configured.value_scale", factor=f"{factor:.4g}", field=by)
            fix, source = Message("laws.configured.fix_value_scale"), Message("laws.configured.source_masks")
            return law_broken(LAW, about, "fail", call.site, message, fix, source, value=factor, expected=declared)
    # What follows v is not known: the factor may stand there.
    return law_holds(LAW, about) if is_close(on_v, declared) else law_not_asked(LAW, about, unread)


def _gates_in_front(call: CallTensors, behind: _Behind) -> list[Gate]:
    """Return the gates of the attention's output, and `Gate()` if it enters the projection as it is."""
    gates = gates_of(Numbers(behind.inner, behind.taken, call.output))
    return [gate for gate in gates if not gate.of]


def _gates_behind(call: CallTensors, behind: _Behind, left: Tensor) -> list[Gate]:
    """Return the gates of what the projection gives; tanh of small numbers gates nothing, though it gives them back."""
    return [gate for gate in gates_of(Numbers(behind.inner, left, call.output)) if gate.of != gate.name]


def _gate(call: CallTensors, readings: list[_Behind], declared: DeclaredGate) -> LawAnswer:
    about, unread = Message(GATE), Message("laws.configured.gate_not_read")
    if declared.mode and declared.activation is None:
        return law_not_asked(LAW, about, Message("laws.configured.unknown_activation", field=declared.by))
    for behind in readings:
        front = _gates_in_front(call, behind)
        # What is behind the projection is known only where what enters it is.
        late = [] if behind.left is None or not front else _gates_behind(call, behind, behind.left)
        gates = [gate for gate in (*front, *late) if gate.name]
        ungated = Gate() in front and any(not gate.name for gate in late)
        fits = [gate for gate in gates if declared.activation in (None, gate.activation)]
        if (declared.gated and fits) or (not declared.gated and ungated):
            return law_holds(LAW, about)
        if gates or ungated:
            return _broken_gate(call, gates, declared)
    return law_not_asked(LAW, about, unread)


def _broken_gate(call: CallTensors, gates: list[Gate], declared: DeclaredGate) -> LawAnswer:
    if not gates:
        message = Message("laws.configured.ungated", field=declared.by)
    else:
        known = {"gate": f"`{gates[0].name}`", "activation": activation_text(gates[0].activation)}
        id = "laws.configured.gate" if declared.gated else "laws.configured.gated"
        message = Message(id, field=declared.by, **known)
    fix = Message("laws.configured.fix_gate" if declared.gated else "laws.configured.fix_gated")
    source = Message("laws.configured.source_masks")
    return law_broken(LAW, Message(GATE), "fail", call.site, message, fix, source)
