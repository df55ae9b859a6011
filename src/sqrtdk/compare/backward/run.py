"""The gradients of one model: those of its parameters, of q, k and v of each attention, and between its modules.

A run goes forward with autograd, in eval mode, and one random gradient of an output goes back. A second run in float64,
of a copy, is the measure of rounding. What a module takes and gives is kept as places in autograd's graph, not as
tensors: a later write in place gives the tensor another place, and the gradient of the old one is the right one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_modules, named_parameters
from sqrtdk.audit.guard import evaluated, offers_choice
from sqrtdk.compare.outside.modules import ModuleListener, ModuleStep
from sqrtdk.compare.sides import ModelSide
from sqrtdk.errors import INTERRUPTS, kind_and_text
from sqrtdk.frontends.jax.derivatives import jax_gradients
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.frontends.program import held_tensor
from sqrtdk.laws.backward.handles import Edge, edge_of, key_of
from sqrtdk.laws.backward.operands import at_last_output, read_pairs
from sqrtdk.laws.backward.passes import operand_gradients
from sqrtdk.laws.backward.traced import TracedHandles, noted
from sqrtdk.laws.training import module_that_trains
from sqrtdk.messages import Message
from sqrtdk.models.run import call as forward
from sqrtdk.models.settings import process_unchanged
from sqrtdk.models.unchanged import unchanged
from sqrtdk.modules.calls import CallPlace, hooked
from sqrtdk.modules.structures import walk

VECTOR_NAMES = {"q": "query", "k": "key", "v": "value"}
Key = tuple[int, int]
Gradient = Tensor | None


class NoBackwardError(Exception):
    """A side has no backward pass.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: Message) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, eq=False)
class ModuleTensors:
    """The tensors that go in and out of the module calls of a run.

    Attributes:
        takes: By place, what each call takes; None stands for a tensor without a graph, which may be detached.
        gives: By place, what it returns.
        met: When each was first met, counted from 0.
    """

    takes: dict[CallPlace, list[Edge | None]] = field(default_factory=dict)
    gives: dict[CallPlace, list[Edge | None]] = field(default_factory=dict)
    met: dict[Key, int] = field(default_factory=dict)

    def note(self, to: dict[CallPlace, list[Edge | None]], place: CallPlace, value: Any) -> None:
        """Note the floating tensors of the structure `value` at a place of `to`, which is `takes` or `gives`."""
        floating = [x for _, x in walk(value, objects=False) if x.is_floating_point()]
        to[place] = [edge_of(x) if x.requires_grad and x.grad_fn is not None else None for x in floating]
        for edge in to[place]:
            if edge is not None:
                self.met.setdefault(key_of(edge), len(self.met))

    def edges(self) -> Iterator[Edge]:
        """Yield the places of all tensors that have one."""
        for edges in (*self.takes.values(), *self.gives.values()):
            yield from (edge for edge in edges if edge is not None)


@dataclass(frozen=True, slots=True, eq=False)
class RunGradients:
    """What the backward pass of one run gives.

    Attributes:
        steps: The module calls, in the order in which they end.
        tensors: The tensors between them.
        by_key: Gradients by place in the graph.
        attentions: By site and number: gradients of "q", "k" and "v", (B, H, L, E), that come from the attention's
            output, and their values.
        parameters: Gradients by name; None where the backward pass does not arrive.
    """

    steps: Sequence[ModuleStep]
    tensors: ModuleTensors
    by_key: Mapping[Key, Gradient]
    attentions: Mapping[tuple[str, int], Mapping[str, tuple[Gradient, Tensor]]]
    parameters: dict[str, Gradient]


@dataclass(frozen=True, slots=True, eq=False)
class SideGradients:
    """The gradients of a side in its own dtype, and in float64 if it can run so.

    Attributes:
        own: Those in its own dtype.
        exact: Those of a float64 copy, or None.
        dtype: Its own dtype.
    """

    own: RunGradients
    exact: RunGradients | None
    dtype: torch.dtype


def side_gradients(side: ModelSide, label: str, output: str, given: Tensor) -> SideGradients:
    """Run a side forward and backward.

    Args:
        side: The side.
        label: "A" or "B", for the reason of an error.
        output: Name of the output that gets a gradient.
        given: Its gradient, in the output's shape.

    Raises:
        NoBackwardError: The side is no torch module, nothing trains, or autograd refuses.
    """
    module = None if side.module is None else module_that_trains(side.module)
    if module is None or side.inputs is None:
        raise NoBackwardError(Message("compare.backward.no_module", side=label))
    attn = side.info.attn if offers_choice(module) else None
    try:
        with unchanged(module, side.inputs), process_unchanged():
            own = _run(module, side.inputs, attn, output, given)
        if isinstance(module, ForeignModule):
            own = replace(own, parameters=own.parameters | _of_jax(module, side.inputs, own.parameters, output, given))
    except INTERRUPTS:
        raise
    except NoBackwardError as error:
        raise NoBackwardError(Message("compare.pair.of_side", side=label, reason=error.reason)) from None
    except Exception as error:  # of the user's backward pass
        reason = Message("laws.gradient.refused", error=kind_and_text(error, 120))
        raise NoBackwardError(Message("compare.pair.of_side", side=label, reason=reason)) from error
    exact = None
    with suppress(Exception):  # an operation without float64: the other side's rounding stands for this one's
        twin = copy.deepcopy(module).to(torch.float64)
        exact = _run(twin, _in_float64(side.inputs), attn, output, given)
    return SideGradients(own, exact, getattr(torch, side.info.dtype))


