"""Trace files as sides, of the writer that docs/en/trace-file.md prints: with q, k, v and the output alone.

A cause is named, or is unknown by nature, where B or both sides are such files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.compare.diff import diff
from sqrtdk.compare.infer.missing import near
from sqrtdk.compare.records import DiffReport
from tests.compare.engine_files import NAMES, calls_of, plain, written
from tests.compare.ports.built import build, inputs
from tests.compare.ports.pairs import Case, case_of
from tests.compare.ports.planted import cross_section

CASES = [
    pytest.param(Case(base, ((cause, planting),), single=True), id=f"{cause}-{planting.name}-{base}")
    for cause, planting, base in cross_section()
]
IN_BOTH = [case for case in CASES if not case.id.startswith("dropout")]  # dropout draws anew
# What a file can't tell, beside a module, and why.
HIDDEN = {
    "dropout": "which weights were dropped: their sums with v alone are told",
    "rounding": "where q and k were rounded: what they were before is the other side's, and as coarse",
    "projection_bias": "an offset of v, where v was not projected from an input that is told",
    "weights": "the projection: what it was given is not told",
    "head_order": "channels in another order, before a rotation that mixes them",
    "input": "what came in",
    "unknown": "no cause has it",
}
# And beside another file: what q and k were before norm and rotation, tables of A's own, a formula of A's own.
HIDDEN_BESIDE = HIDDEN | {
    "bias": "a table of A's own is not told by A",
    "bias_scaled": "a table of A's own is not told by A",
    "softcap_order": "A's softcap is so weak that its value is not told by A",
    "qk_norm_order": "norm and rotation at once, and nothing from before them",
    "qk_norm_eps": "nothing from before the norm",
    "qk_norm_axis": "nothing from before the norm",
    "rope_base": "of another width than a half or a quarter, or with offsets, no rotation that is supposed is A's",
    "rope_partial": "the same",
    "positions": "the same",
}
ALSO = {"softcap_order": {"softcap"}}  # before the scale it is another softcap after it: the two are one function
BASES = ("eager", "gqa", "rope", "rope_fused")
OF_FILES = (("scale", 0, "eager"), ("window", 0, "rope"), ("rope_base", 0, "rope_gqa"), ("qk_norm", 0, "eager"))


def names(report: DiffReport) -> list[str]:
    return [cause.name for cause in report.pairs[0].causes]


def test_options_that_a_file_can_not_follow_are_said(tmp_path: Path) -> None:
    model = build("eager")
    file = written(model, inputs("eager"), tmp_path / "b.safetensors")
    report = diff(model, file, inputs("eager"), dtype_b="bf16", attn_b="sdpa")
    assert report.environment["notes"] == ["B: attn sdpa, dtype bf16: no effect on a side of kind trace file"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", BASES)
def test_a_file_of_the_same_model_is_the_same(base: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, given = build(base, dtype=dtype), inputs(base)
    file = written(model, given, tmp_path / "a.safetensors")
    reports = (diff(model, file, given), diff(file, model, inputs_b=given), diff(file, file))
    for report in reports:
        assert (report.same, [pair.causes for pair in report.pairs]) == (True, [(), (), ()])


def judged(report: DiffReport, case: Case, hidden: dict[str, str]) -> tuple[str, str]:
    """ "named", "unknown" or "wrong", and what is wrong."""
    cause = case.planted[0][0]
    found = {one.name for pair in report.pairs for one in pair.causes}
    if found and found <= {cause} | ALSO.get(cause, set()) and cause != "unknown":
        return "named", ""
    if found <= {"unknown"} and not report.same and cause in hidden:
        return "unknown", ""
    return "wrong", f"{case.name}: {report.same}, {sorted(found)}"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_a_cause_in_a_file_is_named(case: Case, tmp_path: Path) -> None:
    a, b, given = case.sides()
    report = diff(a, written(b, given, tmp_path / "b.safetensors"), given)
    answer, wrong = judged(report, case, HIDDEN)
    assert not wrong
    if answer == "named" and case.planted[0][0] != "rounding":
        assert all(found.explained > 0.99 for found in report.pairs[0].causes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_cause_between_two_files_is_named(case: Case, tmp_path: Path) -> None:
    a, b, given = case.sides()
    files = [written(model, given, tmp_path / f"{i}.safetensors") for i, model in enumerate((a, b))]
    _, wrong = judged(diff(*files), case, HIDDEN_BESIDE)
    assert not wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", IN_BOTH)
def test_a_mistake_in_both_is_the_same(case: Case, tmp_path: Path) -> None:
    _, b, given = case.sides()
    report = diff(b, written(b, given, tmp_path / "b.safetensors"), given)
    assert report.same is True, report.pairs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cause", "number", "base"), OF_FILES)
def test_a_file_as_side_a(cause: str, number: int, base: str, tmp_path: Path) -> None:
    a, b, given = case_of(cause, number, base).sides()
    report = diff(written(a, given, tmp_path / "a.safetensors"), b, inputs_b=given)
    assert (report.same, names(report)) == (False, [cause])


@pytest.mark.parametrize("swap", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_rotation_that_cannot_be_told_is_unknown_with_its_stage(swap: bool, tmp_path: Path) -> None:
    # eight of twelve channels turn: no rotation that is supposed is that one
    a, b, given = case_of("rope_base", 1, "rope_fused").sides()
    files = [written(model, given, tmp_path / f"{i}.safetensors") for i, model in enumerate((a, b))]
    report = diff(*(files[::-1] if swap else files))
    assert (report.same, set(names(report))) == (False, {"unknown"})
    assert [cause.stage for cause in report.pairs[0].causes] == ["query rotation", "key rotation"]


def test_files_of_other_inputs_are_not_judged(tmp_path: Path) -> None:
    model = build("rope_gqa", common={"layers": 1})
    files = [written(model, inputs("rope_gqa", seed=i), tmp_path / f"{i}.safetensors") for i in (0, 1)]
    report = diff(*files)
    assert report.same is None
    assert "inputs are not known to be the same" in str(report.pairs[0].reason)


@pytest.mark.parametrize(("letter", "by"), [("q", 0.25), ("k", 12**-0.5)])
def test_a_factor_that_an_engine_has_put_on_q_or_k_is_a_part_of_the_scale(
    letter: str, by: float, tmp_path: Path
) -> None:
    a, b, given = case_of("scale", 0, "rope_gqa").sides()
    for model, expected in ((a, (True, [])), (b, (False, ["scale"]))):
        folded = {letter: plain(by * getattr(calls_of(model, given)[0], NAMES[letter]).values)}
        report = diff(a, written(model, given, tmp_path / f"{expected[0]}.safetensors", **folded), given)
        assert (report.same, names(report)) == expected


def cut_by_rows(model: nn.Module, given: dict[str, Tensor], path: Path) -> None:
    sqrtdk.record(model, given, path, rows=5)


def cut_by_heads(model: nn.Module, given: dict[str, Tensor], path: Path) -> None:
    sqrtdk.record(model, given, path, heads=[2, 3])


@pytest.mark.parametrize("cut", [cut_by_rows, cut_by_heads])
def test_a_cut_file_is_compared_with_as_much_of_the_model(
    cut: Callable[[nn.Module, dict[str, Tensor], Path], None], tmp_path: Path
) -> None:
    a, b, given = case_of("scale", 0, "gqa").sides()
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
