"""Attention that is no softmax of one product, by its name: linear, sigmoid, ReLU, Sinkhorn, efficient, Nystroem."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import Trace
from tests.attentions.each import each

B, H, L, E = 2, 4, 6, 8
ROOT = E**-0.5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Self-attention with a function of q, k and v in the middle, and a plain one beside it."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.odd, self.plain = Part(attend), Part(lambda q, k, v: (q @ k.mT * ROOT).softmax(-1) @ v)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.odd(x)
        return x + self.plain(x)


class Part(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(H * E, 3 * H * E), attend
        self.register_buffer("directions", torch.randn(2 * E, E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        if self.attend is performer:
            q, k = (torch.exp(t @ self.directions.mT - t.square().sum(-1, keepdim=True) / 2) for t in (q, k))
            return linear(q, k, v).transpose(1, 2).flatten(2)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def run_of(attend: Attend, device: str = "cpu") -> Trace:
    model, x = Net(attend).to(device), torch.randn(B, L, H * E, device=device)
    with torch.no_grad():
        plain = model(x)
        with sqrtdk.trace(model) as run:
            observed = model(x)
    assert plain.is_meta or torch.equal(plain, observed)
    assert [call.formula for call in run.calls if call.site == "plain"] == ["softmax(0.3536 * q.k)"]
    return run


# -- without a softmax -------------------------------------------------------------------------------------------------


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ (k.mT @ v)) / (q @ k.sum(-2)[..., None])


def elu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear(functional.elu(q) + 1, functional.elu(k) + 1, v)


def performer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise AssertionError


def cosformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Relu, and a cosine of the distance as two products (Qin et al. 2022, arXiv:2202.08791)."""
    turn = torch.arange(L, device=q.device)[:, None] * math.pi / 2 / L
    q, k = (torch.cat([x.relu() * turn.sin(), x.relu() * turn.cos()], -1) for x in (q, k))
    return linear(q, k, v)


