"""FlexAttention, eager and compiled: block masks and score functions are read as steps, like any other attention's."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sqrtdk
from sqrtdk.tracing import AttentionCall, Mask
from tests.attentions.each import each

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, L, H, E = 2, 8, 4, 16
EXACT = E**-0.5
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.randn(H, 2 * L - 1, generator=torch.Generator().manual_seed(5))
ROW, COLUMN = torch.arange(L)[:, None], torch.arange(L)[None, :]


class Attention(nn.Module):
    """`seen` is the rule of a block mask."""

    def __init__(
        self,
        kv_heads: int = H,
        attend: Callable[..., Tensor] = flex_attention,
        seen: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.blocks = seen and create_block_mask(seen, None, None, L, L, device="cpu")
        self.q = nn.Linear(32, H * E)
        self.k, self.v = (nn.Linear(32, kv_heads * E) for _ in range(2))
        self.attend, self.options = attend, options

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x).unflatten(-1, (-1, E)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x), block_mask=self.blocks, **self.options)


def trace_of(model: nn.Module) -> tuple[AttentionCall, Tensor]:
    x = torch.randn(B, L, 32)
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(x)
    assert run.not_measured == run.not_attention == ()
    (call,) = run.calls
    return call, x


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def capped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 5 * torch.tanh(s / 5)


# name -> options, the formula, and the logits from q . k
CASES: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], Tensor]]] = {
    "plain": ({}, "0.25 * q.k", lambda p: p * EXACT),
    "causal": (
        {"seen": causal},
        "0.25 * q.k + causal",
        lambda p: (p * EXACT).masked_fill(ROW < COLUMN, -math.inf),
    ),
    "window": (
        {"seen": lambda b, h, i, j: (i >= j) & (i - j < 3)},
        "0.25 * q.k + window",
        lambda p: (p * EXACT).masked_fill((ROW < COLUMN) | (ROW - COLUMN >= 3), -math.inf),
    ),
    "documents": (
        {"seen": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j]},
        "0.25 * q.k + mask",
        lambda p: (p * EXACT).masked_fill(DOCUMENTS[ROW] != DOCUMENTS[COLUMN], -math.inf),
    ),
    "softcap": ({"score_mod": capped}, "5 * tanh(0.25 * q.k / 5)", lambda p: 5 * torch.tanh(p * EXACT / 5)),
    "alibi": (
        {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs()},
        "0.25 * q.k + alibi",
        lambda p: p * EXACT - SLOPES[:, None, None] * (ROW - COLUMN).abs(),
    ),
    "relative bias": (
        {"score_mod": lambda s, b, h, i, j: s + TABLE[h, i - j + L - 1]},
        "0.25 * q.k + relative",
        lambda p: p * EXACT + TABLE[:, ROW - COLUMN + L - 1],
    ),
    "scale": ({"scale": 0.1}, "0.1 * q.k", lambda p: p * 0.1),
    "all": (
        {"seen": causal, "score_mod": capped, "scale": 0.5},
        "5 * tanh(0.5 * q.k / 5) + causal",
        lambda p: (5 * torch.tanh(p * 0.5 / 5)).masked_fill(ROW < COLUMN, -math.inf),
    ),
}


@each("groups", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_flex_attention_is_read(name: str, groups: int) -> None:
    options, formula, logits = CASES[name]
    model = Attention(H // groups, **options, enable_gqa=groups > 1)
    call, x = trace_of(model)
    assert (call.kind, call.formula) == ("flex", f"softmax({formula})")
    assert (call.batch, call.heads, call.kv_heads, call.head_dim) == (B, H, H // groups, E)
    assert call.scale.agree is True
    with torch.no_grad():
        q, k, _ = (y.double() for y in model.split(x))
        z = logits(q @ k.repeat_interleave(groups, 1).mT)
    assert call.stats is not None
    assert call.stats.max_logit == pytest.approx(z.amax((0, 2, 3)).tolist(), rel=1e-4)
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
    assert call.stats.entropy_nats == pytest.approx(entropy.tolist(), rel=1e-4)


@each("factor", [EXACT, 0.5, 2.0, 4.0])
def test_a_wrong_scale_is_read(factor: float) -> None:
    """As the argument, before it, and inside the score function."""

    def before(q: Tensor, k: Tensor, v: Tensor, block_mask: None) -> Tensor:
        return flex_attention(q * factor, k, v)

    for model in (
        Attention(scale=EXACT * factor),
        Attention(attend=before),
        Attention(score_mod=lambda s, b, h, i, j: s * factor),
    ):
        call, _ = trace_of(model)
        assert call.scale.effective == pytest.approx(EXACT * factor)
        assert call.scale.agree is True


def mask_of(model: nn.Module) -> Mask:
    call, _ = trace_of(model)
    assert call.mask is not None
    return call.mask


def test_block_masks_off_by_one() -> None:
    ahead = mask_of(Attention(seen=lambda b, h, i, j: i >= j - 1))
    assert (ahead.least, ahead.ahead_by_one) == (-1, B * H)
    behind = mask_of(Attention(seen=lambda b, h, i, j: i > j))
    assert (behind.least, behind.blind_rows) == (1, B * H)


def test_the_trace_brings_no_warning() -> None:
    """It is the trace that runs a compiled one eagerly."""
    shown = getattr(sys.modules[flex_attention.__module__], "_WARNINGS_SHOWN", set())  # older torches warn every time
    model = Attention(attend=torch.compile(flex_attention, backend="eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown.discard("flex_attention_performance")
        trace_of(model)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@each("whole", [False, True])
def test_a_compiled_one_runs_eagerly_under_the_trace(whole: bool) -> None:
    """The function alone, or the model around it."""
    inner = flex_attention if whole else torch.compile(flex_attention, backend="eager")
    model: Any = Attention(attend=inner, seen=causal, score_mod=capped)
    call, _ = trace_of(torch.compile(model, backend="eager") if whole else model)
    assert (call.kind, call.formula) == ("flex", "softmax(5 * tanh(0.25 * q.k / 5) + causal)")
    assert call.scale.agree is True
