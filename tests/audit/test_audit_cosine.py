"""A cosine divided by sqrt(d) is no textbook attention; one with a gain, and unit vectors with one, are right."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk._check import check
from sqrtdk.audit.records import JudgedCall
from tests.attentions.each import each

E, H = 16, 4


class Cosine(nn.Module):
    """Attention by a cosine times a gain; `lengths` gives unit vectors a length a channel."""

    def __init__(self, gain: float, *, fused: bool = False, lengths: float | None = None) -> None:
        super().__init__()
        self.qkv, self.gain, self.fused = nn.Linear(64, 3 * H * E), gain, fused
        self.lengths = None if lengths is None else nn.Parameter(torch.full((E,), lengths))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        if self.lengths is not None:
            q, k = q * self.lengths, k * self.lengths
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, scale=self.gain)
        return (q @ k.mT * self.gain).softmax(-1) @ v


def judged(model: nn.Module, **options: object) -> JudgedCall:
    (call,) = check(model, (torch.randn(2, 9, 64),), **options).calls
    return call


@each("static", [False, True])
@each("fused", [False, True])
def test_a_divided_cosine_is_named(fused: bool, static: bool) -> None:
    report = check(Cosine(E**-0.5, fused=fused), (torch.randn(2, 9, 64),), static=static)
    (call,) = report.calls
    assert (call.verdict, call.mistake, call.expected) == ("unexplained", "cosine", E**0.5)
    assert report.exit_code == 1
    (message,) = (f.message for f in report.findings if f.rule == "scale_ledger")
    assert message.startswith(
        "scale 0.25 = 1/sqrt(16): cosine, a cosine, at most 1 already, was divided by sqrt(head_dim)"
    )


@each("fused", [False, True])
@each("gain", [1.0, 10.0, E**0.5])
def test_a_cosine_with_a_gain_is_right(gain: float, fused: bool) -> None:
    assert judged(Cosine(gain, fused=fused)).verdict == "declared"


@each("static", [False, True])
def test_unit_vectors_that_a_gain_lengthened_are_no_cosine(static: bool) -> None:
    call = judged(Cosine(E**-0.5, lengths=2.0), static=static)
    assert call.call.norm_gain
    assert (call.verdict, call.mistake) == ("exact", None)


def test_a_config_that_declares_the_division_is_believed() -> None:
    model = Cosine(E**-0.5)
    model.config = SimpleNamespace(query_pre_attn_scalar=E)
    assert judged(model).mistake is None
