"""A graph that is run on given inputs for the figures of its logits, and the command."""

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
from safetensors.torch import save_file
from typer.testing import CliRunner

import sqrtdk
from sqrtdk.cli import _app as app
from tests.attentions.planted import planted
from tests.graphs.files import attention_model, onnx, write
from tests.graphs.modules import exported
from tests.support.optional import jsonschema
from tests.support.program import called

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


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


def test_a_model_and_its_graph_are_compared(zoo: str, program: Callable[..., str]) -> None:
    """The graph's verdict alone, and a diff: a mistake that both share is in the model's own check."""
    path = program("sdpa_scale", "twice")
    same, wrong = (
        CliRunner().invoke(app, ["diff", f"{zoo}:sdpa_scale_{name}", path, "--trust-remote-code", "--json"])
        for name in ("twice", "None")
    )
    assert (same.exit_code, wrong.exit_code) == (0, 1)
    causes = {cause["name"] for pair in json.loads(wrong.stdout)["pairs"] for cause in pair["causes"]}
    assert "scale" in causes
    assert {(c.verdict, c.mistake) for c in sqrtdk.check(path).calls} == {("unexplained", "twice")}
    assert {c.verdict for c in sqrtdk.check(program("qk_norm", "missing")).calls} == {"declared"}


def test_a_run_adds_figures(tmp_path: Path) -> None:
    path = write(attention_model(), tmp_path / "m.onnx")
    (alone,) = sqrtdk.check(str(path)).calls
    assert alone.call.stats is None
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    save_file({"x": x}, tmp_path / "x.safetensors")
    report = sqrtdk.check(str(path), input_file=tmp_path / "x.safetensors")
    (judged,) = report.calls
    assert report.mode == "dynamic"
    assert judged.call.stats is not None
    assert judged.call.formula == alone.call.formula
    weights = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in attention_model().graph.initializer
    }
    logits = 0.5 * (x @ weights["wq"]) @ (x @ weights["wk"]).mT
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    assert judged.call.stats.max_logit[0] == pytest.approx(float(logits[:, seen].max()), rel=1e-5)


def test_a_program_is_run(program: Callable[..., str], tmp_path: Path) -> None:
    _, inputs = planted("sdpa_scale", None)
    save_file({"x": inputs[0]}, tmp_path / "x.safetensors")
    report = sqrtdk.check(program("sdpa_scale", None), input_file=tmp_path / "x.safetensors")
    assert [c.verdict for c in report.calls] == ["exact"] * 3
    assert all(c.call.stats is not None for c in report.calls)


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
    assert (result.exit_code, document["mode"]) == (0, "static")
    assert [finding["severity"] for finding in document["findings"]] == ["warn"]
    assert document["calls"][0]["formula"] == "softmax(0.5 * q.k + causal)"
    assert CliRunner().invoke(app, ["check", str(tmp_path / "none.onnx")]).exit_code == 2
    assert CliRunner().invoke(app, ["check", path, "--dtype", "bf16"]).exit_code == 2
    forecast = CliRunner().invoke(app, ["kv", path])
    assert (forecast.exit_code, forecast.stdout) == (2, "")
    assert "an exported graph is read without values" in forecast.stderr
