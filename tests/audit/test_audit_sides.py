"""The verdict where q and k went through more than a projection: what only an audit says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk._check import check
from sqrtdk.audit.records import CheckReport
from tests.attentions.each import each
from tests.trace.sides_by_hand import DIM, ROOT, Attention, B, E, L, everywhere, scores

CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
SCALES = [(ROOT, ("exact", None)), (1.0, ("unexplained", "missing")), (ROOT**2, ("unexplained", "twice"))]


def judged(attend: Any, *, meta: bool = False, **parts: Any) -> tuple[CheckReport, tuple[str, str | None]]:
    """The audit of one attention, and the verdict and mistake of its call."""
    report = check(Attention(attend, **parts), torch.randn(B, L, DIM), static=meta)
    (call,) = report.calls
    return report, (call.verdict, call.mistake)


@everywhere
def test_the_root_of_a_padded_transposed_head_is_named(meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (functional.pad(q, (0, 8)) @ functional.pad(k.mT, (0, 0, 0, 8)) * 24**-0.5).softmax(-1) @ v

    assert judged(attend, meta=meta)[1] == ("unexplained", "padded_head")


def test_a_gain_of_two_behind_a_factor_is_no_scale_of_four() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (functional.rms_norm(x, (E,)) * E**-0.25 * m.gain for x in (q, k))
        return scores(q, k, v, 1.0)

    report, verdict = judged(attend, gain=nn.Parameter(torch.full((E,), 2.0)))
    assert (verdict, report.calls[0].call.scale.ratio) == (("exact", None), pytest.approx(1.0, rel=1e-4))


@everywhere
@each("masked", [False, True])
@each("scale, expected", SCALES)
def test_sorted_keys_are_neither_causal_nor_a_leak(
    scale: float, expected: tuple[str, str | None], masked: bool, meta: bool
) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = k.norm(dim=-1).argsort(-1)[..., None].expand_as(k)
        z = q @ k.gather(-2, index).mT * scale
        if masked:
            z = z.masked_fill(~CAUSAL.to(z.device), -torch.inf)
        return z.softmax(-1) @ v.gather(-2, index)

    report, verdict = judged(attend, is_causal=True, meta=meta)
    assert verdict == expected
    found = [f for f in report.findings if f.rule == "mask_audit"]
    assert [(f.severity, "gathered" in f.message) for f in found] == [("note", True)]


@everywhere
@each("scale, expected", SCALES)
def test_the_scale_on_either_side_of_a_pool(scale: float, expected: tuple[str, str | None], meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.unflatten(-2, (-1, 2)).mean(-2) for x in (k * scale**0.5, v))
        return scores(q, k, v, scale**0.5)

    assert judged(attend, meta=meta)[1] == expected


@everywhere
@each("where", ["gate", "rows"])
@each("scale, expected", [(ROOT, "declared"), (ROOT**2, "unexplained"), (1.0, None)])
def test_a_factor_of_the_data_or_of_the_rows_is_no_mistake(
    scale: float, expected: str | None, where: str, meta: bool
) -> None:
    """What stands beside it is judged; a missing scale may stand in the factor of the rows."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = 1.0 + torch.arange(L, device=q.device).float()[:, None]
        return scores(q * (m.gate(q).sigmoid() if where == "gate" else lengths.log1p()), k, v, scale)

    report, verdict = judged(attend, gate=nn.Linear(E, 1), meta=meta)
    if expected is None:
        assert verdict == (("unmeasured", None) if where == "rows" else ("unexplained", "missing"))
        return
    assert verdict[0] == expected
    if expected == "unexplained":
        assert "beside" in (report.calls[0].reason or "")
