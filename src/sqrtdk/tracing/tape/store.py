"""The store of nodes: one node for every live tensor, looked up by the tensor and kept right under in-place writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from sqrtdk.tracing.tape import ops, places
from sqrtdk.tracing.tape.graph import alias
from sqrtdk.tracing.tape.node import Node, Root, SoftmaxRun, Weights, WeightSteps, origin
from sqrtdk.tracing.tape.places import Place, Sites, inner_tensors, local_of, module_tensors

_SWEEP = 4096  # new tensors between two clean-ups of dead references
Overwritten = Callable[[Node, Node, Tensor], WeightSteps]


class ProjectionGradients:
    """Passes on the gradients of projections' outputs.

    During dispatch an output is not yet part of autograd's graph. The hook is therefore registered when the next
    operation comes, before anything can write over the output. It changes no number.
    """

    def __init__(self, labels: Collection[str] | None, come: Callable[[int, Tensor], None]) -> None:
        """
        Args:
            labels: names of the projections' weights, "" for weights without a name; None selects all projections.
            come: called in the backward pass with a projection's serial number and the gradient of its output.
        """
        self._labels, self._come = labels, come
        self._waiting: list[tuple[int, TensorWeakRef]] = []

    def note(self, label: str, serial: int, tensor: Tensor) -> None:
        """Note the output of a projection, if its weight is selected and gradients are enabled.

        Args:
            label: name of the projection's weight, "" if it has none.
            serial: serial number of the projection's node.
            tensor: its output, which is held weakly.
        """
        if (self._labels is None or label in self._labels) and torch.is_grad_enabled():
            self._waiting.append((serial, TensorWeakRef(tensor)))

    def attach(self) -> None:
        """Register the hooks of the outputs noted so far; called at the next operation and after the last one."""
        waiting, self._waiting = self._waiting, []
        for serial, ref in waiting:
            tensor = ref()
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(partial(self._come, serial))


class NodeStore:
    """Nodes by tensor. Tensors are held weakly, so that a trace keeps nothing alive that the model has released.

    `overwritten(node, part_node, part)` returns the steps on weights after a part of them was written in place.
    """

    def __init__(
        self, model: nn.Module | None, sites: Sites, values: Mapping[str, Tensor], overwritten: Overwritten
    ) -> None:
        self.softmax_runs: WeakSet[SoftmaxRun] = WeakSet()
        self.projected: WeakSet[Node] = WeakSet()  # roots that a projection has read: hidden states
        self.parts: WeakSet[Node] = WeakSet()  # this rank's shards of parameters
        self.asked: ProjectionGradients | None = None  # set if gradients of projections' outputs are wanted
        self._sites = sites
        self._overwritten = overwritten
        self._values = values  # values of buffers on the meta device, by name
        self._nodes: Any = WeakTensorKeyDictionary()
        self._valued: WeakSet[Node] = WeakSet()
        self._held: dict[int, tuple[str, Tensor]] = {}  # the model's tensors by id; held, so that no id is reused
        self._read: set[int] = set()  # storages of tensors from outside the trace
        self._swapped: set[str] = set()  # names of parameters that were replaced by another tensor
        self._sharing: dict[int, list[TensorWeakRef]] = {}  # tensors by storage
        self._loose: list[TensorWeakRef] = []  # tensors made inside the trace, but outside of any module call
        self._puts = 0
        if model is not None:
            for name, tensor in module_tensors(model):
                for part in inner_tensors(tensor):
                    self._held.setdefault(id(part), (name, part))  # the first name counts: wrappers list some twice

    def close(self) -> None:
        """Drop every tensor and node, at the end of a trace."""
        self._nodes = WeakTensorKeyDictionary()
        for held in (self._sharing, self._loose, self._held):
            held.clear()
        self._values = {}

    def put(self, tensor: Tensor, node: Node) -> None:
        """Set the node of `tensor`, which replaces an earlier one."""
        self._nodes[tensor] = node
        if tensor.is_nested:
            return
        self._sharing.setdefault(_storage(tensor), []).append(TensorWeakRef(tensor))
        self._puts += 1
        if self._puts % _SWEEP == 0:
            shared = {key: [ref for ref in refs if ref() is not None] for key, refs in self._sharing.items()}
            self._sharing = {key: refs for key, refs in shared.items() if refs}
            self._loose = [ref for ref in self._loose if ref() is not None]

    def tensors_of(self, nodes: Collection[Node]) -> dict[Node, Tensor]:
        """Return the tensors, as far as they are alive, of some nodes."""
        return {node: tensor for tensor, node in self._nodes.items() if node in nodes}

    def is_node(self, tensor: Tensor, node: Node) -> bool:
        """Return whether `node` is the current node of `tensor`; it is not if the tensor was written to since."""
        return bool(self._nodes.get(tensor) is node)

    def node(self, tensor: Tensor) -> Node:
        """Return the node of `tensor`.

        A tensor from outside the trace gets a new node: a parameter, a buffer, a constant or an input.
        """
        node: Node | None = self._nodes.get(tensor)
        return node if node is not None else self._leaf(tensor)

    def holding(self, tensor: Tensor) -> Iterator[Node]:
        """Yield the nodes, as far as there are any, of `tensor` and of the tensors that share its storage."""
        shared = () if tensor.is_nested else self._sharing.get(_storage(tensor), ())
        tensors = (tensor, *(other for ref in shared if (other := ref()) is not None))
        yield from (node for each in tensors if (node := self._nodes.get(each)) is not None)

    def _leaf(self, tensor: Tensor) -> Node:
        """Makes the leaf of a tensor from outside the trace: a parameter, a buffer, a constant, or an input."""
        shape = tensor_shape(tensor)
        if not tensor.is_nested:
            self._read.add(_storage(tensor))
        label = self._label(tensor)
        if label is not None or isinstance(tensor, nn.Parameter):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            value = self._values.get(label or "") if tensor.is_meta else None
            node = Node(kind, shape, label=label or "", func=None if value is None else lambda: value)
        elif not tensor.is_floating_point() and not tensor.is_complex():
            node = Node("input", shape, external=True)
        elif tensor.is_nested:
            node = Node("input", shape, act=True, site=self._sites.here(), root=Root())
        elif tensor.numel() <= 1 or tensor.dim() < 2:
            # A one-dimensional tensor is a literal of the code (rotary frequencies), not hidden states.
            node = Node("constant", shape)
        else:
            node = Node("input", shape, act=True, site=self._sites.here())
            node.make_root(Root(), alias(tensor))
            self._valued.add(node)
        self.put(tensor, node)
        return node

    def shard(self, parameter: nn.Parameter) -> None:
        """Make a parameter node for the part of a DTensor that this rank holds, when it is read."""
        local = local_of(parameter)
        label = self._label(parameter) or ""
        if self._nodes.get(local) is None or self._nodes[local].label != label:
            self._read.add(_storage(local))
            node = Node("parameter", tensor_shape(local), label=label)
            self.put(local, node)
            if local.shape != parameter.shape:
                self.parts.add(node)

    def _label(self, tensor: Tensor) -> str | None:
        """Return the model's name for a tensor, or for the parameter that it stands for; None if it has no name.

        Autocast may hold a cast of a parameter in its cache from before the trace, and FSDP replaces a sharded
        parameter by the gathered one while its module runs.
        """
        if id(tensor) in self._held:
            return self._held[id(tensor)][0]
        cast = tensor.grad_fn
        if cast is not None and cast.name() == "ToCopyBackward0":
            source = getattr(cast.next_functions[0][0], "variable", None)
            return self._held[id(source)][0] if id(source) in self._held else None
        name = self._sites.name_of(tensor) if isinstance(tensor, nn.Parameter) else None
        if name is not None:
            self._swapped.add(name)
        return name

    def unread(self) -> frozenset[str]:
        """Return the names of the model's parameters that no operation has read so far."""
        parameters = ((name, tensor) for name, tensor in self._held.values() if isinstance(tensor, nn.Parameter))
        return frozenset(name for name, p in parameters if _storage(local_of(p)) not in self._read) - self._swapped

    def forget(self, tensor: Tensor) -> None:
        """Remove the node of `tensor`; the tensor gets a new one, without ancestors, when it is next read."""
        self._nodes.pop(tensor, None)

    def loosen(self, tensor: Tensor) -> None:
        """Note that `tensor` was made outside of any module call, so that it may turn out to be an input."""
        self._loose.append(TensorWeakRef(tensor))

    def forget_inputs(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Turn tensors made before an outermost module call into inputs of it.

        A submodule as the outermost call may be a step of a method called directly (`model.forward(x)`). The
        activations that the method has computed keep their ancestors then.

        Args:
            module: the module that is called.
            args: its positional arguments.
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
        """Note that `tensor` is a literal of the model's code, not an input; a single number is kept."""
        node = self._nodes[tensor] = Node("constant", tensor_shape(tensor))
        if tensor.numel() == 1:
            node.value = alias(tensor)

    def new_root(self, op: str, tensor: Tensor) -> Node:
        """Return a new root, an activation without ancestors, for a tensor.

        Args:
            op: name of the operation that made the tensor.
            tensor: the tensor, whose values are kept.
        """
        node = Node(op, tensor_shape(tensor), act=True, site=self._sites.here(), place=places.current_place())
        node.make_root(Root(), alias(tensor))
        self._valued.add(node)
        self.put(tensor, node)
        return node

    def cut(self, node: Node, tensor: Tensor, source: Node | None = None, **facts: Any) -> None:
        """Make a node a root, which has no ancestors and keeps its values.

        Args:
            node: the node, which is changed.
            tensor: its values.
            source: node of a projection's input; None if the operation is no projection.
            facts: further attributes of the `Root`.
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
        """Note that weights of a softmax among the arguments enter an operation that is not followed."""
        nodes = (self._nodes.get(arg) for arg in args if isinstance(arg, Tensor))
        _lose((node for node in nodes if node is not None), places.current_place())

    def cut_recurrent(self, module: nn.Module, output: Any) -> None:
        """Make the output of a recurrent module (RNN, LSTM, GRU and their cells) a root.

        Args:
            module: the module that has run; any other kind is ignored.
            output: its output, a tensor or a tuple.
        """
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            for item in output if isinstance(output, tuple) else (output,):
                node = self._nodes.get(item) if isinstance(item, Tensor) else None
                if node is not None and node.act and node.op not in ops.PROJECTIONS:
                    self.cut(node, item, projects=True)
                    torchs = (kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn."))
                    node.op = next(torchs).lower()  # of a user's subclass too: gru, lstmcell

    def keep(self, node: Node, tensor: Tensor) -> None:
        """Keep `tensor` as the values of `node`; a later write in place does not change them."""
        node.value = alias(tensor)
        self._valued.add(node)

    # -- writes in place -------------------------------------------------------------------------------------------

    def save_before_write(self, written: Iterable[Tensor]) -> None:
        """Copy kept values that share storage with tensors which an operation is about to overwrite."""
        for storage in [_storage(tensor) for tensor in written if not tensor.is_meta]:
            for node in list(self._valued):
                if node.value is not None and _storage(node.value) == storage:
                    node.value = node.value.clone()
            for softmax_run in [softmax_run for softmax_run in self.softmax_runs if not softmax_run.entry.attention]:
                if _storage(softmax_run.logits) == storage:
                    softmax_run.logits = softmax_run.logits.clone()
                if _storage(softmax_run.weights) == storage:
                    softmax_run.weights = softmax_run.weights.clone()

    def note_write(self, written: Iterable[Tensor]) -> None:
        """Update the nodes of tensors that share storage with written ones, as they now descend from the write."""
        for tensor in written:
            new = self.node(tensor)
            refs = self._sharing.get(_storage(tensor), [])
            for other in {id(t): t for ref in refs if (t := ref()) is not None}.values():
                old = self._nodes.get(other)
                if other is tensor or old is None or old is new or _storage(other) != _storage(tensor):
                    continue
                if not (new.act or _remembers_constants(old)) or side_by_side_views(other, tensor):
                    continue
                same = other.shape == tensor.shape and other.data_ptr() == tensor.data_ptr()
                self._nodes[other] = new if same else self._overlay(old, new, tensor, tuple(other.shape))

    def _overlay(self, old: Node, new: Node, tensor: Tensor, shape: tuple[int, ...]) -> Node:
        """Return the node of a tensor that was `old` until `new` was written to a part of it."""
        act, external = old.act or new.act, old.external or new.external
        site, place = self._sites.here(), new.place
        both = Node("overwrite", shape, args=(old, new), act=act, external=external, site=site, place=place)
        both.roots, both.products = old.roots | new.roots, old.products | new.products
        both.partial = new.partial or old.partial
        if old.partial is not None and new.partial is not None:
            parts, pending = old.partial.parts | new.partial.parts, old.partial.open - new.partial.parts
            loose = old.partial.loose or new.partial.loose
            both.partial = replace(new.partial, parts=parts, open=pending | new.partial.open, loose=loose)
        if old.weights is not None:
            both.weights = Weights(old.weights.softmax_run, self._overwritten(old, new, tensor))
        return both


def _lose(nodes: Iterable[Node], place: Place | None) -> None:
    """Notes where weights enter an operation that is not followed; reported if they multiply no values elsewhere."""
    for node in nodes:
        if node.weights is not None and not node.weights.softmax_run.entry.lost:
            node.weights.softmax_run.entry.lost, node.weights.softmax_run.entry.lost_at = True, place


def _storage(tensor: Tensor) -> int:
    if tensor.layout not in (torch.strided, torch.jagged):  # a sparse tensor has no storage of its own
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def tensor_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor as a tuple of ints; () for a nested tensor, whose sizes differ."""
    return () if tensor.is_nested else tuple(tensor.shape)


def side_by_side_views(one: Tensor, other: Tensor) -> bool:
    """Return whether two views of one storage share no element and lie side by side, like the pieces of `split`."""
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


def _remembers_constants(written: Node) -> bool:
    """Whether writing a constant into the tensor matters: for logits, weights and constants that the model makes."""
    made = written.func is not None or written.op == "overwrite"
    return bool(written.products) or written.weights is not None or (made and not written.act)
