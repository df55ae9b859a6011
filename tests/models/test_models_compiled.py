"""A compiled model runs as it is written: its compiler is never called, whoever asks, and however it was compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sqrtdk
from sqrtdk import laws
from sqrtdk.kv.forecast import kv_forecast
from sqrtdk.models.modules import forward_arguments
from sqrtdk.recording.record import record
from tests.models.causal_attention import WIDTH, Attention


def never(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled")


def method() -> nn.Module:
    model = Attention()
    model.compile(backend=never)
    return model


def forward() -> nn.Module:
    model = Attention()
    model.forward = torch.compile(model.forward, backend=never)  # type: ignore[method-assign]
    return model


FORMS: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: torch.compile(Attention(), backend=never),
    "part": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.compile(Attention(), backend=never)),
    "method": method,
    "forward": forward,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_compiler_is_never_called(form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, x = FORMS[form](), torch.randn(2, 6, WIDTH)
    report = laws.ask(model, x, laws="finite,samples,causal,place,modes")
    assert {answer.law: answer.state for answer in report.answers if answer.state != "not asked"}.keys() >= {
        "finite", "samples", "causal", "place", "modes",
    }  # fmt: skip
    assert not report.broken
    assert not sqrtdk.check(model, x, laws="none").findings
    assert sqrtdk.diff(model, model, x).same
    assert len(kv_forecast(model, x, kv_dtype="int8").calls) == 1
    assert record(model, x, tmp_path / "run.safetensors").calls == 1
    assert capfd.readouterr().err == ""


def test_the_arguments_of_a_compiled_forward_have_their_names() -> None:
    assert forward_arguments(torch.compile(Attention(), backend=never)) == {"x": True}
