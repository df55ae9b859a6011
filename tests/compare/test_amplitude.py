"""A factor on rotated q and k alike is the amplitude of the rotation, at its line; a scale that is split is a scale."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk

WIDTH, HEADS, ROWS = 32, 4, 12
CHANNELS = WIDTH // HEADS
YARN = 0.1 * math.log(8.0) + 1


def turned(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 1e4 ** (-torch.arange(0, CHANNELS, 2) / CHANNELS)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Attention(nn.Module):
    def __init__(self, of_q: float, of_k: float, scale: float | None = None, *, rotates: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.factors, self.scale, self.turn = (of_q, of_k), scale, turned if rotates else torch.clone

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q = self.turn(q) * self.factors[0]
        k = self.turn(k) * self.factors[1]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return y.transpose(1, 2).flatten(2)


def named(a: Attention, b: Attention) -> sqrtdk.DiffReport:
    return sqrtdk.diff(a, b, (torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)),))


ROOT = CHANNELS**-0.5
AMPLITUDE, OTHER = ("length_factor", "has 1.208 instead of 1 as amplitude"), ("scale", "scales by another number")
Case = tuple[tuple[float, ...], tuple[float, ...], tuple[str, str]]
CASES: dict[str, Case] = {  # factors on q and k, and the scale, of A and of B
    "YaRN": ((1.0, 1.0), (YARN, YARN), AMPLITUDE),
    "lost": ((YARN, YARN), (1.0, 1.0), ("length_factor", "has 1 instead of 1.208 as amplitude")),
    "beside a scaled q": ((ROOT, 1.0, 1.0), (ROOT * YARN, YARN, 1.0), AMPLITUDE),
    "a split scale": ((0.6, 0.6, 1.0), (0.7, 0.7, 1.0), OTHER),
    "another scale": ((1.0, 1.0), (1.0, 1.0, 0.3), OTHER),
}


@pytest.mark.parametrize("name", CASES)
def test_a_factor_on_q_and_k_is_named(name: str) -> None:
    a, b, (cause, says) = CASES[name]
    ((found,),) = (pair.causes for pair in named(Attention(*a), Attention(*b)).pairs)
    assert found.name == cause
    assert says in found.text


def test_a_factor_without_a_rotation_is_a_scale() -> None:
    a, b = Attention(1.0, 1.0, rotates=False), Attention(YARN, YARN, rotates=False)
    assert "length_factor" not in {cause.name for pair in named(a, b).pairs for cause in pair.causes}


def test_the_line_is_that_of_the_factor() -> None:
    ((found,),) = (pair.causes for pair in named(Attention(1.0, 1.0), Attention(YARN, YARN)).pairs)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + lines.index("        q = self.turn(q) * self.factors[0]")
    assert (found.at_b or "").endswith(f"test_amplitude.py:{line}")
    assert found.stage == "query rotation"
