"""What is measured: shapes that attention has in practice, the tensors of one, and names on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape.

    Attributes:
        batch: B.
        heads: Hq.
        key_heads: of keys and values.
        length: L.
        keys: S.
        width: E, and Ev.
        is_causal: upper-left.
        trains: whether anyone runs the backward pass of it.
    """

    batch: int
    heads: int
    key_heads: int
    length: int
    keys: int
    width: int
    is_causal: bool = False
    trains: bool = True

    @property
    def grouped(self) -> bool:
        """Whether query heads share key heads."""
        return self.heads != self.key_heads

    @property
    def pairs(self) -> int:
        """Weights that the plain formula holds."""
        return self.batch * self.heads * self.length * self.keys

    @property
    def text(self) -> str:
        """B x Hq/H x L/S x E; what is twice the same is written once."""
        heads = f"{self.heads}/{self.key_heads}" if self.grouped else f"{self.heads}"
        length = f"{self.length}" if self.length == self.keys else f"{self.length}/{self.keys}"
        return f"{self.batch} x {heads} x {length} x {self.width}" + (", causal" if self.is_causal else "")


WORKLOADS: dict[str, Workload] = {
    "training": Workload(4, 12, 12, 512, 512, 64),
    "long-64": Workload(1, 8, 8, 4096, 4096, 64),
    "long-128": Workload(1, 8, 8, 4096, 4096, 128),
    "causal-64": Workload(1, 8, 8, 4096, 4096, 64, is_causal=True),
    "long-causal": Workload(1, 8, 8, 16384, 16384, 64, is_causal=True),
    "gqa": Workload(1, 32, 8, 2048, 2048, 128),
    "decode": Workload(1, 32, 32, 1, 32768, 128, trains=False),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One workload in one dtype, forward or with the backward pass, with its tensors.

    Attributes:
        workload: its shape.
        training: whether the backward pass is a part of it.
        query: (B, Hq, L, E); query, key and value ask for gradients in training.
        key: (B, H, S, E).
        value: (B, H, S, E).
        cotangent: (B, Hq, L, E), what the backward pass starts from.
    """

    workload: Workload
    training: bool
    query: Tensor
    key: Tensor
    value: Tensor
    cotangent: Tensor

    @classmethod
    def of(cls, workload: Workload, dtype: torch.dtype, training: bool = False, seed: int = 0) -> Case:
        """With Gaussian tensors; equal seeds give equal ones, rounded to the dtype."""
        generator = torch.Generator().manual_seed(seed)
        rows, keys = (workload.heads, workload.length), (workload.key_heads, workload.keys)
        tensors = [
            torch.randn(workload.batch, *size, workload.width, generator=generator, device="cpu").to(dtype)
            for size in (rows, keys, keys, rows)
        ]
        for leaf in tensors[:3]:
            leaf.requires_grad_(training)
        return cls(workload, training, *tensors)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


def chosen(text: str, table: Mapping[str, Thing], what: str) -> dict[str, Thing]:
    """The entries of a table that a list names, in the table's order; "all" names every one.

    Args:
        text: names with commas between them.
        table: of what there is.
        what: it is, for the error.

    Raises:
        InvalidValueError: there is no such entry; the nearest names are offered.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != "all" and name not in table:
            near = get_close_matches(name, table, n=3)
            raise InvalidValueError(
                f"there is no {what} {name!r} in {text!r}",
                hint=f"Did you mean {' or '.join(near)}?" if near else f"Use some of {', '.join(table)}; or all.",
            )
    return {name: thing for name, thing in table.items() if name in names or "all" in names}
