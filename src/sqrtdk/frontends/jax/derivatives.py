"""Derivatives that a JAX program states itself, and the gradients of its parameters as JAX gives them.

A function with `jax.custom_vjp` has a derivative that its author wrote, right or wrong:

    @jax.custom_vjp
    def attend(q, k, v): ...
    attend.defvjp(forward, backward)

Its equation is walked like any call, so a trace reads its formula. Around it stand steps that do nothing in a run
without autograd. With autograd they cut the graph of torch's operations off, and the gradient of the result goes to
JAX, which calls the author's `backward` (`jax.vjp` of this one equation). `stop_gradient` is a cut alone.

Derivatives of `jax.custom_jvp` are torch's own, as JAX's library has many and they are those of the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sqrtdk.frontends.jax.arrays import held_dtype, jax, jax_core, to_jax, to_torch
from sqrtdk.frontends.module import Bound, ForeignModule
from sqrtdk.frontends.program import RunDtypes, held_tensor
from sqrtdk.modules.structures import walk


def without_gradient(numbers: RunDtypes, x: Any) -> Any:
    """Return a value without a gradient; without autograd it is the value itself."""
    return x.detach() if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled() else x


@dataclass(frozen=True, eq=False)
class StatedDerivative:
    """The results of an equation with a derivative of its own.

    Called with what the equation reads and then with its results, which it returns.

    Attributes:
        eqn: The equation.
        jaxpr: The jaxpr that it is part of.
        name: Name of the JAX function and its line, "attend (port.py:12)".
    """

    eqn: Any
    jaxpr: Any
    name: str

    def __call__(self, numbers: RunDtypes, *values: Any) -> Any:
        """Return the results, with the stated derivative if autograd runs."""
        count = len(self.eqn.invars)
        reads, made = values[:count], values[count:]
        needed = any(isinstance(x, Tensor) and x.requires_grad for x in reads)
        if needed and torch.is_grad_enabled():
            made = self._function.apply(len(made), *made, *reads)
        return made if len(made) > 1 else made[0]

    @cached_property
    def _function(self) -> Any:
        """The equation as an autograd function; a class of its own, so that a fault is said by the JAX function."""
        return type("StatedFunction", (_StatedFunction,), {"equation": self, "written": self.name})

    def gradients(self, reads: Sequence[Any], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of what the equation reads, from those of its results.

        Raises:
            TypeError: A gradient is wider than the program's dtype, in which alone JAX runs it.
        """
        firsts = [at for at, variable in enumerate(self.eqn.invars)
                  if not hasattr(variable, "val") and variable not in self.eqn.invars[:at]]  # fmt: skip
        for variable, gradient in zip(self.eqn.outvars, gradients, strict=True):
            own = held_dtype(variable.aval.dtype)
            if gradient is not None and gradient.dtype.itemsize > own.itemsize:
                raise TypeError(f"JAX computes the derivative of {self.name} in {own}, not in {gradient.dtype}")
        variables = [self.eqn.invars[at] for at in firsts]
        alone = self.jaxpr.replace(constvars=[], invars=variables, outvars=self.eqn.outvars, eqns=[self.eqn])
        closed = jax_core().ClosedJaxpr(alone, [])
        arrays = [to_jax(reads[at], self.eqn.invars[at].aval) for at in firsts]
        _, back = jax().vjp(jax_core().jaxpr_as_fun(closed), *arrays)
        of_reads = back([_cotangent(v.aval, g) for v, g in zip(self.eqn.outvars, gradients, strict=True)])
        by_place = dict(zip(firsts, of_reads, strict=True))  # of a value that is read twice JAX gives the sum
        return [_as_gradient(by_place.get(at), x) for at, x in enumerate(reads)]


class _StatedFunction(torch.autograd.Function):
    """Results as they are; their gradients go to JAX."""

    equation: StatedDerivative
    written: str

    @staticmethod
    def forward(ctx: Any, count: int, *values: Any) -> Any:
        made, ctx.reads = values[:count], values[count:]
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return tuple(x.view_as(x) for x in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        equation: StatedDerivative = type(ctx)._forward_cls.equation
        return None, *(None for _ in gradients), *equation.gradients(ctx.reads, gradients)


@runtime_checkable
class Differentiable(Protocol):
    """A source that JAX can differentiate, a `JaxSource`.

    Attributes:
        names: Names of the parameters.
    """

    names: Sequence[str]

    def call(self, inputs: Any, held: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Return the model's outputs from `Bound.spec` of a call, its parameters and the arrays among its inputs."""

    def held_arrays(self) -> list[Any]:
        """Return the parameters as arrays."""

    def input_arrays(self, bound: Bound) -> list[Any]:
        """Return the inputs of a call as arrays."""


def _cotangent(aval: Any, gradient: Tensor | None) -> Any:
    if not jax().numpy.issubdtype(aval.dtype, jax().numpy.inexact):
        return np.zeros(aval.shape, jax().dtypes.float0)
    return jax().numpy.zeros(aval.shape, aval.dtype) if gradient is None else to_jax(gradient, aval)


def _as_gradient(array: Any, read: Any) -> Tensor | None:
    if array is None or not isinstance(read, Tensor) or not read.is_floating_point():
        return None
    return to_torch(array).to(read.device, read.dtype)


def jax_gradients(
    module: ForeignModule,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    output: str,
    gradient: Tensor,
) -> Mapping[str, Tensor | None] | None:
    """Return JAX's gradients of the parameters, `jax.vjp` of the whole function.

    Args:
        module: A module that `from_jax` returned.
        args: Inputs of the call by position.
        named: Inputs by name.
        output: Name of the output that gets a gradient, as `walk` names it; all others get zeros.
        gradient: Its gradient.

    Returns:
        The gradients by the module's names; None where a parameter has none. None if the module's parameters are not
        in JAX's dtypes, so that JAX's gradients are not the module's.
    """
    call = module.traced_call(args, named)
    modules = dict(module.named_modules(remove_duplicate=False))
    if call is None:
        return None
    source, bound, traced = call
    assert isinstance(source, Differentiable)
    held = source.held_arrays()
    dtypes = {name: held_dtype(array.dtype) for name, array in zip(source.names, held, strict=True)}
    if any(held_tensor(modules, module.held(x)).dtype is not dtypes[leaf] for x, (leaf, _) in traced.origins.items()):
        return None
    inputs = source.input_arrays(bound)
    made, back = jax().vjp(lambda arrays: jax().tree.leaves(source.call(bound.spec, arrays, inputs)), held)
    marks = [torch.zeros(x.shape, dtype=held_dtype(x.dtype)) for x in made]  # to find the leaf by its name
    chosen = next(mark for name, mark in walk(traced.outputs(marks)) if (name or "0") == output)
    cotangents = [_cotangent(x, gradient if mark is chosen else None)
                  for x, mark in zip(made, marks, strict=True)]  # fmt: skip
    (of_held,) = back(cotangents)
    whole = {name: None if x.dtype == jax().dtypes.float0 else to_torch(x)
             for name, x in zip(source.names, of_held, strict=True)}  # fmt: skip
    return {
        module.held(name): None if (of_leaf := whole[leaf]) is None else of_leaf[indices]
        for name, (leaf, indices) in traced.origins.items()
    }
