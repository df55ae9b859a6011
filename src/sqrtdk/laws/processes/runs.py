"""A run of a model, on a rank or alone, that keeps what its modules take and give, its outputs and gradients.

What it keeps is of plain tensors, strings and numbers, so that `torch.save` writes it and `torch.load` reads it with
`weights_only=True`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_buffers, named_modules, named_parameters, whole_tensor
from sqrtdk.audit.guard import eval_mode
from sqrtdk.errors import INTERRUPTS, kind_and_text
from sqrtdk.models.copies import copied
from sqrtdk.models.records import Inputs
from sqrtdk.models.run import call
from sqrtdk.modules.calls import CallPlace, hooked
from sqrtdk.modules.structures import tensors_of, walk
from sqrtdk.tracing.tape.stance import fast_path_off

_MOST_KEPT = 2**28  # numbers of all modules together; what comes later is left out
RunRecord = dict[str, Any]  # calls: (path, index, takes, gives) in the order of ending; outputs; grads; error


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached and on the CPU; a DTensor's local part, a plain tensor as it is."""
    part = getattr(tensor, "to_local", None)
    local: Tensor = tensor.detach() if part is None else part().detach()
    return local.cpu().clone()


def state_of_rank(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name, with DTensors gathered from all ranks of their meshes."""
    named = {**dict(named_parameters(module)), **dict(named_buffers(module))}
    return {name: whole_tensor(tensor).cpu().clone() for name, tensor in named.items() if not tensor.is_meta}


def run_of_rank(
    module: nn.Module, inputs: Inputs, cotangents: Mapping[str, Tensor | None] | None = None, *, seed: int = 0,
    training: bool = False,
) -> RunRecord:  # fmt: skip
    """Run a module once, and keep what its modules take and give; an error is kept in place of it.

    Args:
        module: This rank's module.
        inputs: This rank's inputs.
        cotangents: Of each output by name, dL/d output in its shape; None for a run without a backward pass.
        seed: Seed of the run.
        training: Whether dropout is on.
    """
    record: RunRecord = {"calls": [], "outputs": {}, "grads": {}, "error": ""}
    torch.manual_seed(seed)
    try:
        with fast_path_off(), eval_mode(module), torch.set_grad_enabled(cotangents is not None):
            if training:
                module.train()
            if cotangents is None:
                with _noted(module, record):
                    returned = call(module, inputs)
                record["outputs"] = {name: local_tensor(value) for name, value in tensors_of(returned).items()}
            else:
                with _without_grads(module):
                    returned = run_with_graph(module, inputs)
                    record["grads"] = _gradients(module, returned, cotangents)
    except INTERRUPTS:
        raise
    except BaseException as error:  # the model is the user's
        record |= {"calls": [], "outputs": {}, "error": kind_and_text(error.__cause__ or error, 120)}
    return record


def run_with_graph(module: nn.Module, inputs: Inputs) -> Any:
    """Run with autograd; `sqrtdk.models.run.call` runs without."""
    own = copied(inputs)
    return module(**own) if isinstance(own, dict) else module(*own)


@contextmanager
def _noted(module: nn.Module, record: RunRecord) -> Iterator[None]:
    room = _MOST_KEPT
    begun: dict[str, Tensor | None] = {}

    def begins(place: CallPlace, args: Any, kwargs: Any) -> None:
        begun[place[0]] = _first(args, kwargs)

    def ends(place: CallPlace, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal room
        gives = _first((output,), {})
        takes = begun.pop(place[0], None)
        room -= sum(tensor.numel() for tensor in (takes, gives) if tensor is not None)
        if room >= 0:
            record["calls"].append((*place, takes, gives))

    modules = dict(named_modules(module))
    with hooked(modules, begins, ends):
        yield


def _first(args: Any, kwargs: Any) -> Tensor | None:
    """Return a copy of the first tensor of a structure that has values and an axis."""
    for _, tensor in walk((args, kwargs), objects=False):
        if not tensor.is_meta and not tensor.is_nested and tensor.dim():
            return local_tensor(tensor)
    return None


@contextmanager
def _without_grads(module: nn.Module) -> Iterator[None]:
    """Run with parameters that have no gradient; those that they had are put back."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def loss_of(returned: Any, cotangents: Mapping[str, Tensor | None]) -> Tensor | None:
    """Return sum(output * cotangent) over the outputs that autograd reaches; None if it reaches none."""
    terms = []
    for name, tensor in walk(returned):
        cotangent = cotangents.get(name or "0")
        if cotangent is not None and tensor.requires_grad:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            terms.append((local * cotangent.to(local)).sum())
    return torch.stack(terms).sum() if terms else None


def _gradients(module: nn.Module, returned: Any, cotangents: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the gradients of the parameters for sum(output * cotangent)."""
    loss = loss_of(returned, cotangents)
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]
    found = {}
    # FSDP has other parameters during a run than before and after it.
    for name, parameter in named_parameters(module):
        grad, spread = parameter.grad, hasattr(parameter, "full_tensor")
        if grad is not None or spread:
            # All ranks of a mesh gather together, also one that no gradient reached.
            whole = whole_tensor(torch.zeros_like(parameter) if grad is None else grad)
            if grad is not None or bool(whole.any()):
                found[name] = whole
    return found
