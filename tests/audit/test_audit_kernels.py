"""Operators of other libraries, FlexAttention, packed sequences and scores without a product, through the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sqrtdk
from sqrtdk import check, scores
from sqrtdk.audit.records import CheckReport
from tests.attentions import stand_in_kernels as kernels
from tests.attentions.each import each

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, L, H, E = 2, 8, 4, 16
EXACT = E**-0.5
AT = torch.arange(0, B * L + 1, L, dtype=torch.int32)


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    with kernels.registered():
        yield


class Attention(nn.Module):
    """Projections, and an attention of (B, L, H, E); its module says nothing of a scale."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, H * E) for _ in range(3))
        self.attend, self.is_causal = attend, causal

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*(f(x).unflatten(-1, (H, E)) for f in (self.q, self.k, self.v)))


def flash(scale: float, causal: bool = False, right: int = -1) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operator = torch.ops.flash_attn._flash_attn_forward
        return operator(q, k, v, 0.0, scale, causal, -1, right, 0.0, None, False)[0]

    return run


def varlen(scale: float, causal: bool = False) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        operator = torch.ops.flash_attn._flash_attn_varlen_forward
        return operator(*packed, AT, AT, L, L, 0.0, scale, causal)[0].view_as(q)

    return run


def xformers(scale: float, causal: bool = False) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operator = torch.ops.xformers.efficient_attention_forward_cutlass
        return operator(q, k, v, None, None, None, None, 0.0, False, 2 * causal, scale, None, None)[0]

    return run


def flex(scale: float, causal: bool = False) -> Callable[..., Tensor]:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device="cpu") if causal else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale, block_mask=mask)

    return run


KINDS = {"flash": flash, "varlen": varlen, "xformers": xformers, "flex": flex}


def report_of(model: nn.Module, **options: Any) -> CheckReport:
    return check(model, torch.randn(B, L, 32), **options)


@each("kind", KINDS)
def test_a_causal_kernel_leaks_nothing(kind: str) -> None:
    report = report_of(Attention(KINDS[kind](EXACT, True), causal=True))
    assert ([call.verdict for call in report.calls], report.findings) == (["exact"], ())
    assert report.calls[0].call.formula == "softmax(0.25 * q.k + causal)"


def test_a_leak_of_the_future_is_critical() -> None:
    """A module that says it is causal, and a window that shows every row the key after its own."""
    report = report_of(Attention(flash(EXACT, right=1), causal=True))
    assert [finding.severity for finding in report.findings] == ["critical"]


def test_what_a_kernel_does_besides_is_unmeasured() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.flash_attn_3.fwd(q, k, v, q_v=torch.zeros_like(q))[0]

    report = report_of(Attention(attend), fail_on="unmeasured")
    assert [call.verdict for call in report.calls] == ["unmeasured"]
    assert report.exit_code == 1


@each("score", [scores.keras_additive(), scores.distance()])
def test_a_score_without_a_product_has_no_scale_to_judge(score: Any) -> None:
    """Its masks and its numbers are judged all the same."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sqrtdk.attention(*(x.transpose(1, 2) for x in (q, k, v)), score=score)

    report = report_of(Attention(attend), fail_on="unmeasured")
    assert [(finding.rule, finding.severity) for finding in report.findings] == [("unmeasured", "note")]
    assert report.exit_code == 1
    leaking = report_of(Attention(attend, causal=True))
    assert "critical" in {finding.severity for finding in leaking.findings}
