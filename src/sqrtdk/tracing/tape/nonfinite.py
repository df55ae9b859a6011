"""Finds the first number of a run that is not finite: the operation that made it, its source line, and its cause.

Two kinds of events matter. The first is a NaN: from a NaN weight, a softmax over a row that sees no key, inf - inf or
0 * inf. The second is a finite number beyond its dtype's range, 65504 in float16; it becomes infinite, and NaN a few
operations later. An intended infinity (`masked_fill(hidden, -inf)`, `log(0)`) is neither. A NaN that the code puts
back, as `weights.masked_fill(blind, 0.0)` does, is not the cause of a later one: each NaN, and each infinity that is
not intended, is followed from tensor to tensor, and the one that reaches the output counts. A run is watched only after
it is known to have gone wrong, because the watch reads the numbers of every operation.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sqrtdk._modes import EagerMode, eager_compiler
from sqrtdk.errors import SqrtdkError
from sqrtdk.tracing.tape import places
from sqrtdk.tracing.tape.ops import CONTRACTIONS, base_name
from sqrtdk.tracing.tape.places import Sites
from sqrtdk.tracing.tape.stance import fast_path_off
from sqrtdk.tracing.tape.travel import tensors_in

# Outputs of these hold whatever the memory held before: `torch.empty` for a cache that is filled later.
_UNWRITTEN = ("empty", "new_empty", "resize")
_SOFTMAX_NAMES = ("_softmax", "_safe_softmax", "softmax")
_EACH_NUMBER = ("add", "exp", "mul", "sub")
_CONVERSIONS = ("_to_copy", "copy")


class TensorOwner(NamedTuple):
    """What holds a tensor that exists before the run.

    Attributes:
        kind: "parameter", "buffer" or "input".
        name: its name in the model, or among the inputs.
    """

    kind: Literal["parameter", "buffer", "input"]
    name: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The operation at which the numbers of a run stop being finite.

    Kinds: "held", a tensor of the model or its input is not finite; "overflow", finite numbers exceed the dtype's
    range; "blind", a softmax over rows whose logits are all -inf; "infinite", arithmetic on infinities such as
    inf - inf; "undefined", arithmetic on finite numbers such as 0 / 0.
    """

    site: str  # path of the module that ran
    op: str  # the operation's name in aten, "bmm"
    at: str | None  # file and line, "myport.py:14"; None if they are unknown
    kind: str
    owner: TensorOwner | None = None  # "held": what holds the tensor
    rows: int = 0  # "blind": number of rows without a logit above -inf; "infinite", "undefined": rows of NaN alone
    of: int = 0  # number of all rows; 0 if some rows hold both NaN and numbers
    columns: int = 0  # length of a row
    dtype: str = ""  # "overflow": the dtype, "float16"
    size: float | None = None  # "overflow": the largest number in float64; None if it could not be computed

    @property
    def contracts(self) -> bool:
        """Whether the operation is a matrix product, as q . k is."""
        return self.op in CONTRACTIONS


def find_origin(model: nn.Module, run: Callable[[], object], held: Mapping[TensorOwner, Tensor]) -> Origin | None:
    """Runs the model once more and checks the numbers of every operation.

    Args:
        model: the model, for the paths of its modules.
        run: a forward pass that returns tensors, in lists and tuples: of its NaN and infinities, those in them count.
        held: the tensors that exist before the run.

    Returns:
        The origin, or None if every operation gives finite numbers, or infinities that are intended.

    Raises:
        SqrtdkError: `run` raises it before any number is NaN.
    """
    sites = Sites(model)
    watch = _Watch(sites, held)
    try:
        with fast_path_off(), sites, eager_compiler(), watch:
            returned = run()
    except SqrtdkError:
        if not watch.origins:
            raise
        returned = None
    return watch.origin_of(returned)


