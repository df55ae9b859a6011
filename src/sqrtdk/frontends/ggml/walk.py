"""Writes the graph of one evaluation of ggml as a program: a step for each operation, and views as what they view.

ggml's graph is of one row of ids and of one length. What depends on the ids gets a first axis here, so that the program
takes any number of rows. A cache is empty before the run: what an operation reads of it is what was written, and keys
that were not written, with which llama.cpp fills it up to a multiple of 256, are left out with their part of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sqrtdk.errors import ModelError
from sqrtdk.frontends.ggml.graph import NUMPY_TYPES, GgmlRun, GgmlTensor, original_name
from sqrtdk.frontends.ggml.operations import GGML_OPERATIONS, GgmlReading, UnreadError
from sqrtdk.frontends.ggml.paths import node_paths
from sqrtdk.frontends.ggml.rounding import ggml_rounded
from sqrtdk.frontends.ggml.views import elements_of, strides_of, torch_shape, view_of
from sqrtdk.frontends.program import FlatProgram, FlatStep, RunDtypes
from sqrtdk.messages import Message, joined

TOKEN_LEAF = "inp_tokens"  # llama.cpp's name of the token ids
_VIEW_OPERATIONS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
_MOST_NAMED = 5  # operations that an error names
_IDS_REF = 0  # reference of the token ids


@dataclass(frozen=True, slots=True, eq=False)
class _Value:
    """What a tensor of the graph holds.

    Attributes:
        ref: reference in the program.
        batched: whether it has a first axis for rows of ids.
        kept: keys of a cache that it has, if it is made of some of them.
        constant: its values, if they depend on nothing but the length.
    """

    ref: int
    batched: bool
    kept: Tensor | None = None
    constant: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Cache:
    """What was written to the memory of a cache.

    Attributes:
        source: rows that were written, as one value.
        total: elements of it, for one row of ids.
        places: index in `source` of each element of the memory; -1 where nothing was written.
    """

    source: _Value
    total: int
    places: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Walk:
    run: GgmlRun
    tensors: dict[int, GgmlTensor]
    steps: list[FlatStep] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    values: dict[int, _Value] = field(default_factory=dict)
    memory: dict[int, _Value] = field(default_factory=dict)  # what the memory of a tensor holds, if not its own value
    caches: dict[int, _Cache] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    count: int = _IDS_REF

    def new(self) -> int:
        self.count += 1
        return self.count

    # -- what is read --------------------------------------------------------------------------------------------------

    def value(self, key: int) -> _Value:
        """Return the value of a tensor that a node reads."""
        if key in self.values:
            return self.values[key]
        leaf = self.tensors[key]
        name = original_name(leaf.name)
        if name == TOKEN_LEAF:
            made = _Value(_IDS_REF, True)
        elif leaf.is_weight:
            made = _Value(self.new(), False)
            self.parameters[made.ref] = leaf.name
        elif leaf.op != "NONE" and leaf.root is not None:
            raise UnreadError(f"a view of {name} that no operation makes")
        elif name != leaf.name and (found := self._made(name)) is not None:
            made = found
        elif key in self.run.data:
            tensor = torch.from_numpy(self.run.data[key]).reshape(torch_shape(leaf.ne, False))
            made = self.constant(tensor.float() if tensor.is_floating_point() else tensor)
        else:
            raise UnreadError(f"{name}, which has no values")
        self.values[key] = made
        return made

    def _made(self, name: str) -> _Value | None:
        """Return the value of the last node of a name, which was copied to another device."""
        keys = [key for key in self.values if self.tensors[key].name == name]
        return self.values[keys[-1]] if keys else None

    def constant(self, tensor: Tensor) -> _Value:
        made = _Value(self.new(), False, constant=tensor)
        self.constants[made.ref] = tensor
        return made

    # -- views ---------------------------------------------------------------------------------------------------------

    def view(self, node: GgmlTensor, at: int, path: str) -> _Value:
        """Return the value of a view: of what a node computed, or of a cache."""
        root = self.tensors[node.root if node.root is not None else node.src[0]]
        if root.key in self.caches or root.is_cache:
            return self._view_of_cache(node, root, at, path)
        held = self.memory.get(root.key) or self.value(root.key)
        item = root.nb[0]
        strides = [stride // item for stride in node.nb[::-1]]
        view = view_of(
            int(np.prod(root.ne)), node.offset // item, node.shape, strides, torch_shape(node.ne, held.batched),
            held.batched,
        )  # fmt: skip
        if view is None or node.ne[3] > 1:
            raise UnreadError(f"{node.op} {node.name} with strides {node.nb}")
        return self.step(view, [held], node, at, path, kept=held.kept)

    def _view_of_cache(self, node: GgmlTensor, root: GgmlTensor, at: int, path: str) -> _Value:
        cache = self.caches.get(root.key)
        if cache is None:  # the memory as it will be written: nobody reads its values
            return _Value(-1, True)
        places = cache.places[elements_of(node.offset, node.ne, node.nb, root.nb[0])]
        kept: Tensor | None = None
        ne = list(node.ne)
        for axis in range(4):
            written: Any = (places >= 0).any(axis=tuple(a for a in range(4) if a != axis))
            if not written.all():
                index = written.nonzero()[0]
                places, ne[3 - axis] = places.take(index, axis), len(index)
                kept = torch.from_numpy(index)
        grid = strides_of(places) if (places >= 0).all() else None
        view = None
        if grid is not None and ne[3] == 1:
            view = view_of(
                cache.total, grid[0], ne[::-1], grid[1], torch_shape(ne, cache.source.batched), cache.source.batched
            )
        if view is None:
            raise UnreadError(f"{node.name}, of a cache that was not filled by this run alone")
        return self.step(view, [cache.source], node, at, path, kept=kept)

    def write(self, node: GgmlTensor, at: int, path: str) -> None:
        """Note what SET_ROWS, or CPY, writes to a cache."""
        rows = self.value(node.src[0])
        root = self.tensors[node.root or 0]
        total = int(np.prod(self.tensors[node.src[0]].ne))
        if node.op == "SET_ROWS":
            index = self.value(node.src[1]).constant
            if index is None:
                raise UnreadError("SET_ROWS at places that are computed")
            where = elements_of(node.offset, node.ne, node.nb, root.nb[0]).reshape(-1, node.ne[0])
            elements = where[index.reshape(-1).numpy()].reshape(-1)
        else:
            elements = elements_of(node.offset, node.ne, node.nb, root.nb[0]).reshape(-1)
        if root.key in self.caches or elements.size != total:
            raise UnreadError(f"{node.name}, a cache that is written more than once")
        kind = node.type
        if kind not in NUMPY_TYPES and kind != "q8_0":
            raise UnreadError(f"a cache in {kind}")
        held = self.step(lambda numbers, x: ggml_rounded(numbers, x, kind), [rows], node, at, path)
        places = np.full(int(np.prod(root.ne)), -1, np.int64)
        places[elements] = np.arange(total)
        self.caches[root.key] = _Cache(held, total, places)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(
        self, operation: Any, reads: Sequence[_Value], node: GgmlTensor, at: int, path: str, kept: Tensor | None = None
    ) -> _Value:
        """Write an operation, or compute it if all that it reads is constant."""
        known = [value.constant for value in reads if value.constant is not None]
        if len(known) == len(reads):
            made = self.constant(operation(RunDtypes(), *known))
            return replace(made, kept=kept)
        ref, batched = self.new(), any(value.batched for value in reads)
        self.steps.append(
            FlatStep(
                node.op, operation, tuple(value.ref for value in reads), (ref,), (None,), path, node_place(node), at
            )
        )
        return _Value(ref, batched, kept)

    def node(self, node: GgmlTensor, at: int, path: str) -> None:
        """Write one node."""
        root = None if node.root is None else self.tensors[node.root]
        if node.op in _VIEW_OPERATIONS:
            self.values[node.key] = self.view(node, at, path)
            return
        if node.op in ("SET_ROWS", "CPY") and root is not None and root.is_cache:
            self.write(node, at, path)
            return
        read = GGML_OPERATIONS.get(node.op)
        if read is None:
            raise UnreadError(node.op)
        sources = node.src[:1] if node.op in ("CPY", "DUP", "REPEAT") else node.src
        reads = [self.value(key) for key in sources]
        batched = any(value.batched for value in reads)
        if batched and node.ne[3] > 1:
            raise UnreadError(f"{node.op} {node.name} of several sequences")
        kept = next((value.kept for value in reads if value.kept is not None), None)
        reading = GgmlReading(
            node, tuple(self.tensors[key] for key in sources), tuple(value.batched for value in reads),
            torch_shape(node.ne, batched), kept,
        )  # fmt: skip
        operation = read(reading)
        if node.op == "GET_ROWS" and self._every_row(reads, reading):
            self.values[node.key] = reads[0]
            return
        passes = node.op not in ("FLASH_ATTN_EXT",) and not (node.op == "MUL_MAT" and reads[0].kept is not None
                                                            and reads[1].kept is not None)  # fmt: skip
        made = self.step(operation, reads, node, at, path, kept if passes else None)
        self.values[node.key] = made
        if root is not None:  # in place: what views this memory from now on reads the result
            self.memory[root.key] = made

    def _every_row(self, reads: Sequence[_Value], reading: GgmlReading) -> bool:
        """Return whether all rows are picked, in order, as where the outputs of all tokens are wanted."""
        ids = reads[1].constant
        return (
            ids is not None
            and reads[0].batched
            and reading.node.ne == reading.sources[0].ne
            and torch.equal(ids.reshape(-1), torch.arange(ids.numel(), dtype=ids.dtype))
        )


def node_place(node: GgmlTensor) -> str:
    """Return what stands for the file of a node: "<ROPE Qcur-0>"."""
    return f"<{node.op} {node.name}>".replace(" >", ">")


def walk_ggml(run: GgmlRun) -> FlatProgram:
    """Return an evaluation of ggml as a program of the token ids, of shape (rows, length).

    Raises:
        ModelError: An operation is not read; the error names all of them.
    """
    tensors = dict(run.leaves) | {node.key: node for node in run.nodes}
    walk = _Walk(run, tensors)
    paths = node_paths(run.nodes, run.leaves, run.architecture.startswith("gemma"))
    behind: set[int] = set()  # tensors that follow from an operation that is not read
    for at, (node, path) in enumerate(zip(run.nodes, paths, strict=True)):
        if any(key in behind for key in node.src):
            behind.add(node.key)
            continue
        try:
            walk.node(node, at, path)
        except UnreadError as error:
            behind.add(node.key)
            walk.unread.setdefault(str(error), f"{node_place(node)}:{at}")
    last = run.nodes[-1].key
    if walk.unread or last not in walk.values:
        names = [f"{name} ({where})" for name, where in walk.unread.items()]
        more = [] if len(names) <= _MOST_NAMED else [f"{len(names) - _MOST_NAMED} more"]
        raise ModelError(
            Message("frontends.unread_ggml", names=joined([*names[:_MOST_NAMED], *more], "comma"), title=run.title),
            hint=Message("frontends.hint.unread_ggml"),
        )
    return FlatProgram((_IDS_REF,), walk.parameters, walk.constants, tuple(walk.steps), (walk.values[last].ref,))
