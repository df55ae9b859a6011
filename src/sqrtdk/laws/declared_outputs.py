"""The part of law `configured` about outputs: the factor on v, and the gate on the output, as the config declares them.

The traced run gives v before and after its factor, the output of each attention, and what the modules beside it take
and give. A factor counts on v, on the output, or behind the output's projection; a number behind it may also be a
residual multiplier, so it counts only where the config's factor needs it. A gate stands in front of the projection or
behind it. That there is none is said only where the output enters the projection as it is, leaves the attention so, and
is added to the residual stream so: `x + self.attn(x)`, but not `x + self.attn(x) * torch.tanh(self.alpha)`.
Not asked: what can't be read so, such as a gate in a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.audit.configs import field, module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.declared_outputs import OUTPUT_FIELDS, DeclaredGate, declared_gate, declared_value_scale
from sqrtdk.audit.records import LawAnswer
from sqrtdk.audit.tolerance import is_close
from sqrtdk.laws.answers import law_broken, law_holds, law_not_asked
from sqrtdk.laws.declared_masks import LAW
from sqrtdk.laws.subject import Subject
from sqrtdk.laws.traced import Traced, is_container, traced, upwards
from sqrtdk.messages import Message
from sqrtdk.modules.structures import first_tensor
from sqrtdk.tracing.probe.gates import (
    NEAR_GATE,
    Gate,
    Numbers,
    activation_text,
    gates_of,
    merged_heads,
    multiple_of,
)
from sqrtdk.tracing.tensors import CallTensors

VALUE_SCALE, GATE = "laws.configured.about.value_scale", "laws.configured.about.gate"


@dataclass(frozen=True, slots=True, eq=False)
class _Taker:
    """The call of a module, inside the module around an attention, that may be the projection of its output.

    Attributes:
        name: its path within the module around it.
        inner: calls inside that module, by path within it: the first tensor that each gave.
        taken: what this call takes, (B, L, D).
        projected: what it gives.
        left: what leaves the module around it.
        linear: whether it gives nothing but its weight times what it takes, plus its bias.
        added: whether what leaves is what it gives, or that and something that is added.
        alone: whether what leaves goes on as it is in the modules farther out.
    """

    name: str
    inner: tuple[tuple[str, Tensor], ...]
    taken: Tensor
    projected: Tensor
    left: Tensor
    linear: bool
    added: bool
    alone: bool


def of_gates(subject: Subject) -> Iterator[LawAnswer]:
    """Yield for each attention whether the factor on v and the output gate that the config declares show in its run.

    The first call of each attention is compared. Attentions whose config declares neither have no answer.
    """
    for judged in subject.calls:
        call = judged.call
        config = config_at(subject.module, call.site, OUTPUT_FIELDS)
        scale, gate = declared_value_scale(config), declared_gate(config)
        if call.index or (scale is None and gate is None):
            continue
        run = traced(subject)
        tensors = run.calls.get((call.site, 0))
        if tensors is None:
            continue
        takers = list(_takers(subject.module, run, tensors))
        if scale is not None:
            yield _value_scale(tensors, takers, *scale)
        if gate is not None:
            yield _gate(tensors, takers, gate)


# -- what is behind an attention ---------------------------------------------------------------------------------------


def _takers(model: nn.Module, run: Traced, call: CallTensors) -> Iterator[_Taker]:
    """Yield each call that takes numbers of the shape of an attention's output and does not just pass them on."""
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
        around = run.passages.get(path)
        left = None if around is None else first_tensor(around.gives)
        behind = [
            (name, one.takes) for name, one in inner.items() if one.takes is not None and one.takes.shape == shape
        ]
        if around is None or left is None or not behind:
            continue
        alone = _goes_on(model, run, path, left)
        for name, taken in behind:
            projected = dict(given).get(name)
            if projected is None or torch.equal(projected, taken):  # a dropout in eval mode
                continue
            linear = _is_linear(module_at(model, inside + name), taken, projected)
            added = _same(left, projected) or (around.takes is not None and _is_sum(left, projected, around.takes))
            yield _Taker(name, given, taken, projected, left, linear, added, alone)
        return


def _goes_on(model: nn.Module, run: Traced, path: str, left: Tensor) -> bool:
    """Return whether what leaves a module is added to something that is known, or leaves the model, as it is."""
    for around in upwards(path)[1:]:
        passage = run.passages.get(around)
        if passage is None:
            if is_container(module_at(model, around)):
                continue
            return False
        inside = around + "." if around else ""
        others = {name: one for name, one in run.passages.items() if name.startswith(inside) and name != around}
        beside = [one for name, one in others.items() if name != path]
        # Gemma's x + norm(self.attn(x)); a norm of two tensors may hold a gate
        normed = [
            first_tensor(one.gives)
            for name, one in others.items()
            if one.single and one.takes is not None and _same(one.takes, left) and _is_norm(model, name)
        ]
        forms = [left, *(tensor for tensor in normed if tensor is not None)]
        gives = first_tensor(passage.gives)
        reached = [tensor for tensor in (gives, *(one.takes for one in beside)) if tensor is not None]
        streams = [passage.takes, *(one.takes for one in beside), *(first_tensor(one.gives) for one in beside)]
        known = [stream for stream in streams if stream is not None]
        if any(_is_sum(whole, form, stream) for form in forms for stream in known for whole in reached):
            return True
        last = next((form for form in forms if gives is not None and _same(gives, form)), None)
        if last is None:
            return False
        left = last
    return True


