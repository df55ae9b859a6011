"""The first output of a forward pass that is not finite: its module, and the state of that module's inputs.

The smallest and the largest number of every tensor that a module takes, owns or returns stay on the device, two numbers
of one reduction. A tensor that is met again is not reduced again. One transfer at the end of the step says which
tensors hold NaN or plus infinity. Minus infinity alone hides a key or a class, and is accepted, as by the law `finite`.

A module that runs inside another one ends first, so the first output in order of ending is that of the innermost
module. A sum between two modules, `x = x + mlp(x)`, is met as the input of the next module, or as the output of the
block.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_modules
from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message
from sqrtdk.modules.calls import OpenCalls
from sqrtdk.modules.structures import walk
from sqrtdk.monitor.samples import (
    CAUSE_BETWEEN,
    CAUSE_INPUTS,
    CAUSE_UNKNOWN,
    CAUSE_WEIGHT,
    CAUSE_WEIGHT_AROUND,
    CAUSE_WITHIN,
    FROM_FINITE,
    FROM_MINUS,
    RULED_OUT,
    FirstNonfinite,
)
from sqrtdk.tracing import Trace

Place = tuple[str, int]  # site and index of an attention
Paths = Mapping[nn.Module, str]

FINITE, MINUS, BAD = 0, 1, 2  # MINUS: minus infinity and no NaN


@dataclass(slots=True, eq=False)
class _Passage:
    """One call of a module; tensors are referred to by their numbers in the step."""

    module: nn.Module
    earlier: int = 0  # number of modules of the pass that had ended when this one began
    inputs: list[int] = field(default_factory=list)
    own: list[tuple[str, int]] = field(default_factory=list)  # "parameter bias"
    outputs: list[tuple[str, int]] = field(default_factory=list)
    attentions: int = 0  # number of attentions of the pass that had run when this module ended


@dataclass(slots=True, eq=False)
class _Pass:
    """One forward pass of the model: the calls of its modules in the order of ending."""

    ended: list[_Passage] = field(default_factory=list)
    root: _Passage | None = None
    # by the number of attentions that had run: the next attention
    following: dict[int, Place] = field(default_factory=dict)
    # by attention: for each block of keys whether it came from another rank, and how many numbers are not finite
    keys: dict[Place, tuple[tuple[bool, Tensor | None], ...]] = field(default_factory=dict)

    def between(self, start: int, end: int) -> tuple[Place, ...]:
        """Return the attentions that ran while their number rose from `start` to `end`."""
        return tuple(dict.fromkeys(self.following[count] for count in range(start, end) if count in self.following))

    def received(self, places: Iterable[Place]) -> bool:
        """Return whether an attention got keys that are not finite from other ranks alone."""
        for place in places:
            bad = {came for came, count in self.keys.get(place, ()) if count is not None and int(count)}
            if bad == {True}:
                return True
        return False


class NonfiniteSearch:
    """Search over the tensors of all modules in a step's forward passes; the hooks of `StepTracer` report the modules.

    Attributes:
        failures: why some tensors could not be read.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._passes: list[_Pass] = []
        self._open = OpenCalls[_Passage]()
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # by id: the tensor, its version and number
        # by number: smallest and largest value of tensors met since the last pass
        self._extremes: list[tuple[Tensor, Tensor]] = []
        self._count = 0
        self._states: list[tuple[list[int], Tensor]] = []  # numbers of tensors, and their states

    def pass_begins(self) -> None:
        """Begin a forward pass; call it before the model runs."""
        self._passes.append(_Pass())
        self._open = OpenCalls()

    def begins(self, module: nn.Module, args: Any) -> None:
        """Begin a module: the pass calls it.

        Args:
            module: the module that is called.
            args: positional arguments of the call; torch's global pre-hook does not receive keywords.
        """
        now = self._passes[-1]
        passage = _Passage(module)
        now.root = now.root or passage
        self._open.begins(id(module), passage)
        with self._looking():
            passage.inputs = [number for _, number in self._all(walk(args, objects=False))]
            for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
                tensors = ((f"{kind} {name}", tensor) for name, tensor in held.items() if tensor is not None)
                passage.own += self._all(tensors)

    def ends(self, module: nn.Module, output: Any, attentions: int) -> None:
        """End a module: it returned, or raised (then its output is None).

        Args:
            module: the module that was called.
            output: its return value.
            attentions: number of attentions of the pass that have run.
        """
        ended = self._open.ends(id(module))
        if ended is None:
            return
        passage = ended.noted
        passage.earlier, passage.attentions = ended.earlier, attentions
        self._passes[-1].ended.append(passage)
        with self._looking():
            passage.outputs = list(self._all(walk(output, objects=False)))

    def pass_ends(self, trace: Trace) -> None:
        """End a forward pass; call it after the model has returned.

        Args:
            trace: The complete trace of the pass.
        """
        now = self._passes[-1]
        for count in range(max((passage.attentions for passage in now.ended), default=0) + 1):
            call = trace.after(count)
            if call is not None:
                now.following[count] = call.site, call.index
        now.keys = {(call.site, call.index): blocks for call, blocks in zip(trace.calls, trace.nonfinite, strict=True)}
        with self._looking():
            self._judge()

    def looked_at(self) -> int:
        """Return the number of modules with an output that was read; 0 if any tensor could not be read."""
        if self.failures:
            return 0
        ended = (passage for each in self._passes for passage in each.ended)
        return len({passage.module for passage in ended if passage.outputs})

    def first(self, model: nn.Module) -> FirstNonfinite | None:
        """Return the first output that is not finite; None if all are finite.

        A pass whose final output is not finite either is preferred, as the model got over the others.

        Args:
            model: The model, whose paths name the modules.
        """
        found: list[FirstNonfinite | None] = []
        with self._looking():
            self._judge()  # for a pass that raised, `pass_ends` was not called
            found.append(self._first(model))
        return found[0] if found else None

    def _first(self, model: nn.Module) -> FirstNonfinite | None:
        """Return the first NaN or infinite output; without one, a final output of minus infinity alone, which masks
        explain.
        """
        states = self._transferred()
        bad = []
        for number, each in enumerate(self._passes):
            place = next((at for at, one in enumerate(each.ended) if _worst(one.outputs, states) == BAD), None)
            if place is not None:
                bad.append((number, place))
        if bad:
            paths = {module: path for path, module in named_modules(model)}
            found = [_judged(self._passes[number], place, number, states, paths) for number, place in bad]
            return next((one for one in found if one.returned), found[0])
        for number, each in enumerate(self._passes):
            if each.root is not None and _worst(each.root.outputs, states) == MINUS:
                tensor = next(name for name, at in each.root.outputs if states[at] == MINUS)
                kind = type(each.root.module).__name__
                return FirstNonfinite("", kind, tensor, RULED_OUT, "", False, None, (number, len(each.ended)))
        return None

    # -- looking ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Run operations hidden from every mode of the trace and the caller, and catch errors: an observer never
        stops a run."""
        try:
            with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                yield
        except Exception as error:
            self.failures.append(Message("alarms.unmeasured.outputs", error=kind_and_text(error)))

    def _all(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int]]:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # inside vmap there is one number per sample, and it is gone when vmap ends
        for name, tensor in tensors:
            number = self._look(tensor)
            if number is not None:
                yield name, number

    def _look(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; None if it holds no numbers that can be read."""
        version = None if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        values = _values(tensor)
        if values is None:
            return None
        low, high = torch.aminmax(values)
        self._extremes.append((low, high))
        number, self._count = self._count, self._count + 1
        if version is not None:
            self._known[id(tensor)] = (weakref.ref(tensor), version, number)
        return number

    def _judge(self) -> None:
        """Reduce the tensors met since the last pass to their states, which stay on their device."""
        start = self._count - len(self._extremes)
        groups: dict[Any, list[int]] = defaultdict(list)
        for at, (low, _) in enumerate(self._extremes):
            groups[low.device, low.dtype].append(at)
        for members in groups.values():
            low, high = (torch.stack([self._extremes[at][side] for at in members]) for side in (0, 1))
            minus = (low == -torch.inf).to(torch.int8)
            # NaN compares false, so it counts as BAD
            states = torch.where(high < torch.inf, minus, torch.full_like(minus, BAD))
            self._states.append(([start + at for at in members], states))
        self._extremes = []

    def _transferred(self) -> dict[int, int]:
        """Return the state of every tensor by its number, with one transfer from each device."""
        by_device: dict[torch.device, list[tuple[list[int], Tensor]]] = defaultdict(list)
        for numbers, states in self._states:
            by_device[states.device].append((numbers, states))
        found: dict[int, int] = {}
        for parts in by_device.values():
            numbers = [number for each, _ in parts for number in each]
            found |= zip(numbers, torch.cat([states for _, states in parts]).tolist(), strict=True)
        return found


