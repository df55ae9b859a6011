"""Walks a jaxpr and writes its equations as steps: calls are entered, scans unrolled, branches run when they are met.

    jit, custom_jvp, remat, ...    entered: their equations are steps like all others
    custom_vjp                     entered too; steps around it hand its gradient to JAX
    scan over parameters           unrolled; each turn is a module, "layers.0", with its own slice of the parameters
    any other scan                 unrolled, or run turn by turn if it has very many steps
    cond, while                    one step, which runs the branch or the body operation by operation

A primitive that nobody reads is noted with its line; `walk_jaxpr` raises one error that names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.frontends.jax.arrays import held_dtype, is_key, jax, mask_of, to_torch
from sqrtdk.frontends.jax.derivatives import StatedDerivative, without_gradient
from sqrtdk.frontends.jax.elementwise import ELEMENT_OPERATIONS, SAME
from sqrtdk.frontends.jax.holding import (
    BranchOperation,
    JaxOperation,
    ScanOperation,
    ShapedOperation,
    UnsignedOperation,
    WhileOperation,
    stack_rows,
    take_row,
)
from sqrtdk.frontends.jax.places import Places, Where, equations
from sqrtdk.frontends.jax.products import PRODUCT_OPERATIONS, plain_windows, reads_ragged
from sqrtdk.frontends.jax.shapes import SHAPE_OPERATIONS
from sqrtdk.frontends.names import common_path, layer_path, refuse_unread, with_layer_numbers
from sqrtdk.frontends.program import FlatProgram, FlatStep, Literal
from sqrtdk.messages import Message

JAX_OPERATIONS = ELEMENT_OPERATIONS | SHAPE_OPERATIONS | PRODUCT_OPERATIONS
# Calls, with the parameter that holds their jaxpr.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "call": "call_jaxpr",
    "remat": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "jaxpr",
    "shard_map": "jaxpr", "composite": "jaxpr", "custom_batching_call": "call",
}  # fmt: skip
STATED = ("custom_vjp_call", "custom_vjp_call_jaxpr")
# Operations on whole numbers and keys that JAX computes itself, exactly: their results have no rounding.
BY_JAX = frozenset({
    "random_seed", "random_bits", "random_split", "random_fold_in", "random_clone", "threefry2x32",
    "rng_bit_generator", "population_count", "clz", "nextafter",
})  # fmt: skip
_WITHOUT_RESULT = ("debug_callback", "debug_print", "after_all", "create_token")
# Operations that take Python numbers beside a tensor, as a trace reads them: 0.25 * x.
_TAKES_NUMBERS = frozenset(ELEMENT_OPERATIONS) | {"pad", "dynamic_slice", "dynamic_update_slice"}
_FIRST_IS_TENSOR = ("select_n", "pad", "dynamic_slice")
_MOST_UNROLLED = 2**15  # of a program whose loops are unrolled
Ref = Any  # a reference, a literal, or a list of references: a stacked parameter, one for each layer


@dataclass(slots=True)
class JaxprWalk:
    """The steps of one jaxpr, as they are written.

    Attributes:
        places: finds where equations came from.
        names: name of the parameter of each invar of the jaxpr; None for an input.
        split: by invar, the layers that a stacked parameter is split into: number and path, outermost scan first.
        homes: by scan and the calls around it, the path of its layers; None for a scan over no parameters.
        learned: references that come from parameters.
        external: references that come from inputs.
    """

    places: Places
    names: Sequence[str | None]
    split: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    homes: dict[tuple[int, ...], str | None] = field(default_factory=dict)
    steps: list[FlatStep] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    origins: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    learned: set[int] = field(default_factory=set)
    external: set[int] = field(default_factory=set)
    count: int = 0

    # -- parameters that scans split into layers -----------------------------------------------------------------------

    def find_layers(self, jaxpr: Any, known: Mapping[Any, tuple[int, int]], calls: tuple[int, ...] = ()) -> None:
        """Find the scans over parameters.

        Args:
            jaxpr: where to look.
            known: the invar of each variable, and how often it was split.
            calls: the calls around the jaxpr, which may share it with others.
        """
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            if name == "scan":
                skip = params["num_consts"] + params["num_carry"]
                inner = params["jaxpr"].jaxpr
                xs = [(v, known.get(u) if _hashable(u) else None) for u, v in
                      zip(eqn.invars[skip:], inner.invars[skip:], strict=True)]  # fmt: skip
                mine = [(v, place) for v, place in xs if place is not None and self.names[place[0]] is not None]
                home = common_path([str(self.names[at]) for _, (at, _) in mine]) if mine else None
                called = (*calls, id(eqn))
                self.homes[called] = home
                deeper = dict(self._known_in(inner.invars[:skip], eqn.invars[:skip], known))
                for v, (at, depth) in mine:
                    layers = self.split.setdefault(at, [])
                    if len(layers) == depth:
                        layers.append((params["length"], home or ""))
                    deeper[v] = at, depth + 1
                self.find_layers(inner, deeper, (*calls, id(eqn)))
            elif name in CALLS:
                inner = getattr(params[CALLS[name]], "jaxpr", params[CALLS[name]])
                deeper = dict(self._known_in(inner.invars, eqn.invars, known))
                self.find_layers(inner, deeper, (*calls, id(eqn)))

    def _known_in(self, inner: Any, outer: Any, known: Mapping[Any, tuple[int, int]]) -> Any:
        return ((v, known[u]) for v, u in zip(inner, outer, strict=True) if _hashable(u) and u in known)

    def parameter(self, at: int) -> Ref:
        """Record the parameter of the invar number `at`, and return its reference.

        A stacked parameter that scans split into layers gives nested lists, with one reference for each layer.
        """

        def refs(layers: Sequence[tuple[int, str]], numbers: tuple[tuple[str, int], ...]) -> Ref:
            if not layers:
                made = self.new()
                name = with_layer_numbers(str(self.names[at]), numbers)
                self.parameters[made] = name
                self.learned.add(made)
                self.origins[name] = str(self.names[at]), tuple(n for _, n in numbers)
                return made
            (length, home), *inner = layers
            return [refs(inner, (*numbers, (home, n))) for n in range(length)]

        return refs(self.split.get(at, []), ())

    # -- equations -----------------------------------------------------------------------------------------------------

    def new(self) -> int:
        """Return a reference, a positive integer, that is not in use yet."""
        self.count += 1
        return self.count

    def constant(self, value: Any) -> int:
        """Record an array or tensor as a constant of the program, and return its reference."""
        made = self.new()
        self.constants[made] = value if isinstance(value, Tensor) else to_torch(value)
        return made

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Ref], call: Where, name: str = "") -> list[Ref]:
        """Translate the equations of a jaxpr into steps.

        Args:
            jaxpr: The jaxpr.
            consts: Values of its constants.
            args: References of its arguments.
            call: Place of the call that runs it.
            name: Name of the function that it is the body of; "" if it has none.

        Returns:
            References of its outputs; an output that is a number is a `Literal`.
        """
        known: dict[Any, Ref] = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        known |= zip(jaxpr.invars, args, strict=True)

        def read(variable: Any) -> Ref:
            if _hashable(variable):
                return known[variable]
            value = variable.val
            return Literal(np.asarray(value).item()) if np.ndim(value) == 0 else self.constant(value)

        for eqn in jaxpr.eqns:
            where = self.places.of(eqn, call, name)
            refs = [read(variable) for variable in eqn.invars]
            stated = eqn.primitive.name in STATED and not any(isinstance(ref, list) for ref in refs)
            made = self._stated(eqn, jaxpr, refs, where) if stated else self.equation(eqn, refs, where)
            known |= zip(eqn.outvars, made, strict=True)
        return [read(variable) for variable in jaxpr.outvars]

    def _stated(self, eqn: Any, jaxpr: Any, refs: list[Ref], where: Where) -> list[Ref]:
        """Translate a call whose derivative is stated beside it."""
        inside = [self._cut("custom_vjp", ref, where) for ref in refs]
        made = [self._as_constant(self._whole(ref, where), variable)
                for ref, variable in zip(self.equation(eqn, inside, where), eqn.outvars, strict=True)]  # fmt: skip
        file, line = where.line or ("", 0)
        name = str(eqn.params[CALLS[eqn.primitive.name]].jaxpr.debug_info.func_name)
        derivative = StatedDerivative(eqn, jaxpr, f"{name} ({PurePath(file).name}:{line})" if file else name)
        results = self._step("custom_vjp", derivative, [*refs, *made], (None,) * len(made), where)
        for result, ref in zip(results, made, strict=True):
            self._comes_from(result, ref)
        return results

    def _cut(self, name: str, ref: Ref, where: Where) -> Ref:
        return ref if isinstance(ref, Literal) else self._step(name, without_gradient, [ref], (None,), where)[0]

    def _comes_from(self, made: Ref, ref: Ref) -> None:
        """Note that a value is another one, whatever else its step reads."""
        for origins in (self.learned, self.external):
            (origins.add if ref in origins else origins.discard)(made)

    def equation(self, eqn: Any, refs: list[Ref], where: Where) -> list[Ref]:
        """Translate one equation into steps; a call, or a scan of few steps, into the steps of its body.

        `refs` are the references of what it reads, and `where` is its place. Returns references of its results.
        """
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map" and params["mesh"].size != 1:
            self._unread(f"shard_map over {params['mesh'].size} devices", where)
        if name in CALLS:
            inner = params[CALLS[name]]
            consts, here = getattr(inner, "consts", ()), replace(where, calls=(*where.calls, id(eqn)))
            return self.jaxpr(getattr(inner, "jaxpr", inner), consts, refs, here, str(params.get("name", "")))
        if name == "scan" and _unrolled_steps(params) <= _MOST_UNROLLED - len(self.steps):
            return self._unrolled(eqn, refs, where)
        refs = [self._whole(ref, where) for ref in refs]
        if name == "stop_gradient":
            return [self._cut(name, ref, where) for ref in refs]
        if name in SAME and not _positional(params):
            return refs
        if name in _WITHOUT_RESULT:
            return [self.constant(torch.zeros(())) for _ in eqn.outvars]
        return self._written(eqn, refs, where)

    def _written(self, eqn: Any, refs: list[Ref], where: Where) -> list[Ref]:
        name = eqn.primitive.name
        dtypes = tuple(held_dtype(variable.aval.dtype) for variable in eqn.outvars)
        alone = all(isinstance(ref, Literal) for ref in refs)
        kept = () if alone or name not in _TAKES_NUMBERS else range(name in _FIRST_IS_TENSOR, len(refs))
        refs = [ref if at in kept else self._as_constant(ref, variable)
                for at, (ref, variable) in enumerate(zip(refs, eqn.invars, strict=True))]  # fmt: skip
        run = self._operation(eqn, where, refs)
        if run is None:
            return [self.new() for _ in eqn.outvars]
        return self._step(name, run, refs, dtypes, where)

    def _step(
        self, name: str, run: Callable[..., Any], reads: Sequence[Ref], dtypes: tuple[torch.dtype | None, ...],
        where: Where,
    ) -> list[Ref]:  # fmt: skip
        made = [self.new() for _ in dtypes]
        file, line = where.line or ("<jax>", len(self.steps) + 1)
        path = self.places.path(where)
        for origins in (self.learned, self.external):
            if any(type(ref) is int and ref in origins for ref in reads):
                origins.update(made)
        self.steps.append(FlatStep(name, run, tuple(reads), tuple(made), dtypes, path, file, line, where.frames))
        return list(made)

    def _as_constant(self, ref: Ref, variable: Any) -> Ref:
        if not isinstance(ref, Literal):
            return ref
        return self.constant(torch.tensor(ref.value, dtype=held_dtype(variable.aval.dtype)))

    def _operation(self, eqn: Any, where: Where, refs: Sequence[Ref]) -> Callable[..., Any] | None:
        """Return what computes an equation, or None, and note it, if nobody reads it."""
        name, params = eqn.primitive.name, dict(eqn.params)
        avals = [variable.aval for variable in eqn.outvars]
        if name == "cond":
            return BranchOperation([self._body(branch, where) for branch in params["branches"]])
        if name == "while":
            test, body = (self._body(params[key], where) for key in ("cond_jaxpr", "body_jaxpr"))
            return WhileOperation(test, body, params["cond_nconsts"], params["body_nconsts"])
        if name == "scan":
            body, fixed, carried = self._body(params["jaxpr"], where), params["num_consts"], params["num_carry"]
            return ScanOperation(body, fixed, carried, params["length"], params["reverse"], avals)
        keys = any(map(_is_key_variable, (*eqn.invars, *eqn.outvars)))
        if name in BY_JAX or (keys and name in JAX_OPERATIONS):
            return JaxOperation(eqn.primitive, params, [variable.aval for variable in eqn.invars], avals)
        unread = (
            name not in JAX_OPERATIONS
            or (name == "conv_general_dilated" and params["batch_group_count"] != 1)
            or (name == "ragged_dot_general" and not reads_ragged(params["ragged_dot_dimension_numbers"]))
            or (name.startswith("reduce_window") and not plain_windows(params))
            or (name == "reduce_precision" and (params["exponent_bits"], params["mantissa_bits"])
                not in ((5, 10), (8, 7), (8, 23)))
        )  # fmt: skip
        if unread:
            self._unread(name, where)
            return None
        if name in ("bitcast_convert_type", "shift_right_logical"):
            params["source"] = np.dtype(eqn.invars[0].aval.dtype).name
        if name == "gather":
            params["embeds"] = refs[0] in self.learned and refs[1] in self.external
        operation = partial(JAX_OPERATIONS[name], **params)
        masks = [mask_of(aval.dtype) for aval in avals]
        if len(masks) == 1 and masks[0] is not None:
            return UnsignedOperation(operation, masks[0], tuple(avals[0].shape))
        return ShapedOperation(operation, tuple(avals[0].shape)) if len(avals) == 1 else operation

    def _unread(self, name: str, where: Where) -> None:
        file, line = where.line or ("", 0)
        self.unread.setdefault(name, f"{file}:{line}" if file else "")

    # -- loops ---------------------------------------------------------------------------------------------------------

    def _body(self, closed: Any, where: Where) -> FlatProgram:
        """Return the body of a loop or branch as a program of its own, whose constants lie in it."""
        inner = JaxprWalk(self.places, [None] * len(closed.jaxpr.invars), count=self.count)
        refs = [inner.new() for _ in closed.jaxpr.invars]
        outputs = inner.jaxpr(closed.jaxpr, closed.consts, refs, where)
        pairs = zip(outputs, closed.jaxpr.outvars, strict=True)
        outputs = [inner._as_constant(inner._whole(ref, where), variable) for ref, variable in pairs]
        self.unread |= inner.unread
        return FlatProgram(tuple(refs), {}, inner.constants, tuple(inner.steps), tuple(outputs))

    def _whole(self, ref: Ref, where: Where) -> Ref:
        """Return a reference; rows of a scan, or the layers of a parameter, are stacked."""
        if not isinstance(ref, list):
            return ref
        rows = [self._whole(row, where) for row in ref]
        return self._step("stack", stack_rows, rows, (None,), where)[0]

    def _unrolled(self, eqn: Any, refs: list[Ref], where: Where) -> list[Ref]:
        params, home = eqn.params, self.homes.get((*where.calls, id(eqn)))
        fixed, carried = params["num_consts"], params["num_carry"]
        body, length = params["jaxpr"], params["length"]
        state, xs = refs[fixed : fixed + carried], refs[fixed + carried :]
        rows: list[list[Ref]] = [[]] * length
        for n in reversed(range(length)) if params["reverse"] else range(length):
            here = replace(where, calls=(*where.calls, id(eqn)))
            if home is not None:
                layers = (*where.layers, (home, n))
                here = replace(here, prefix=layer_path(home, layers), layers=layers, depth=len(where.frames) + 1)
            inner = [x[n] if isinstance(x, list) else self._row(x, n, aval, here) for x, aval in
                     zip(xs, [v.aval for v in eqn.invars[fixed + carried :]], strict=True)]  # fmt: skip
            made = self.jaxpr(body.jaxpr, body.consts, [*refs[:fixed], *state, *inner], here)
            state, rows[n] = made[:carried], made[carried:]
        if not length:
            shapes = [v.aval for v in eqn.outvars[carried:]]
            return [*state, *(self.constant(torch.zeros(a.shape, dtype=held_dtype(a.dtype))) for a in shapes)]
        return [*state, *([row[at] for row in rows] for at in range(len(rows[0])))]

    def _row(self, ref: Ref, n: int, aval: Any, where: Where) -> Ref:
        return self._step("row", partial(take_row, n), [ref], (held_dtype(aval.dtype),), where)[0]


def _positional(params: Mapping[str, Any]) -> bool:
    """Return whether a collective is one over axes of the array: of a mapped axis, `vmap(..., axis_name="i")`."""
    axes = params.get("axes", ())
    return isinstance(axes, tuple) and any(isinstance(axis, int) for axis in axes)


def _unrolled_steps(params: Mapping[str, Any]) -> int:
    return int(params["length"]) * len(equations(params["jaxpr"].jaxpr))


def _hashable(variable: Any) -> bool:
    return not hasattr(variable, "val")  # a literal has a value


def _is_key_variable(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and is_key(dtype)


def walk_jaxpr(
    closed: Any, names: Sequence[str | None], places: Places
) -> tuple[FlatProgram, dict[str, tuple[str, tuple[int, ...]]]]:
    """Return a closed jaxpr as a program, and the parameter and the indices in it of each of the program's parameters.

    Args:
        closed: the jaxpr.
        names: name of the parameter of each of its invars; None for an input.
        places: finds where equations came from.

    Raises:
        ModelError: It has primitives that nobody reads.
    """
    jaxpr = closed.jaxpr
    made = JaxprWalk(places, names)
    homes = frozenset(name.partition(".")[0] for name in names if name is not None)
    places.learn(jaxpr, homes)
    made.find_layers(jaxpr, {variable: (at, 0) for at, variable in enumerate(jaxpr.invars)})
    refs = [made.new() if name is None else made.parameter(at) for at, name in enumerate(names)]
    inputs = tuple(ref for ref, name in zip(refs, names, strict=True) if name is None)
    made.external.update(inputs)
    outputs = made.jaxpr(jaxpr, closed.consts, refs, Where())
    outputs = [made._whole(ref, Where()) for ref in outputs]
    refuse_unread(made.unread, "JAX", jax().__version__, Message("frontends.hint.unread"))
    program = FlatProgram(inputs, made.parameters, made.constants, tuple(made.steps), tuple(outputs))
    return program, made.origins
