"""A run: what is refused and what is only not measured, and what the record says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk.bench.choose import chosen
from sqrtdk.bench.paired import Spread
from sqrtdk.bench.peers import sdpa
from sqrtdk.bench.record import PASSES, BenchRecord, Pass, to_json
from sqrtdk.bench.runner import run
from sqrtdk.bench.ways import BASE, WAYS, Way
from sqrtdk.bench.workloads import DTYPES, WORKLOADS, Case, Workload
from sqrtdk.errors import BenchError, InvalidValueError, UnsupportedError
from sqrtdk.report.bench import to_text
from tests.support.optional import jsonschema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "bench.schema.json").read_text())
SMALL = Workload(1, 2, 2, 12, 12, 8)
STEP = replace(SMALL, length=1, trains=False)


def changed(change: Callable[[Tensor], Tensor], peer: bool = True) -> Way:
    """Torch's own operation, its output changed."""
    return Way("changed", lambda case: lambda: change(sdpa(case)()), peer=peer)


def raising(error: Exception, late: bool, peer: bool) -> Way:
    def make(case: Case) -> Callable[[], Tensor]:
        def call() -> Tensor:
            raise error

        return call if late else call()  # type: ignore[return-value]

    return Way("raising", make, peer=peer)


def measure(way: Way, **options: Any) -> BenchRecord:
    return run({"small": SMALL}, {"it": way}, **{"repeats": 2, "passes": ["forward"]} | options)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.01 * gradient


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t * 1.001, "differ by .* in the output"),
        (lambda t: t.masked_fill(torch.eye(12, 8).bool(), torch.nan), "differ by nan"),
        (lambda t: t.mT, r"\(1, 2, 8, 12\) torch.float32, sdpa \(1, 2, 12, 8\)"),
        (lambda t: t.double(), "torch.float64, sdpa"),
        (lambda t: t * 0, "differ by"),
    ],
)
def test_a_way_that_disagrees_is_an_error(change: Callable[[Tensor], Tensor], words: str) -> None:
    for peer in (True, False):
        with pytest.raises(BenchError, match=words) as caught:
            measure(changed(change, peer))
        assert "1 x 2 x 12 x 8" in str(caught.value)
        assert "--way" in caught.value.hint


def test_a_wrong_gradient_is_an_error_in_training_only() -> None:
    way = changed(_WrongGradient.apply)
    measure(way)
    with pytest.raises(BenchError, match="in the gradient of the query"):
        measure(way, passes=["training"])


def test_nothing_is_timed_of_a_way_that_disagrees() -> None:
    ran = []

    def watched(t: Tensor) -> Tensor:
        ran.append(1)
        return 2 * t

    with pytest.raises(BenchError):
        measure(changed(watched), repeats=5)
    assert len(ran) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("peer", [False, True])
def test_what_cannot_run_is_listed_with_the_reason(late: bool, peer: bool) -> None:
    error = UnsupportedError("no such kernel", hint="wait")
    record = measure(raising(error, late, peer))
    assert [(row.way, row.reason) for row in record.not_measured] == [("it", "no such kernel")]
    assert [row.way for row in record.measured] == [BASE]
    assert "not measured: it: no such kernel" in to_text(record)


def test_any_error_of_others_code_is_a_reason_and_of_ours_an_error() -> None:
    error = RuntimeError("it\nbroke")
    assert measure(raising(error, True, peer=True)).not_measured[0].reason == "RuntimeError: it broke"
    with pytest.raises(RuntimeError, match="broke"):
        measure(raising(error, True, peer=False))
    with pytest.raises(RuntimeError, match="broke"):
        run({"small": SMALL}, {BASE: raising(error, True, peer=False)}, repeats=1)


def test_the_base_runs_first_in_every_round_and_all_ways_in_turn() -> None:
    ran: list[str] = []

    def spy(name: str) -> Way:
        def make(case: Case) -> Callable[[], Tensor]:
            call = sdpa(case)

            def told() -> Tensor:
                ran.append(name)
                return call()

            return told

        return Way(name, make)

    told: list[tuple[int, int]] = []
    run(
        {"small": SMALL},
        {"b": spy("b"), BASE: spy("0"), "a": spy("a")},
        passes=["forward"],
        repeats=3,
        progress=lambda done, total: told.append((done, total)),
    )
    assert "".join(ran) == "0ba" * 5  # once to compare, once to warm up, three times counted
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_ratios_are_to_the_base_in_the_same_round() -> None:
    record = measure(WAYS["eager"], repeats=5)
    base, row = record.measured
    assert row.base == base.seconds
    assert len(row.seconds) == 5
    assert base.ratio == Spread(1.0, 1.0, 1.0)
    pairs = sorted(a / b for a, b in zip(row.seconds, base.seconds, strict=True))
    assert (row.ratio.median, row.ratio.p10, row.ratio.p90) == (pairs[2], pairs[0], pairs[4])
    assert row.ms.median == 1e3 * sorted(row.seconds)[2]