def _is_norm(model: nn.Module, path: str) -> bool:
    return type(module_at(model, path)).__name__.endswith("Norm")


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding. Zeros are not told from other zeros."""
    number = multiple_of(one, other)
    return number is not None and abs(number - 1) <= NEAR_GATE


def _is_sum(whole: Tensor, part: Tensor, stream: Tensor) -> bool:
    """Return whether `whole` is `stream + part`: the difference, since a small part is lost beside a large stream."""
    return whole.shape == part.shape == stream.shape and _same(whole.double() - stream.double(), part)


def _is_linear(module: nn.Module | None, taken: Tensor, projected: Tensor) -> bool:
    weight, bias = field(module, "weight"), field(module, "bias")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not (bias is None or isinstance(bias, Tensor)):
        return False
    if (weight.dtype, weight.device) != (taken.dtype, taken.device):
        return False
    with torch.no_grad():
        return any(
            taken.shape[-1] == matrix.shape[1] and _same(functional.linear(taken, matrix, bias), projected)
            for matrix in (weight, weight.T)  # the transposed one of GPT-2's Conv1D
            if bias is None or bias.shape == matrix.shape[:1]
        )


def _gates_in_front(call: CallTensors, taker: _Taker) -> list[Gate]:
    """Return the gates of the attention's output, and `Gate()` if it enters the projection as it is."""
    names = [name for name, _ in taker.inner]
    # What ends after the projection gates nothing in front of it.
    gates = gates_of(Numbers(taker.inner[: names.index(taker.name)], taker.taken, call.output))
    return [gate for gate in gates if not gate.of]


def _gates_behind(call: CallTensors, taker: _Taker) -> list[Gate]:
    """Return the gates of what the projection gives; none of zeros, which any gate gives back."""
    if not bool(taker.projected.any()):
        return []
    others = [(name, tensor) for name, tensor in taker.inner if name != taker.name]
    # The projection first: a dropout in eval mode gives the same numbers.
    gates = gates_of(Numbers([(taker.name, taker.projected), *others], taker.left, call.output))
    return [gate for gate in gates if gate.of == taker.name != gate.name and gate.name]


# -- the two fields ----------------------------------------------------------------------------------------------------


def _value_scale(call: CallTensors, takers: list[_Taker], by: str, declared: float) -> LawAnswer:
    value, about = call.value, Message(VALUE_SCALE)
    unread = law_not_asked(LAW, about, Message("laws.configured.value_scale_not_read"))
    on_v = multiple_of(value.values, value.projected) if value.projected is not None else None
    if on_v is None:
        return unread
    merged = merged_heads(call.output)
    for taker in takers:
        on_output = multiple_of(taker.taken, merged)
        if on_output is None and _is_product(_gates_in_front(call, taker)):
            on_output = 1.0
        late = 1.0 if taker.added else multiple_of(taker.left, taker.projected)
        if late is None and _is_product(_gates_behind(call, taker)):
            late = 1.0
        if on_output is None or late is None:
            continue
        factor, twice = on_v * on_output, is_close(on_v, declared) and is_close(on_output, declared)
        # A number behind the projection may be a residual multiplier, as one beside v may have another purpose.
        fits = any(is_close(number, declared) for number in (factor, factor * late))
        if fits or (is_close(on_v, declared) and not twice):
            return law_holds(LAW, about)
        if not (taker.linear and taker.added and taker.alone):
            return unread
        message = Message("laws.configured.value_scale", factor=f"{factor:.4g}", field=by)
        fix, source = Message("laws.configured.fix_value_scale"), Message("laws.configured.source_masks")
        return law_broken(LAW, about, "fail", call.site, message, fix, source, value=factor, expected=declared)
    return unread


def _is_product(gates: list[Gate]) -> bool:
    """Return whether there is a product with a gate, and no other factor: the 2 of 2 * sigmoid may be the config's."""
    return any(gate.name for gate in gates) and all(gate.activation != "2 * sigmoid" for gate in gates)


def _gate(call: CallTensors, takers: list[_Taker], declared: DeclaredGate) -> LawAnswer:
    about = Message(GATE)
    if declared.mode and declared.activation is None:
        return law_not_asked(LAW, about, Message("laws.configured.unknown_activation", field=declared.by))
    for taker in takers:
        front = _gates_in_front(call, taker)
        # What is behind the projection is known only where what enters it is.
        late = _gates_behind(call, taker) if front else []
        gates = [gate for gate in (*front, *late) if gate.name]
        if declared.gated and any(declared.activation in (None, gate.activation) for gate in gates):
            return law_holds(LAW, about)
        plain = Gate() in front and taker.added  # a gate that is 1 everywhere is plain as well
        if plain and taker.linear and taker.alone and not gates:
            return _broken_gate(call, [], declared) if declared.gated else law_holds(LAW, about)
        if gates and not plain and taker.linear and (taker.added or late):
            return _broken_gate(call, gates, declared)
    return law_not_asked(LAW, about, Message("laws.configured.gate_not_read"))


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
