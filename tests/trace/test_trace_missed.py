"""Attention that cannot be read is named, the model's own result is kept, and what is unsure is not asserted."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each
from tests.attentions.styles import tolerance

E, H = 8, 2


class Attend(nn.Module):
    """An attention with projections; subclasses say what happens between q, k and v."""

    def __init__(self, *arguments: object) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.arguments = arguments

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x).unflatten(-1, (H, E)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * E**-0.5).softmax(-1) @ v


def traced(model: nn.Module, x: Tensor) -> Trace:
    """One run, its output bit-equal to the run without a trace."""
    with torch.no_grad():
        plain = model(x)
        with sqrtdk.trace(model) as run:
            observed = model(x)
    assert torch.equal(plain, observed)
    return run


def only(run: Trace) -> AttentionCall:
    (call,) = run.calls
    return call


def test_a_raw_parameter_as_the_query_reads_alike_for_every_batch() -> None:
    """`parameter . k` is a projection to the eye, whether it is repeated over a batch or not."""

    class Latents(Attend):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(1, 4, 16))

        def forward(self, x: Tensor) -> Tensor:
            k, v = self.k(x), self.v(x)
            return torch.bmm(self.latents.expand(len(x), -1, -1), k.mT).mul(0.25).softmax(-1) @ v

    model = Latents()
    for batch in (1, 3):
        run = traced(model, torch.randn(batch, 5, 16))
        assert run.calls == ()
        assert ["projection" in other.reason for other in run.not_attention] == [True]


# -- not guessed -------------------------------------------------------------------------------------------------------


def test_a_mask_inside_a_softcap_is_shown_inside() -> None:
    class Inside(Attend):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
            z = (q @ k.mT * 0.25).masked_fill(~visible, -1e9)
            return (2 * torch.tanh(z / 2)).softmax(-1) @ v

    call = only(traced(Inside(), torch.randn(2, 5, 16)))
    assert call.formula == "softmax(2 * tanh((0.25 * q.k + causal) / 2))"


@each("fused", [False, True])
def test_tokens_all_alike_say_nothing_by_numbers(fused: bool) -> None:
    """Every product of one row is the same: what varies is rounding, and a slope of it would mean nothing."""

    class Rotary(Attend):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            angle = torch.arange(q.shape[-2])[:, None] * 100.0 ** (-torch.arange(0, E, 2) / E)
            cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
            q, k = (t * cos + torch.cat([-t[..., E // 2 :], t[..., : E // 2]], -1) * sin for t in (q, k))
            if fused:
                return functional.scaled_dot_product_attention(q, k, v)
            return super().attend(q, k, v)

    model = Rotary()
    call = only(traced(model, torch.ones(1, 12, 16)))
    assert (call.scale.numeric, call.scale.agree) == (None, None)
    assert "does not vary" in (call.scale.reason or "")
    assert call.scale.effective == pytest.approx(E**-0.5)
    call = only(traced(model, torch.randn(1, 12, 16)))
    assert call.scale.agree is True


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_one_module_a_head() -> None:
    """Textbook code: a list of single heads, three-dimensional tensors, no count of heads anywhere near."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query, self.value = (nn.Linear(24, E, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            z = self.query(x) @ self.key(x).transpose(-2, -1) * 24**-0.5
            return z.softmax(-1) @ self.value(x)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 3
            self.heads = nn.ModuleList(Head() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(x) for head in self.heads], -1)

    run = traced(Heads(), torch.randn(3, 5, 24))
    assert [(c.site, c.batch, c.heads, c.head_dim, c.model_dim) for c in run.calls] == [
        (f"heads.{i}", 3, 1, E, 24) for i in range(3)
    ]
    assert all(call.scale.agree for call in run.calls)


# -- what is an input --------------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """Token ids, given by position or by name, and positions of the model's own making."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(16, 16), nn.Embedding(16, 16)
        self.block = Attend()

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.token(ids) + self.position(torch.arange(ids.shape[-1])))


@each("named", [False, True])
@each("made", ["arange", "literal", "random", "zeros"])
def test_inputs_may_be_made_inside_the_block(named: bool, made: str) -> None:
    makers = {
        "arange": lambda: torch.arange(5)[None],
        "literal": lambda: torch.tensor([[3, 1, 4, 1, 5]]),
        "random": lambda: torch.randint(16, (1, 5)),
        "zeros": lambda: torch.zeros(1, 5, dtype=torch.long),
    }
    model = Embedded()
    with torch.no_grad(), sqrtdk.trace(model) as run:
        ids = makers[made]()
        model(ids=ids) if named else model(ids)
    assert [(call.site, call.formula) for call in run.calls] == [("block", "softmax(0.3536 * q.k)")]


def test_a_part_of_the_model_may_be_called_by_itself() -> None:
    model = Embedded()
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model.block(torch.ones(1, 5, 16))
        x = torch.linspace(0, 1, 80).view(1, 5, 16)
        model.block(x * 2)
    assert [(call.site, call.index, call.formula) for call in run.calls] == [
        ("block", 0, "softmax(0.3536 * q.k)"),
        ("block", 1, "softmax(0.3536 * q.k)"),
    ]


def test_a_method_keeps_its_factors() -> None:
    """A scale that stands between two module calls of a method."""

    class Scaled(Attend):
        def score(self, x: Tensor) -> Tensor:
            q = self.q(x) * 0.5
            return (q @ self.k(x).mT / math.sqrt(2)).softmax(-1) @ self.v(x)

    model = Scaled()
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model.score(torch.randn(2, 5, 16))
    assert only(run).formula == "softmax(0.3536 * q.k)"


def test_rules_for_warnings_come_back() -> None:
    import torch._dynamo  # noqa: F401

    before = list(warnings.filters)
    with sqrtdk.trace():
        assert len(warnings.filters) == len(before) + 1
    assert list(warnings.filters) == before


# -- what trace is given -----------------------------------------------------------------------------------------------


@each("wrong", ["gpt2", 3, {"model": 3}, nn.Linear])
def test_anything_but_a_module_is_refused(wrong: Any) -> None:
    with pytest.raises(sqrtdk.SqrtdkError, match=type(wrong).__name__) as caught:
        sqrtdk.trace(wrong)
    assert isinstance(caught.value, TypeError)
    assert caught.value.hint


def test_without_a_model_the_sites_are_unnamed() -> None:
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 1, 8)
    with sqrtdk.trace() as found:
        layer(x, x, x)
    assert [(call.site, call.head_dim) for call in found.calls] == [("", 4)]


@each("eager", [True, False])
def test_enlarging_multiplies_q_of_one_call(eager: bool) -> None:
    """The logits of the named call grow by the factor; those of the others stay."""
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()

    def attend() -> None:
        for _ in range(2):
            if eager:
                _ = (q @ k.mT * 8**-0.5).softmax(-1) @ v
            else:
                functional.scaled_dot_product_attention(q, k, v)

    with sqrtdk.trace(enlarge={("", 1): 5.0}) as found:
        attend()
    true = (q.double() @ k.double().mT / math.sqrt(8)).std(-1, correction=0).square().mean((0, 2)).sqrt()
    first, second = (call.stats for call in found.calls)
    assert first is not None
    assert second is not None
    assert first.std_logit == pytest.approx(true.tolist(), rel=tolerance(torch.float32))
    assert second.std_logit == pytest.approx((5 * true).tolist(), rel=tolerance(torch.float32))
