"""The same verdicts from an exported graph as from its module: every family, every planted mistake, both kinds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sqrtdk
from tests.attentions.planted import PLANTED, STYLES
from tests.graphs.modules import NOT_WRITTEN, exported, family, mistaken
from tests.hf.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
KINDS = (".onnx", ".pt2")
CASES = [(name, kind) for name in FAMILIES for kind in KINDS if kind != ".onnx" or name not in NOT_WRITTEN]
MISTAKES = [(style, mistake, kind) for style in STYLES for mistake in (None, *PLANTED) for kind in KINDS]
# A module's attribute tells that its scale was forgotten. A graph has none, and 1.0 after a norm is a rule.
BY_ATTRIBUTE = {("qk_norm", "missing"): ("declared", None)}
ALIKE: Counter[str] = Counter()  # attentions with the same verdict, by kind of what they are of
FAST = {("llama", ".onnx"), ("t5", ".pt2"), ("fused_qkv", None, ".pt2")}
FIRST = {("gqa", "twice", ".onnx")}


def later(cases: list[Any]) -> list[Any]:
    """Cases with their tiers: an export takes seconds."""
    marks = {case: () if case in FIRST else pytest.mark.full if case in FAST else pytest.mark.slow for case in cases}
    return [pytest.param(*case, marks=marks[case]) for case in cases]


def verdicts(report: Any) -> list[Any]:
    return [(c.call.site, c.call.index, c.verdict, c.mistake) for c in report.calls]


@pytest.mark.parametrize(("name", "kind"), later(CASES))
def test_a_family(name: str, kind: str, tmp_path: Path) -> None:
    model, inputs = family(name, tmp_path)
    own = sqrtdk.check(model, inputs)
    report = sqrtdk.check(str(exported(model, inputs, tmp_path / f"m{kind}", name)))
    assert verdicts(report) == verdicts(own)
    assert [f for f in report.findings if f.severity != "note"] == []
    ALIKE[f"families {kind}"] += len(own.calls)


@pytest.mark.full
@pytest.mark.parametrize(("style", "mistake", "kind"), later(MISTAKES))
def test_a_mistake(style: str, mistake: str | None, kind: str, tmp_path: Path) -> None:
    model, inputs = mistaken(style, mistake, tmp_path)
    own = sqrtdk.check(model, inputs)
    report = sqrtdk.check(str(exported(model, inputs, tmp_path / f"m{kind}")))
    other = BY_ATTRIBUTE.get((style, mistake or ""))
    wanted = [(*entry[:2], *(other or entry[2:])) for entry in verdicts(own)]
    assert verdicts(report) == wanted
    assert report.exit_code == int(any(entry[2] == "unexplained" for entry in wanted))
    ALIKE[f"planted {kind}"] += len(own.calls) * ((style, mistake) not in BY_ATTRIBUTE)


@pytest.mark.slow
def test_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        told = ", ".join(f"{count} of {kind}" for kind, count in sorted(ALIKE.items()))
        print(f"\nattentions with the module's own verdict: {told}; of {len(CASES)} and {len(MISTAKES)} exports")
    assert len(CASES) == 2 * 29 - len(NOT_WRITTEN)
    assert len(MISTAKES) == 2 * 70
