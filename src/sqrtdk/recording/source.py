"""Gives the tensors of a file by name: first their shapes alone (a dry run for checks), then their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sqrtdk.masks.packed import PackedMask, unpack_mask
from sqrtdk.recording.format import BIT_DTYPES
from sqrtdk.recording.header import Header, Spec
from sqrtdk.recording.limits import (
    LEAST_WORK,
    MAX_MASK,
    MAX_MASKS,
    MAX_TENSORS,
    WORK_A_BYTE,
    at_most,
    quote,
    refuse_file,
)


class TensorSource:
    """Tensors of a file by name. A tensor with several names is read once.

    Args:
        header: header of the file.
        same: names that stand for tensors of other names.
        load: reads a tensor; None gives shapes alone, as tensors on the meta device.
        load_small: reads what is small and is needed beside shapes: records and the model's inputs; None is `load`.

    Attributes:
        dry: whether only shapes are given.
    """

    def __init__(
        self,
        header: Header,
        same: Mapping[str, str],
        load: Callable[[Spec], Tensor] | None,
        load_small: Callable[[Spec], Tensor] | None = None,
    ) -> None:
        self.dry = load is None
        self._load_small = load_small
        self._specs = header.specs
        self._same = same
        self._load = load
        # Only tensors with several names are kept, so that a file is never in memory twice.
        self._shared: dict[str, Tensor | None] = dict.fromkeys(same.values())
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._size = header.size + max((spec.end for spec in header.specs.values()), default=0)
        self._entries = self._logits = 0
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._specs or name in self._same

    def take(self, name: str, kinds: frozenset[torch.dtype], *, small: bool = False) -> Tensor | None:
        """Return a tensor of the file; None if it has none of this name.

        Args:
            name: Name of the tensor.
            kinds: dtypes that it may have.
            small: Whether its values are read even if only shapes are asked for.

        Raises:
            TraceFileError: It has another dtype.
        """
        place = self._same.get(name, name)
        spec = self._specs.get(place)
        if spec is None:
            return None
        self._taken |= {name, place}
        if spec.dtype not in kinds:
            wanted = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            refuse_file(f"{quote(name)} is of {str(spec.dtype).removeprefix('torch.')}", f"It may be: {wanted}.")
        if self._load is None:
            # Texts and model inputs are read even in a dry run: they are small, and say what the file is about.
            if small and self._load_small is not None:
                return self._load_small(spec)
            return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        if place not in self._shared:  # taken once, so it is not kept here
            return self._load(spec)
        known = self._shared[place]
        if known is None:
            known = self._shared[place] = self._load(spec)
        return known

    def bits(self, name: str) -> Tensor | None:
        """Return a bool tensor, which the file may hold as uint8 of 0 and 1.

        Raises:
            TraceFileError: The dtype is another, or a number is neither 0 nor 1.
        """
        tensor = self.take(name, BIT_DTYPES)
        if tensor is None or tensor.dtype is torch.bool:
            return tensor
        if not self.dry and tensor.numel() and int(tensor.max()) > 1:
            refuse_file(
                f"{quote(name)} holds {int(tensor.max())}; 1 is a key that the row sees, 0 one that it does not"
            )
        return tensor.bool()

    def mask(self, name: str, packed: PackedMask) -> Tensor:
        """Return a mask as a bool tensor, from the form in which the file packs it.

        Equal masks, as those of all layers, share one tensor.

        Raises:
            TraceFileError: The mask, or all masks together, exceed a limit.
        """
        count = math.prod(packed.shape)
        at_most(count, MAX_MASK, f"entries in the mask {quote(name)}")
        parts = tuple(self._same.get(at, at) for at in (name + ".padding", name + ".bits") if at in self)
        key = (packed.shape, packed.least, packed.greatest, parts)
        if key not in self._masks:
            self._entries += count
            at_most(self._entries, MAX_MASKS, "entries in all masks")
            self._masks[key] = (
                torch.empty(packed.shape, dtype=torch.bool, device="meta") if self.dry else unpack_mask(packed)
            )
        return self._masks[key]

    def count_logits(self, shape: tuple[int, ...]) -> None:
        """Count the logits (B, Hq, L, S) of a call towards the limit on the work that one file may ask for."""
        self._logits += math.prod(shape)

    def check_work(self) -> None:
        """Refuse a file that takes far more work than its size justifies.

        Raises:
            TraceFileError: It has too many logits and mask entries for its bytes.
        """
        # Work in proportion to the size of the file: a small untrusted one can't keep a reader busy for hours.
        work, most = self._logits + self._entries, max(LEAST_WORK, WORK_A_BYTE * self._size)
        if work > most:
            refuse_file(
                f"{self._logits} logits and {self._entries} entries of masks in a file of {self._size} bytes; "
                f"at most {most} are computed, {WORK_A_BYTE} a byte",
                "Record less: --calls, --rows or --heads.",
            )

    def prefixed(self, begin: str) -> list[str]:
        """Return the names of tensors that begin with a prefix, in the file's order."""
        return [name for name in (*self._specs, *self._same) if name.startswith(begin)]

    def end(self) -> None:
        """Refuse tensors that were never taken: their names are misspelt or from another version.

        Raises:
            TraceFileError: There is such a tensor.
        """
        if left := (self._specs.keys() | self._same.keys()) - self._taken:
            refuse_file(
                f"the tensor {quote(min(left))} belongs to no call",
                "Names begin with 'calls.0.', 'calls.1.', ...; docs/en/trace-file.md lists how they go on.",
            )


def check_same(same: dict[str, str], header: Header) -> None:
    """Check the table of names that stand for equal tensors of other names.

    Raises:
        TraceFileError: There are too many, a name is a tensor's own, or its target is missing.
    """
    at_most(len(same), MAX_TENSORS, "names in 'same'")
    for name, place in same.items():
        if name in header.specs:
            refuse_file(f"{quote(name)} is a tensor, and stands for {quote(place)} as well")
        if place not in header.specs:
            refuse_file(f"{quote(name)} stands for {quote(place)}, which the file lacks")
