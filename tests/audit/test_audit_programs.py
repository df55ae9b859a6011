"""The audit of programs, adapted and quantised models: the right scale is exact, a missing one is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sqrtdk.audit.check import check
from tests.attentions.programs import (
    ROOT,
    WIDTH,
    Adapter,
    ByLibrary,
    E,
    Merging,
    Net,
    Packed,
    SizedAfter,
    Whole,
    WholeInputs,
    changed,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def inputs() -> torch.Tensor:
    return torch.randn(4, 6, WIDTH)


def weights(kind: type[Whole]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: changed(model, lambda layer: whole(layer.weight.detach(), kind))


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "exported": lambda model: torch.export.export(model.eval(), (inputs(),)).module(),
    "graph": torch.fx.symbolic_trace,
    "traced": lambda model: torch.jit.trace(model.eval(), (inputs(),)),
    "adapter": lambda model: changed(model, Adapter),
    "merging adapter": lambda model: changed(model, Merging),
    "library": lambda model: changed(model, lambda layer: ByLibrary(layer, True)),
    "dynamically quantised": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
    **{kind.__name__: weights(kind) for kind in (Whole, SizedAfter, WholeInputs, Packed)},
}


@pytest.mark.parametrize(
    ("scale", "verdict", "mistake"),
    [(ROOT, "exact", None), (1.0, "unexplained", "missing"), (1 / E, "unexplained", "twice")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_is_judged_in_every_form(kind: str, scale: float, verdict: str, mistake: str | None) -> None:
    report = check(KINDS[kind](Net(scale)), inputs())
    assert [(judged.verdict, judged.mistake) for judged in report.calls] == [(verdict, mistake)] * 2
    assert [judged.call.site for judged in report.calls] == ["blocks.0.attn", "blocks.1.attn"]
    assert all("weight can't be looked at" in entry.reason for entry in report.not_measured)  # for NaN: not by `Whole`
