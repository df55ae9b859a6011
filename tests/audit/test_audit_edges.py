"""The audit of graph attention: the right scale is exact, a wrong one is named, an additive score is not judged."""

from __future__ import annotations

import pytest
import torch

from sqrtdk.audit.check import check
from tests.attentions.edges import ROOT, WIDTH, AfterTheSum, E, EdgeAttention, Gat, H, N, edges

SCALES = {
    "right": (ROOT, "exact", None),
    "missing": (1.0, "unexplained", "missing"),
    "twice": (1 / E, "unexplained", "twice"),
    "inverted": (1 / ROOT, "unexplained", "inverted"),
    "model_dim": (WIDTH**-0.5, "unexplained", "model_dim"),
    "head_count": (H**-0.5, "unexplained", "head_count"),
    "doubled": (2 * ROOT, "unexplained", "unknown"),
}


@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("kind", [EdgeAttention, AfterTheSum])
@pytest.mark.parametrize("name", SCALES)
def test_the_scale_on_the_edges_is_judged(name: str, kind: type[EdgeAttention], static: bool) -> None:
    scale, verdict, mistake = SCALES[name]
    factors = (ROOT, ROOT) if name == "twice" else (scale, 1.0)
    model = kind(lambda q, k: (q * k).sum(-1) * factors[0] * factors[1])
    report = check(model, (torch.randn(N, WIDTH), edges()), static=static)
    assert [(judged.verdict, judged.mistake) for judged in report.calls] == [(verdict, mistake)]
    assert report.exit_code == int(verdict != "exact")
    if name == "right":
        assert report.findings == ()


def test_an_additive_score_is_unmeasured_and_said() -> None:
    report = check(Gat(), (torch.randn(N, WIDTH), edges()))
    (judged,) = report.calls
    assert (judged.verdict, judged.call.kind) == ("unmeasured", "edge softmax")
    assert "additive" in (judged.reason or "")
