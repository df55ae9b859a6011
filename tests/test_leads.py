"""Names that people guess: each works, or its error says what does the same.

The sessions are real ones: a model checked, compared, traced and watched. What an error recommends is tried as well, so
that no lead ends nowhere.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
import sqrtdk.audit
import sqrtdk.compare
from sqrtdk import _leads
from sqrtdk.errors import InvalidTypeError, MissingExtraError

Q = K = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))


class Core(nn.Module):
    is_causal = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attention = nn.Linear(16, 48), Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder()
    with sqrtdk.trace(model) as run:
        model(X)
    return {
        "CheckReport": sqrtdk.check(model, X, laws="causal"),
        "DiffReport": sqrtdk.diff(model, Decoder(), X),
        "LawReport": sqrtdk.laws.ask(model, X, "causal"),
        "Trace": run,
    }


def test_a_check_says_and_saves_itself(reports: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = reports["CheckReport"]
    assert report.ok
    assert report.to_dict() == json.loads(report.to_json())
    assert report.to_html().startswith("<!doctype html>")
    assert report.to_markdown().startswith("###")
    report.print()
    assert capsys.readouterr().out == report.summary()
    assert "softmax(0.3536 * q.k + causal)" in report.summary()


def test_what_could_not_be_judged_is_not_ok() -> None:
    class Hidden(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT / 4.0).softmax(-1)
            return super().forward(torch.from_numpy(weights.detach().numpy()) @ x)

    report = sqrtdk.check(Hidden(), X, laws="none")
    assert (report.outcome, report.exit_code, report.ok) == ("incomplete", 0, False)


def test_a_comparison_is_ok_if_nothing_differs(reports: dict[str, Any]) -> None:
    report, model = reports["DiffReport"], Decoder()
    assert (report.same, report.ok) == (False, False)
    assert sqrtdk.diff(model, model, X).ok
    assert "What to change in B" in report.summary()
    assert report.to_dict()["pairs"][0]["causes"][0]["name"] == "weights"


def test_laws_are_ok_if_asked_and_kept(reports: dict[str, Any]) -> None:
    assert reports["LawReport"].ok
    assert not sqrtdk.laws.ask(Decoder(), X, "padding").ok, "it was not asked"


def test_a_table_for_pandas(reports: dict[str, Any]) -> None:
    pytest.importorskip("pandas")
    check, stats = reports["CheckReport"].to_dataframe(), reports["CheckReport"].calls[0].call.stats
    assert check["head"].tolist() == [0, 1]
    assert check["max_logit"].tolist() == list(stats.max_logit)
    assert set(check["formula"]) == {"softmax(0.3536 * q.k + causal)"}
    diff = reports["DiffReport"].to_dataframe()
    assert (diff["site_a"].tolist(), diff["same"].tolist()) == (["attention"], [False])


def test_without_pandas(reports: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="a data frame needs pandas") as raised:
        reports["CheckReport"].to_dataframe()
    assert raised.value.hint == "pip install pandas"


def test_pictures_hold_the_statistics(reports: dict[str, Any], tmp_path: Path) -> None:
    """The colours of a picture are the numbers: of every head and query, or of every attention and head."""
    pytest.importorskip("matplotlib")
    rows = sqrtdk.measure(Q, K, is_causal=True)
    figure = rows.plot()
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    wanted = [rows.max_logit, rows.entropy_nats, rows.peak]
    for image, values in zip(images, wanted, strict=True):
        assert torch.allclose(torch.tensor(image), values.double().mean(0))
    figure.savefig(tmp_path / "rows.png")
    stats = reports["CheckReport"].calls[0].call.stats
    for drawn in (reports["CheckReport"].plot(), reports["CheckReport"].calls[0].plot()):
        (image, *_) = (axes.images[0].get_array() for axes in drawn.axes if axes.images)
        assert image.tolist() == [list(stats.max_logit)]
    _, aux = sqrtdk.attention(Q, K, K, return_aux=sqrtdk.AuxRequest(max_logit=True, entropy_nats=True))
    assert len([axes for axes in aux.plot().axes if axes.images]) == 2


def test_nothing_to_draw() -> None:
    pytest.importorskip("matplotlib")
    report = sqrtdk.check("demo", static=True)
    with pytest.raises(sqrtdk.errors.InvalidValueError, match="nothing to draw"):
        report.plot()


@pytest.mark.parametrize("kind", ["CheckReport", "DiffReport", "LawReport", "Trace"])
def test_every_lead_of_a_record_ends_at_something(kind: str, reports: dict[str, Any]) -> None:
    record = reports[kind]
    leads = _leads._OF_RECORDS[kind] | ({} if kind in ("LawReport", "Trace") else dict(_leads._OF_REPORTS))
    for name, lead in leads.items():
        with pytest.raises(AttributeError, match=f"^{kind} has no {name!r}; it is ") as raised:
            getattr(record, name)
        assert lead in str(raised.value)
        if lead.startswith(("sqrtdk.", "print(")):
            assert callable(eval(re.split(r"\(", lead)[0], {"sqrtdk": sqrtdk, "print": print}))
        else:
            assert hasattr(record, re.split(r"[^a-z_]", lead)[0]), (name, lead)


def test_other_names_are_refused_as_python_does(reports: dict[str, Any]) -> None:
    with pytest.raises(AttributeError, match=r"^CheckReport has no 'finding'; did you mean 'findings'\?$"):
        _ = reports["CheckReport"].finding
    assert not hasattr(reports["CheckReport"], "__array__")
    assert not hasattr(reports["CheckReport"], "_ipython_display_")


@pytest.mark.parametrize("room", sorted(_leads._MEANT_BY_CALL))
def test_a_module_that_is_called_says_what_was_meant(room: str) -> None:
    module = import_module(f"sqrtdk.{room}")
    with pytest.raises(InvalidTypeError, match=f"^sqrtdk.{room} is a module, which can't be called") as raised:
        module(None, x=1)
    for name in re.findall(r"sqrtdk\.[a-z_.]*[a-z_]", raised.value.hint):
        found: Any = sqrtdk
        for part in name.split(".")[1:]:
            found = getattr(found, part)


@pytest.mark.parametrize(
    ("call", "name", "hint"),
    [
        (lambda: sqrtdk.watch(Decoder(), logger=None), "watch has no argument 'logger'", "sinks="),
        (lambda: sqrtdk.watch(Decoder(), log="runs"), "watch has no argument 'log'", "to='folder'"),
        (lambda: sqrtdk.watch(Decoder(), evry=3), r"watch has no argument 'evry'; did you mean 'every'\?", "model"),
        (lambda: sqrtdk.check(Decoder(), input=X), "check has no argument 'input'", "Pass inputs"),
        (lambda: sqrtdk.check(Decoder(), X, verbose=True), "check has no argument 'verbose'", "report.print()"),
        (lambda: sqrtdk.diff(Decoder(), Decoder(), X, atol=1e-3), "diff has no argument 'atol'", "derived"),
        (lambda: sqrtdk.trace(Decoder(), X), "trace takes 1 argument without a name", "with sqrtdk.trace(model)"),
        (lambda: sqrtdk.trace(Decoder(), x=X), "trace has no argument 'x'", "inside"),
    ],
)  # fmt: skip
def test_arguments_of_other_libraries(call: Callable[[], object], name: str, hint: str) -> None:
    with pytest.raises(InvalidTypeError, match=f"^{name}") as raised:
        call()
    assert hint in raised.value.hint


@pytest.mark.parametrize("call", sorted(_leads.OF_CALLS))
def test_no_guess_is_an_argument(call: str) -> None:
    assert not set(_leads.OF_CALLS[call]) & set(inspect.signature(getattr(sqrtdk, call)).parameters)
