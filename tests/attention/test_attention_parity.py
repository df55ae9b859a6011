"""With torch's arguments alone, `sqrtdk.attention` is torch's `scaled_dot_product_attention`: a generated grid.

Output and gradients. `impl="auto"` takes torch's own kernels here, so that they are equal to the last bit, but where
torch is given other arguments: its CPU kernel gives NaN for a causal call with a scale of zero or below, and most of
its kernels refuse a mask beside `is_causal`; there the reference is torch with both in one mask, within rounding.
A part of the grid runs on each named implementation too, within the tolerance of its dtype.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sqrtdk
from tests.tolerances import HALF, complaint

CHUNKS, EACH = 24, 100
LENGTHS = (0, 1, 1, 2, 3, 5, 8, 17)
DIMS = (1, 2, 3, 5, 7, 8, 13, 16, 33, 64, 129)
DTYPES = (torch.float64, torch.float32, torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("plain", "heads_last", "expanded", "broadcast", "sliced", "two_dims", "three_dims", "five_dims")
MASKS = ("none", "none", "causal", "bool", "bool_full", "float", "float_full", "blind", "blind_float", "bool_causal")


@dataclass(frozen=True)
class Setup:
    """One configuration; tensors follow from it and its seed."""

    seed: int
    layout: str
    mask: str
    dtype: torch.dtype
    length: int
    keys: int
    dim: int
    value_dim: int
    heads: int
    kv_heads: int
    scale: float | None

    def query_key_value(self, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        q_lead, kv_lead = self._leads()
        sizes = (
            (*q_lead, self.length, self.dim),
            (*kv_lead, self.keys, self.dim),
            (*kv_lead, self.keys, self.value_dim),
        )
        return tuple(torch.randn(s, generator=draw, dtype=torch.float64).to(self.dtype).requires_grad_() for s in sizes)

    def _leads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        q, kv = (self.heads,), (self.kv_heads,)
        return {
            "two_dims": ((), ()),
            "three_dims": (q, kv),
            "five_dims": ((2, 2, *q), (2, 2, *kv)),
            "broadcast": ((3, *q), (1, *kv)),
            "expanded": ((3, *q), (1, *kv)),
        }.get(self.layout, ((2, *q), (2, *kv)))

    def laid_out(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views with the strides of the layout."""
        if self.layout == "heads_last":
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        if self.layout == "expanded":
            k, v = (t.expand(3, *t.shape[1:]) for t in (k, v))
        if self.layout == "sliced":
            q, k, v = (torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (q, k, v))
        return q, k, v

    def arguments(self, draw: torch.Generator, lead: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": self.scale, "enable_gqa": self.heads != self.kv_heads}
        pairs = (self.length, self.keys)
        shape = (*lead, *pairs) if self.mask.endswith("full") else pairs
        if self.mask in ("bool", "bool_full", "bool_causal"):
            found["attn_mask"] = torch.rand(shape, generator=draw) > 0.3
        if self.mask in ("float", "float_full"):
            mask = torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)
            found["attn_mask"] = mask.masked_fill(torch.rand(shape, generator=draw) > 0.8, -math.inf)
        if self.mask in ("blind", "blind_float"):
            visible = torch.rand(shape, generator=draw) > 0.3
            visible[::2] = False
            floats = torch.zeros(shape, dtype=self.dtype).masked_fill(~visible, -math.inf)
            found["attn_mask"] = visible if self.mask == "blind" else floats
        if self.mask in ("causal", "bool_causal"):
            found["is_causal"] = True
        return found


