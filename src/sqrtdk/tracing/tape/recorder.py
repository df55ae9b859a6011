"""The recorder: a dispatch mode that sees every aten operation, runs it unchanged, and extends the lineage graph.

The `store` keeps one node for every tensor, and the `classifier` sets its role. When softmax weights multiply values,
or a fused attention kernel runs, the listener is called and reads the formula from the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sqrtdk._modes import EagerMode, in_backward_pass
from sqrtdk.errors import kind_and_text
from sqrtdk.impl.call import Call, transformed
from sqrtdk.messages import Message
from sqrtdk.tracing.tape import ops, places
from sqrtdk.tracing.tape.node import Node, Online, Product, SoftmaxEntry, SoftmaxRun
from sqrtdk.tracing.tape.places import Place, Sites
from sqrtdk.tracing.tape.store import NodeStore
from sqrtdk.tracing.tape.travel import NAMESPACES, Travel, world_size


@dataclass(slots=True)
class KernelCall:
    """A call of an attention that is one operation, such as scaled_dot_product_attention."""

    op: str  # qualified name, "aten::_scaled_dot_product_flash_attention_for_cpu"
    arguments: dict[str, Any]  # by the names of the operator's schema
    nodes: dict[str, Node]  # nodes of the tensor arguments
    output: Tensor  # the first result
    site: str  # module path
    place: Place | None = None  # source line
    lse: Tensor | None = None  # log of the sums of exponentials, (B, H, L), if the operator returns it
    turned_off: frozenset[str] = frozenset()  # arguments passed as False or 0 although their default is on
    entry: SoftmaxEntry | None = None  # of the attention, if other blocks of keys may be merged with it

    @property
    def vectors(self) -> list[Node]:
        """The nodes of the tensor arguments, without masks and biases, which are added."""
        return [node for name, node in self.nodes.items() if not name.endswith(("mask", "bias"))]


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A call of `sqrtdk.attention` that ran in blocks of rows."""

    call: Call
    nodes: dict[str, Node]  # of query, key and value
    output: Tensor
    site: str
    place: Place | None
    entry: SoftmaxEntry | None = None  # of the attention, if other blocks of keys may be merged with it


@dataclass(frozen=True, slots=True)
class Unweighted:
    """Logits that multiply values, or pick keys, without a softmax: their node and their numbers."""

    node: Node
    logits: Tensor
    keys: int = -1  # the axis of the keys: -2 if the logits are the right operand, v.mT @ z
    picks: bool = False  # they pick keys, and meet no values


@dataclass(frozen=True, slots=True)
class Operands:
    """The activations among the operands of an opaque operation, by the names of its schema."""

    name: str
    nodes: dict[str, Node]


@dataclass(slots=True)
class TapeListener:
    """The functions that the recorder and the classifier call when they find something."""

    eager: Callable[[SoftmaxRun, Tensor, Tensor], None]  # (softmax, values, output): weights multiply values
    kernel: Callable[[KernelCall], None]  # an attention that is one operation ran
    missed: Callable[..., None]  # (site, reason, seen=None): an operation that can't be followed, and its operands
    enlarge: Callable[[str], float | None]  # returns the factor to put on q at a site, or None
    unsoftened: Callable[[str, Unweighted], None]  # logits multiply values at a site, without a softmax
    whole: Callable[[WholeCall], None]  # our own attention ran in blocks of rows
    online: Callable[[Online], None]  # an attention that was computed in blocks of keys is complete
    ended: Callable[[SoftmaxRun], None] | None = None  # the last weights of a softmax are gone


