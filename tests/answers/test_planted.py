"""Planted mistakes, on the trained model: each is named rightly, and what is outside the table has no name.

B is made by transformers' own code (`planted.py`); the edits under test run another attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from sqrtdk.answers import AnswersReport
from sqrtdk.answers.compare import diff_answers
from tests.answers.planted import (
    CAUSES,
    OUTSIDE,
    PAIRS,
    ROUNDED,
    Plant,
    both,
    matrix,
    nothing,
    prompts,
    reference,
    side,
)
from tests.answers.planted_types import TYPES, drawn

# what rounding of this kind hides: the report says "no fault above", or "not decided"
HIDDEN: dict[str, tuple[str, ...]] = {
    "float32": (),
    "int8": (),
    "bfloat16": ("exact gelu", "eps 1e-3", "window less one", "no final cap", "final cap 50"),
}


@cache
def model() -> PreTrainedModel:
    return reference()


def asked(plant: Plant, rounding: str) -> AnswersReport:
    rounded: Callable[[PreTrainedModel], PreTrainedModel] = ROUNDED[rounding]
    return diff_answers(model(), side(model(), plant, rounded), prompts())


def names(report: AnswersReport) -> list[str]:
    return sorted(cause.name for cause in report.causes)


@pytest.mark.parametrize(("mistake", "rounding"), matrix(CAUSES, ROUNDED, each=7))
def test_a_planted_cause_is_proven(mistake: str, rounding: str) -> None:
    cause, plant = CAUSES[mistake]
    report = asked(plant, rounding)
    if mistake in HIDDEN[rounding]:
        assert names(report) in ([], [cause])
    else:
        assert (report.verdict, names(report)) == ("proven", [cause])


@pytest.mark.full
@pytest.mark.parametrize("rounding", ROUNDED)
def test_a_right_side_has_no_fault(rounding: str) -> None:
    report = asked(nothing, rounding)
    assert (report.verdict, report.same) == ("no fault", True)


@pytest.mark.parametrize(("mistake", "rounding"), matrix(OUTSIDE, ROUNDED, each=5))
def test_a_mistake_outside_the_table_has_no_name(mistake: str, rounding: str) -> None:
    report = asked(OUTSIDE[mistake], rounding)
    assert names(report) == []
    if rounding == "float32":  # rounding may hide a small one
        assert report.same is False


@pytest.mark.parametrize(("pair", "rounding"), matrix(PAIRS, ["float32", "int8"], each=9))
def test_both_of_a_pair_are_named_or_none(pair: tuple[str, str], rounding: str) -> None:
    (first, plant), (second, other) = (CAUSES[mistake] for mistake in pair)
    assert names(asked(both(plant, other), rounding)) in ([], sorted([first, second]))


@pytest.mark.parametrize(("kind", "rounding"), matrix(TYPES, ["float32", "int8"], each=5))
def test_models_of_other_types(kind: str, rounding: str) -> None:
    model = drawn(kind)
    right = diff_answers(model, side(model, nothing, ROUNDED[rounding]), prompts())
    assert (right.verdict, right.same) == ("no fault", True)
    for cause, plant in TYPES[kind].values():
        report = diff_answers(model, side(model, plant, ROUNDED[rounding]), prompts())
        assert (report.verdict, names(report)) == ("proven", [cause])


@pytest.mark.parametrize(("shift", "bos"), matrix([0, 1], [0, 1, 2], each=4))
def test_the_alignment_of_rows_and_the_tokens_before_a_prompt_are_found(bos: int, shift: int) -> None:
    b = copy.deepcopy(model())
    CAUSES["base 1e6"][1](b)

    def call(ids: list[int]) -> list[dict[int, float]]:
        whole = [1] * bos + ids
        with torch.no_grad():
            logits = b(input_ids=torch.tensor([whole]), use_cache=False).logits[0, bos:]
        rows = [dict(zip(*part, strict=True)) for part in _largest(logits)]
        return rows[shift:] + [{}] * shift

    report = diff_answers(model(), call, prompts())
    assert (report.verdict, report.bos, report.shift) == ("proven", bos, shift)
    assert names(report) == ["rope_base"]


def _largest(logits: torch.Tensor) -> Iterator[tuple[list[int], list[float]]]:
    values, ids = logits.double().log_softmax(-1).topk(20)
    return ((own.tolist(), row.tolist()) for own, row in zip(ids, values, strict=True))


@pytest.mark.full
def test_a_model_that_is_stored_in_bfloat16_runs_without_that_rounding() -> None:
    stored = copy.deepcopy(model()).bfloat16()
    b = copy.deepcopy(stored).float()
    report = diff_answers(stored, side(b, nothing, ROUNDED["float32"]), prompts())
    assert (report.verdict, report.same) == ("no fault", True)
    assert report.a.dtype == "float32"
    assert any("bfloat16" in note for note in report.environment["notes"])
    report = diff_answers(stored, side(b, CAUSES["base 1e6"][1], ROUNDED["float32"]), prompts())
    assert (report.verdict, names(report)) == ("proven", ["rope_base"])
    assert next(stored.parameters()).dtype is torch.bfloat16
