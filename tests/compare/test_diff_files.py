"""Trace files as sides: of the writer that docs/en/trace-file.md prints, with q, k, v and the output alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.compare.completing import near
from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import DiffReport
from tests.compare.engine_files import written
from tests.compare.ports.built import build, inputs
from tests.compare.ports.planted import PLANTED

BASES = ("eager", "gqa", "rope", "rope_fused")
# cause, number of its variant, base
OF_FILES = (
    ("scale", 0, "eager"), ("softcap", 1, "rope"), ("mask_offset", 0, "eager"), ("window", 0, "rope"),
    ("sinks", 0, "post"), ("projection_bias", 0, "rope"), ("rope_base", 0, "rope_gqa"), ("rope_layout", 0, "rope"),
    ("positions", 0, "rope_gqa"), ("qk_norm", 0, "eager"), ("group_order", 0, "gqa"), ("head_order", 0, "rope"),
    ("length_factor", 0, "rope"), ("length_factor", 1, "rope_gqa"), ("softcap", 0, "fused"), ("window", 1, "post"),
)  # fmt: skip
OF_TWO_FILES = (
    ("scale", 0, "eager"), ("mask_offset", 0, "eager"), ("rope_base", 0, "rope_gqa"), ("head_order", 0, "rope"),
    ("rope_layout", 0, "rope"), ("group_order", 0, "gqa"),
)  # fmt: skip


def planted(cause: str, number: int, base: str) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """A, B with a cause, and inputs; of one layer, as what follows from a difference has other inputs."""
    planting = PLANTED[cause][number]
    shared = {**planting.shared(base), "layers": 1}
    changes = planting.changes(base)
    for fields in (shared, changes):
        if "windows" in fields:
            fields["windows"] = fields["windows"][:1]
    return build(base, common=shared), build(base, common=shared, **changes), inputs(base, **shared)


def names(report: DiffReport) -> list[str]:
    return [cause.name for cause in report.pairs[0].causes]


def test_options_that_a_file_can_not_follow_are_said(tmp_path: Path) -> None:
    model = build("eager")
    file = written(model, inputs("eager"), tmp_path / "b.safetensors")
    report = diff(model, file, inputs("eager"), dtype_b="bf16", attn_b="sdpa")
    assert report.environment["notes"] == ["B: attn sdpa, dtype bf16: no effect on a side of kind trace file"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", BASES)
def test_a_file_of_the_same_model_is_the_same(base: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, given = build(base, dtype=dtype), inputs(base)
    file = written(model, given, tmp_path / "a.safetensors")
    reports = (diff(model, file, given), diff(file, model, inputs_b=given), diff(file, file))
    for report in reports:
        assert (report.same, [pair.causes for pair in report.pairs]) == (True, [(), (), ()])


@pytest.mark.parametrize(("cause", "number", "base"), OF_FILES)
def test_a_cause_in_a_file_is_named(cause: str, number: int, base: str, tmp_path: Path) -> None:
    a, b, given = planted(cause, number, base)
    report = diff(a, written(b, given, tmp_path / "b.safetensors"), given)
    assert (report.same, names(report)) == (False, [cause])
    assert all(found.explained > 0.99 for found in report.pairs[0].causes)


@pytest.mark.parametrize(("cause", "number", "base"), OF_FILES[:12:3])
def test_a_file_as_side_a(cause: str, number: int, base: str, tmp_path: Path) -> None:
    a, b, given = planted(cause, number, base)
    report = diff(written(a, given, tmp_path / "a.safetensors"), b, inputs_b=given)
    assert (report.same, names(report)) == (False, [cause])


@pytest.mark.parametrize(("cause", "number", "base"), OF_TWO_FILES)
def test_a_cause_between_two_files_is_named(cause: str, number: int, base: str, tmp_path: Path) -> None:
    a, b, given = planted(cause, number, base)
    files = [written(model, given, tmp_path / f"{i}.safetensors") for i, model in enumerate((a, b))]
    report = diff(*files)
    assert (report.same, names(report)) == (False, [cause])


@pytest.mark.parametrize("swap", [False, True])
def test_a_rotation_that_cannot_be_told_is_unknown_with_its_stage(swap: bool, tmp_path: Path) -> None:
    # eight of twelve channels turn: no rotation that is supposed is that one
    a, b, given = planted("rope_base", 1, "rope_fused")
    files = [written(model, given, tmp_path / f"{i}.safetensors") for i, model in enumerate((a, b))]
    report = diff(*(files[::-1] if swap else files))
    assert (report.same, set(names(report))) == (False, {"unknown"})
    assert [cause.stage for cause in report.pairs[0].causes] == ["query norm", "key norm"]


def test_files_of_other_inputs_are_not_judged(tmp_path: Path) -> None:
    model = build("rope_gqa", common={"layers": 1})
    files = [written(model, inputs("rope_gqa", seed=i), tmp_path / f"{i}.safetensors") for i in (0, 1)]
    report = diff(*files)
    assert report.same is None
    assert "inputs are not known to be the same" in str(report.pairs[0].reason)


def cut_by_rows(model: nn.Module, given: dict[str, Tensor], path: Path) -> None:
    sqrtdk.record(model, given, path, rows=5)


def cut_by_heads(model: nn.Module, given: dict[str, Tensor], path: Path) -> None:
    sqrtdk.record(model, given, path, heads=[2, 3])


@pytest.mark.parametrize("cut", [cut_by_rows, cut_by_heads])
def test_a_cut_file_is_compared_with_as_much_of_the_model(
    cut: Callable[[nn.Module, dict[str, Tensor], Path], None], tmp_path: Path
) -> None:
    a, b, given = planted("scale", 0, "gqa")
    for model, expected in ((a, (True, [])), (b, (False, ["scale"]))):
        path = tmp_path / f"{expected[0]}.safetensors"
        cut(model, given, path)
        report = diff(a, path, given)
        assert (report.same, names(report)) == expected


def test_near_counts_roundings() -> None:
    x = torch.linspace(1, 2, 64)
    assert near(x, x * (1 + 2**-22), torch.float32)
    assert not near(x, x * (1 + 2**-16), torch.float32)
    assert not near(x, None, torch.float32)