@dataclass(slots=True)
class Scene:
    """The state of a trace while it runs, shared by the recorder and the classifier."""

    store: NodeStore  # the nodes
    sites: Sites  # the running modules
    listener: TapeListener
    products: bool  # measure the largest |q . k|
    flex: bool = False  # FlexAttention's own code is running
    entries: list[SoftmaxEntry] = field(default_factory=list)  # every softmax so far
    exponentials: list[SoftmaxEntry] = field(default_factory=list)  # every exponential of logits times values
    online: list[Online] = field(default_factory=list)  # complete attentions by blocks, not yet passed to the listener
    held: int = 0  # number of logits that exponentials hold
    keep: bool = False  # keep the values of q, k and v at every step, and the operands of projections
    travel: Travel = field(default_factory=Travel)  # what collectives brought and took along


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """One output of an operation.

    Attributes:
        node: its node, which is still being filled in.
        tensor: its values.
        tensors: the tensors among the operands, by position.
    """

    node: Node
    tensor: Tensor
    tensors: dict[int, Tensor]


_FLEX, _JAGGED, _SHARDED = "flex_attention", "NestedTensor", "DTensor"
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor)
# Operations that may be q . k. Only for nested tensors torch dispatches "matmul" whole instead of decomposing it.
_MULTIPLYING = frozenset({"bmm", "baddbmm", "matmul"})
_KNOWN_NAMESPACES = ("aten", "prims", "prim")


class _Reading(threading.local):
    now = False  # True while a trace computes for itself
    only: Any = None  # the recorder that computes rows again under its own tape


_reading = _Reading()


@contextmanager
def unseen() -> Iterator[None]:
    """Return a context manager within which a trace computes for itself: no trace of this thread records it."""
    before, _reading.now = _reading.now, True
    try:
        yield
    finally:
        _reading.now = before


