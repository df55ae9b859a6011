"""The forecast on the command line, in JSON, in the terminal, in the page; what the page of the docs says of it."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sqrtdk import cli
from sqrtdk._check import check
from sqrtdk.audit.cache import CacheForecast, StoredWay
from sqrtdk.audit.records import CheckReport
from sqrtdk.kv import FORMATS, OUTLIER, kv_forecast
from sqrtdk.kv.findings import KL_BARS, OUTPUT_BARS, findings, with_forecast
from sqrtdk.report.html import to_html
from sqrtdk.report.json import to_json
from sqrtdk.report.terminal import to_text
from sqrtdk.tracing import NotMeasured
from tests.support.optional import jsonschema

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "check.schema.json").read_text())
PAGE = (ROOT / "docs" / "en" / "kv-cache.md").read_text(encoding="utf-8")
SMALL = ["--seq-len", "16"]
EVIL = "<script>alert(1)</script>\x1b[31m"


def run(*arguments: str):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(cli._app, ["kv", "demo", *SMALL, *arguments])


@pytest.fixture(scope="module")
def report() -> CheckReport:
    forecast = kv_forecast("demo", kv_dtype="int4", kv_scale="tensor", seq_len=48)
    return with_forecast(check("demo", seq_len=48), forecast)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_format_is_an_option(dtype: str) -> None:
    done = run("--cache-dtype", dtype, "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    cache = document["kv_cache"]
    assert (cache["dtype"], cache["scale"]) == (dtype, FORMATS[dtype].scale)
    assert len(cache["calls"]) == 3
    assert len(cache["calls"][0]["stored"]["heads"]) == 2


def test_without_a_format_all_are_compared_and_none_is_a_finding(tmp_path: Path) -> None:
    done = run("--json", "--html", str(tmp_path / "a.html"), "--fail-on", "note")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert "kv_cache" not in document
    assert {"kv_cache", "unmeasured"}.isdisjoint(finding["rule"] for finding in document["findings"])
    for name, cache in zip(FORMATS, document["kv_formats"], strict=True):
        alone = json.loads(run("--cache-dtype", name, "--json").stdout)["kv_cache"]
        assert cache == alone
    page = (tmp_path / "a.html").read_text()
    assert all(f"<code>{name}</code>" in page.partition('<section id="cache">')[2] for name in FORMATS)


def test_the_line_of_a_format_is_of_its_worst_head(report: CheckReport) -> None:
    forecast = report.kv_cache
    assert forecast is not None
    fine = replace(forecast, dtype="int8", calls=())
    unfit = replace(fine, dtype="q8_0", not_measured=(NotMeasured("a", "its heads are odd"),))
    text = to_text(replace(report, kv_cache=None, kv_formats=(forecast, unfit)), width=100)
    line = next(line.split() for line in text.splitlines() if line.startswith("int4"))
    worst = max(head.kl_mean_nats for call in forecast.calls for head in call.stored.heads)
    assert line[1:5] == ["warn", "4", "tensor", f"{worst:.3g}"]
    assert "q8_0: 1 attentions not judged: its heads are odd" in text


def test_a_check_has_no_forecast() -> None:
    assert not {"kv_cache", "kv_formats"} & set(json.loads(to_json(check("demo", seq_len=16))))
    assert "cache in " not in to_text(check("demo", seq_len=16, laws="none")).lower()


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--cache-dtype", "int8", "--rows", "0"], "rows"),
        (["--cache-dtype", "q8_0", "--cache-scale", "head"], "scales of its own"),
        (["--static"], "--static"),
        (["--cache-dtype", "int3"], "int3"),
        (["--cache-dtype", "int4", "--cache-scale", "1"], "none can be fixed"),
        (["--cache-dtype", "int8", "--cache-scale", "0"], "above 0"),
        (["--cache-dtype", "int8", "--cache-scale", "row"], "row"),
    ],
)
def test_what_makes_no_sense_is_one_error(arguments: list[str], rule: str, tmp_path: Path) -> None:
    done = run(*arguments, "--output", str(tmp_path / "out.json"))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert rule in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_schema_refuses_what_is_not_of_the_forecast(report: CheckReport) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    document = json.loads(to_json(report))
    validator.validate(document)
    for path, value in ((("dtype",), "int3"), (("calls", 0, "folded"), "rows"), (("surprise",), 1)):
        broken = json.loads(to_json(report))
        place = broken["kv_cache"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(broken)


def test_the_terminal_has_a_line_a_call(report: CheckReport) -> None:
    wide = to_text(report, width=160)
    assert "A cache in int4, one scale a tensor, 4 bits a number  3 attentions" in wide
    titles = next(line for line in wide.splitlines() if "KL nats" in line)
    for name in (
        "worst",
        "head",
        "median",
        "max",
        "key changes",
        "output off",
        "group",
        "token",
        "channel",
        "fold",
        "q/k norm",
    ):
        assert name in titles
    assert sum(line.startswith("blocks.") and line.count("%") == 2 for line in wide.splitlines()) >= 3
    narrow = to_text(report, width=100)
    assert max(map(len, narrow.splitlines())) <= 110
    assert "Each layer by itself" in " ".join(narrow.split())


def test_in_chinese_it_has_chinese_words_and_punctuation(report: CheckReport) -> None:
    for width in (60, 160):
        text = to_text(report, width=width, language="zh")
        lines = text.partition("问题\n")[0].splitlines()[3:]
        assert [line for line in lines if re.search(r"[,;] |[\u4e00-\u9fff] ?[,;]", line)] == []
        assert not re.search(r"precision|values|outlier channels|large rows", text)
        assert "QK 规范化" in text


def hostile(report: CheckReport) -> CheckReport:
    forecast = report.kv_cache
    assert forecast is not None
    call = replace(forecast.calls[0], site=EVIL)
    return with_forecast(report, replace(forecast, calls=(call,), not_measured=(NotMeasured(EVIL, EVIL),)))


def test_strange_names_are_text(report: CheckReport) -> None:
    page = to_html(hostile(report))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "\x1b" not in page
    assert "\x1b[31m" not in to_text(hostile(report))


def test_the_page_has_a_section_only_where_one_was_asked_for(report: CheckReport) -> None:
    assert '<section id="cache">' in to_html(report)
    assert '<section id="cache">' not in to_html(replace(report, kv_cache=None))


def test_an_attention_without_a_forecast_is_a_finding(report: CheckReport) -> None:
    forecast = replace(
        report.kv_cache or CacheForecast("int8", "tensor", 8.0, "", ()), not_measured=(NotMeasured("a", "b"),)
    )
    (missed,) = [finding for finding in findings(forecast) if finding.rule == "unmeasured"]
    assert (missed.severity, missed.site) == ("warn", "a")
    told = with_forecast(replace(report, fail_on="unmeasured", findings=()), replace(forecast, calls=()))
    assert told.exit_code == 1


def test_nan_where_no_row_saw_a_key_is_null(report: CheckReport) -> None:
    assert report.kv_cache is not None
    call = report.kv_cache.calls[0]
    empty = replace(call.stored.heads[0], kl_mean_nats=float("nan"), output_error=float("nan"))
    stored = StoredWay(call.stored.name, (empty, empty))
    odd = replace(report, kv_cache=replace(report.kv_cache, calls=(replace(call, stored=stored, seeing_rows=(0, 0)),)))
    document = json.loads(to_json(odd))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["kv_cache"]["calls"][0]["stored"]["heads"][0]["kl_mean_nats"] is None
    assert "nan" not in to_text(odd, width=160).split("A cache")[1].split("Figures")[0].split("blocks")[0]


def test_the_page_of_the_docs_has_every_format_and_bar() -> None:
    for name, form in FORMATS.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
        assert f"`{form.scale}`" in row
    rows = [f"| {name} | {kl:g} | {output:g} |" for (name, kl), (_, output) in zip(KL_BARS, OUTPUT_BARS, strict=True)]
    assert all(row in PAGE.splitlines() for row in rows)
    assert f"{OUTLIER:g} times" in PAGE


def test_the_examples_of_the_docs_run() -> None:
    example = doctest.DocTestParser().get_doctest(PAGE, {}, "kv-cache.md", "kv-cache.md", 0)
    assert len(example.examples) > 3
    said: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(example, out=said.append)
    assert not said, "".join(said)


FACTORY = """import pathlib
import torch
from torch.nn import functional


