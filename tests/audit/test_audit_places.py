"""A finding names the lines that it is about: of the scale, and of what was lost."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sqrtdk._check import check
from sqrtdk.audit.records import CheckReport, Finding
from sqrtdk.errors import ModelError
from sqrtdk.report.html import to_html
from sqrtdk.report.json import to_json
from sqrtdk.report.terminal import to_text
from tests.support.optional import jsonschema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())
PORT = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.qkv, self.out, self.middle = nn.Linear(32, 96), nn.Linear(32, 32), middle

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(self.middle(q, k, v).transpose(1, 2).flatten(2))


def right(q, k, v):
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


def missing(q, k, v):
    logits = q @ k.mT  # scale
    return logits.softmax(-1) @ v


def twice(q, k, v):
    q = q * 8**-0.5  # scale
    return F.scaled_dot_product_attention(q, k, v)  # scale


def inverted(q, k, v):
    logits = q @ k.mT
    logits = logits * 8**0.5  # scale
    return logits.softmax(-1) @ v


def unread(q, k, v):
    logits = q @ k.mT * 8**-0.5
    logits = torch.special.expit(logits)  # lost
    return logits.softmax(-1) @ v


def without_softmax(q, k, v):
    logits = q @ k.mT * 8**-0.5
    return torch.relu(logits) @ v  # lost


def lost(q, k, v):
    weights = (q @ k.mT * 8**-0.5).softmax(-1)
    return torch.cdist(weights, v.mT)  # lost
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CheckReport]:
    """Audits a layer that is right, and two with the function of this name."""
    home = tmp_path_factory.mktemp("port")
    (home / "audited_port.py").write_text(PORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(home))
        module = importlib.import_module("audited_port")
        made = {name: getattr(module, name) for name in re.findall(r"^def (\w+)", PORT, re.MULTILINE)}

        def audited(name: str, **options: object) -> CheckReport:
            torch.manual_seed(0)
            model = nn.Sequential(*(module.Layer(made[part]) for part in ("right", name, name)))
            return check(model, torch.randn(2, 12, 32), **options)  # type: ignore[arg-type]

        audited.layer = lambda name: module.Layer(made[name])  # type: ignore[attr-defined]
        yield audited


def lines(function: str, comment: str) -> str:
    """The lines of a function that end in the comment, as a finding names them."""
    inside, told = "", []
    for number, text in enumerate(PORT.splitlines(), 1):
        inside = text if text.startswith("def ") else inside
        if inside.startswith(f"def {function}(") and text.endswith(f"# {comment}"):
            told.append(f"audited_port.py:{number}")
    return ", ".join(told)


def of(report: CheckReport, rule: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule == rule]


@pytest.mark.parametrize("name", ["missing", "twice", "inverted"])
def test_a_wrong_scale_names_its_lines(port: Callable[..., CheckReport], name: str) -> None:
    report = port(name)
    assert [call.mistake for call in report.calls] == [None, name, name]
    assert [finding.at for finding in of(report, "scale_ledger")] == [lines(name, "scale")] * 2
    text = " ".join(to_text(report, width=160).split())
    assert f"1-2 (2 sites) {lines(name, 'scale')} scale_ledger" in text
    assert lines(name, "scale") in to_html(report)


def test_a_contradicted_declaration_names_its_line() -> None:
    class Declared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"query_pre_attn_scalar": 32}
            self.q, self.k, self.v = (nn.Linear(32, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ self.k(x).mT * 8**-0.5).softmax(-1) @ self.v(x)

    (finding,) = of(check(Declared(), torch.randn(2, 12, 32)), "declared_vs_actual")
    assert re.search(r"test_audit_places\.py:\d+$", finding.at or "")


@pytest.mark.parametrize(
    ("name", "severity", "formula"),
    [
        ("unread", "warn", "softmax(unknown(sigmoid)(0.3536 * q.k))"),
        ("without_softmax", "warn", "relu(0.3536 * q.k)"),
        ("lost", "note", "softmax(0.3536 * q.k)"),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_what_is_lost_is_a_finding_with_formula_and_line(
    port: Callable[..., CheckReport], name: str, severity: str, formula: str, static: bool
) -> None:
    report = port(name, static=static, fail_on="unmeasured")
    assert report.exit_code == 1
    findings = of(report, "unmeasured")
    assert [(f.site, f.severity, f.at) for f in findings] == [(str(i), severity, lines(name, "lost")) for i in (1, 2)]
    assert all(finding.message.endswith(f"seen up to there: {formula}") for finding in findings)
    text = " ".join(to_text(report, width=160).split())
    assert text.count("seen up to there") == len({f.message for f in findings})  # and not once more as an aside
    assert f" {lines(name, 'lost')} unmeasured" in text
    document = json.loads(to_json(report))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    # what enters the last layer may be one average, whose logits are all equal
    lost = [finding["at"] for finding in document["findings"] if finding["rule"] == "unmeasured"]
    assert lost == [lines(name, "lost")] * 2
    assert lines(name, "lost") in to_html(report)
    assert port(name, static=static).exit_code == 0


def test_an_attention_module_that_was_lost_names_its_softmax(port: Callable[..., CheckReport]) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = port.layer("lost")  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    report = check(nn.Sequential(port.layer("right"), Attention()), torch.randn(2, 12, 32))  # type: ignore[attr-defined]
    (finding,) = report.findings
    assert (finding.site, finding.severity, finding.at) == ("1", "warn", lines("lost", "lost"))
    assert finding.message.endswith("no attention was found in it; seen up to there: softmax(0.3536 * q.k)")
    assert [entry.code for entry in report.not_attention] == ["lost_sight"]


def test_where_nothing_could_be_read_the_error_says_where(port: Callable[..., CheckReport]) -> None:
    model = port.layer("without_softmax")  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=re.escape(f"at {lines('without_softmax', 'lost')}")) as caught:
        check(model, torch.randn(2, 12, 32))
    assert "relu(0.3536 * q.k)" in str(caught.value)