def _judged(now: _Pass, place: int, number: int, states: Mapping[int, int], paths: Paths) -> FirstNonfinite:
    """Return what is known of the module that ended at `place`, the first with an output that is not finite."""
    passage = now.ended[place]
    tensor = next(name for name, at in passage.outputs if states[at] == BAD)
    weight = next((name for name, at in passage.own if states[at] == BAD), None)
    entering = max((states[at] for at in passage.inputs), default=None)
    root = now.root or passage
    detail, last = "", passage.earlier  # `last`: number of modules that had returned finite numbers
    if weight is not None:
        cause, detail = CAUSE_WEIGHT, weight
    elif entering == BAD and any(states[at] == BAD for at in root.inputs):
        cause = CAUSE_INPUTS
    elif entering == BAD and (outer := _weight_around(now, place, states, paths)):
        cause, detail = CAUSE_WEIGHT_AROUND, outer
    elif entering == BAD:
        cause, detail = CAUSE_BETWEEN, _site(now.ended[passage.earlier - 1], paths) if passage.earlier else ""
    elif passage.earlier < place:
        cause, detail, last = CAUSE_WITHIN, _site(now.ended[place - 1], paths), place
    else:
        cause = CAUSE_UNKNOWN if entering is None else FROM_MINUS if entering == MINUS else FROM_FINITE
    behind = now.between(now.ended[last - 1].attentions if last else 0, passage.attentions)
    return FirstNonfinite(
        site=_site(passage, paths),
        kind=type(passage.module).__name__,
        tensor=tensor,
        cause=cause,
        detail=detail,
        returned=_worst(root.outputs, states) == BAD,
        before=now.following.get(passage.attentions),
        order=(number, place),
        behind=behind,
        received=now.received(behind),
    )


def _weight_around(now: _Pass, place: int, states: Mapping[int, int], paths: Paths) -> str:
    """Return a parameter or buffer that is not finite, from the modules around the one that ended at `place`."""
    began = now.ended[place].earlier
    for one in now.ended[place + 1 :]:
        if one.earlier <= began:
            for name, at in one.own:
                if states[at] == BAD:
                    return name.replace(" ", f" {site}." if (site := _site(one, paths)) else " ", 1)
    return ""


def _site(passage: _Passage, paths: Paths) -> str:
    """Return the path of a module, or its class if it was made during the forward pass."""
    return paths.get(passage.module, type(passage.module).__name__)


def _worst(outputs: Sequence[tuple[str, int]], states: Mapping[int, int]) -> int:
    return max((states[at] for _, at in outputs), default=FINITE)


def _values(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor as a plain tensor of a comparable dtype; of a sharded one, this rank's numbers."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # DTensor
    if tensor.is_nested:
        tensor = tensor.values() if tensor.layout is torch.strided else tensor._values  # type: ignore[assignment]
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel() or not tensor.untyped_storage().nbytes():
        return None  # a sharded weight whose memory is freed still has a size, but no storage
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
