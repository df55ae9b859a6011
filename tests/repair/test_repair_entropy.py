"""The floor for the entropy: its value by hand, its gradient, and that a head under it comes up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest, entropy_floor
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats.request import AuxOutput

WANTED = AuxRequest(entropy_nats=True, keys=True)


def _aux(q: Tensor, k: Tensor, **options: Any) -> AuxOutput:
    output = sqrtdk.attention(q, k, k, return_aux=WANTED, **options)
    assert isinstance(output, tuple)
    return output[1]


def _vectors(size: float = 1.0) -> tuple[Tensor, Tensor]:
    q, k = (size * torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("unit", ["nats", "fraction"])
def test_the_value_by_hand(unit: str, causal: bool) -> None:
    q, k = _vectors(3.0)
    logits = q @ k.mT / 2
    if causal:
        logits = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    p = logits.softmax(-1)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    count = torch.arange(1, 6).double() if causal else torch.full((5,), 5.0).double()
    floor = 1.2 if unit == "nats" else 0.7
    rows = (entropy if unit == "nats" else entropy / count.clamp(min=2).log())[..., 1 if causal else 0 :]
    expected = torch.relu(floor - rows.mean((0, 2))).mean()
    actual = entropy_floor(_aux(q, k, is_causal=causal), **{unit: floor})
    assert expected > 0.1
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("unit", ["nats", "fraction"])
def test_gradcheck(unit: str) -> None:
    inputs = _vectors(2.0)
    floor = {unit: 1.0 if unit == "nats" else 0.8}
    assert entropy_floor(_aux(*inputs, is_causal=True), **floor) > 0.05
    assert torch.autograd.gradcheck(lambda q, k: entropy_floor(_aux(q, k, is_causal=True), **floor), inputs)


def test_heads_above_the_floor_have_no_gradient() -> None:
    q, k = _vectors(1e-3)
    loss = entropy_floor(_aux(q, k), fraction=0.9)
    loss.backward()
    assert loss == 0
    assert q.grad is not None
    assert not q.grad.any()


def test_one_head_under_the_floor_is_the_only_one_to_move() -> None:
    q, k = (torch.randn(2, 3, 5, 4, dtype=torch.float64) * torch.tensor([1e-2, 1e-2, 8.0])[:, None, None] for _ in "qk")
    q.requires_grad_()
    entropy_floor(_aux(q, k), fraction=0.9).backward()
    assert q.grad is not None
    assert q.grad.abs().amax((0, 2, 3)).gt(0).tolist() == [False, False, True]
    with torch.no_grad():
        before = _aux(q, k).entropy_nats
        after = _aux(q - 0.5 * q.grad, k).entropy_nats
    assert before is not None
    assert after is not None
    assert after[:, 2].mean() > before[:, 2].mean()


def test_rows_without_a_choice_and_blind_rows_count_for_nothing() -> None:
    q, k = _vectors()
    mask = torch.eye(5, dtype=torch.bool)
    mask[3] = False
    loss = entropy_floor(_aux(q, k, attn_mask=mask), nats=1.0)
    assert loss == 0
    loss.backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


def test_a_sink_and_a_sampled_backward() -> None:
    q, k = _vectors(2.0)
    sinks = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, s: entropy_floor(_aux(q, k.detach(), sinks=s), nats=2.0), (q, sinks))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one floor is given, in nats or as a fraction; got nats=None, fraction=None"),
        ({"nats": 1.0, "fraction": 0.5}, "one floor is given"),
        ({"nats": 0.0}, "nats is a finite number above 0; got 0.0"),
        ({"nats": math.nan}, "nats is a finite number above 0; got nan"),
        ({"fraction": 1.5}, "fraction is at most 1; got 1.5"),
        ({"fraction": -1.0}, "fraction is a finite number above 0; got -1.0"),
    ],
)
def test_wrong_floors(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        entropy_floor(_aux(*_vectors()), **options)


def test_wrong_aux() -> None:
    with pytest.raises(InvalidTypeError, match=r"aux is the AuxOutput of sqrtdk.attention; got Tensor"):
        entropy_floor(torch.ones(2, 3), nats=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="aux has entropy_nats and keys; it has entropy_nats"):
        entropy_floor(AuxOutput(entropy_nats=torch.ones(1, 2, 3)), nats=1.0)
    with pytest.raises(InvalidValueError, match=r"\(..., heads, rows\); got \(3,\)"):
        entropy_floor(AuxOutput(entropy_nats=torch.ones(3), keys=torch.ones(3)), nats=1.0)
