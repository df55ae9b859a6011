"""What tests of a GPU share: where they run, sizes, and what a call gives.

"cpu" is Triton's interpreter: the same functions at small sizes, so that they are right when they first meet a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest
from tests.support.triton_here import unable

ALL = AuxRequest.all()
ON_GPU = torch.cuda.is_available() and torch.version.cuda is not None
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="torch sees no NVIDIA GPU")]
interpreted = pytest.mark.skipif(ON_GPU or unable() is not None, reason=f"no interpreter: {unable()}, or a GPU")


def on(names: str, there: Iterable[tuple[Any, ...]], here: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """The values of a test on a GPU, and the fewer of it in the interpreter, where a call takes long."""
    values = [pytest.param(*row, "cuda", marks=on_gpu) for row in there]
    values += [pytest.param(*row, "cpu", marks=interpreted) for row in here]
    return pytest.mark.parametrize(f"{names}, kind" if names else ("kind",), values)


only_gpu = on("", [()], [])
in_both = on("", [()], [()])
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """B, Hq, H, L, S, E, Ev."""

    batch: int
    heads: int
    key_heads: int
    length: int
    keys: int
    width: int
    value_width: int

    @property
    def small(self) -> Sizes:
        """For the interpreter: a tile and a half."""
        return Sizes(1, self.heads, self.key_heads, min(self.length, 24), min(self.keys, 40), 16, 16)


def qkv(sizes: Sizes, dtype: torch.dtype, kind: str) -> list[Tensor]:
    """On the device, the same numbers on each."""
    s = sizes
    shapes = ((s.heads, s.length, s.width), (s.key_heads, s.keys, s.width), (s.key_heads, s.keys, s.value_width))
    return [torch.randn(s.batch, *shape).to(dtype).to(kind).requires_grad_() for shape in shapes]


def results(given: list[Tensor], impl: str, cotangents: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """Output, statistics, and the gradients of output, lse and entropy together, by name."""
    sizes = {"enable_gqa": given[0].shape[1] != given[1].shape[1]}
    output, aux = sqrtdk.attention(*given, impl=impl, return_aux=ALL, **sizes, **options)
    total = sum(
        (torch.where(t.isneginf(), 0.0, t).double() * weight).sum()
        for t, weight in zip((output, aux.lse, aux.entropy_nats), cotangents, strict=True)
    )
    gradients = torch.autograd.grad(total, given)
    found = {"output": output} | {name: getattr(aux, name) for name in ALL.wanted}
    named = zip(("d query", "d key", "d value"), gradients, strict=True)
    return {name: t.detach() for name, t in found.items()} | dict(named)


def weights_of(given: list[Tensor]) -> list[Tensor]:
    """Cotangents of output, lse and entropy."""
    q, _, v = given
    rows = q.shape[:-1]
    return [torch.randn(*shape, dtype=torch.float64).to(q.device) for shape in ((*rows, v.shape[-1]), rows, rows)]


LARGE = {
    "128": Sizes(2, 4, 4, 300, 700, 128, 128),
    "64-grouped": Sizes(1, 8, 2, 513, 513, 64, 64),
    "256": Sizes(1, 2, 2, 190, 333, 256, 256),
    "96-48": Sizes(1, 2, 1, 257, 600, 96, 48),
    "80": Sizes(1, 2, 2, 200, 200, 80, 80),
    "16": Sizes(1, 2, 2, 1030, 1030, 16, 16),
    "one-query": Sizes(2, 8, 1, 1, 9000, 128, 128),
    "four-queries": Sizes(1, 8, 8, 4, 9000, 64, 64),
}
