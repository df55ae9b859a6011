"""B is llama.cpp with a GGUF that a conversion got wrong: each mistake that its floor does not hide is named."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from sqrtdk.answers import AnswersReport
from sqrtdk.answers.compare import diff_answers
from tests.answers.planted import OUTSIDE, matrix, prompts, reference

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from tests.answers.ggufs import WRONG, Conversion, llama_cpp_side

DTYPES = ["F16", "Q8_0"]
# what rounding of this kind hides: the report says "no fault above", or "not decided"
HIDDEN: dict[str, tuple[str, ...]] = {"F16": ("eps 1e-5",), "Q8_0": ("eps 1e-5", "eps 1e-3", "final cap 50")}


@cache
def model() -> PreTrainedModel:
    return reference()


def asked(path: Path, dtype: str, conversion: Conversion) -> AnswersReport:
    return diff_answers(model(), llama_cpp_side(path / "m.gguf", model(), dtype, conversion), prompts())


def names(report: AnswersReport) -> list[str]:
    return [cause.name for cause in report.causes]


@pytest.mark.parametrize(("mistake", "dtype"), matrix(WRONG, DTYPES, each=7))
def test_a_wrong_conversion_is_proven(mistake: str, dtype: str, tmp_path: Path) -> None:
    cause, conversion = WRONG[mistake]
    report = asked(tmp_path, dtype, conversion)
    if mistake in HIDDEN[dtype]:
        assert names(report) in ([], [cause])
    else:
        assert (report.verdict, names(report)) == ("proven", [cause])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["F32", *DTYPES, "Q4_0"])
def test_a_right_conversion_has_no_fault(dtype: str, tmp_path: Path) -> None:
    report = asked(tmp_path, dtype, Conversion())
    assert (report.verdict, report.same) == ("no fault", True)


@pytest.mark.parametrize(("mistake", "dtype"), matrix(OUTSIDE, DTYPES, each=5))
def test_a_mistake_outside_the_table_has_no_name(mistake: str, dtype: str, tmp_path: Path) -> None:
    report = asked(tmp_path, dtype, Conversion(before=OUTSIDE[mistake]))
    assert names(report) == []
    assert report.same is False
