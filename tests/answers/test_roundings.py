"""How B is rounded: every kind that fits is named, and the smallest floor among them is used."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sqrtdk.answers import AnswersReport, diff_answers
from sqrtdk.answers.choose import _between, _fitting
from sqrtdk.answers.judge import Tried
from sqrtdk.answers.rounding import ROUNDINGS
from tests.answers.planted import CAUSES, GEMMA, ROUNDED, nothing, prompts, reference, side

NAMES = [rounding.name for rounding in ROUNDINGS]
INT8 = "int8, a scale a row, linear layers alone"


def runs(**kinds: tuple[float, float]) -> list[Tried]:
    """Runs whose rows are alike up to their size: residue and floor of some kinds; of the others 0.05 and 0.001."""
    shape = torch.rand(320, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    sizes = {name: kinds.get(name.replace(" ", "_").replace(",", ""), (0.05, 0.001)) for name in NAMES}
    return [
        Tried(shape / shape.mean() * residue**2, torch.zeros(320, 1).double(), floor)
        for residue, floor in sizes.values()
    ]


def fitting(**kinds: tuple[float, float]) -> list[str]:
    return [NAMES[number] for number in _fitting(runs(**kinds))]


def test_a_kind_fits_if_it_leaves_what_it_makes() -> None:
    assert fitting(float32=(0.0012, 2e-5), float16=(0.0012, 0.0009), bfloat16=(0.0012, 0.03)) == ["float16"]
    assert fitting(float32=(0.0012, 2e-5), float16=(0.0012, 0.0009), TF32=(0.0012, 0.0006)) == ["TF32", "float16"]
    assert fitting(float32=(0.0012, 2e-5), float16=(0.0012, 0.0002), bfloat16=(0.0012, 0.03)) == []


def test_rounded_weights_that_come_nearer_fit_however_large_the_floor_is() -> None:
    assert fitting(float32=(0.005, 2e-5), int8_groups_of_32=(0.0001, 0.004), bfloat16=(0.005, 0.006)) == [
        "int8, groups of 32"
    ]


def test_where_none_fits_the_least_floor_that_covers_is_taken_and_the_one_below_is_named() -> None:
    found = runs(float32=(0.0012, 2e-5), float16=(0.0012, 0.0002), bfloat16=(0.0012, 0.03), int8_cache=(0.0012, 0.004))
    assert [NAMES[number] for number in _between(found)] == ["int8 cache", "float16"]
    assert _between(runs(float32=(0.0012, 2e-5))) == []


@cache
def model() -> PreTrainedModel:
    return reference()


def asked(mistake: str | None, rounding: str) -> AnswersReport:
    plant = CAUSES[mistake][1] if mistake else nothing
    return diff_answers(model(), side(model(), plant, ROUNDED[rounding]), prompts())


@pytest.mark.full
@pytest.mark.parametrize(
    ("rounding", "name", "most"), [("float32", "float32", 2e-5), ("int8", INT8, 1e-4), ("bfloat16", "bfloat16", 0.03)]
)
def test_the_kind_is_named_and_its_floor_is_used(rounding: str, name: str, most: float) -> None:
    for mistake in (None, "base 1e6"):
        report = asked(mistake, rounding)
        assert name in report.roundings
        assert report.rounding == report.roundings[0]
        assert report.floor <= most
        assert all(f"`{kind}`" in " ".join(report.paragraphs) for kind in report.roundings if kind != "float32")


@pytest.mark.full
def test_a_checkpoint_in_bfloat16_and_a_float16_file_hide_no_small_mistake(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from tests.answers.ggufs import WRONG, Conversion, llama_cpp_side

    folder = tmp_path / "stored"
    shutil.copytree(GEMMA, folder)  # bfloat16, in which its factor on the embeddings would be 9.8125, not 9.798
    right = diff_answers(str(folder), llama_cpp_side(tmp_path / "m.gguf", model(), "F16", Conversion()), prompts())
    assert (right.verdict, right.same) == ("no fault", True)
    assert {"float16"} <= {*right.roundings} <= {"TF32", "float16", "float16 cache"}
    assert right.floor < 0.001
    wrong = llama_cpp_side(tmp_path / "m.gguf", model(), "F16", WRONG["window 31"][1])
    report = diff_answers(str(folder), wrong, prompts())
    assert (report.verdict, [cause.name for cause in report.causes]) == ("proven", ["window"])
    assert any("bfloat16" in note for note in report.environment["notes"])
