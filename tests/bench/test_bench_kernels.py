"""benchmarks/kernels.py: what is refused and what is only not measured, what is printed, and what the record says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from peers import sdpa
from sqrtdk.errors import InvalidValueError, UnsupportedError
from tests.support.optional import jsonschema
from timing import Spread
from ways import BASE, WAYS, DisagreementError, Way
from workloads import DTYPES, WORKLOADS, Case, Workload, chosen

SCHEMA = json.loads((Path(__file__).parents[2] / "benchmarks" / "kernels.schema.json").read_text())
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


def measure(way: Way, passes: tuple[str, ...] = ("forward",), repeats: int = 2) -> tuple[kernels.Rows, kernels.Rows]:
    return kernels.run({"small": SMALL}, {"it": way}, ["float32"], passes, repeats)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two small workloads on the command line; a run leaves the threads of torch as they were."""
    monkeypatch.setitem(WORKLOADS, "small", SMALL)
    monkeypatch.setitem(WORKLOADS, "step", STEP)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
        with pytest.raises(DisagreementError, match=words) as caught:
            measure(changed(change, peer))
        assert "1 x 2 x 12 x 8" in str(caught.value)


def test_a_wrong_gradient_is_an_error_in_training_only() -> None:
    way = changed(_WrongGradient.apply)
    measure(way)
    with pytest.raises(DisagreementError, match="in the gradient of the query"):
        measure(way, passes=("training",))


def test_nothing_is_timed_of_a_way_that_disagrees() -> None:
    ran = []

    def watched(t: Tensor) -> Tensor:
        ran.append(1)
        return 2 * t

    with pytest.raises(DisagreementError):
        measure(changed(watched), repeats=5)
    assert len(ran) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("peer", [False, True])
def test_what_cannot_run_is_listed_with_the_reason(late: bool, peer: bool, capsys: pytest.CaptureFixture[str]) -> None:
    error = UnsupportedError("no such\x1b[31m kernel", hint="wait")
    measured, missing = measure(raising(error, late, peer))
    assert [(row["way"], row["reason"]) for row in missing] == [("it", "no such\x1b[31m kernel")]
    assert [row["way"] for row in measured] == [BASE]
    assert "not measured: it: no such\\x1b[31m kernel\n" in capsys.readouterr().out  # it can't steer the terminal


def test_any_error_of_others_code_is_a_reason_and_of_ours_an_error() -> None:
    error = RuntimeError("it\nbroke")
    assert measure(raising(error, True, peer=True))[1][0]["reason"] == "RuntimeError: it broke"
    with pytest.raises(RuntimeError, match="broke"):
        measure(raising(error, True, peer=False))
    with pytest.raises(RuntimeError, match="broke"):
        kernels.run({"small": SMALL}, {BASE: raising(error, True, peer=False)}, ["float32"], ["forward"], 1)


def test_the_base_runs_first_in_every_round_and_all_ways_in_turn() -> None:
    ran: list[str] = []

    def spy(name: str) -> Way:
        def make(case: Case) -> Callable[[], Tensor]:
            call = sdpa(case)

            def noted() -> Tensor:
                ran.append(name)
                return call()

            return noted

        return Way(name, make)

    ways = {"b": spy("b"), BASE: spy("0"), "a": spy("a")}
    kernels.run({"small": SMALL}, ways, ["float32"], ["forward"], 3)
    assert "".join(ran) == "0ba" * 5  # once to compare, once to warm up, three times counted


def test_ratios_are_to_the_base_in_the_same_round() -> None:
    (base, row), _ = measure(WAYS["eager"], repeats=5)
    assert len(row["seconds"]) == 5
    assert Spread(**base["ratio"]) == Spread(1.0, 1.0, 1.0)
    pairs = sorted(a / b for a, b in zip(row["seconds"], base["seconds"], strict=True))
    assert Spread(**row["ratio"]) == Spread(pairs[2], pairs[0], pairs[4])
    assert row["ms"]["median"] == 1e3 * sorted(row["seconds"])[2]


def test_a_run_inside_no_grad_trains_all_the_same() -> None:
    with torch.no_grad():
        assert len(measure(WAYS["eager"], passes=("training",))[0]) == 2


