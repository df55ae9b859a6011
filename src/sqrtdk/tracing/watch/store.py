"""The store of nodes: one for every live tensor, found by the tensor itself, and kept right under writes in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from sqrtdk.tracing.watch import places
from sqrtdk.tracing.watch.graph import Node, alias, origin
from sqrtdk.tracing.watch.marks import Carried, Partial, Root, Weighing, Weights
from sqrtdk.tracing.watch.places import Place, Sites

_SWEEP = 4096  # new tensors between two clean-ups of dead references
_DEEPEST = 4  # objects, containers or tensors in one another
_WIDEST = 64  # what holds more than that is no cache of tables
_PURE = 1e-6
Overwritten = Callable[[Node, Node, Tensor], Carried]


class Asked:
    """Which gradients of what projections gave a trace hands on.

    An operation's result has its node in autograd's graph only after the operation has been seen: the hook is put on it
    when the next one comes, which is before anything could write over it. It changes no number.
    """

    def __init__(self, labels: Collection[str] | None, come: Callable[[int, Tensor], None]) -> None:
        """
        Args:
            labels: names of the weights of the projections, "" for those without a name; None: of all.
            come: gets the serial number of a projection's node, and the gradient of what it gave, in a backward pass.
        """
        self._labels, self._come = labels, come
        self._waiting: list[tuple[int, TensorWeakRef]] = []

    def note(self, label: str, serial: int, tensor: Tensor) -> None:
        """A projection gave a tensor."""
        if (self._labels is None or label in self._labels) and torch.is_grad_enabled():
            self._waiting.append((serial, TensorWeakRef(tensor)))

    def attach(self) -> None:
        """Another operation comes, or the last one has run."""
        waiting, self._waiting = self._waiting, []
        for serial, ref in waiting:
            tensor = ref()
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(partial(self._come, serial))


class Store:
    """Nodes by tensor. Tensors are held weakly, so that a trace keeps nothing alive that the model lets go.

    `overwritten` says what weights went through of which a part was written: from their node, the part's, the part.
    """

    def __init__(
        self, model: nn.Module | None, sites: Sites, values: Mapping[str, Tensor], overwritten: Overwritten
    ) -> None:
        self.weighings: WeakSet[Weighing] = WeakSet()
        self.projected: WeakSet[Node] = WeakSet()  # roots that a projection has read: hidden states
        self.parts: WeakSet[Node] = WeakSet()  # this rank's parts of parameters
        self.asked: Asked | None = None  # where gradients of what projections gave are asked for
        self._sites = sites
        self._overwritten = overwritten
        self._values = values  # of buffers on the meta device
        self._nodes: Any = WeakTensorKeyDictionary()
        self._valued: WeakSet[Node] = WeakSet()
        self._held: dict[int, tuple[str, Tensor]] = {}  # the model's tensors by id, which stays theirs while held
        self._read: set[int] = set()  # storages of tensors from outside the trace
        self._swapped: set[str] = set()  # names of parameters in whose place others were read
        self._sharing: dict[int, list[TensorWeakRef]] = {}  # tensors by storage
        self._loose: list[TensorWeakRef] = []  # made inside the block, but in no module call
        self._puts = 0
        if model is not None:
            for name, tensor in module_tensors(model):
                for part in within(tensor):
                    self._held.setdefault(id(part), (name, part))  # a wrapper may list parameters that have a name

    def close(self) -> None:
        """Drop every tensor."""
        self._nodes = WeakTensorKeyDictionary()
        for held in (self._sharing, self._loose, self._held):
            held.clear()
        self._values = {}

    def put(self, tensor: Tensor, node: Node) -> None:
        """Note that `tensor` is now `node`."""
        self._nodes[tensor] = node
        if tensor.is_nested:
            return
        self._sharing.setdefault(_storage(tensor), []).append(TensorWeakRef(tensor))
        self._puts += 1
        if self._puts % _SWEEP == 0:
            shared = {key: _alive(refs) for key, refs in self._sharing.items()}
            self._sharing = {key: refs for key, refs in shared.items() if refs}
            self._loose = _alive(self._loose)

    def is_node(self, tensor: Tensor, node: Node) -> bool:
        """Whether `tensor` is known as `node`."""
        return bool(self._nodes.get(tensor) is node)

    def node(self, tensor: Tensor) -> Node:
        """The node of `tensor`; one that comes from outside the trace gets a leaf."""
        node: Node | None = self._nodes.get(tensor)
        return node if node is not None else self._leaf(tensor)

    def _leaf(self, tensor: Tensor) -> Node:
        """A tensor from outside the trace: a parameter or attribute of the model, a constant, or an input."""
        shape = shape_of(tensor)
        if not tensor.is_nested:
            self._read.add(_storage(tensor))
        label = self._name(tensor) or self._cast_label(tensor) or self._swapped_label(tensor)
        if label is not None or isinstance(tensor, nn.Parameter):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            value = self._values.get(label or "") if tensor.is_meta else None
            node = Node(kind, shape, label=label or "", func=None if value is None else lambda: value)
        elif not tensor.is_floating_point() and not tensor.is_complex():
            node = Node("input", shape, external=True)
        elif tensor.is_nested:
            node = Node("input", shape, act=True, site=self._sites.here(), root=Root())
        elif tensor.numel() <= 1 or tensor.dim() < 2:
            # A row of numbers is a literal of the code (rotary factors), not hidden states.
            node = Node("constant", shape)
        else:
            node = Node("input", shape, act=True, site=self._sites.here())
            node.make_root(Root(), alias(tensor))
            self._valued.add(node)
        self.put(tensor, node)
        return node

    def shard(self, parameter: nn.Parameter) -> None:
        """A DTensor is read: what this rank holds of it is a parameter, wherever it comes from."""
        local = local_of(parameter)
        label = self._name(parameter) or self._swapped_label(parameter) or ""
        if self._nodes.get(local) is None or self._nodes[local].label != label:
            self._read.add(_storage(local))
            node = Node("parameter", shape_of(local), label=label)
            self.put(local, node)
            if local.shape != parameter.shape:
                self.parts.add(node)

    def _name(self, tensor: object) -> str | None:
        """What the model calls a tensor that it holds."""
        return self._held[id(tensor)][0] if id(tensor) in self._held else None

    def _cast_label(self, tensor: Tensor) -> str | None:
        """Name of the parameter that autocast cast to this tensor before the trace began, and kept in its cache."""
        cast = tensor.grad_fn
        if cast is None or cast.name() != "ToCopyBackward0":
            return None
        return self._name(getattr(cast.next_functions[0][0], "variable", None))

    def _swapped_label(self, tensor: Tensor) -> str | None:
        """Name of a parameter that stands in for a sharded one while its module runs, as FSDP puts it together."""
        if not isinstance(tensor, nn.Parameter):
            return None
        name = self._sites.name_of(tensor)
        if name is not None:
            self._swapped.add(name)
        return name

    def unread(self) -> frozenset[str]:
        """Names of the model's parameters that no operation read."""
        parameters = ((name, tensor) for name, tensor in self._held.values() if isinstance(tensor, nn.Parameter))
        return frozenset(name for name, p in parameters if _storage(local_of(p)) not in self._read) - self._swapped

    def forget(self, tensor: Tensor) -> None:
        """Let `tensor` be a leaf when it is next seen."""
        self._nodes.pop(tensor, None)

    def loosen(self, tensor: Tensor) -> None:
        """Note that `tensor` was made in no module call: it may turn out to be an input."""
        self._loose.append(TensorWeakRef(tensor))

    def forget_inputs(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """An outermost module call begins: what was made before it is an input of it.

        A part of the model that is called by itself may be a step of a method of the model (`model.forward(x)`):
        what that method has computed from its inputs goes on.
        """
        loose = [tensor for ref in self._loose if (tensor := ref()) is not None]
        if self._sites.names.get(id(module)):
            arguments = {id(arg) for arg in args}
            loose = [x for x in loose if id(x) in arguments and not self.node(x).act]
        else:
            self._loose.clear()
        for tensor in loose:
            self.forget(tensor)

    def constant(self, tensor: Tensor) -> None:
        """Note that `tensor` is a literal of the code, not an input."""
        node = self._nodes[tensor] = Node("constant", shape_of(tensor))
        if tensor.numel() == 1:
            node.value = alias(tensor)

    def new_root(self, op: str, tensor: Tensor) -> Node:
        """A root for what an opaque operation gave."""
        node = Node(op, shape_of(tensor), act=True, site=self._sites.here(), place=places.here())
        node.make_root(Root(), alias(tensor))
        self._valued.add(node)
        self.put(tensor, node)
        return node

    def cut(self, node: Node, tensor: Tensor, source: Node | None = None, **facts: Any) -> None:
        """End the lineage here: `node` is a root that keeps its values; `source` is what a projection read.

        `facts` are what else is known of the root, by its attributes' names.
        """
        root = Root(logits=next((p for p in node.parents() if p.products), None), **facts)
        if source is not None:
            start = origin(source)
            earlier = (frozenset({r.serial}) | r.root.lineage for r in start.roots if r.root is not None)
            root = replace(root, source=start.serial, lineage=frozenset({start.serial}).union(*earlier))
            self.projected.update(start.roots)
        _lose(node.parents(), node.place)
        node.make_root(root, alias(tensor))
        self._valued.add(node)
        if self.asked is not None:
            self.asked.note(node.label, node.serial, tensor)

    def lose(self, args: Iterable[Any]) -> None:
        """What these go into is not followed."""
        nodes = (self._nodes.get(arg) for arg in args if isinstance(arg, Tensor))
        _lose((node for node in nodes if node is not None), places.here())

    def keep(self, node: Node, tensor: Tensor) -> None:
        """Keep the values of `node`."""
        node.value = alias(tensor)
        self._valued.add(node)

    # -- writes in place -------------------------------------------------------------------------------------------

    def save_before_write(self, written: Iterable[Tensor]) -> None:
        """Values that a later reading needs are copied before an operation overwrites their storage."""
        for storage in [_storage(tensor) for tensor in written if not tensor.is_meta]:
            for node in list(self._valued):
                if node.value is not None and _storage(node.value) == storage:
                    node.value = node.value.clone()
            for weighing in [weighing for weighing in self.weighings if not weighing.entry.attention]:
                if _storage(weighing.logits) == storage:
                    weighing.logits = weighing.logits.clone()
                if _storage(weighing.weights) == storage:
                    weighing.weights = weighing.weights.clone()

    def note_write(self, written: Iterable[Tensor]) -> None:
        """Other tensors on the written storage changed as well: they now descend from the write too."""
        for tensor in written:
            new = self.node(tensor)
            refs = self._sharing.get(_storage(tensor), [])
            for other in {id(t): t for ref in refs if (t := ref()) is not None}.values():
                old = self._nodes.get(other)
                if other is tensor or old is None or old is new or _storage(other) != _storage(tensor):
                    continue
                if not (new.act or _remembers_constants(old)) or apart(other, tensor):
                    continue
                same = other.shape == tensor.shape and other.data_ptr() == tensor.data_ptr()
                self._nodes[other] = new if same else self._overlay(old, new, tensor, tuple(other.shape))

    def _overlay(self, old: Node, new: Node, tensor: Tensor, shape: tuple[int, ...]) -> Node:
        """What was `old` until `new` was written to a part of it."""
        act, external = old.act or new.act, old.external or new.external
        site, place = self._sites.here(), new.place
        both = Node("overwrite", shape, args=(old, new), act=act, external=external, site=site, place=place)
        both.roots, both.products = old.roots | new.roots, old.products | new.products
        both.partial = overlaid(old.partial, new.partial)
        if old.weights is not None:
            both.weights = Weights(old.weights.weighing, self._overwritten(old, new, tensor))
        return both


def _lose(nodes: Iterable[Node], place: Place | None) -> None:
    """Note where weights met what is not followed, for the case that they meet no values elsewhere."""
    for node in nodes:
        if node.weights is not None and not node.weights.weighing.entry.lost:
            node.weights.weighing.entry.lost, node.weights.weighing.entry.lost_at = True, place


def _alive(refs: list[TensorWeakRef]) -> list[TensorWeakRef]:
    return [ref for ref in refs if ref() is not None]


def _storage(tensor: Tensor) -> int:
    if tensor.layout not in (torch.strided, torch.jagged):  # a sparse tensor has none of its own
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Nested tensors have none."""
    return () if tensor.is_nested else tuple(tensor.shape)


def apart(one: Tensor, other: Tensor) -> bool:
    """Whether two views of one storage are pieces beside one another, as `split` gives them, that share no element."""
    if one.stride() != other.stride() or one.dim() != other.dim():
        return False
    low, high = sorted((one, other), key=lambda tensor: tensor.storage_offset())
    rest = int(high.storage_offset()) - int(low.storage_offset())
    outer = 0
    for axis in sorted(range(one.dim()), key=one.stride, reverse=True):
        stride = one.stride(axis)
        if not stride or one.shape[axis] * stride <= 0:
            return False
        steps, rest = divmod(rest, stride)
        if steps >= low.shape[axis]:
            return not outer or (steps + high.shape[axis]) * stride <= outer
        outer = stride
    return False


def overlaid(old: Partial | None, new: Partial | None) -> Partial | None:
    """What a tensor carries of which a part was written."""
    if old is None or new is None:
        return new or old
    pending = (old.open - new.parts) | new.open
    return Partial(old.parts | new.parts, pending, new.scaled, old.loose or new.loose, new.weighed)


def _remembers_constants(written: Node) -> bool:
    """Whether a constant that is written to it matters: to logits, weights, and constants that the model makes."""
    made = written.func is not None or written.op == "overwrite"
    return bool(written.products) or written.weights is not None or (made and not written.act)


def module_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and attributes by name, those in containers too, and deeper only what can be a rotation."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    known: set[int] = set()
    for path, module in model.named_modules():
        for key, item in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            direct = [item, *(_items(item) if isinstance(item, (list, tuple, dict)) else ())]
            found = [inner for inner in direct if isinstance(inner, Tensor)]
            for tensor in (*found, *_tables(item, _DEEPEST, known)):
                yield f"{path}.{key}".lstrip("."), tensor


def _items(item: object) -> list[object]:
    """What an object or a container holds, without its own methods; nothing of a module, which has its turn."""
    if isinstance(item, (nn.Module, ModuleType)):
        return []
    if isinstance(item, list):
        return list(list.__iter__(item))
    if isinstance(item, tuple):
        return list(tuple.__iter__(item))
    held: object = item
    if not isinstance(item, dict):
        with suppress(Exception):  # a stranger's object may refuse anything
            held = getattr(item, "__dict__", None)  # of a class it is no dict
    return list(dict.values(held)) if isinstance(held, dict) else []


def _tables(item: object, deep: int, known: set[int]) -> Iterator[Tensor]:
    """Tables of angles in an object that is no module: `rotation.tables[device][length] = (cosines, sines)`."""
    if isinstance(item, Tensor):
        if _holds_angles(item):
            yield item
    elif deep and id(item) not in known and len(inside := _items(item)) <= _WIDEST:
        known.add(id(item))
        for inner in inside:
            yield from _tables(inner, deep - 1, known)


def _holds_angles(tensor: Tensor) -> bool:
    """Whether it can be cosines and sines by position: those of the first, 0, are all 0 or the amplitude."""
    if tensor.is_meta or tensor.is_nested or tensor.dim() < 2 or not tensor.is_floating_point() or len(tensor) < 2:
        return False
    sizes = tensor.detach().abs().to(torch.float32)
    first, largest = sizes[0], sizes.max()
    return bool(largest > 0) and bool(((first == 0) | (first >= largest * (1 - _PURE))).all())


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: of a DTensor the plain one in it."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) else tensor


def within(tensor: Tensor, deep: int = _DEEPEST) -> Iterator[Tensor]:
    """The tensor, and those that it holds where its class is a stranger's, as of quantised weights."""
    yield tensor
    if deep and type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        for item in vars(tensor).values():
            if isinstance(item, Tensor):
                yield from within(item, deep - 1)
