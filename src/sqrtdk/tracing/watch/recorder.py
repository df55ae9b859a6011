"""The recorder: a dispatch mode that sees every aten operation, runs it unchanged, and grows the lineage graph.

The `store` keeps one node for every tensor, the `classifier` says what each is. When softmax weights meet a value
product, or a fused attention kernel runs, the listener is told and reads the formula off the graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sqrtdk._modes import EagerMode
from sqrtdk.errors import kind_and_text
from sqrtdk.tracing.watch import ops, places
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import Online, SoftmaxEntry, Weighing
from sqrtdk.tracing.watch.places import Place, Sites
from sqrtdk.tracing.watch.store import Store


@dataclass(slots=True)
class KernelCall:
    """A call of an attention that is one operation.

    Attributes:
        op: its whole name, "aten::_scaled_dot_product_flash_attention_for_cpu".
        arguments: by their names in the operator's schema.
        nodes: of those that are tensors.
        output: its first result.
        lse: log of the sums of exponentials, (B, H, L), where it gave them.
        site: module path.
        place: where in the code.
    """

    op: str
    arguments: dict[str, Any]
    nodes: dict[str, Node]
    output: Tensor
    site: str
    place: Place | None = None
    lse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Unweighted:
    """Logits that met values without a softmax: their node and values."""

    node: Node
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Operands:
    """The activations among the operands of an operation whose computation is not seen, by their names."""

    name: str
    nodes: dict[str, Node]


class Missed(Protocol):
    """Who is told what can't be followed."""

    def __call__(self, site: str, reason: str, seen: Unweighted | Operands | None = None) -> None:
        """Note the site, why it can't be followed, and what was seen of it."""


@dataclass(slots=True)
class Listener:
    """Who is told: of an eager attention that is complete, of a kernel that ran, and of what could not be seen.

    `unsoftened` is told of logits that met values without a softmax, and their site; `ended` of a softmax whose weights
    are gone.
    """

    eager: Callable[[Weighing, Tensor, Tensor], None]
    kernel: Callable[[KernelCall], None]
    missed: Missed
    enlarge: Callable[[str], float | None]
    unsoftened: Callable[[str, Unweighted], None]
    online: Callable[[Online], None]
    ended: Callable[[Weighing], None] | None = None


@dataclass(slots=True)
class Scene:
    """A trace while it runs.

    Attributes:
        store: the nodes.
        sites: where in the model an operation runs.
        listener: who is told.
        products: note the largest |q . k|.
        flex: what runs is FlexAttention's own code.
        entries: every softmax so far.
        exponentials: every exponential of logits that met values so far.
        online: those that are divided by their sum, and not told yet.
        held: how many logits exponentials hold.
        keep: keep the values of q, k and v at every step, and what projections multiplied.
    """

    store: Store
    sites: Sites
    listener: Listener
    products: bool
    flex: bool = False
    entries: list[SoftmaxEntry] = field(default_factory=list)
    exponentials: list[SoftmaxEntry] = field(default_factory=list)
    online: list[Online] = field(default_factory=list)
    held: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """One output of an operation: its node, which is being filled in, its values, and the operands by position."""

    node: Node
    tensor: Tensor
    tensors: dict[int, Tensor]


_FLEX = "flex_attention"
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_JAGGED = "NestedTensor"
_SHARDED = "DTensor"
_RING = "ran on sequences that are sharded over ranks (torch's context_parallel), which is not followed"
_MULTIPLYING = frozenset({"bmm", "baddbmm", "matmul"})  # q and k; "matmul" of nested tensors alone is no composite
_KNOWN = ("aten", "prims", "prim")