@pytest.mark.usefixtures("tiny")
def test_a_record_meets_the_schema(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    path = tmp_path / "record.json"
    ways = "auto-stats,tiled-stats,eager,onnxruntime"
    options = f"--workload small,step --way {ways} --dtype all --repeats 2 --threads 1 --seed 3 --json {path}"
    assert kernels.main(options.split()) == 0
    document = json.loads(path.read_text())
    schema = jsonschema.Draft202012Validator(SCHEMA)
    schema.validate(document)
    assert document["command"] == f"python benchmarks/kernels.py {options}"
    assert document["options"] == {
        "workloads": ["small", "step"],
        "ways": [BASE, *ways.split(",")],
        "dtypes": list(DTYPES),
        "passes": ["forward", "training"],
        "repeats": 2,
        "threads": 1,
        "seed": 3,
    }
    assert document["environment"]["threads"] == 1
    assert {row["pass"] for row in document["measured"]} == set(kernels.PASSES)
    assert {row["dtype"] for row in document["measured"]} == set(DTYPES)
    assert all(len(row["seconds"]) == 2 for row in document["measured"])
    assert str(Path.home()) not in json.dumps(document["environment"])
    untrained = [row["dtype"] for row in document["not_measured"] if (row["workload"], row["way"]) == ("step", "all")]
    assert untrained == list(DTYPES)
    row, missing = document["measured"][0], document["not_measured"][0]
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


@pytest.mark.parametrize("name", ["bench", "bench-float16", "bench-fused", "bench-long"])
def test_the_records_that_are_kept_meet_the_schema(name: str) -> None:
    kept = Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json"
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(kept.read_text()))


def test_the_schema_names_every_dtype_and_pass() -> None:
    kinds = SCHEMA["$defs"]
    assert kinds["measured"]["properties"]["dtype"]["enum"] == list(DTYPES)
    assert kinds["pass"]["enum"] == list(kernels.PASSES)


@pytest.mark.usefixtures("tiny")
def test_the_table_has_every_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        kernels.main(["--workload", "small,step", "--way", "auto-stats", "--dtype", "float32", "--repeats", "1"]) == 0
    )
    text = capsys.readouterr().out
    for title in ("small  1 x 2 x 12 x 8, float32, training\n", "step  1 x 2 x 1/12 x 8, float32, forward\n"):
        assert title in text
    number = r"[\d.e+-]+"  # a ratio may have three digits before its point, or be tiny where one of two was held up
    spread = rf"{number} \[{number} \.\. {number}\]"
    assert re.search(rf"^  sdpa +{spread} ms$", text, re.MULTILINE)
    assert re.search(rf"^  auto-stats +{spread} ms  x {spread} +on (cpu|fused)$", text, re.MULTILINE)
    assert "not measured: all: nobody trains on this workload" in text
    assert "6 measured, 1 not; " in text


def test_the_columns_stay_apart_where_a_ratio_is_large() -> None:
    held_up = {"median": 123.4, "p10": 123.4, "p90": 123.4}
    line = kernels.line_of({"way": "auto-stats", "impl": "cpu", "ms": held_up, "ratio": held_up})
    assert line.endswith(" ms  x 123.40 [123.40 .. 123.40] on cpu")


@pytest.mark.usefixtures("tiny")
def test_a_run_without_a_figure_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor one whose only figures are those that all others were to be compared with, nor one of wrong results."""
    small = ["--workload", "small", "--way", "eager", "--dtype", "float32", "--pass", "forward", "--repeats", "1"]
    assert kernels.main([*small, "--way", "sdpa"]) == 0
    monkeypatch.setitem(WAYS, "eager", raising(UnsupportedError("no such kernel"), False, peer=False))
    assert kernels.main(small) == 1
    assert kernels.main([*small, "--pass", "training", "--workload", "step"]) == 1
    assert kernels.main([*small, "--way", "eager,auto"]) == 0
    monkeypatch.setitem(WAYS, "eager", changed(lambda t: 1.01 * t))
    assert kernels.main([*small, "--json", str(tmp_path / "record.json")]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--workload trainin", "there is no workload 'trainin'.*Did you mean training"),
        ("--way flx,cpu", "there is no way 'flx'.*flex"),
        ("--dtype float64", "there is no dtype 'float64'"),
        ("--repeats 0", "--repeats is 1 or more; got 0"),
        ("--threads 0", "--threads is 1 to .*; got 0"),
        (f"--threads {(os.cpu_count() or 1) + 1}", "the CPUs here; got"),
        (f"--seed {2**64}", f"seed {2**64} is not from"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        kernels.main(options.split())
    assert caught.value.code == 2
    assert re.search(words, capsys.readouterr().err)


def test_the_list_names_everything_and_the_defaults_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--list"]) == 0
    text = capsys.readouterr().out
    for name, row in (WORKLOADS | WAYS).items():
        assert re.search(rf"^  {name} +{re.escape(row.text)}$", text, re.MULTILINE)
    options = kernels.parsed([])
    assert (len(options.workloads), len(options.ways), len(options.dtypes)) == (4, 7, 2)


def test_names_are_chosen_in_the_tables_order() -> None:
    assert list(chosen("decode, training,decode", WORKLOADS, "workload")) == ["training", "decode"]
    assert list(chosen("all", WAYS, "way")) == list(WAYS)
    for text, hint in (("trainin", "Did you mean training"), ("", "Use some of"), ("gqa,", "Use some of")):
        with pytest.raises(InvalidValueError, match="there is no workload") as caught:
            chosen(text, WORKLOADS, "workload")
        assert caught.value.hint.startswith(hint)
