"""Heads that are mixed, combined or laid out otherwise get the verdict that their scale deserves."""

from __future__ import annotations

import math

import pytest
import torch

from sqrtdk import check
from sqrtdk.audit.records import CheckReport
from tests.attentions.each import each
from tests.attentions.heads import AFTER, COMBINED, MIXED, ROOT, Attend, B, D, Heads, L, linear, weighed
from tests.attentions.layouts import LAID, Laid
from tests.attentions.written import WRITTEN

SCALES = {"right": (ROOT, None), "missing": (1.0, "missing"), "twice": (ROOT**2, "twice")}
over_scales = each("scale, static", [("right", False), ("missing", False), ("twice", False), ("missing", True)])
STYLES: dict[str, Attend] = {
    **{f"mixed: {name}": attend for name, (attend, _) in MIXED.items()},
    **{f"weights: {name}": weighed(change) for name, (change, _) in AFTER.items()},
    **{f"combined: {name}": attend for name, (attend, *_) in COMBINED.items()},
    **{f"written: {name}": attend for name, (attend, *_) in WRITTEN.items()},
}


def audit(attend: Attend, scale: float = ROOT, *, static: bool = False) -> CheckReport:
    torch.manual_seed(0)
    return check(Heads(attend, scale), torch.randn(B, L, D), static=static)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", STYLES)
@over_scales
def test_the_scale_is_judged_through_what_happens_to_the_heads(name: str, scale: str, static: bool) -> None:
    number, mistake = SCALES[scale]
    report = audit(STYLES[name], number, static=static)
    assert {(judged.verdict, judged.mistake) for judged in report.calls} == {
        ("unexplained", mistake) if mistake else ("exact", None)
    }
    assert report.unjudged == ()
    assert report.exit_code == (1 if mistake else 0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LAID)
@over_scales
def test_the_scale_is_judged_in_every_layout(name: str, scale: str, static: bool) -> None:
    number, mistake = SCALES[scale]
    run, shape, *_ = LAID[name]
    if name == "one head in windows":
        number, mistake = (number, mistake) if scale == "right" else (ROOT / D**-0.5, "missing")
    torch.manual_seed(0)
    report = check(Laid(run, number), torch.randn(B, *shape, D), static=static)
    (judged,) = report.calls
    assert (judged.verdict, judged.mistake) == (("unexplained", mistake) if mistake else ("exact", None))
    assert report.unjudged == ()
    assert report.exit_code == (1 if mistake else 0)


def test_one_wrong_scale_of_two_softmaxes_is_found() -> None:
    def attend(m: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.mT * ROOT).softmax(-1) - m.share * (k @ q.mT).softmax(-1)) @ v

    report = audit(attend)
    assert [(judged.verdict, judged.mistake) for judged in report.calls] == [
        ("exact", None),
        ("unexplained", "missing"),
    ]
    assert report.exit_code == 1


def test_a_mixing_whose_bias_shows_the_future_fails() -> None:
    def attend(m: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((L, L), -math.inf).triu(1)
        return linear(m.after, (q @ k.mT * ROOT + hidden).softmax(-1)) @ v

    report = audit(attend)
    assert [judged.verdict for judged in report.calls] == ["exact"]
    assert {finding.rule for finding in report.findings if finding.severity in ("fail", "critical")} == {"mask_audit"}