class Layer(torch.nn.Linear):
    def forward(self, x):
        q, k, v = super().forward(x).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def make():
    with pathlib.Path("built").open("a") as file:
        file.write("once ")
    return Layer(64, 192), torch.randn(2, 1, 8, 64)
"""


@pytest.mark.parametrize("more", [[], ["--rows", "4"]])
def test_the_model_that_is_audited_is_the_one_that_is_forecast(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built once."""
    name = f"forecast_once_{len(more)}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli._app, ["kv", f"{name}:make", "--cache-dtype", "int8", "--json", *more])
    assert done.exit_code == 0, done.stderr
    (call,) = json.loads(done.stdout)["kv_cache"]["calls"]
    assert (call["rows"], call["rows_of"]) == (4 if more else 16, 16)
    assert (tmp_path / "built").read_text() == "once "


def test_the_forecast_of_the_command_line_is_that_of_python() -> None:
    told = json.loads(run("--cache-dtype", "int4", "--rows", "5", "--json").stdout)["kv_cache"]["calls"]
    own = kv_forecast("demo", kv_dtype="int4", rows=5, seq_len=16).calls
    assert [head["kl_mean_nats"] for call in told for head in call["stored"]["heads"]] == [
        head.kl_mean_nats for call in own for head in call.stored.heads
    ]
