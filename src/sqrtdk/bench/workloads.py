"""What is measured: shapes that attention has in practice, and the tensors of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        """B x Hq/H x L/S x E; what is twice the same is written once.

        Example:
            >>> WORKLOADS["gqa"].text, WORKLOADS["decode"].text
            ('1 x 32/8 x 2048 x 128', '1 x 32 x 1/32768 x 128')
        """
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