class _Watch(EagerMode):
    """Checks the outputs of each operation.

    Attributes:
        origins: where a NaN was made of numbers, or an infinity without intent, in the order of the run.
    """

    supports_higher_order_operators = True

    def __init__(self, sites: Sites, held: Mapping[TensorOwner, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins: list[Origin] = []
        self._sites = sites
        self._held = {_memory(tensor): owner for owner, tensor in held.items() if _memory(tensor)}
        self._unwritten: set[int] = set()
        self._carried: dict[int, int] = {}  # memory of a tensor with NaN or infinity -> place in `origins`
        self._last = 0  # that of the last operation that gave NaN
        self._thread = threading.get_ident()

    def origin_of(self, returned: object) -> Origin | None:
        """Return the first origin of the NaN that a run returned, else of its infinities, else that of its last NaN.

        None if the infinities that it returned are intended. A NaN that was put back is then no cause either.
        """
        if not self.origins:
            return None
        with suppress(Exception):
            nan, infinite = self._entering(returned)
            if nan or infinite:
                return self.origins[min(nan or infinite)]
            if any(bool(x.isinf().any()) for x in _floats(returned)):
                return None
        return self.origins[self._last]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread or not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        given, entering = (*args, *kwargs.values()), (list[int](), list[int]())
        before = self._sick(given) if func._schema.is_mutable else None
        if self.origins:
            with suppress(Exception):
                entering = self._entering(given)  # before the operation, which may write into its operands
        output = func(*args, **kwargs)
        with suppress(Exception):  # a tensor subclass may lack an operation of the check: it is then skipped
            self._look(func, args, kwargs, output, before, entering)
        return output

    def _entering(self, operands: Any) -> tuple[list[int], list[int]]:
        """Return the origins, as places in `origins`, of the NaN and of the infinities in tensors that the run made.

        Infinities of no known origin are intended ones, as those of a mask.
        """
        nan, infinite = list[int](), list[int]()
        for x in _floats(operands):
            if (memory := _memory(x)) in self._held:
                continue
            written = memory not in self._unwritten
            if written and bool(x.isnan().any()):
                nan.append(self._carried.get(memory, self._last))
            elif (not written or memory in self._carried) and bool(x.isinf().any()):
                # What is written into an `empty` tensor is not followed: the first overflow may be in it.
                overflows = (i for i, origin in enumerate(self.origins) if origin.kind == "overflow")
                place = self._carried[memory] if written else next(overflows, None)
                infinite += [] if place is None else [place]
        return nan, infinite

    def _look(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        before: TensorOwner | None,
        entering: tuple[list[int], list[int]],
    ) -> None:
        name, results = base_name(func), list(_floats(output))
        if name.startswith(_UNWRITTEN):
            self._unwritten.update(map(_memory, results))
            return
        if _is_view(func):
            if name == "lift_fresh":  # torch.tensor(-inf), where another tensor lay
                self._carried.pop(_memory(output), None)
            return
        # A write into a part of an `empty` tensor leaves the rest of it unwritten. A new result is written throughout,
        # and may lie at an address that an unwritten tensor had before.
        if func._schema.is_mutable:
            results = [x for x in results if _memory(x) not in self._unwritten]
        else:
            self._unwritten.difference_update(map(_memory, results))
        for tensor in results:
            if not func._schema.is_mutable or _is_whole(tensor):
                self._carried.pop(_memory(tensor), None)  # of what lay here before
        if all(bool(x.isfinite().all()) for x in results):
            return
        (nan, infinite), spoiled = entering, [x for x in results if bool(x.isnan().any())]
        causes = nan if nan and spoiled else infinite
        if not causes and self._made(func, name, args, kwargs, results, before):
            causes = [len(self.origins) - 1]
        if not causes:
            return
        for tensor in results:
            if not bool(tensor.isfinite().all()):
                self._carried[_memory(tensor)] = min(causes)
        self._last = min(causes) if spoiled else self._last

    def _made(
        self, func: Any, name: str, args: Any, kwargs: Any, results: list[Tensor], before: TensorOwner | None
    ) -> bool:
        """Adds the origin of results that are not finite, and returns whether there is one."""
        count = len(self.origins)
        given = (*args, *kwargs.values())
        operands = list(_floats(given))
        asked = any(isinstance(x, float) and math.isinf(x) for x in given)  # `(1 - mask) * float("-inf")`
        infinite = asked or any(bool(x.isinf().any()) for x in operands)
        # -inf is an overflow only in a matrix product: elsewhere masks make it on purpose, `mask.log()`.
        outgrew = name in CONTRACTIONS or any(bool(x.isposinf().any()) for x in results)
        origin = Origin(self._sites.here(), name, places.place_text(places.current_place()), "undefined")
        if sick := before or self._sick(operands):
            self.origins.append(replace(origin, kind="held", owner=sick))
        elif any(bool(x.isnan().any()) for x in results):
            self.origins.append(self._of_nan(origin, args, results, infinite=infinite))
        elif operands and (outgrew if not infinite else not asked and _outgrows_beside(name, operands, results[0])):
            kind, size = str(results[0].dtype).removeprefix("torch."), _size(func, name, args, kwargs)
            self.origins.append(replace(origin, kind="overflow", dtype=kind, size=size))
        return len(self.origins) > count

    def _of_nan(self, origin: Origin, args: Any, results: list[Tensor], *, infinite: bool) -> Origin:
        if origin.op in _SOFTMAX_NAMES:
            hidden = (args[0] == -torch.inf).all(args[1])
            if bool(hidden.any()):
                return replace(origin, kind="blind", rows=int(hidden.sum()), of=hidden.numel())
        nan = results[0].isnan()
        nan = nan if nan.dim() else nan[None]
        every = nan.all(-1)
        of = every.numel() if torch.equal(every, nan.any(-1)) else 0
        kind = "infinite" if infinite else origin.kind
        return replace(origin, kind=kind, rows=int(every.sum()), of=of, columns=nan.shape[-1])

    def _sick(self, operands: Any) -> TensorOwner | None:
        """Return the owner of an operand that is not finite, or None; -inf is a fault only in a parameter."""
        for tensor in _floats(operands):
            owner = self._held.get(_memory(tensor))
            if owner is None:
                continue
            sick = ~tensor.isfinite() if owner.kind == "parameter" else tensor.isnan() | tensor.isposinf()
            if bool(sick.any()):
                return owner
        return None


def _size(func: Any, name: str, args: Any, kwargs: Any) -> float | None:
    """Return the largest absolute number of an operation, computed again in float64, or None if that fails."""
    with suppress(Exception):
        if name in _CONVERSIONS:
            return float(args[-1 if name == "copy" else 0].double().abs().amax())
        wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        size = float(func(*wide, **kwargs).abs().amax())
        return size if size < torch.inf else None
    return None


def _outgrows_beside(name: str, operands: list[Tensor], result: Tensor) -> bool:
    """Whether finite numbers of an operation on each number overflow beside infinities: y in (-inf, y) * 3e4."""
    if name not in _EACH_NUMBER:
        return False
    grown = result.isposinf()
    for x in operands:
        grown = grown & x.isfinite()
    return bool(grown.any())


def _floats(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among values and in their lists."""
    return (x for x in tensors_in([values]) if x.is_floating_point() and not x.is_meta and not x.is_nested)


def _is_view(func: Any) -> bool:
    """Whether an operation returns views of its argument and no new numbers."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor fills its storage, so that nothing else lies in it."""
    with suppress(Exception):
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return False


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or 0 if it is unknown (a meta tensor)."""
    with suppress(Exception):
        return int(tensor.untyped_storage().data_ptr())
    return 0