def _of_jax(
    module: ForeignModule, inputs: Any, known: Mapping[str, Gradient], output: str, given: Tensor
) -> dict[str, Gradient]:
    """Return the gradients of a JAX function's parameters, as `jax.vjp` of the whole function gives them.

    JAX gives zeros for a parameter that the backward pass does not reach, which is one without a gradient in `known`.
    """
    args, named = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    gradients = jax_gradients(module, args, named, output, given) or {}
    return {
        name: gradient for name, gradient in gradients.items()
        if name in known and gradient is not None and (known[name] is not None or gradient.any())
    }  # fmt: skip


def _in_float64(inputs: Any) -> Any:
    def cast(x: Any) -> Any:
        return x.to(torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x

    return {name: cast(x) for name, x in inputs.items()} if isinstance(inputs, dict) else tuple(map(cast, inputs))


def _run(module: nn.Module, inputs: Any, attn: str | None, output: str, given: Tensor) -> RunGradients:
    tensors, listener = ModuleTensors(), ModuleListener()

    def begins(place: CallPlace, args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            tensors.note(tensors.takes, place, (args, kwargs))

    def ends(place: CallPlace, args: Any, kwargs: Any, returned: Any) -> None:
        with torch._C.DisableTorchFunction():
            tensors.note(tensors.gives, place, returned)

    def grad_on(place: CallPlace, args: Any, kwargs: Any) -> None:
        torch.set_grad_enabled(True)  # the trace runs without

    with evaluated(module, attn), torch.enable_grad():
        every = dict(named_modules(module))
        with noted(module) as run, hooked({"": module}, grad_on), listener.on(module), hooked(every, begins, ends):
            returned = {name or "0": x for name, x in walk(forward(module, inputs))}
        out = returned.get(output)
        if out is None or not out.requires_grad:
            raise NoBackwardError(Message("compare.backward.no_gradient", output=output))
        return _backward(module, out, run, tensors, listener.steps, given)


def _backward(
    module: nn.Module,
    out: Tensor,
    run: TracedHandles,
    tensors: ModuleTensors,
    steps: Sequence[ModuleStep],
    given: Tensor,
) -> RunGradients:
    pairs = [(call, at_last_output(reached)) for call, reached in read_pairs(run) if reached is not None]
    parameters = {name: x for name, x in _parameters(module) if x.requires_grad}
    every = [*tensors.edges()]
    every += [one.edge for _, reached in pairs for one in (reached.output, reached.lse) if one is not None]
    edges = {key_of(edge): edge for edge in (*every, *parameters.values())}
    cotangent = given.to(out.device, out.dtype)
    wanted: Any = [*edges.values()]
    found = torch.autograd.grad([out], wanted, [cotangent], allow_unused=True, retain_graph=True)
    by_key = dict(zip(edges, found, strict=True))
    attentions: dict[tuple[str, int], dict[str, tuple[Gradient, Tensor]]] = {}
    for call, reached in pairs:
        operands = attentions[call.site, call.index] = {}
        if reached.output is None:
            continue
        # What else reads k, as another layer, reads it on one side before its heads are repeated and not on the other.
        ends = [one.edge for one in (reached.output, reached.lse) if one is not None]
        given_to = {key_of(edge): edge for edge in ends if by_key[key_of(edge)] is not None}
        own = {short: handle.edge for short, handle in reached.handles.items()}
        cotangents = [gradient for key in given_to if (gradient := by_key[key]) is not None]
        arrived = operand_gradients(reached, own, [*given_to.values()], cotangents) if given_to else dict.fromkeys(own)
        for short, gradient in arrived.items():
            operands[short] = gradient, getattr(reached.call, VECTOR_NAMES[short]).values
    named = {name: by_key[key_of(x)] for name, x in parameters.items()}
    return RunGradients(steps, tensors, by_key, attentions, named)


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter once; those of a foreign module by its program's names, as the weights are paired."""
    if not isinstance(module, ForeignModule):
        yield from named_parameters(module)
        return
    modules = dict(named_modules(module, remove_duplicate=False))
    yield from ((name, held_tensor(modules, name)) for name in module.weight_names)
