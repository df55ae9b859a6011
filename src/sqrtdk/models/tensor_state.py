"""The state of one tensor: read as raw memory, compared, and written back, whatever its dtype, layout or class.

A tensor is compared by the bytes of its storage. So NaN equals itself, float8, complex and quantised numbers need no
operation of their own, and a write that no operation shows is seen: `weight.data.mul_(2)`, `weight.numpy()[:] = 0`.
A sparse tensor is read as its strided parts. A subclass that wraps other tensors (`DTensor`, a jagged nested tensor, a
quantised weight) has no storage: whoever walks over its attributes finds the tensors that it wraps.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Up to 2 GiB are copied, small tensors first. Of what does not fit, a checksum still shows that it changed.
MOST_COPIED_BYTES = 2**31
_CHUNK = 2**17  # int64 words that share one sum
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

Span = tuple[int, int, int]  # address of a storage, first byte, number of bytes


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that hold the numbers of a tensor; none for a tensor without memory of its own.

    Example:
        >>> [tuple(part.shape) for part in strided_parts(torch.eye(3).to_sparse())]
        [(2, 3), (3,)]
    """
    if tensor.is_meta or not has_memory(tensor):
        return []
    if tensor.layout in _PARTS:
        return [getattr(tensor, name)() for name in _PARTS[tensor.layout]]
    return [tensor] if tensor.layout is torch.strided else [tensor.to_dense()]  # the layout of mkldnn shows no memory


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor holds numbers in memory of its own.

    A tensor on "meta" does not, and a wrapper subclass has a storage without an address.
    """
    if tensor.layout is not torch.strided:
        return tensor.layout is not torch.jagged
    try:
        return tensor.untyped_storage().data_ptr() != 0 or not tensor.numel()
    except (RuntimeError, NotImplementedError):
        return False


def span_of(part: Tensor) -> Span:
    """Return which bytes of its storage a strided tensor covers, gaps between its rows included.

    Returns:
        An id of the storage, the first byte, and the byte after the last one.
    """
    storage: Any = part.untyped_storage()
    if part.is_nested:  # its parts may be anywhere
        return storage._cdata, 0, storage.nbytes()
    if not part.numel():
        return storage._cdata, 0, 0
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(part.shape, part.stride(), strict=True))
    first = int(part.storage_offset()) * part.itemsize
    return storage._cdata, first, (last + 1) * part.itemsize


def memory_of(part: Tensor) -> Tensor:
    """Return the bytes that a strided tensor covers, (bytes,) uint8, as a view that shares the memory.

    The view includes the gaps between rows, and has no autograd history.

    Example:
        >>> memory_of(torch.zeros(3, 4)[:, 0]).shape
        torch.Size([36])
    """
    storage = part.untyped_storage()
    _, first, count = span_of(part)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (count,), (1,))


def _words(memory: Tensor) -> list[Tensor]:
    """Return the same memory in words of 8 bytes and a rest, which are compared five times as fast as bytes."""
    if memory.storage_offset() % 8:
        return [memory]
    whole = len(memory) // 8 * 8
    return [memory[:whole].view(torch.int64), memory[whole:]]


def _equal(one: Tensor, other: Tensor) -> bool:
    if len(one) != len(other):
        return False
    if one.storage_offset() % 8 != other.storage_offset() % 8:
        return torch.equal(one, other)
    return all(torch.equal(a, b) for a, b in zip(_words(one), _words(other), strict=True))


def _checksum(memory: Tensor) -> int:
    sums: list[int] = []
    for words in _words(memory):
        whole = len(words) // _CHUNK * _CHUNK
        sums += words[:whole].view(-1, _CHUNK).sum(1, dtype=torch.int64).tolist()
        sums.append(int(words[whole:].sum(dtype=torch.int64)))
    return hash(tuple(sums))


@dataclass(slots=True)
class MemoryCopies:
    """Copies of the memory of tensors; memory that several tensors share, as tied weights do, is copied once.

    Attributes:
        left: bytes that may still be copied.
        of: the copy of each span of memory, or its checksum.
        alive: tensors that are kept alive, as an address stands for a storage only while it is in use.
    """

    left: int = field(default_factory=lambda: MOST_COPIED_BYTES)
    of: dict[Span, Tensor | int] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # an address stands for a storage only while it is in use

    def take(self, part: Tensor) -> Tensor | int:
        """Return a copy of the memory of a tensor; if there is no room for a copy, its checksum."""
        span, memory = span_of(part), memory_of(part)
        if span not in self.of:
            copy: Tensor | int | None = None
            if len(memory) <= self.left:
                with suppress(RuntimeError, MemoryError):  # no room on its device
                    copy = memory.clone()
                    self.left -= len(memory)
            self.of[span] = _checksum(memory) if copy is None else copy
            self.alive.append(memory)
        return self.of[span]


def _is_unchanged(part: Tensor, before: Tensor | int) -> bool:
    memory = memory_of(part)
    return _checksum(memory) == before if isinstance(before, int) else _equal(memory, before)


@dataclass(slots=True, eq=False)
class TensorState:
    """A tensor with all that a run may change of it.

    Attributes:
        tensor: The user's own object.
        alias: The same memory under the shape that it had; None for a wrapper, or if the numbers are not held.
        values: For each part, its bytes or their checksum.
        kind: Dtype, layout and the like.
        whole: A copy, for a layout whose parts can't be written to.
    """

    tensor: Tensor
    alias: Tensor | None
    values: list[Tensor | int]
    kind: tuple[Any, ...]
    whole: Tensor | None
    is_leaf: bool
    requires_grad: bool
    grad: Tensor | None
    version: int | None

    def has_moved(self) -> bool:
        """Return whether the tensor's numbers, shape or place in memory differ from those of before."""
        tensor = self.tensor
        if self.alias is None:
            return False
        if _kind(tensor) != self.kind:
            return True
        parts = strided_parts(tensor)
        return len(parts) != len(self.values) or not all(map(_is_unchanged, parts, self.values))

    def _has_other_marks(self) -> bool:
        tensor = self.tensor
        if tensor.is_leaf != self.is_leaf or tensor.requires_grad != self.requires_grad:
            return True
        return self.is_leaf and tensor.grad is not self.grad

    def restore(self) -> bool:
        """Restore the tensor's numbers, `grad` and `requires_grad`.

        Returns:
            Whether the tensor is as it was before.
        """
        tensor, moved = self.tensor, self.has_moved()
        if moved:
            self._restore_numbers()
        if self.is_leaf and not tensor.is_leaf:
            tensor.detach_()
        if self.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if self.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad
        if self.version is not None and tensor._version != self.version:
            # The numbers are those of before, so a graph that holds the tensor may still run backward.
            with suppress(AttributeError, TypeError):
                torch._C._autograd._unsafe_set_version_counter((tensor,), (self.version,))
        return not (self._has_other_marks() or (moved and self.has_moved()))

    def _restore_numbers(self) -> None:
        """Restore place, shape and numbers of the tensor, from the copies of its memory."""
        tensor, alias = self.tensor, self.alias
        assert alias is not None
        if _kind(tensor) != self.kind and tensor.layout is torch.strided:
            # `weight.data = other`, `buffer.resize_(8)`, `self.half()`
            if (size := self.kind[-1]) < alias.untyped_storage().nbytes():
                with suppress(RuntimeError):  # storage that numpy shares keeps its size
                    alias.untyped_storage().resize_(size)
            tensor.data = alias
        parts = strided_parts(tensor)
        if len(parts) == len(self.values):
            for part, value in zip(parts, self.values, strict=True):
                memory = memory_of(part)
                if isinstance(value, Tensor) and len(value) == len(memory) and not _equal(memory, value):
                    memory.copy_(value)
        if self.whole is not None and self.has_moved():
            try:
                tensor.data = self.whole.clone()
            except RuntimeError:
                tensor.copy_(self.whole)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return what says where and how the numbers of a tensor lie; the last entry is the size of a storage."""
    common = (tensor.dtype, tensor.layout, tensor.device)
    if tensor.layout is torch.sparse_coo:
        return (*common, tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout is not torch.strided:
        return (*common, tuple(tensor.shape))
    storage: Any = tensor.untyped_storage()
    shape = () if tensor.is_nested else (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return (*common, *shape, storage._cdata, storage.nbytes())


def tensor_state(tensor: Tensor, copies: MemoryCopies | None) -> TensorState:
    """Return the state of a tensor before a run: its numbers, layout, gradient and version.

    Args:
        tensor: The tensor.
        copies: Takes the copies of the numbers, so that memory which several tensors share is copied once. Numbers for
            which it has no room are kept as a checksum, and can be compared but not restored. None: the numbers are not
            read; the rest of the state is.
    """
    parts = [] if copies is None else strided_parts(tensor)
    plain = copies is not None and not tensor.is_meta and has_memory(tensor)
    odd = plain and tensor.layout is not torch.strided
    values = [copies.take(part) for part in parts] if copies is not None else []
    return TensorState(
        tensor=tensor,
        alias=tensor.detach() if plain else None,
        values=values,
        kind=_kind(tensor) if plain else (),
        whole=tensor.detach().clone() if odd and not any(isinstance(value, int) for value in values) else None,
        is_leaf=tensor.is_leaf,
        requires_grad=tensor.requires_grad,
        grad=tensor.grad if tensor.is_leaf else None,
        version=None if copies is None or tensor.is_inference() else tensor._version,
    )


def stored_bytes(tensor: Tensor) -> int:
    """Return about how many bytes a tensor stores; sparse tensors and wrapper subclasses count as 0 or little."""
    with suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().nbytes() if has_memory(tensor) else 0
    return 0