def sparsemax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The simplex's nearest point (Martins and Astudillo 2016, arXiv:1602.02068)."""
    z = q @ k.mT * ROOT
    ordered = z.sort(-1, descending=True)[0]
    count = torch.arange(1, L + 1, device=z.device)
    support = (1 + count * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    level = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (z - level).clamp(min=0) @ v


WITHOUT: dict[str, tuple[Attend, str]] = {
    "keys and values first": (lambda q, k, v: q @ (k.mT @ v), "linear attention: "),
    "queries and keys first": (lambda q, k, v: (q @ k.mT) @ v, "linear attention: "),
    "scaled": (lambda q, k, v: (q @ k.mT * ROOT) @ v, "linear attention: .*, scaled by 0.3536"),
    "elu": (elu, "linear attention: "),
    "performer": (performer, "linear attention: "),
    "cosformer": (cosformer, "linear attention: "),
    "sigmoid": (lambda q, k, v: (q @ k.mT * ROOT).sigmoid() @ v, r"sigmoid attention: .* sigmoid\(0.3536 \* q.k\)$"),
    "unscaled sigmoid": (lambda q, k, v: (q @ k.mT).sigmoid() @ v, r"sigmoid attention: .* sigmoid\(q.k\)$"),
    "relu": (
        lambda q, k, v: (q @ k.mT * ROOT).relu() / L @ v,
        r"ReLU attention: .* 0.1667 \* relu\(0.3536 \* q.k\)$",
    ),
    "squared relu": (
        lambda q, k, v: (q @ k.mT * ROOT).relu().square() @ v,
        r"squared-ReLU attention: .* square\(relu\(0.3536 \* q.k\)\)$",
    ),
    "relu times relu": (
        lambda q, k, v: (r := (q @ k.mT * ROOT).relu()).mul(r) @ v,
        r"squared-ReLU attention: .* square\(relu\(0.3536 \* q.k\)\)$",
    ),
    "sparsemax": (sparsemax, "a product of activations meets"),
    "cosine": (lambda q, k, v: (q @ k.mT).cos() @ v, "a product of activations meets"),
}


@each("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", WITHOUT)
def test_attention_without_a_softmax_is_named_with_its_scale(name: str, device: str) -> None:
    attend, text = WITHOUT[name]
    run = run_of(attend, device)
    assert len(run.calls) == 1
    assert {missed.site for missed in run.not_measured} == {"odd"}
    (reason,) = {missed.reason for missed in run.not_measured}
    assert "without a softmax" in reason
    (formula,) = {missed.formula for missed in run.not_measured}
    assert re.match(text, f"{reason} {formula}"), (reason, formula)
    if name in ("elu", "performer"):
        assert "scaled" not in reason  # what is before a feature map is no factor


@each("context_first", [False, True])
def test_softmaxes_of_q_and_k_apart_are_no_poolings(context_first: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, context = q.softmax(-1), k.softmax(-2).mT @ v
        return (context.mT @ q.mT).mT if context_first else q @ context

    run = run_of(attend)
    assert (len(run.calls), run.not_measured) == (1, ())
    assert [(other.site, other.code) for other in run.not_attention] == [("odd", "apart")] * 2


def test_a_pooling_of_what_a_pooling_gave_is_a_pooling() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.sentence = nn.Linear(16, 1), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = (self.word(x).softmax(-2).mT @ x).squeeze(-2)
            return self.sentence(x).softmax(-2).mT @ x

    model = Twice()
    with sqrtdk.trace(model) as run:
        model(torch.randn(2, 3, 5, 16))
    assert [other.code for other in run.not_attention] == ["one_projection"] * 2


# -- more than a softmax -----------------------------------------------------------------------------------------------


def by_logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q @ k.mT * ROOT
    for _ in range(3):
        z = z - z.logsumexp(-1, keepdim=True)
        z = z - z.logsumexp(-2, keepdim=True)
    return z.exp() @ v


def by_division(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT * ROOT).exp()
    for _ in range(3):
        w = w / w.sum(-1, keepdim=True)
        w = w / w.sum(-2, keepdim=True)
    return w @ v


def after_the_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT * ROOT).softmax(-1)
    for _ in range(3):
        w = w / w.sum(-2, keepdim=True)
        w = w / w.sum(-1, keepdim=True)
    return w @ v


@each("attend", [by_logarithms, by_division, after_the_softmax])
def test_rows_and_columns_normalised_in_turn_are_no_softmax(attend: Attend) -> None:
    """Sinkhorn (Sander et al. 2022, arXiv:2110.11773): the slope of the logits is not the weights'."""
    call = next(call for call in run_of(attend).calls if call.site == "odd")
    assert call.unknown == ("Sinkhorn normalisation on the weights",)
    assert (call.formula, call.scale.effective) == ("softmax(0.3536 * q.k)", None)
    assert "Sinkhorn" in (call.scale.reason or "")


def test_one_division_by_the_sum_over_the_queries_is_named_for_what_it_is() -> None:
    """Slot attention (Locatello et al. 2020, arXiv:2006.15055)."""

    def slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = (q @ k.mT * ROOT).softmax(-1)
        return w / w.sum(-2, keepdim=True) @ v

    call = next(call for call in run_of(slots).calls if call.site == "odd")
    assert "division by the sum over the queries on the weights" in call.unknown
    assert call.scale.effective is None


def landmarks(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], 2, L // 2, E)[:, :, :, 0]


def nystroem(inverse: Callable[[Tensor], Tensor]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * ROOT
        few_q, few_k = landmarks(q), landmarks(k)
        left, middle, right = (a @ b.mT for a, b in ((q, few_k), (few_q, few_k), (few_q, k)))
        return left.softmax(-1) @ inverse(middle.softmax(-1)) @ (right.softmax(-1) @ v)

    return attend


def iterated(w: Tensor) -> Tensor:
    """The inverse by iteration, as the paper has it (Xiong et al. 2021, arXiv:2102.03902, equation 11)."""
    eye = torch.eye(w.shape[-1], device=w.device)
    z = w.mT / (w.abs().sum(-1).amax() * w.abs().sum(-2).amax())
    for _ in range(4):
        y = w @ z
        z = 0.25 * z @ (13 * eye - y @ (15 * eye - y @ (7 * eye - y)))
    return z


@each("inverse", [iterated, torch.linalg.pinv, torch.linalg.inv])
def test_each_softmax_of_landmarks_is_one_attention(inverse: Callable[[Tensor], Tensor]) -> None:
    run = run_of(nystroem(inverse))
    assert run.not_attention == run.not_measured == ()
    calls = [call for call in run.calls if call.site == "odd"]
    assert sorted((call.query_len, call.key_len) for call in calls) == [(2, 2), (2, L), (L, 2)]
    assert {(call.formula, call.heads, call.scale.agree) for call in calls} == {("softmax(0.3536 * q.k)", H, True)}