def setups(chunk: int) -> list[Setup]:
    draw = random.Random(chunk)
    found = []
    for i in range(EACH):
        layout = draw.choice(LAYOUTS)
        groups = (1, 1) if layout == "two_dims" else draw.choice(((2, 2), (3, 3), (1, 1), (4, 2), (6, 3), (3, 1)))
        dim = draw.choice(DIMS)
        found.append(
            Setup(
                seed=chunk * EACH + i,
                layout=layout,
                mask=draw.choice(MASKS),
                dtype=draw.choice(DTYPES),
                length=draw.choice(LENGTHS),
                keys=draw.choice(LENGTHS),
                dim=dim,
                value_dim=draw.choice((dim, dim, 1, 6)),
                heads=groups[0],
                kv_heads=groups[1],
                scale=draw.choice((None, None, 0.3, 1.0, -0.5, 0.0, 3)),
            )
        )
    return found


def results(attention: Any, setup: Setup, *, one_mask: bool = False, **extra: Any) -> list[Tensor]:
    """Output and the gradients of query, key and value; `one_mask` gives causal and mask as a single mask."""
    draw = torch.Generator().manual_seed(setup.seed)
    leaves = setup.query_key_value(draw)
    q, k, v = setup.laid_out(*leaves)
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3]) + q.shape[-3:-2]
    given = setup.arguments(draw, lead)
    if one_mask and given.pop("is_causal", False):
        visible = torch.ones(setup.length, setup.keys, dtype=torch.bool).tril()
        given["attn_mask"] = given.get("attn_mask", visible) & visible
    output = attention(q, k, v, **given, **extra)
    cotangent = torch.randn(output.shape, generator=draw, dtype=torch.float64).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


def needs_one_mask(setup: Setup) -> bool:
    causal = setup.mask in ("causal", "bool_causal")
    return setup.mask == "bool_causal" or (causal and setup.scale is not None and setup.scale <= 0)


def compare(setup: Setup, ours: list[Tensor], theirs: list[Tensor], *, exactly: bool) -> list[str]:
    size = 5.0 * max(1, abs(setup.scale or 1.0)) * setup.dim  # of a product of normal numbers, and a mask
    largest = max((t.abs().max().item() for t in theirs if t.numel()), default=0.0)
    wrong = []
    for name, mine, torchs in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
        if mine.dtype != torchs.dtype:
            wrong.append(f"{name} of {setup}: {mine.dtype}")
        if exactly:
            found = None if torch.equal(mine, torchs) else "not equal to the last bit"
        else:
            uses = 1 if name == "output" else 3 * setup.heads // setup.kv_heads  # of a key that batches and heads share
            found = complaint(mine, torchs, setup.dtype, length=17, logit=size, magnitude=largest, uses=uses)
        if found is not None:
            wrong.append(f"{name} of {setup}: {found}")
    return wrong


@pytest.mark.sampled(6)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_auto_is_sdpa(chunk: int) -> None:
    wrong = []
    for setup in setups(chunk):
        one_mask = needs_one_mask(setup)
        theirs = results(functional.scaled_dot_product_attention, setup, one_mask=one_mask)
        exactly = not one_mask and not isinstance(setup.scale, int)  # an int is no scale of torch's own path
        try:
            wrong += compare(setup, results(sqrtdk.attention, setup), theirs, exactly=exactly)
        except RuntimeError as error:
            wrong.append(f"{setup}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("impl", ["dense", "fused", "tiled"])
@pytest.mark.parametrize("chunk", range(0, CHUNKS, 4))
def test_named_implementations_are_sdpa_within_rounding(chunk: int, impl: str) -> None:
    wrong = []
    for setup in setups(chunk):
        if setup.dtype in HALF:
            continue  # the battery judges these against a better reference
        theirs = results(functional.scaled_dot_product_attention, setup, one_mask=needs_one_mask(setup))
        wrong += compare(setup, results(sqrtdk.attention, setup, impl=impl), theirs, exactly=False)
    assert not wrong, "\n".join(wrong)


def test_at_least_2000_configurations() -> None:
    everything = [setup for chunk in range(CHUNKS) for setup in setups(chunk)]
    for field in ("layout", "mask", "dtype", "length", "keys", "dim"):
        assert len({getattr(setup, field) for setup in everything}) > 1
    assert len(set(everything)) == len(everything)
    assert len(everything) >= 2000
