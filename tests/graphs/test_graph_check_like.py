"""A graph judged by the model that it is of, and a graph that is run for the figures of its logits."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import sqrtdk
from sqrtdk._check import check_with
from sqrtdk.cli import _app as app
from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.models.options import LoadOptions
from sqrtdk.report.html import to_html
from sqrtdk.report.json import to_json
from tests.attentions.planted import planted
from tests.graphs.files import attention_model, onnx, write
from tests.graphs.modules import exported
from tests.support.optional import jsonschema
from tests.support.program import called

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
NONE = LoadOptions()


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose factories are the planted models."""
    module = ModuleType("graph_zoo")
    for style, mistake in (("qk_norm", "missing"), ("sdpa_scale", "twice"), ("sdpa_scale", None)):
        setattr(module, f"{style}_{mistake}", lambda style=style, mistake=mistake: planted(style, mistake))
    monkeypatch.setitem(sys.modules, "graph_zoo", module)
    return "graph_zoo"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], str]:
    """A planted model as a program, exported once."""
    folder = tmp_path_factory.mktemp("programs")

    @functools.cache
    def made(style: str, mistake: str | None) -> str:
        return str(exported(*planted(style, mistake), folder / f"{style}_{mistake}.pt2"))

    return made


def test_what_an_attribute_tells(zoo: str, program: Callable[..., str]) -> None:
    """Alone the graph follows the rule of normalised q and k; the model's attribute says that its scale was lost."""
    path = program("qk_norm", "missing")
    assert {c.verdict for c in sqrtdk.check(path).calls} == {"declared"}
    report = check_with(path, None, NONE, like=f"{zoo}:qk_norm_missing")
    assert {(c.verdict, c.mistake) for c in report.calls} == {("unexplained", "missing")}
    assert report.exit_code == 1


def test_a_graph_that_is_not_its_model(zoo: str, program: Callable[..., str]) -> None:
    path = program("sdpa_scale", "twice")
    report = check_with(path, None, NONE, like=f"{zoo}:sdpa_scale_None")
    assert {(c.verdict, c.mistake) for c in report.calls} == {("unexplained", "twice")}
    assert all("it applies 0.204124, the graph 0.0416667" in finding.message for finding in report.findings)
    assert len(report.findings) == 3
    same = check_with(path, None, NONE, like=f"{zoo}:sdpa_scale_twice")
    assert {(c.verdict, c.mistake) for c in same.calls} == {("unexplained", "twice")}
    assert all(c.declared_by is None for c in same.calls)


def test_a_model_with_other_attentions(tmp_path: Path) -> None:
    path = str(write(attention_model(), tmp_path / "m.onnx"))
    report = check_with(path, None, NONE, like="demo", fail_on="unmeasured")
    assert report.exit_code == 1
    assert any("no attention of demo" in finding.message for finding in report.unjudged)
    assert any("is not in the graph" in finding.message for finding in report.unjudged)


def test_a_run_adds_figures(tmp_path: Path) -> None:
    path = write(attention_model(), tmp_path / "m.onnx")
    (alone,) = sqrtdk.check(str(path)).calls
    assert alone.call.stats is None
    report = check_with(str(path), None, NONE, run_graph=True)
    (judged,) = report.calls
    assert report.mode == "dynamic"
    assert judged.call.stats is not None
    assert judged.call.formula == alone.call.formula
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    weights = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in attention_model().graph.initializer
    }
    logits = 0.5 * (x @ weights["wq"]) @ (x @ weights["wk"]).mT
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    assert judged.call.stats.max_logit[0] == pytest.approx(float(logits[:, seen].max()), rel=1e-5)


def test_a_program_is_run(program: Callable[..., str]) -> None:
    report = check_with(program("sdpa_scale", None), None, NONE, run_graph=True)
    assert [c.verdict for c in report.calls] == ["exact"] * 3
    assert all(c.call.stats is not None for c in report.calls)


def test_options_of_graphs_alone() -> None:
    with pytest.raises(InvalidValueError, match="exported graphs"):
        check_with("demo", None, NONE, like="demo")


@pytest.mark.full
def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In English and in Chinese; `...` stands for lines that are left out."""
    sizes = {0: torch.export.Dim("rows", min=2, max=8), 1: torch.export.Dim("tokens", min=2, max=64)}
    exported(*planted("sdpa_scale", "twice"), tmp_path / "twice.onnx", dynamic_shapes={"x": sizes})
    monkeypatch.chdir(tmp_path)
    for language in ("en", "zh"):
        page = (Path(__file__).parents[2] / "docs" / language / "graphs.md").read_text(encoding="utf-8")
        (shown,) = re.findall(
            r"^```console\n\$ sqrtdk (check twice\.onnx.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
        )
        printed = called(*shown[0].split(), COLUMNS="120").stdout
        first, last = shown[1].split("...\n")
        assert printed.startswith(first)
        assert printed.endswith(f"\n{last}")


def test_the_command(tmp_path: Path) -> None:
    path = str(write(attention_model(), tmp_path / "m.onnx"))
    schema = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())
    result = CliRunner().invoke(app, ["check", path, "--json"])
    document = json.loads(result.stdout)
    jsonschema.validate(document, schema)
    assert (result.exit_code, document["mode"]) == (1, "static")
    assert document["calls"][0]["formula"] == "softmax(0.5 * q.k + causal)"
    assert CliRunner().invoke(app, ["check", str(tmp_path / "none.onnx")]).exit_code == 2
    assert CliRunner().invoke(app, ["check", path, "--dtype", "bf16"]).exit_code == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--sarif", "s"], "--sarif"),
        (["--junit", "j", "--markdown", "-"], "--junit, --markdown"),
        (["--kv-dtype", "int8", "--kv-rows", "1"], "--kv-dtype, --kv-rows"),
        (["--static", "--seq-len", "4"], "--static, --seq-len"),
        (["--fail-on", "critical"], "--fail-on critical"),
    ],
)
def test_what_a_diff_does_not_take_is_refused(
    more: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be passed over in silence."""
    monkeypatch.chdir(tmp_path)
    write(attention_model(), tmp_path / "m.onnx")
    result = CliRunner().invoke(app, ["check", "m.onnx", "--like", "demo", "--run", *more])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: {said} given with --like and --run" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_the_bar_reaches_the_diff(zoo: str, program: Callable[..., str]) -> None:
    path = program("sdpa_scale", "twice")
    given = ["check", path, "--like", f"{zoo}:sdpa_scale_None", "--run", "--trust-remote-code"]
    assert [CliRunner().invoke(app, [*given, *more]).exit_code for more in ([], ["--fail-on", "never"])] == [1, 0]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        check_with(str(write(attention_model(), tmp_path / "m.onnx")), None, NONE, like="./none")


@pytest.mark.parametrize("kind", [".onnx", ".pt2"])
def test_a_run_says_where_its_inputs_come_from(kind: str, tmp_path: Path) -> None:
    """In the report itself, in its JSON and on its page, beside the figures."""
    if kind == ".onnx":
        path, told = write(attention_model(), tmp_path / "m.onnx"), "made up, with seed 0: x (2, 5, 8)"
    else:
        model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        x = torch.randn(2, 5, 16)
        path, told = exported(model, (x, x, x), tmp_path / "m.pt2"), "those that the program was exported with"
    report = check_with(str(path), None, LoadOptions(), run_graph=True)
    assert report.calls[0].call.stats is not None
    assert any(told in note for note in report.environment["notes"])
    assert told in str(json.loads(to_json(report))["environment"]["notes"])
    assert told in to_html(report).split("</header>")[0]
