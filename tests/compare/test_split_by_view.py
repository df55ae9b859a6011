"""`diff` names heads that are a view of all tokens' features: `x.view(B, H, L, E)` where tokens come first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import sqrtdk
from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.records import DiffReport

HEADS, E, D, ROWS, LENGTH = 4, 8, 32, 2, 12
X = torch.randn(ROWS, LENGTH, D, generator=torch.Generator().manual_seed(0))


def rope(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, E, 2) / E)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Attention(nn.Module):
    """Attention of which some vectors are split by a view."""

    def __init__(self, viewed: str, rotates: bool, scale: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.by, self.rotates, self.scale = viewed, rotates, scale

    def split(self, x: Tensor, letter: str) -> Tensor:
        if letter in self.by:
            return x.view(ROWS, HEADS, LENGTH, E)  # the mistake
        return x.view(ROWS, LENGTH, HEADS, E).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x), "q"), self.split(self.k(x), "k"), self.split(self.v(x), "v")
        if self.rotates:
            q, k = rope(q), rope(k)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    def __init__(self, viewed: str = "", rotates: bool = False, scale: float = E**-0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(viewed, rotates, scale) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def line_of_the_mistake() -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"test_split_by_view.py:{next(at for at, line in enumerate(lines, 1) if line.endswith('# the mistake'))}"


def causes(report: DiffReport) -> list[list[str]]:
    return [[cause.name for cause in pair.causes] for pair in report.pairs]


@pytest.mark.parametrize(
    ("viewed", "rotates", "letters", "stage"),
    [
        ("k", False, "k", "key"),
        ("qkv", False, "q, k and v", "query"),
        pytest.param("v", False, "v", "value", marks=pytest.mark.full),
        pytest.param("kv", True, "k and v", "key", marks=pytest.mark.full),
        pytest.param("q", True, "q", "query", marks=pytest.mark.full),
    ],
)
def test_heads_that_are_a_view_are_named_in_each_layer(viewed: str, rotates: bool, letters: str, stage: str) -> None:
    """Each layer by itself, though what enters the second one differs already."""
    report = sqrtdk.diff(Model(rotates=rotates), Model(viewed, rotates), (X,))
    assert causes(report) == [["head_order"], ["head_order"]]
    for pair in report.pairs:
        (cause,) = pair.causes
        assert cause.stage == stage
        assert (cause.at_b or "").endswith(line_of_the_mistake())
        assert f"splits {letters} into heads by a view" in str(cause.text)
        assert str(fix_of(cause)).startswith(f"split {letters} with .view(B, L, heads, head_dim).transpose(1, 2)")
        assert pair.residue is not None
        assert pair.allowed is not None
        assert pair.residue <= pair.allowed
    assert any(str(text).endswith("The attentions explain all of it.") for text in report.paragraphs)


def test_a_wrong_scale_beside_it_is_named_too() -> None:
    report = sqrtdk.diff(Model(), Model("k", scale=1 / E), (X,))
    assert causes(report) == [["head_order", "scale"]] * 2


@pytest.mark.full
def test_where_a_has_the_view_no_advice_is_given_to_copy_it() -> None:
    report = sqrtdk.diff(Model("k"), Model(), (X,))
    assert causes(report) == [["head_order"]] * 2
    assert [fix_of(cause) for pair in report.pairs for cause in pair.causes] == [None, None]


@pytest.mark.parametrize("viewed", ["", pytest.param("k", marks=pytest.mark.full)])
def test_the_same_split_on_both_sides_is_the_same(viewed: str) -> None:
    report = sqrtdk.diff(Model(viewed), Model(viewed), (X,))
    assert report.same
    assert causes(report) == [[], []]
