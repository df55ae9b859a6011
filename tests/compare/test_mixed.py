"""`diff` with an adapter and a rounding at once: both are named, and where rounding hides the adapter, neither is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sqrtdk import diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.weights.grids import PER_ROW, Grid, sharing_by
from tests.compare.test_adapted import add, known, merged, said
from tests.models.adapted import adapter, base_model, written_base

INT4, NF4, INT8 = Grid("int4", sharing_by(16)), Grid("nf4", sharing_by(16)), Grid("int8", PER_ROW)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    written_base(tmp_path / "base")
    adapter(tmp_path / "lora")
    return tmp_path


def rounded(model: Any, grid: Grid = INT4) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_proj" in name:
                p.copy_(grid.rounded(p))
    return model


def compared(a: Any, b: Any) -> DiffReport:
    return diff(*(str(side) if isinstance(side, Path) else side for side in (a, b)), seq_len=8)


Made = Callable[[Path], Any]
RIGHT: dict[str, tuple[Made, Made, str, str]] = {  # A, B, the kind of rounding, the side that is rounded
    "merged, then rounded": (lambda at: at / "lora", lambda at: rounded(merged(at, add(1))), INT4.name, "B"),
    "rounded, then merged": (
        lambda at: at / "lora", lambda at: put(rounded(base_model(), INT8), at), INT8.name, "B",
    ),
    "original and QLoRA": (lambda at: base_model(), lambda at: on_rounded(at), NF4.name, "B"),
    "QLoRA and merged into the original": (lambda at: on_rounded(at), lambda at: merged(at, add(1)), NF4.name, "A"),
}  # fmt: skip


def put(model: Any, home: Path) -> Any:
    """The adapter's update, in a model of other numbers than the base."""
    for name, p in merged(home, add(1)).named_parameters():
        model.get_parameter(name).data += p.detach() - base_model().get_parameter(name).detach()
    return model


def on_rounded(home: Path) -> Path:
    """The adapter's directory, with a base that is rounded."""
    rounded(base_model(), NF4).save_pretrained(home / "base")
    return home / "lora"


@pytest.mark.parametrize("name", RIGHT)
def test_both_are_named_and_nothing_else_differs(home: Path, name: str) -> None:
    a, b, kind, coarse = RIGHT[name]
    report = compared(a(home), b(home))
    found = known(report)
    assert report.same
    assert [(change.kind, len(change.weights)) for change in found.changes] == [("LoRA", 4), (kind, 14)]
    assert (found.faults, found.coarse, found.undecided) == ((), coarse, ())
    assert "adapter" in said(report)
    assert f"rounded to {kind}" in said(report)
    assert "The first difference" not in said(report)


@pytest.mark.parametrize(("times", "name"), [(0.0, "adapter_not_loaded"), (2.0, "adapter_factor")])
def test_a_wrong_share_is_named_under_the_rounding(home: Path, times: float, name: str) -> None:
    report = compared(home / "lora", rounded(merged(home, add(times))))
    assert not report.same
    assert [(fault.name, len(fault.weights)) for fault in known(report).faults] == [(name, 4)]
    assert [(change.kind, len(change.weights)) for change in known(report).changes] == [(INT4.name, 14)]


def test_an_update_far_below_a_step_is_not_decided(home: Path) -> None:
    for times in (0.0, 1.0):
        model = rounded(merged(home, add(times / 1000), lora_alpha=8 / 1000))
        report = compared(home / "lora", model)
        found = known(report)
        assert (report.same, report.exit_code, len(found.undecided)) == (None, 0, 4)
        assert [change.kind for change in found.changes] == [INT4.name]
        assert "is not decided" in said(report)


def test_a_quantised_original_is_named_alike(home: Path) -> None:
    report = compared(rounded(base_model()), base_model())
    (change,) = known(report).changes
    assert report.same
    assert (change.kind, len(change.weights), known(report).coarse) == (INT4.name, 14, "A")
    assert "A's `q_proj`, `k_proj`, `v_proj`, `o_proj` and 3 more of 2 layers are B's rounded to" in said(report)


def test_a_merged_adapter_that_nobody_names_is_not_taken_for_a_rounding(home: Path) -> None:
    report = compared(base_model(), rounded(merged(home, add(1))))
    assert not report.same
    assert all("q_proj" not in name and "v_proj" not in name for x in known(report).changes for name in x.weights)
