"""Walks a jaxpr and writes its equations as steps: calls are entered, scans unrolled, branches run when they are met.

    jit, custom_jvp, remat, ...    entered: their equations are steps like all others
    scan over parameters           unrolled; each turn is a module, "layers.0", with its own slice of the parameters
    any other scan                 unrolled, or run turn by turn if it has very many steps
    cond, while                    one step, which runs the branch or the body operation by operation

A primitive that nobody reads is noted with its line; `walk` raises one error that names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.errors import ModelError
from sqrtdk.frontends.jax.arrays import is_key, jax, mask_of, to_jax, to_torch, torch_dtype
from sqrtdk.frontends.jax.elementwise import ELEMENTWISE, SAME
from sqrtdk.frontends.jax.places import Places, Where, equations
from sqrtdk.frontends.jax.products import PRODUCTS, plain_windows, reads_ragged
from sqrtdk.frontends.jax.shapes import SHAPES
from sqrtdk.frontends.program import Literal, Numbers, Program, Step
from sqrtdk.messages import Message

OPERATIONS = ELEMENTWISE | SHAPES | PRODUCTS
# Calls, with the parameter that holds their jaxpr.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "call": "call_jaxpr",
    "remat": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "jaxpr",
    "shard_map": "jaxpr", "composite": "jaxpr", "custom_batching_call": "call",
}  # fmt: skip
# Operations on whole numbers and keys that JAX computes itself, exactly: their results have no rounding.
BY_JAX = frozenset({
    "random_seed", "random_bits", "random_split", "random_fold_in", "random_clone", "threefry2x32",
    "rng_bit_generator", "population_count", "clz", "nextafter",
})  # fmt: skip
_WITHOUT_RESULT = ("debug_callback", "debug_print", "after_all", "create_token")
# Operations that take Python numbers beside a tensor, as a trace reads them: 0.25 * x.
_TAKES_NUMBERS = frozenset(ELEMENTWISE) | {"pad", "dynamic_slice", "dynamic_update_slice", "cond", "while"}
_FIRST_IS_TENSOR = ("select_n", "pad", "dynamic_slice")
_MOST_STEPS = 2**15  # of a program whose loops are unrolled
_MOST_NAMED = 5  # primitives that an error names
Ref = Any  # a reference, a literal, or a list of references: a stacked parameter, one for each layer


@dataclass(slots=True)
class Walk:
    """The steps of one jaxpr, as they are written.

    Attributes:
        places: finds where equations came from.
        names: name of the parameter of each invar of the jaxpr; None for an input.
        split: by invar, the layers that a stacked parameter is split into: number and path, outermost scan first.
        homes: by scan, the path of its layers; "" for a scan over no parameters.
    """

    places: Places
    names: Sequence[str | None]
    split: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    homes: dict[int, str | None] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    origins: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    count: int = 0

    # -- parameters that scans split into layers -----------------------------------------------------------------------

    def find_layers(self, jaxpr: Any, known: Mapping[Any, tuple[int, int]]) -> None:
        """Find the scans over parameters. `known` has the invar of each variable, and how often it was split."""
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            if name == "scan":
                skip = params["num_consts"] + params["num_carry"]
                inner = params["jaxpr"].jaxpr
                xs = [(v, known.get(u) if _hashable(u) else None) for u, v in
                      zip(eqn.invars[skip:], inner.invars[skip:], strict=True)]  # fmt: skip
                mine = [(v, place) for v, place in xs if place is not None and self.names[place[0]] is not None]
                home = _common([str(self.names[at]) for _, (at, _) in mine]) if mine else None
                self.homes[id(eqn)] = home
                deeper = dict(self._known_in(inner.invars[:skip], eqn.invars[:skip], known))
                for v, (at, depth) in mine:
                    layers = self.split.setdefault(at, [])
                    if len(layers) == depth:
                        layers.append((params["length"], home or ""))
                    deeper[v] = at, depth + 1
                self.find_layers(inner, deeper)
            elif name in CALLS:
                inner = getattr(params[CALLS[name]], "jaxpr", params[CALLS[name]])
                self.find_layers(inner, dict(self._known_in(inner.invars, eqn.invars, known)))

    def _known_in(self, inner: Any, outer: Any, known: Mapping[Any, tuple[int, int]]) -> Any:
        return ((v, known[u]) for v, u in zip(inner, outer, strict=True) if _hashable(u) and u in known)

    def parameter(self, at: int) -> Ref:
        """Return the reference of a parameter, or nested lists of references of its layers."""

        def refs(layers: Sequence[tuple[int, str]], numbers: tuple[tuple[str, int], ...]) -> Ref:
            if not layers:
                made = self.new()
                name = numbered(str(self.names[at]), numbers)
                self.parameters[made] = name
                self.origins[name] = str(self.names[at]), tuple(n for _, n in numbers)
                return made
            (length, home), *inner = layers
            return [refs(inner, (*numbers, (home, n))) for n in range(length)]

        return refs(self.split.get(at, []), ())

    # -- equations -----------------------------------------------------------------------------------------------------

    def new(self) -> int:
        """Return a reference that nothing has yet."""
        self.count += 1
        return self.count

    def constant(self, value: Any) -> int:
        """Return the reference of a constant."""
        made = self.new()
        self.constants[made] = value if isinstance(value, Tensor) else to_torch(value)
        return made

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Ref], call: Where, name: str = "") -> list[Ref]:
        """Write the equations of a jaxpr. Returns references of its outputs."""
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
            known |= zip(eqn.outvars, self.equation(eqn, refs, where), strict=True)
        return [read(variable) for variable in jaxpr.outvars]

    def equation(self, eqn: Any, refs: list[Ref], where: Where) -> list[Ref]:
        """Write one equation. Returns references of its results."""
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map" and params["mesh"].size != 1:
            self._unread(f"shard_map over {params['mesh'].size} devices", where)
        if name in CALLS:
            inner = params[CALLS[name]]
            consts = getattr(inner, "consts", ())
            return self.jaxpr(getattr(inner, "jaxpr", inner), consts, refs, where, str(params.get("name", "")))
        if name == "scan" and params["length"] * len(equations(params["jaxpr"].jaxpr)) <= _MOST_STEPS - len(self.steps):
            return self._unrolled(eqn, refs, where)
        refs = [self._whole(ref, where) for ref in refs]
        if name in SAME:
            return refs
        if name in _WITHOUT_RESULT:
            return [self.constant(torch.zeros(())) for _ in eqn.outvars]
        return self._written(eqn, refs, where)

    def _written(self, eqn: Any, refs: list[Ref], where: Where) -> list[Ref]:
        name = eqn.primitive.name
        made = [self.new() for _ in eqn.outvars]
        dtypes = tuple(torch_dtype(variable.aval.dtype) for variable in eqn.outvars)
        alone = all(isinstance(ref, Literal) for ref in refs)
        kept = () if alone or name not in _TAKES_NUMBERS else range(name in _FIRST_IS_TENSOR, len(refs))
        refs = [ref if at in kept else self._as_constant(ref, variable)
                for at, (ref, variable) in enumerate(zip(refs, eqn.invars, strict=True))]  # fmt: skip
        run = self._operation(eqn, where)
        if run is not None:
            frame = where.frames[-1] if where.frames else None
            file, line = ("<jax>", len(self.steps) + 1) if frame is None else (frame.file, frame.line)
            path = self.places.path(where)
            self.steps.append(Step(name, run, tuple(refs), tuple(made), dtypes, path, file, line, where.frames))
        return list(made)

    def _as_constant(self, ref: Ref, variable: Any) -> Ref:
        if not isinstance(ref, Literal):
            return ref
        return self.constant(torch.tensor(ref.value, dtype=torch_dtype(variable.aval.dtype)))

    def _operation(self, eqn: Any, where: Where) -> Callable[..., Any] | None:
        """Return what computes an equation, or None, and note it, if nobody reads it."""
        name, params = eqn.primitive.name, dict(eqn.params)
        avals = [variable.aval for variable in eqn.outvars]
        if name == "cond":
            return _Cond([self._body(branch, where) for branch in params["branches"]])
        if name == "while":
            counts = params["cond_nconsts"], params["body_nconsts"]
            return _While(self._body(params["cond_jaxpr"], where), self._body(params["body_jaxpr"], where), *counts)
        if name == "scan":
            counts = params["num_consts"], params["num_carry"], params["length"]
            return _Scan(self._body(params["jaxpr"], where), *counts, params["reverse"], avals)
        keys = any(map(_is_key_variable, (*eqn.invars, *eqn.outvars)))
        if name in BY_JAX or (keys and name in OPERATIONS):
            return _ByJax(eqn.primitive, params, [variable.aval for variable in eqn.invars], avals)
        unread = (
            name not in OPERATIONS
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
        operation = partial(OPERATIONS[name], **params)
        masks = [mask_of(aval.dtype) for aval in avals]
        if any(masks) and name not in ("bitcast_convert_type",):
            return _Masked(operation, masks[0] or 0, tuple(avals[0].shape))
        if any(masks):
            return _Masked(operation, masks[0] or 0, None)
        return _Shaped(operation, tuple(avals[0].shape)) if len(avals) == 1 else operation

    def _unread(self, name: str, where: Where) -> None:
        frame = where.frames[-1] if where.frames else None
        self.unread.setdefault(name, "" if frame is None else f"{frame.file}:{frame.line}")

    # -- loops ---------------------------------------------------------------------------------------------------------

    def _body(self, closed: Any, where: Where) -> Program:
        """Return the body of a loop or branch as a program of its own, whose constants lie in it."""
        inner = Walk(self.places, [None] * len(closed.jaxpr.invars), count=self.count)
        refs = [inner.new() for _ in closed.jaxpr.invars]
        outputs = inner.jaxpr(closed.jaxpr, closed.consts, refs, where)
        outputs = [inner._whole(ref, where) for ref in outputs]
        self.unread |= inner.unread
        return Program(tuple(refs), {}, inner.constants, tuple(inner.steps), tuple(outputs))

    def _whole(self, ref: Ref, where: Where) -> Ref:
        """Return a reference; rows of a scan, or the layers of a parameter, are stacked."""
        if not isinstance(ref, list):
            return ref
        rows = [self._whole(row, where) for row in ref]
        made = self.new()
        frame = where.frames[-1] if where.frames else None
        file, line = ("<jax>", len(self.steps) + 1) if frame is None else (frame.file, frame.line)
        reads = tuple(rows)
        self.steps.append(Step("stack", _stacked, reads, (made,), (None,), self.places.path(where), file, line, where.frames))
        return made

    def _unrolled(self, eqn: Any, refs: list[Ref], where: Where) -> list[Ref]:
        params, home = eqn.params, self.homes.get(id(eqn))
        fixed, carried = params["num_consts"], params["num_carry"]
        body, length = params["jaxpr"], params["length"]
        state, xs = refs[fixed : fixed + carried], refs[fixed + carried :]
        rows: list[list[Ref]] = [[]] * length
        for n in reversed(range(length)) if params["reverse"] else range(length):
            here = where
            if home is not None:
                layers = (*where.layers, (home, n))
                here = replace(where, prefix=numbered_path(home, layers), layers=layers, depth=len(where.frames) + 1)
            inner = [x[n] if isinstance(x, list) else self._row(x, n, aval, here) for x, aval in
                     zip(xs, [v.aval for v in eqn.invars[fixed + carried :]], strict=True)]  # fmt: skip
            made = self.jaxpr(body.jaxpr, body.consts, [*refs[:fixed], *state, *inner], here)
            state, rows[n] = made[:carried], made[carried:]
        if not length:
            shapes = [v.aval for v in eqn.outvars[carried:]]
            return [*state, *(self.constant(torch.zeros(a.shape, dtype=torch_dtype(a.dtype))) for a in shapes)]
        return [*state, *([row[at] for row in rows] for at in range(len(rows[0])))]

    def _row(self, ref: Ref, n: int, aval: Any, where: Where) -> Ref:
        made = self.new()
        frame = where.frames[-1] if where.frames else None
        file, line = ("<jax>", len(self.steps) + 1) if frame is None else (frame.file, frame.line)
        take = partial(_taken, n)
        dtype = torch_dtype(aval.dtype)
        self.steps.append(Step("row", take, (ref,), (made,), (dtype,), self.places.path(where), file, line, where.frames))
        return made


def _stacked(numbers: Numbers, *rows: Any) -> Tensor:
    return torch.stack([row if isinstance(row, Tensor) else torch.tensor(row) for row in rows])


def _taken(n: int, numbers: Numbers, x: Tensor) -> Tensor:
    return x[n]


def _hashable(variable: Any) -> bool:
    return not hasattr(variable, "val")  # a literal has a value


def _is_key_variable(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and is_key(dtype)


def _common(names: Sequence[str]) -> str:
    """Return the path of the module that holds all parameters of these names."""
    parts = [name.split(".")[:-1] for name in names]
    same = []
    for here in zip(*parts, strict=False):
        if len(set(here)) > 1:
            break
        same.append(here[0])
    return ".".join(same)


def numbered(name: str, numbers: Sequence[tuple[str, int]]) -> str:
    """Return the name of a parameter of one layer.

    Example:
        >>> numbered("layers.attn.wq", [("layers", 3)]), numbered("wq", [("", 3)])
        ('layers.3.attn.wq', '3.wq')
        >>> numbered("groups.layers.w", [("groups", 1), ("groups.layers", 2)])
        'groups.1.layers.2.w'
    """
    parts = name.split(".")
    for home, n in reversed(numbers):
        parts.insert(home.count(".") + 1 if home else 0, str(n))
    return ".".join(parts)


def numbered_path(home: str, numbers: Sequence[tuple[str, int]]) -> str:
    """Return the path of one layer of a scan inside others.

    Example:
        >>> numbered_path("groups.layers", [("groups", 1), ("groups.layers", 2)]), numbered_path("", [("", 2)])
        ('groups.1.layers.2', '2')
    """
    return numbered(f"{home}.", numbers).strip(".") if home else ".".join(str(n) for _, n in numbers)


# -- operations that hold other programs, or JAX's own -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Shaped:
    """An operation whose result has a shape that torch's may broadcast to: a number, where JAX has an array of one."""

    operation: Callable[..., Any]
    shape: tuple[int, ...]

    def __call__(self, numbers: Numbers, *values: Any) -> Tensor:
        made: Tensor = self.operation(numbers, *values)
        return made if made.shape == self.shape else made.expand(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Masked:
    """An operation on unsigned integers, whose result is cut to their bits."""

    operation: Callable[..., Any]
    most: int
    shape: tuple[int, ...] | None

    def __call__(self, numbers: Numbers, *values: Any) -> Tensor:
        made = self.operation(numbers, *values)
        made = made.to(torch.int64 if self.most > 2**16 else torch.int32) & self.most
        return made if self.shape is None or made.shape == self.shape else made.expand(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class _ByJax:
    """An operation on whole numbers or keys that JAX computes."""

    primitive: Any
    params: Mapping[str, Any]
    takes: Sequence[Any]
    gives: Sequence[Any]

    def __call__(self, numbers: Numbers, *values: Any) -> Any:
        if any(isinstance(value, Tensor) and value.is_meta for value in values):
            made = [torch.empty(aval.shape, dtype=torch_dtype(aval.dtype), device="meta") for aval in self.gives]
        else:
            arrays = [to_jax(value, aval) for value, aval in zip(values, self.takes, strict=True)]
            results = self.primitive.bind(*arrays, **self.params)
            made = list(map(to_torch, results if self.primitive.multiple_results else [results]))
        return made if len(made) > 1 else made[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Cond:
    branches: Sequence[Program]

    def __call__(self, numbers: Numbers, which: Any, *values: Any) -> list[Any]:
        at = min(max(int(which), 0), len(self.branches) - 1)
        return _tensors(self.branches[at].inline(numbers, *values))


@dataclass(frozen=True, slots=True, eq=False)
class _While:
    test: Program
    body: Program
    test_fixed: int
    body_fixed: int

    def __call__(self, numbers: Numbers, *values: Any) -> list[Any]:
        first, second = self.test_fixed, self.test_fixed + self.body_fixed
        state = list(values[second:])
        while bool(self.test.inline(numbers, *values[:first], *state)[0]):
            state = self.body.inline(numbers, *values[first:second], *state)
        return _tensors(state)


@dataclass(frozen=True, slots=True, eq=False)
class _Scan:
    """A scan of very many steps, run turn by turn."""

    body: Program
    fixed: int
    carried: int
    length: int
    reverse: bool
    gives: Sequence[Any]

    def __call__(self, numbers: Numbers, *values: Any) -> list[Any]:
        state, xs = list(values[self.fixed : self.fixed + self.carried]), values[self.fixed + self.carried :]
        rows: list[list[Any]] = [[]] * self.length
        for n in reversed(range(self.length)) if self.reverse else range(self.length):
            made = self.body.inline(numbers, *values[: self.fixed], *state, *(x[n] for x in xs))
            state, rows[n] = made[: self.carried], made[self.carried :]
        return _tensors([*state, *(_stacked(numbers, *column) for column in zip(*rows, strict=True))])


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]


def walk(
    closed: Any, names: Sequence[str | None], places: Places
) -> tuple[Program, dict[str, tuple[str, tuple[int, ...]]]]:
    """Return a closed jaxpr as a program, and the parameter and the indices in it of each of the program's parameters.

    Args:
        closed: the jaxpr.
        names: name of the parameter of each of its invars; None for an input.
        places: finds where equations came from.

    Raises:
        ModelError: It has primitives that nobody reads.
    """
    jaxpr = closed.jaxpr
    made = Walk(places, names)
    homes = frozenset(name.partition(".")[0] for name in names if name is not None)
    places.learn(jaxpr, homes)
    made.find_layers(jaxpr, {variable: (at, 0) for at, variable in enumerate(jaxpr.invars)})
    refs = [made.new() if name is None else made.parameter(at) for at, name in enumerate(names)]
    inputs = tuple(ref for ref, name in zip(refs, names, strict=True) if name is None)
    outputs = made.jaxpr(jaxpr, closed.consts, refs, Where())
    outputs = [made._whole(ref, Where()) for ref in outputs]
    if made.unread:
        named = [f"{name} ({line})" if line else name for name, line in [*made.unread.items()][:_MOST_NAMED]]
        more = len(made.unread) - len(named)
        raise ModelError(
            Message("frontends.unread", names=", ".join(named) + (f" (+{more})" if more else ""), version=jax().__version__),
            hint=Message("frontends.hint.unread"),
        )
    program = Program(inputs, made.parameters, made.constants, tuple(made.steps), tuple(outputs))
    return program, made.origins
