"""Law `gradient`: a factor that stands on q or k has its name, and a finding says which lines make the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.audit.records import BROKEN, KEPT
from sqrtdk.laws import ask
from sqrtdk.laws.backward.factors import factor_name
from sqrtdk.report.check.fold import expected_text, fold_findings, values
from sqrtdk.report.check.laws import law_rows
from tests.laws.backward_models import One, features

SCALE = 0.25


def _dz(p: Tensor, dp: Tensor) -> Tensor:
    return p * (dp - (dp * p).sum(-1, keepdim=True))


class Inside(torch.autograd.Function):
    """The scale stands on q, inside of the function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, on_q: float, on_k: float) -> Tensor:
        p = ((q * on_q) @ (k * on_k).mT).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.factors = on_q, on_k
        return p @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, p), (on_q, on_k) = ctx.saved_tensors, ctx.factors
        dz = _dz(p, grads[0] @ v.mT) * on_q * on_k
        return dz @ k, dz.mT @ q, p.mT @ grads[0], None, None


class OfKeyForgotten(Inside):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, p), (on_q, on_k) = ctx.saved_tensors, ctx.factors
        dz = _dz(p, grads[0] @ v.mT)
        dq = dk = None
        if ctx.needs_input_grad[0]:
            dq = dz @ k * on_q * on_k
        dk = dz.mT @ (q * on_k)
        return dq, dk, p.mT @ grads[0], None, None


class Forgotten(Inside):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        dz = _dz(p, grads[0] @ v.mT)
        return (
            dz @ k,
            dz.mT @ q,
            p.mT @ grads[0],
            None,
            None,
        )


class Again(Inside):
    """Gets a q that is scaled, and multiplies by the scale once more."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        dz = _dz(p, grads[0] @ v.mT) * SCALE
        dq, dk = dz @ k, dz.mT @ q
        dk = dk.contiguous() if dk.shape[0] > 1 else dk
        dk *= 1.0
        return dq, dk, p.mT @ grads[0], None, None


class NoBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        p = (q @ k.mT * SCALE + bias).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        dz = _dz(p, grads[0] @ v.mT) * SCALE
        return dz @ k, dz.mT @ q, p.mT @ grads[0], None


def scaled_in_front(function: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: function.apply(q * SCALE, k, v, 1.0, 1.0)


CASES: dict[str, tuple[Callable[..., Tensor], str, str]] = {  # the attention, what is said, the code that is shown
    "inside, of k": (
        lambda q, k, v: OfKeyForgotten.apply(q, k, v, SCALE, 1.0),
        "the gradient of k is 4 times the formula's: the scale is missing",
        "`dk = dz.mT @ (q * on_k)`",
    ),
    "inside, of both": (
        lambda q, k, v: Forgotten.apply(q, k, v, SCALE, 1.0),
        "the gradient of q, k is 4 times the formula's: the scale is missing",
        "",
    ),
    "half on k": (
        lambda q, k, v: OfKeyForgotten.apply(q, k, v, 0.5, 0.5),
        "the gradient of k is 2 times the formula's: the factor 0.5 on q or k is missing",
        "`dk = dz.mT @ (q * on_k)`",
    ),
    "in front": (
        scaled_in_front(Again),
        "the gradient of q, k is 0.25 times the formula's: the scale is applied twice",
        "",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_factor_on_q_or_k_that_is_forgotten_or_repeated_has_its_name(name: str) -> None:
    attend, message, code = CASES[name]
    (answer,) = ask(One(attend), features(), "gradient").answers
    assert answer.finding is not None
    assert str(answer.finding.message) == message
    assert code in str(answer.finding.fix)
    assert "multiply the gradient of" in str(answer.finding.fix)


@pytest.mark.parametrize("on_q", [SCALE, 0.5, 0.3])
def test_factors_inside_of_a_right_function_are_judged_and_kept(on_q: float) -> None:
    answers = ask(One(lambda q, k, v: Inside.apply(q, k, v, on_q, SCALE / on_q)), features(), "gradient").answers
    assert [(one.state, str(one.reason)) for one in answers] == [(KEPT, "")]


def _line(function: Any, text: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    begins = lines.index(next(line for line in lines if line.startswith(f"class {function.__name__}")))
    return next(f":{number}" for number, line in enumerate(lines, 1) if number > begins and text in line)


def test_the_lines_that_make_the_gradient_are_those_of_the_finding() -> None:
    for name, function, texts in (
        ("inside, of k", OfKeyForgotten, ["dk = dz.mT @ (q * on_k)"]),
        ("inside, of both", Forgotten, ["dz @ k,", "dz.mT @ q,"]),
    ):
        (answer,) = ask(One(CASES[name][0]), features(), "gradient").answers
        assert answer.finding is not None
        assert answer.finding.at is not None
        assert [at[at.rindex(":") :] for at in answer.finding.at.split(", ")] == [_line(function, t) for t in texts]


def test_values_in_branches_are_not_followed_and_the_function_is_named() -> None:
    (answer,) = ask(One(CASES["in front"][0]), features(), "gradient").answers
    assert answer.finding is not None
    assert answer.finding.at is not None  # dk = ... if ... else ... is one value; the write in place follows
    assert "Again.backward" in str(answer.finding.fix)


class Relative(One):
    """A table of a relative bias, which the backward pass leaves out or which is detached in front of it."""

    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda q, k, v: NoBias.apply(q, k, v, cut(self.table[self.distance].permute(2, 0, 1))))
        length = features()["x"].shape[1]
        place = torch.arange(length)
        self.distance = place[:, None] - place + length - 1
        self.table = nn.Parameter(torch.randn(2 * length - 1, 4))


def test_a_bias_without_a_gradient_is_said_once_and_where() -> None:
    (left_out,) = ask(Relative(lambda x: x), features(), "gradient").answers
    assert left_out.finding is not None
    assert str(left_out.reason) == "no gradient reaches the bias: detached, or left out of the backward pass"
    assert "NoBias.backward" in str(left_out.finding.fix)
    (detached,) = ask(Relative(Tensor.detach), features(), "gradient").answers
    assert detached.finding is not None
    assert str(detached.reason) == "no gradient reaches the bias: detached, or left out of the backward pass"
    assert "NoBias" not in str(detached.finding.fix)


def test_every_attention_with_the_fault_is_marked_and_one_sentence_has_them() -> None:
    layers = nn.Sequential(*(One(CASES["inside, of k"][0]) for _ in range(2)))
    report = sqrtdk.check(layers.train(), features()["x"], laws="gradient")
    broken = [answer for answer in report.laws if answer.state == BROKEN]
    assert [answer.site for answer in broken] == ["0", "1"]
    (row,) = law_rows(broken)
    assert row.sites == ("0-1",)
    (folded,) = fold_findings([one for one in report.findings if one.rule == "law_gradient"])
    assert folded.site == "0-1"
    assert values(folded).en == "a difference of 300% of the gradient's largest entry"
    assert expected_text(folded).en == "0"


def test_a_factor_that_a_group_shares_with_v_is_the_groups() -> None:
    assert factor_name(0.25, (), (), 4) == ("mean", 0.25)
    assert factor_name(0.25, (0.25,), (), 4) == ("scale_twice", 0.25)