def test_what_nobody_trains_is_listed_once() -> None:
    told: list[tuple[int, int]] = []
    record = run(
        {"step": STEP, "small": SMALL},
        {"eager": WAYS["eager"]},
        repeats=1,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [(row.place.workload, row.place.kind, row.way) for row in record.not_measured] == [
        ("step", "training", "all")
    ]
    assert {(row.place.workload, row.place.kind) for row in record.measured} == {
        ("step", "forward"),
        ("small", "forward"),
        ("small", "training"),
    }
    assert told[-1] == (6, 6)


def test_threads_hold_for_the_run_alone_also_when_it_fails() -> None:
    before, seen = torch.get_num_threads(), []

    def noted(t: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return t

    record = measure(changed(noted), threads=1)
    assert set(seen) == {1}
    assert record.threads == record.environment["threads"] == 1
    with pytest.raises(BenchError):
        measure(changed(lambda t: 2 * t), threads=1)
    assert torch.get_num_threads() == before


def test_a_run_inside_no_grad_trains_all_the_same() -> None:
    with torch.no_grad():
        assert len(measure(WAYS["eager"], passes=["training"]).measured) == 2


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"threads": 0}, {"threads": 10**6}])
def test_numbers_that_cannot_be_meant(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidValueError, match=rf"{next(iter(wrong))} is 1 .*; got {next(iter(wrong.values()))}"):
        measure(WAYS["eager"], **wrong)


def test_a_record_meets_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    ways = {name: WAYS[name] for name in ("auto-stats", "tiled-stats", "eager", "onnxruntime")}
    record = run({"small": SMALL, "step": STEP}, ways, dtypes=list(DTYPES), repeats=2, command="sqrtdk bench")
    document = json.loads(to_json(record))
    schema = jsonschema.Draft202012Validator(SCHEMA)
    schema.validate(document)
    assert {row["pass"] for row in document["measured"]} == set(PASSES)
    assert {row["dtype"] for row in document["measured"]} == set(DTYPES)
    assert all(len(row["seconds"]) == 2 for row in document["measured"])
    assert document["options"]["ways"][0] == document["base"] == BASE
    assert document["not_measured"]
    assert str(Path.home()) not in json.dumps(document["environment"])
    row = document["measured"][0]
    missing = document["not_measured"][0]
    wrong: list[dict[str, Any]] = [
        {"schema_version": 2},
        {"more": 1},
        {"measured": [row | {"seconds": []}]},
        {"measured": [row | {"pass": "backward"}]},
        {"measured": [{key: value for key, value in row.items() if key != "ratio"}]},
        {"not_measured": [missing | {"reason": ""}]},
        {"environment": document["environment"] | {"kernel": {}}},
    ]
    for broken in wrong:
        assert not schema.is_valid(document | broken), broken


def test_the_schema_names_every_dtype_and_pass() -> None:
    kinds = SCHEMA["$defs"]
    assert kinds["measured"]["properties"]["dtype"]["enum"] == list(DTYPES)
    assert kinds["pass"]["enum"] == list(PASSES)


def test_the_text_has_every_place_and_fits_its_width() -> None:
    passes: list[Pass] = ["forward", "training"]
    record = run({"small": SMALL, "step": STEP}, {"auto-stats": WAYS["auto-stats"]}, passes=passes, repeats=1)
    text = to_text(record, width=200)
    for title in ("small  1 x 2 x 12 x 8, float32, training", "step  1 x 2 x 1/12 x 8, float32, forward"):
        assert title in text
    assert "of 1 round;" in text
    assert "not measured: all: nobody trains on this workload" in text
    assert record.environment["cpu"] in text
    assert "  on cpu\n" in text or "  on fused\n" in text
    assert "\x1b[" in to_text(record, color=True)
    assert "\x1b" not in text
    for width in (40, 60):
        assert max(len(line) for line in to_text(record, width=width).splitlines()) <= width


def test_a_reason_cannot_steer_the_terminal() -> None:
    text = to_text(measure(raising(RuntimeError("\x1b[31mred"), True, peer=True)))
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text


def test_names_are_chosen_in_the_tables_order() -> None:
    assert list(chosen("decode, training,decode", WORKLOADS, "workload")) == ["training", "decode"]
    assert list(chosen("all", WAYS, "way")) == list(WAYS)
    for text, hint in (("trainin", "Did you mean training"), ("", "Use some of"), ("gqa,", "Use some of")):
        with pytest.raises(InvalidValueError, match="there is no workload") as caught:
            chosen(text, WORKLOADS, "workload")
        assert caught.value.hint.startswith(hint)