class Recorder(EagerMode):
    """Runs every operation unchanged and notes where its output came from.

    `classifier` is a `sqrtdk.tracing.lower.classifier.Classifier`; its package imports this one, so not vice versa.
    """

    supports_higher_order_operators = True

    def __init__(self, scene: Scene, classifier: Any, kernels: Mapping[str, str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scene = scene
        self.store, self.sites, self.listener = scene.store, scene.sites, scene.listener
        self.classifier = classifier
        self._kernels = kernels
        self.sites.entering = self.store.forget_inputs
        self.sites.leaving = partial(self._guard, self.store.cut_recurrent)
        self._thread = threading.get_ident()
        self._again = False  # True: it records only what a backward pass recomputes (checkpointing)
        self._within = False  # an attention that is noted as one call is running
        self._composite: dict[Any, bool] = {}

    def __enter__(self) -> Recorder:
        self._thread = threading.get_ident()
        self._again = in_backward_pass()
        super().__enter__()
        return self

    # -- running ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._ignores():
            return func(*args, **kwargs)
        if self.store.asked is not None:
            self._guard(self.store.asked.attach)
        if not hasattr(func, "_schema"):
            return self._higher_order(func, args, kwargs)
        name = ops.base_name(func)
        kinds = {kind.__name__ for kind in types}
        if _JAGGED in kinds or (_SHARDED in kinds and not self._is_ring(func, args)):
            for arg in (*args, *kwargs.values()) if _SHARDED in kinds else ():
                if isinstance(arg, torch.nn.Parameter):
                    self._guard(self.store.shard, arg)
            return NotImplemented  # the subclass then runs plain operations, which are recorded
        if self._is_foreign(func, name, types):
            self._guard(self.store.lose, (*args, *kwargs.values()))
            return func(*args, **kwargs)
        if func._schema.name in self._kernels:
            return self._run_kernel(func, args, kwargs)
        if self._is_composite(func) and not any(isinstance(arg, Tensor) and arg.is_nested for arg in args):
            # Nested tensors are not decomposed: decompositions need sizes.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._run(func, name, args, kwargs)

    def _ignores(self) -> bool:
        again = in_backward_pass()
        other = threading.get_ident() != self._thread or again is not self._again
        return other or _reading.now or self._within or _reading.only not in (None, self)

    def whole(self, call: Call, run: Callable[[Call], Any]) -> Any:
        """Run an attention in blocks of rows, as its code runs it, and pass it on to the listener as one call.

        Args:
            call: the call of `sqrtdk.attention`.
            run: runs it, and returns its result. It gets a larger query if the listener asks for that.

        Returns:
            The result of `run`.
        """
        inputs = {"query": call.query, "key": call.key, "value": call.value}
        if self._ignores() or transformed() or any(type(x) not in _PLAIN_TENSORS for x in inputs.values()):
            return run(call)
        if self.store.asked is not None:
            self._guard(self.store.asked.attach)
        site, place, nodes = self.sites.here(), places.current_place(), self._nodes(inputs)
        entry = None if call.aux is None or not call.aux.lse else self._entry(call.query, call.keys, call.dtype)
        self._guard(self.store.lose, inputs.values())
        factor = self.listener.enlarge(site)
        larger = call if factor is None else replace(call, query=call.query * factor)
        self._within = True
        try:
            results = run(larger)
        finally:
            self._within = False
        before, _reading.only = _reading.only, self
        try:
            self._guard(self.listener.whole, WholeCall(larger, nodes, results[0], site, place, entry))
        finally:
            _reading.only = before
        for result in results:
            if isinstance(result, Tensor):
                self._guard(self.store.new_root, "attention", result)
        if entry is not None:
            self._guard(self._may_merge, entry, nodes, results[0], results[-1].lse)
        return results

    def merged(self, outputs: Sequence[Tensor], lses: Sequence[Tensor], run: Callable[[], Any]) -> Any:
        """Run a merge of attentions to several blocks of keys; if all have been recorded, they are one from there on.

        Args:
            outputs: of the blocks.
            lses: of the blocks.
            run: computes the merged output and lse.
        """
        of_outputs, of_lses = ([self.store.node(one) for one in each] for each in (outputs, lses))
        known = all(node.partial is not None for node in of_outputs) and all(node.products for node in of_lses)
        if self._ignores() or transformed() or not known:
            return run()
        self._within = True
        try:
            output, lse = run()
        finally:
            self._within = False
        self._guard(self.classifier.merged, of_outputs, of_lses, output, lse)
        return output, lse

    def _entry(self, query: Tensor, keys: int, dtype: torch.dtype) -> SoftmaxEntry:
        """Return the entry of an attention that is one operation and returns its lse."""
        shape, site = (*query.shape[:-1], keys), self.sites.here()
        logits = Node("logits", shape, act=True, site=site, product=Product(dtype, None))
        return SoftmaxEntry(site, shape, place=places.current_place(), logits=logits)

    def _may_merge(self, entry: SoftmaxEntry, nodes: dict[str, Node], output: Tensor, lse: Tensor | None) -> None:
        """Mark the results of an attention that was recorded, so that other blocks of keys may be merged with it."""
        if entry.record is not None and lse is not None and {"query", "key"} <= nodes.keys():
            self.classifier.whole(entry, (nodes["query"], nodes["key"]), output, lse)

    def _is_foreign(self, func: Any, name: str, types: Any) -> bool:
        """Whether its tensors are of a subclass that is not followed; an attention on them is reported as missed."""
        subclass = next((t for t in types if t not in _PLAIN_TENSORS), None)
        if subclass is not None and (name in ops.SOFTMAX_OPERATIONS or func._schema.name in self._kernels):
            sharded = subclass.__name__ == _SHARDED
            reason = (
                Message("trace.missed.sharded", operation=name)
                if sharded
                else Message("trace.missed.subclass", operation=name, kind=subclass.__name__)
            )
            self.listener.missed(self.sites.here(), reason)
        return subclass is not None

    def _is_ring(self, func: Any, args: Any) -> bool:
        """Whether it is an attention on sharded sequences (ring attention), which runs several kernels a rank."""
        if func._schema.name not in self._kernels:
            return False
        placements = getattr(args[0] if args else None, "placements", ())
        return any(placement.is_shard(args[0].dim() - 2) for placement in placements)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        written = ops.written_tensors(func, args, kwargs)
        self._guard(self.store.save_before_write, written)
        enlarge = name in _MULTIPLYING and not self.scene.flex
        output = func(*(self._enlarged(name, args) if enlarge else args), **kwargs)
        self._guard(self._note, func, name, args, kwargs, output, written)
        return output

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, output: Any, written: Any) -> None:
        foreign = func.namespace not in _KNOWN_NAMESPACES
        turned = self.classifier.rotations(args, output) if foreign else {}
        if foreign and not turned and self.classifier.may_attend(name, args, kwargs, output):
            reason = Message("trace.missed.opaque", name=f"{func.namespace}::{name}")
            nodes = self._nodes(ops.bound_arguments(func, args, kwargs))
            operands = Operands(name, {key: node for key, node in nodes.items() if node.act})
            self.listener.missed(self.sites.here(), reason, operands)
        if foreign and output is None:  # the operation writes its result into an argument
            output = written
        self.classifier.note(func, name, args, kwargs, output, turned)
        self.store.note_write(written)
        if func.namespace in NAMESPACES:
            self.scene.travel.note(self.store, name, ops.bound_arguments(func, args, kwargs), output)

    def _nodes(self, named: dict[str, Any]) -> dict[str, Node]:
        return {key: self.store.node(value) for key, value in named.items() if isinstance(value, Tensor)}

    def _guard(self, work: Callable[..., object], *args: Any) -> None:
        """Runs bookkeeping and reports its errors as missed: a fault of the trace must not stop the model."""
        try:
            work(*args)
        except Exception as error:
            self.listener.missed(self.sites.here(), Message("trace.missed.trace_failed", error=kind_and_text(error)))

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs FlexAttention by its own dense implementation, so that each operation is recorded."""
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
            # `_can_decompose` raises for operators of `prim`, which torch does not find in its registry.
            known = self._composite[func] = func.namespace != "prim" and bool(func._can_decompose())
        return known

    # -- attention kernels -----------------------------------------------------------------------------------------

    def _run_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        passed, whole = ops.bound_arguments(func, args, kwargs), func._schema.name
        defaults = {arg.name: arg.default_value for arg in func._schema.arguments if arg.has_default_value()}
        names = [arg.name for arg in func._schema.arguments if arg.name in passed or arg.name in defaults]
        named = {name: passed[name] if name in passed else defaults[name] for name in names}
        turned_off = frozenset(name for name in passed if not ops.is_on(passed[name]) and ops.is_on(defaults.get(name)))
        site, written = self.sites.here(), ops.written_tensors(func, args, kwargs)
        nodes = self._nodes(named)
        self._guard(self.store.lose, named.values())
        self._guard(self.store.save_before_write, written)
        query = self._kernels[whole]
        factor = None if query is None else self.listener.enlarge(site)
        if query is not None and factor is not None:
            larger, place = named[query] * factor, list(named).index(query)
            if query in kwargs:
                kwargs = kwargs | {query: larger}
            else:
                args = ops.with_argument(args, place, larger)
            named[query] = larger
        output = func(*args, **kwargs)
        several = output if isinstance(output, (tuple, list)) else (output,)
        results = [x for x in (named.get("out"), *several) if isinstance(x, Tensor)] or written
        if results:
            # Flash kernels return the logsumexp second: it has the output's shape without the features.
            lse = results[1] if len(results) > 1 and results[1].shape == results[0].shape[:-1] else None
            # Every fused kernel returns an lse for its backward pass; only blocks of a ring are merged by it.
            blocks = lse is not None and "key" in nodes and world_size() > 1
            entry = self._entry(results[0], nodes["key"].shape[-2], torch.float32) if blocks else None
            self.listener.kernel(
                KernelCall(whole, named, nodes, results[0], site, places.current_place(), lse, turned_off, entry)
            )
        for result in results:
            self._guard(self.store.new_root, whole.removeprefix("aten::"), result)
        if results and entry is not None:
            self._guard(self._may_merge, entry, nodes, results[0], lse)
        self._guard(self.store.note_write, written)
        return output

    def _enlarged(self, name: str, args: Any) -> Any:
        left, right = ops.CONTRACTIONS.get(name, (0, 1))
        if not self.classifier.is_product(args[left], args[right]):
            return args
        factor = self.listener.enlarge(self.sites.here())
        return args if factor is None else ops.with_argument(args, left, args[left] * factor)
