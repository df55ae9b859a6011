"""Dropout of the weights that is on in eval mode is found, whoever applies it; dropout as torch means it is quiet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk._check import check
from tests.attentions.each import each

RATE = 0.25
Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Self-attention with a dropout of its own."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.drop, self.attend = nn.Linear(32, 96), nn.Dropout(RATE), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(self, q, k, v)


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 8**-0.5).softmax(-1)


def sdpa(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=RATE)


def function(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.dropout(weights(q, k), RATE) @ v


def guarded_sdpa(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=RATE if m.training else 0.0)


def guarded_function(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.dropout(weights(q, k), RATE, training=m.training) @ v


def module(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.drop(weights(q, k)) @ v


@each("static", [False, True])
@each("attend", [sdpa, function])
def test_dropout_that_is_always_on_fails(attend: Attend, static: bool) -> None:
    report = check(Attention(attend), (torch.randn(2, 6, 32),), static=static)
    (finding,) = (f for f in report.findings if f.rule == "dropout")
    assert (finding.severity, finding.value, report.exit_code) == ("fail", RATE, 1)
    assert finding.message == "attention dropout of 0.25 is on in eval mode"
    assert report.calls[0].health == "fail"
    assert report.outcome == "failed"


@each("static", [False, True])
@each("attend", [guarded_sdpa, guarded_function, module])
def test_dropout_of_training_is_quiet(attend: Attend, static: bool) -> None:
    report = check(Attention(attend).train(), (torch.randn(2, 6, 32),), static=static)
    assert not [f for f in report.findings if f.rule == "dropout"]
    assert report.exit_code == 0
