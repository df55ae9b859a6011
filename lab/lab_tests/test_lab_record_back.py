"""Any record of a claim comes back from its file as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqrtdk.messages import Text
from sqrtdk_lab import record as lab_record
from sqrtdk_lab.figures import Axis, Figure, Method, Plot, Series
from sqrtdk_lab.judge import Check, ClaimVerdict, PartAnswer
from sqrtdk_lab.record import Outcome, Record
from tests.recording_files.sample_calls import unlike

FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = st.text(max_size=5)
NUMBERS = st.floats()
TEXTS = st.builds(Text, WORDS, WORDS)
FIGURES = st.builds(
    Figure,
    WORDS,
    *[NUMBERS] * 3,
    st.sampled_from(get_args(Method)),
    st.integers(1, 10**12),
    st.dictionaries(WORDS, WORDS | st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=2),
)
MET = st.sampled_from((True, False, None))
CHECKS = st.builds(Check, FIGURES, NUMBERS, NUMBERS, MET)


def tuples(of: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, min_size=least, max_size=2).map(tuple)


@st.composite
def series(draw: st.DrawFn) -> Series:
    style, size = draw(st.sampled_from(("line", "bars"))), draw(st.integers(0, 3))
    x, y = (
        (*draw(st.lists(of, min_size=size, max_size=size)),) for of in (WORDS if style == "bars" else NUMBERS, NUMBERS)
    )
    return Series(draw(WORDS), x, y, *((y, y) if draw(st.booleans()) else ((), ())), style)


PARTS = st.builds(PartAnswer, TEXTS, tuples(CHECKS, 1), MET)
VERDICTS = st.builds(ClaimVerdict, st.sampled_from(("holds", "depends", "undecided")), tuples(PARTS, 1))
OUTCOMES = st.builds(Outcome, st.just({}), tuples(FIGURES), VERDICTS)
AXES = [st.sampled_from(get_args(Axis))] * 2
PLOTS = st.builds(Plot, WORDS, TEXTS, WORDS, WORDS, tuples(series()), *AXES, tuples(st.tuples(WORDS, NUMBERS)))
RECORDS = st.builds(
    Record,
    **dict.fromkeys(("id", "group", "formula", "command", "started"), WORDS),
    **dict.fromkeys(("statement", "method", "control_method", "why"), TEXTS),
    sources=tuples(WORDS),
    quick=st.booleans(),
    seed=st.integers(0, 10**18),
    outcome=OUTCOMES,
    control=OUTCOMES,
    condition=st.none() | TEXTS,
    plots=tuples(PLOTS),
    environment=st.dictionaries(WORDS, WORDS, max_size=2),
    duration_s=NUMBERS,
    level=st.floats(0, 1, exclude_min=True, exclude_max=True),
)


@FEW
@given(RECORDS)
def test_a_record_of_a_claim_comes_back(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "record.json"
    path.write_text(lab_record.to_json(record), encoding="utf-8")
    assert unlike(record, lab_record.read_record(path)) == []
