"""The library at hand: what types say, what `dir` lists, how records are read, written and shown in a line."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk import AuxRequest
from sqrtdk.audit.cache import CacheForecast
from sqrtdk.audit.records import CheckReport, JudgedCall
from sqrtdk.errors import InvalidTypeError, InvalidValueError, OutputError
from sqrtdk.report.files import WRITERS
from sqrtdk.report.watch.summary import Summary
from sqrtdk.tracing.records import AttentionCall
from tests.report import sample_diff, sample_report

TYPED = """
from typing import assert_type
from torch import Tensor, zeros
import sqrtdk
from sqrtdk.impl.choice import Choice
from sqrtdk.stats import AuxOutput, RowStats

q = zeros(1, 1, 4, 4)
asked: sqrtdk.AuxRequest | None = None
assert_type(sqrtdk.attention(q, q, q), Tensor)
assert_type(sqrtdk.attention(q, q, q, is_causal=True, return_aux=None, impl="dense"), Tensor)
assert_type(sqrtdk.attention(q, q, q, return_aux=sqrtdk.AuxRequest.all()), tuple[Tensor, AuxOutput])
assert_type(sqrtdk.attention(q, q, q, return_aux=True), tuple[Tensor, AuxOutput])
output, aux = sqrtdk.attention(q, q, q, return_aux=sqrtdk.AuxRequest(entropy_nats=True))
assert_type(aux.entropy_nats, Tensor | None)
assert_type(sqrtdk.measure(q, q), RowStats)
assert_type(sqrtdk.explain(q, q, q), Choice)
report = sqrtdk.check("demo")
assert_type(report, sqrtdk.CheckReport)
assert_type(report.calls[0].site, str)
assert_type(report.calls[0].scale.ratio, float | None)
assert_type(sqrtdk.diff("demo", "demo"), sqrtdk.DiffReport)
"""


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 1, 2, 4, 8))


def _shape(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (one.kind, one.annotation)
        for name, one in inspect.signature(function).parameters.items()
        if name not in ("return_aux", "return_weights", "_unknown")  # `_unknown` is for a good error alone
    }


def test_the_overloads_take_what_attention_takes() -> None:
    overloads = typing.get_overloads(sqrtdk.attention)
    assert len(overloads) == 3
    for one in (*overloads, sqrtdk.explain):
        assert _shape(one) == _shape(sqrtdk.attention)
    defaults = {name: one.default for name, one in inspect.signature(sqrtdk.attention).parameters.items()}
    assert {name: one.default for name, one in inspect.signature(sqrtdk.explain).parameters.items()} == defaults


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["jaxtyping", "nothing"])
def test_types_are_told_to_mypy(tmp_path: Path, shapes: str) -> None:
    """Also where jaxtyping, which users need not have, is nothing."""
    (tmp_path / "use.py").write_text(TYPED)
    config = "[mypy]\nstrict = true\n"
    if shapes == "nothing":
        config += "[mypy-jaxtyping.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
    (tmp_path / "mypy.ini").write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "use.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_explain_takes_all_that_attention_takes(qkv: tuple[torch.Tensor, ...]) -> None:
    mask = torch.ones(4, 4).bool()
    everything = {
        "attn_mask": mask, "dropout_p": 0.1, "scale": 0.3, "softcap": 5.0, "bias": torch.zeros(4, 4),
        "window": (2, 0), "sinks": 0.0, "causal_lower_right": True, "return_aux": AuxRequest.all(),
    }  # fmt: skip
    assert sqrtdk.explain(*qkv, **everything).impl in ("cpu", "dense")  # without the compiled kernel the second
    assert sqrtdk.explain(*qkv, impl="tiled").impl == "tiled"


def test_errors_of_explain_speak_of_explain(qkv: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(TypeError, match=r"^explain has no argument 'bad'"):
        sqrtdk.explain(*qkv, bad=1)
    with pytest.raises(TypeError, match=r"^explain\(\) missing 1 required positional argument: 'value'"):
        sqrtdk.explain(*qkv[:2])
    with pytest.raises(InvalidTypeError, match=r"^explain\(\): query is a tensor"):
        sqrtdk.explain(1, *qkv[1:])


@pytest.mark.parametrize("module", [sqrtdk, sqrtdk.extending, sqrtdk.report])
def test_dir_lists_what_is_public(module: Any) -> None:
    names = [name for name in dir(module) if name != "__version__"]
    assert names
    assert [name for name in names if name.startswith("_") or name in ("annotations", "Any", "TYPE_CHECKING")] == []
    assert set(getattr(module, "__all__", ())) <= set(names)
    assert all(hasattr(module, name) for name in names)


# -- Python and JSON ---------------------------------------------------------------------------------------------------


def test_a_judged_call_has_no_field_of_its_call_but_those_that_name_it() -> None:
    there = {field.name for field in dataclasses.fields(AttentionCall)} & set(dir(JudgedCall))
    assert there == {"site", "formula"}
    judged = sample_report.sick().calls[0]
    assert (judged.site, judged.formula) == (judged.call.site, judged.call.formula)


@pytest.mark.parametrize("name", ["healthy", "static", "sick", "leaking", "unjudged", "hostile"])
def test_what_json_says_python_says_by_the_same_path(name: str) -> None:
    report: CheckReport = getattr(sample_report, name)()
    unlike = list(_unlike(json.loads(report.to_json()), report, "report"))
    assert unlike == ["report.model.class"] * (unlike != [])  # a word of Python: `cls`
    assert report.model.cls == json.loads(report.to_json())["model"]["class"]


def _unlike(value: Any, record: Any, path: str) -> Any:
    """Paths whose value in JSON is not the one in Python; numbers and words are compared, containers walked."""
    if isinstance(value, dict) and not isinstance(record, dict):
        # in Python the sentence itself has its id and values
        for key in value.keys() - {"message_id", "values", "declared_by_message"}:
            inner = value[key]
            owner = record.call if isinstance(record, JudgedCall) and not hasattr(record, key) else record
            if hasattr(owner, key):
                yield from _unlike(inner, getattr(owner, key), f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(value, list):
        if len(value) != len(record):
            yield path
        for place, (inner, item) in enumerate(zip(value, record, strict=False)):
            yield from _unlike(inner, item, f"{path}[{place}]")
    elif isinstance(value, bool | int | float | str) and not isinstance(record, float | dict) and value != record:
        yield path


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", list(WRITERS["CheckReport"]))
def test_a_check_is_saved_as_what_the_ending_says(tmp_path: Path, ending: str) -> None:
    report = sample_report.sick()
    path = tmp_path / f"report{ending.upper()}"
    report.save(path)
    text = path.read_text(encoding="utf-8")
    starts = {
        ".json": '{\n  "schema_version": 1',
        ".html": "<!doctype html>",
        ".sarif": "{",
        ".xml": "<?xml",
        ".md": "#",
        ".txt": "org/sick-125m",
    }
    assert text.startswith(starts[ending])
    if ending == ".json":
        assert text == report.to_json()


def test_the_others_are_saved(tmp_path: Path) -> None:
    difference = sample_diff.two_causes()
    difference.save(tmp_path / "diff.json")
    difference.save(str(tmp_path / "diff.html"))
    assert (tmp_path / "diff.json").read_text() == difference.to_json()
    assert json.loads(difference.to_json())["same"] is False


def test_what_a_watch_and_a_cache_told_is_saved(tmp_path: Path) -> None:
    none, steps = np.zeros(0), np.zeros(0, dtype=np.int64)
    run = Summary("exp1", None, None, 1, 0, steps, {}, steps, none, (), (), (), None, None)
    run.save(tmp_path / "run.json")
    run.save(tmp_path / "run.html")
    assert json.loads((tmp_path / "run.json").read_text())["run"] == "exp1"
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    forecast = CacheForecast("int8", "tensor", 8.0, "the format", ())
    forecast.save(tmp_path / "cache.json")
    assert json.loads(forecast.to_json())["bits"] == 8.0


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    report, path = sample_report.healthy(2), tmp_path / "report.json"
    with pytest.raises(
        InvalidValueError, match=r"written to .json, .html, .sarif, .xml, .md, .txt files; got the ending '.pdf'"
    ):
        report.save(tmp_path / "report.pdf")
    with pytest.raises(InvalidValueError, match=r"a DiffReport is written to .json, .html, .txt files; got"):
        sample_diff.same().save(tmp_path / "report")
    with pytest.raises(OutputError, match="there is no directory"):
        report.save(tmp_path / "missing" / "report.json")
    assert list(tmp_path.iterdir()) == []
    path.write_text("kept")
    with pytest.raises(OutputError, match="is not overwritten") as error:
        report.save(path)
    assert "force=True" in (error.value.hint or "")
    assert path.read_text() == "kept"
    report.save(path, force=True)
    assert path.read_text() == report.to_json()
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


# -- in a line ---------------------------------------------------------------------------------------------------------


def test_records_are_short_in_a_line(qkv: tuple[torch.Tensor, ...]) -> None:
    report = sample_report.healthy(2)
    assert repr(report) == "CheckReport('org/healthy-7b', passed; calls: 2 exact; findings: none)"
    formula = "'softmax(0.125 * rope(q).rope(k) + causal)'"
    assert repr(report.calls[0]) == (
        f"JudgedCall('model.layers.0.self_attn', {formula}, scale ratio 1, exact, health ok)"
    )
    assert repr(report.calls[0].call) == f"AttentionCall('model.layers.0.self_attn', {formula}, scale ratio 1)"
    assert repr(sample_diff.softcap()).endswith("differ; causes: softcap)")
    _, aux = sqrtdk.attention(*qkv, return_aux=AuxRequest(entropy_nats=True, peak=True))
    assert repr(aux) == "AuxOutput(entropy_nats, peak: each (1, 2, 4) float32)"
    assert repr(type(aux)()) == "AuxOutput()"


def test_a_line_holds_no_control_of_a_stranger() -> None:
    for record in (sample_report.hostile(), *sample_report.hostile().calls, sample_diff.hostile()):
        assert repr(record).isprintable()
        assert "\\x1b[31m" in repr(record)