class Classifying(Protocol):
    """Who says what each tensor is."""

    def note(self, func: Any, name: str, args: Any, kwargs: Any, output: Any, turned: Mapping[int | None, int]) -> None:
        """Make the nodes of what `func` gave for `args`; `turned` are outputs that rotate an argument."""

    def rotations(self, args: Any, output: Any) -> Mapping[int | None, int]:
        """Which outputs of an operation that is not seen are rotations of which argument."""

    def is_product(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether a contraction of the two is a product of queries and keys."""

    def may_attend(self, name: str, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether an operation that is not seen may be an attention."""


class _Reading(threading.local):
    now = False


_reading = _Reading()


@contextmanager
def unseen() -> Iterator[None]:
    """A block of a trace's own computing, which no other trace of this thread takes for the model's."""
    before, _reading.now = _reading.now, True
    try:
        yield
    finally:
        _reading.now = before


class Recorder(EagerMode):
    """Runs every operation as it is and notes where its output came from."""

    supports_higher_order_operators = True

    def __init__(self, scene: Scene, classifier: Classifying, kernels: Mapping[str, str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scene = scene
        self.store, self.sites, self.listener = scene.store, scene.sites, scene.listener
        self.classifier = classifier
        self._kernels = kernels
        self.sites.entering = self.store.forget_inputs
        self._thread = threading.get_ident()
        self._again = False  # it sees what a backward pass computes again, and nothing else
        self._composite: dict[Any, bool] = {}

    def __enter__(self) -> Recorder:
        self._thread = threading.get_ident()
        self._again = torch._C._current_graph_task_id() != -1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    # -- running ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        again = torch._C._current_graph_task_id() != -1
        if threading.get_ident() != self._thread or again is not self._again or _reading.now:
            return func(*args, **kwargs)
        if self.store.asked is not None:
            self._guard(self.store.asked.attach)
        if not hasattr(func, "_schema"):
            return self._higher_order(func, args, kwargs)
        name = _base_name(func)
        kinds = {kind.__name__ for kind in types}
        if _JAGGED in kinds or (_SHARDED in kinds and not self._is_ring(func, args)):
            for arg in (*args, *kwargs.values()) if _SHARDED in kinds else ():
                if isinstance(arg, torch.nn.Parameter):
                    self._guard(functools.partial(self.store.shard, arg))
            return NotImplemented  # what it does with its values is seen
        if self._is_foreign(func, name, types):
            self._guard(lambda: self.store.lose((*args, *kwargs.values())))
            return func(*args, **kwargs)
        if func._schema.name in self._kernels:
            return self._run_kernel(func, name, args, kwargs)
        if self._is_composite(func) and not _has_nested(args):  # decompositions need sizes
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._run(func, name, args, kwargs)

    def _is_foreign(self, func: Any, name: str, types: Any) -> bool:
        """Whether its tensors are of a kind that is not followed; an attention among them is missed."""
        subclass = next((t for t in types if t not in _PLAIN), None)
        if subclass is not None and (name in ops.SOFTMAX or func._schema.name in self._kernels):
            reason = _RING if subclass.__name__ == _SHARDED else f"ran on {subclass.__name__}, which is not followed"
            self.listener.missed(self.sites.here(), f"{name} {reason}")
        return subclass is not None

    def _is_ring(self, func: Any, args: Any) -> bool:
        """Whether it is an attention of sequences of which each rank has a part: several kernels a rank, in turn."""
        if func._schema.name not in self._kernels:
            return False
        placements = getattr(args[0] if args else None, "placements", ())
        return any(placement.is_shard(args[0].dim() - 2) for placement in placements)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        written = _written(func, args, kwargs)
        if written:
            self._guard(lambda: self.store.save_before_write(written))
        enlarge = name in _MULTIPLYING and not self.scene.flex
        output = func(*(self._enlarged(name, args) if enlarge else args), **kwargs)
        self._guard(lambda: self._note(func, name, args, kwargs, output, written))
        return output

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, output: Any, written: Any) -> None:
        foreign = func.namespace not in _KNOWN
        turned = self.classifier.rotations(args, output) if foreign else {}
        if foreign and not turned and self.classifier.may_attend(name, args, kwargs, output):
            reason = f"{func.namespace}::{name} is opaque: what it computes is not seen"
            self.listener.missed(self.sites.here(), reason, self._operands(func, name, args, kwargs))
        if foreign and output is None:  # it writes its result
            output = written
        self.classifier.note(func, name, args, kwargs, output, turned)
        self.store.note_write(written)

    def _operands(self, func: Any, name: str, args: Any, kwargs: Any) -> Operands:
        tensors = {key: value for key, value in _bind(func, args, kwargs).items() if _is_tensor(value)}
        nodes = {key: self.store.node(value) for key, value in tensors.items()}
        return Operands(name, {key: node for key, node in nodes.items() if node.act})

    def _guard(self, work: Callable[[], object]) -> None:
        """Bookkeeping that fails must not stop the model."""
        try:
            work()
        except Exception as error:
            self.listener.missed(self.sites.here(), f"the trace failed here: {kind_and_text(error)}")

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """FlexAttention run eagerly: its own dense implementation, seen operation by operation."""
        if func.name() != _FLEX:
            return func(*args, **kwargs)
        dense = func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
        self.scene.flex = True
        try:
            with self:
                return dense(*args, **kwargs)
        finally:
            self.scene.flex = False

    def _is_composite(self, func: Any) -> bool:
        known = self._composite.get(func)
        if known is None:
            # torch does not find those of `prim` among its operators, and raises
            known = self._composite[func] = func.namespace != "prim" and bool(func._can_decompose())
        return known

    # -- attention kernels -----------------------------------------------------------------------------------------

    def _run_kernel(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        named = _bind(func, args, kwargs)
        site, written = self.sites.here(), _written(func, args, kwargs)
        nodes = {key: self.store.node(value) for key, value in named.items() if isinstance(value, torch.Tensor)}
        self._guard(lambda: self.store.lose(named.values()))
        if written:
            self._guard(lambda: self.store.save_before_write(written))
        output = self._run_enlarged(func, named, site, args, kwargs)
        several = output if isinstance(output, (tuple, list)) else (output,)
        results = [x for x in (named.get("out"), *several) if isinstance(x, Tensor)] or written
        if results:
            call = KernelCall(func._schema.name, named, nodes, results[0], site, places.here(), _lse(results))
            self.listener.kernel(call)
        for result in results:
            self._guard(functools.partial(self.store.new_root, func._schema.name.removeprefix("aten::"), result))
        self._guard(lambda: self.store.note_write(written))
        return output

    def _run_enlarged(self, func: Any, named: dict[str, Any], site: str, args: Any, kwargs: Any) -> Any:
        query = self._kernels[func._schema.name]
        factor = None if query is None else self.listener.enlarge(site)
        if query is None or factor is None:
            return func(*args, **kwargs)
        larger = named[query] = named[query] * factor
        if query in kwargs:
            return func(*args, **{**kwargs, query: larger})
        place = [argument.name for argument in func._schema.arguments].index(query)
        return func(*args[:place], larger, *args[place + 1 :], **kwargs)

    def _enlarged(self, name: str, args: Any) -> Any:
        left, _ = ops.CONTRACTIONS.get(name, (0, 1))
        a, b = args[left], args[left + 1]
        if self.classifier.is_product(a, b):
            factor = self.listener.enlarge(self.sites.here())
            if factor is not None:
                return (*args[:left], a * factor, *args[left + 1 :])
        return args


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    given = _bind(func, args, kwargs)
    writes = (arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write)
    return [tensor for name in writes if isinstance(tensor := given.get(name), Tensor)]


def _lse(results: list[torch.Tensor]) -> torch.Tensor | None:
    """What a kernel gave beside its output, one number a row."""
    return results[1] if len(results) > 1 and results[1].shape == results[0].shape[:-1] else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _has_nested(args: Any) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_nested for arg in args)


def _base_name(func: Any) -> str:
    name = str(func._schema.name).split("::")[1]
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names of the operator's schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
