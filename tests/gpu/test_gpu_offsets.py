"""Offsets past 2^31 numbers and 2^32 bytes, in memory that nobody fills."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import Tensor

from sqrtdk import AuxRequest
from tests.gpu.judged import attention
from tests.support.triton_here import DEVICE, needs_triton

pytest.importorskip("sqrtdk.impl.gpu.operators", reason="Triton is not installed")
pytestmark = needs_triton
ALL = AuxRequest.all()
NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python has no name for
STEP = 2**31 // 3  # four of them pass 2^31, and 2^32 bytes of one-byte numbers


def far_apart(sizes: tuple[int, ...], strides: tuple[int, ...], numbers: Tensor) -> Tensor:
    """The numbers in memory that nobody fills: pages that are not touched are not there."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    assert span > 2**31
    if DEVICE.type != "cpu" or not sys.platform.startswith("linux"):
        pytest.skip("memory is there in full")
    width = numbers.element_size()
    memory = mmap.mmap(-1, span * width, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    far = torch.frombuffer(memory, dtype=numbers.dtype).as_strided(sizes, strides)
    return far.copy_(numbers)


@pytest.mark.parametrize(
    "name",
    [
        "key",
        "rows of query",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("query", "value", "bias", "attn_mask", "rows of key")
        ),
    ],
)
def test_offsets_past_32_bits(name: str) -> None:
    """Five rows, or heads, each 2^31 / 3 numbers behind the other; also in the backward pass."""
    near = {key: torch.randn(1, 5, 5, 8).to(torch.bfloat16) for key in ("query", "key", "value")}
    options: dict[str, Tensor] = {}
    if name == "bias":
        options[name] = torch.randn(5, 5).to(torch.bfloat16)
    if name == "attn_mask":
        options[name] = torch.rand(5, 5) < 0.7
    of = options if name in options else near
    key = name.removeprefix("rows of ")
    strides = {"bias": (STEP, 1), "attn_mask": (STEP, 1), "rows of query": (0, 8, STEP, 1)}
    strides["rows of key"] = strides["rows of query"]
    original = of[key]
    of[key] = far_apart(tuple(original.shape), strides.get(name, (0, STEP, 8, 1)), original)
    for leaf in near.values():
        leaf.requires_grad_()
    found = results(near, options)
    of[key] = original.detach().clone()
    for leaf in near.values():
        leaf.requires_grad_()
    assert all(map(torch.equal, found, results(near, options)))


def results(given: dict[str, Tensor], options: dict[str, Tensor]) -> list[Tensor]:
    output, aux = attention(given, options, ALL)
    total = output.float().square().sum() + aux.entropy_nats.sum()
    return [output, *aux, *torch.autograd.grad(total, list(given.values()))]
