"""Planted causes where B, or both sides, are files with q, k, v and the output alone: named, or unknown by nature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import DiffReport
from tests.compare.engine_files import written
from tests.compare.ports.built import build, inputs
from tests.compare.ports.pairs import Case
from tests.compare.ports.planted import cross_section

PART = [Case(base, ((cause, planting),)) for cause, planting, base in cross_section()]
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


def models(case: Case) -> tuple[Any, Any, Any]:
    """A, B and inputs; of one layer where one has the cause."""
    planting = case.planted[0][1]
    common, changes = dict(case.common), dict(case.changes)
    if not (planting.only or planting.first):
        common["layers"] = 1
        for fields in (common, changes):
            fields |= {"windows": fields["windows"][:1]} if "windows" in fields else {}
    b = build(case.base, common=common, only=planting.only, **changes)
    return build(case.base, common=common), b, inputs(case.base, **common)


def beside_module(case: Case, folder: Path) -> DiffReport:
    a, b, given = models(case)
    return diff(a, written(b, given, folder / "b.safetensors"), given)


def beside_file(case: Case, folder: Path) -> DiffReport:
    a, b, given = models(case)
    return diff(written(a, given, folder / "a.safetensors"), written(b, given, folder / "b.safetensors"))


def in_both(case: Case, folder: Path) -> DiffReport:
    _, b, given = models(case)
    return diff(b, written(b, given, folder / "b.safetensors"), given)


def judged(report: DiffReport, case: Case, hidden: dict[str, str]) -> tuple[str, str]:
    """ "named", "unknown" or "wrong", and what is wrong."""
    cause = case.planted[0][0]
    found = {one.name for pair in report.pairs for one in pair.causes}
    if found and found <= {cause} | ALSO.get(cause, set()) and cause != "unknown":
        return "named", ""
    if found <= {"unknown"} and not report.same and cause in hidden:
        return "unknown", ""
    return "wrong", f"{case.name}: {report.same}, {sorted(found)}"


WAYS = {"beside a module": (beside_module, HIDDEN), "beside a file": (beside_file, HIDDEN_BESIDE)}


def tell(capsys: pytest.CaptureFixture[str], way: str, cases: list[Case], folder: Path) -> None:
    compare, hidden = WAYS[way]
    answers = [(case, *judged(compare(case, folder), case, hidden)) for case in cases]
    counts = Counter(answer for _, answer, _ in answers)
    unknown = dict.fromkeys(case.planted[0][0] for case, answer, _ in answers if answer == "unknown")
    with capsys.disabled():
        said = ", ".join(f"{counts[answer]} {answer}" for answer in ("named", "unknown", "wrong"))
        print(f"\n{way}: {len(cases)} cases, {said}")
        for cause in unknown:
            print(f"  {cause}: {hidden[cause]}")
    assert not counts["wrong"], "\n".join(text for *_, text in answers if text)


@pytest.mark.parametrize("way", WAYS)
def test_some_causes_in_files(way: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tell(capsys, way, PART[2::7], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_cause_in_files(way: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tell(capsys, way, PART, tmp_path)


def same(run: Callable[[Case, Path], DiffReport], cases: list[Case], folder: Path) -> list[str]:
    return [f"{case.name}: {report.pairs}" for case in cases if (report := run(case, folder)).same is not True]


def test_some_mistakes_in_both_are_the_same(tmp_path: Path) -> None:
    assert not same(in_both, PART[1::9], tmp_path)


@pytest.mark.slow
def test_mistakes_in_both_are_the_same(tmp_path: Path) -> None:
    cases = [case for case in PART if case.planted[0][0] not in ("dropout",)]  # it draws anew in each run
    assert not same(in_both, cases, tmp_path)
