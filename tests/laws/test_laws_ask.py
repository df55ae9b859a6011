"""Laws at hand: `sqrtdk.laws.ask`, `assert_laws`, the option of `check`, and what a report shows of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import sqrtdk
from sqrtdk import check, laws
from sqrtdk.audit.baseline import compare_with_baseline, ledger_of
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, CheckReport, LawAnswer
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.messages import Message, said
from sqrtdk.report.check.consequences import consequences
from sqrtdk.report.check.headline import headline
from sqrtdk.report.check.html import to_html
from sqrtdk.report.check.junit import to_junit
from sqrtdk.report.check.laws import caption, counts, law_rows, named_law, picture
from sqrtdk.report.check.sarif import to_sarif
from sqrtdk.report.terminal import to_text
from sqrtdk.testing import assert_laws
from tests.graphs.files import attention_model, write
from tests.laws.models import Decoder, ids, leaking
from tests.report.sample_report import lawless
from tests.support.needs import needs
from tests.support.program import called

HAN = re.compile(r"[\u4e00-\u9fff]")


def leak() -> CheckReport:
    return check(leaking(), ids(), laws="all")


def test_a_broken_law_is_told_first_and_nothing_is_said_to_be_well() -> None:
    report = leak()
    (causal,) = [answer for answer in report.laws if answer.law == "causal"]
    assert (causal.state, causal.site, causal.finding in report.findings) == (BROKEN, "attn", True)
    assert "textbook" not in headline(report).en
    assert "教科书" not in headline(report).zh
    right = headline(check(Decoder(), ids(), laws="all"))
    assert right.en == "The one attention has the textbook scale"


def test_what_moves_stands_under_the_mask_that_lets_it() -> None:
    (told,) = [one for one in consequences(leak().findings) if one.cause.first.rule == "mask_audit"]
    assert [folded.first.rule for folded in told.consequences] == ["law_causal"]


def test_ask_answers_as_check_does_and_leaves_the_model_alone() -> None:
    model, inputs = leaking().train(), ids()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    report = laws.ask(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [(answer.law, answer.state) for answer in report.answers] == [(a.law, a.state) for a in leak().laws]
    assert [answer.law for answer in report.broken] == ["causal"]
    assert repr(report).startswith("LawReport(Decoder; broken: causal; ")
    assert sqrtdk.laws is laws


def test_nan_has_the_finding_that_says_where() -> None:
    inputs = ids()
    inputs["attention_mask"][0] = 0
    model = Decoder()
    model.embed.weight.data[1] = float("nan")
    (answer,) = laws.ask(model, {**inputs, "input_ids": torch.ones_like(inputs["input_ids"])}, "finite").broken
    assert answer.finding is not None
    assert answer.finding.rule == "nonfinite"
    assert answer.finding.message == "parameter embed.weight holds NaN or infinity"


@pytest.mark.parametrize(
    ("model", "arguments", "kind", "told"),
    [
        (Decoder, {"laws": "gravity"}, InvalidValueError, "there is no law 'gravity'"),
        (7, {}, InvalidTypeError, "model is a int"),
        (lambda: nn.Linear(3, 3), {"inputs": torch.ones(1, 3)}, ModelError, "no attention"),
        pytest.param("x.onnx", {}, ModelError, "can't read the graph", marks=needs("a graph", onnx="1")),
    ],
)
def test_bad_input_is_one_clear_error(model: object, arguments: dict[str, object], kind: type, told: str) -> None:
    made = model() if callable(model) else model
    with pytest.raises(kind, match=told) as error:
        laws.ask(made, **{"inputs": ids(), **arguments} if made != 7 else arguments)  # type: ignore[arg-type]
    assert error.value.hint  # type: ignore[attr-defined]


def test_the_assertion_names_the_law_the_place_and_the_fix() -> None:
    with pytest.raises(AssertionError) as error:
        assert_laws(leaking(), ids())
    first, *lines = str(error.value).splitlines()
    assert first == "laws of Decoder: 1 law broken (fail_on: fail)"
    assert lines[0] == "attn  critical, law_causal"
    assert lines[-1].strip() == "fix: pass is_causal=True or the causal mask to this attention"
    assert assert_laws(Decoder(), ids()).broken == ()
    for allowed in ("law_causal", "attn", ("a*", "not asked")):
        assert assert_laws(leaking(), ids(), allow=allowed).broken
    with pytest.raises(InvalidValueError, match="law_casual"):
        assert_laws(leaking(), ids(), allow="law_casual")


def test_a_mask_that_never_arrives_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="law_padding"):
        assert_laws(Decoder(takes_mask=False), ids(), "padding")


def test_an_assertion_that_asks_nothing_does_not_pass() -> None:
    with pytest.raises(AssertionError, match="documents  not asked: every row is one document") as error:
        assert_laws(Decoder(), ids(), "causal,documents")
    assert str(error.value).startswith("laws of Decoder: 1 law not asked")
    assert assert_laws(Decoder(), ids(), "documents", allow="not asked").broken == ()
    assert assert_laws(Decoder(), ids(), "documents", fail_on="never").broken == ()


def test_every_law_has_a_name_in_chinese() -> None:
    assert all(HAN.search(said(named_law(law), "zh")) for law in laws.LAWS)


def test_what_is_broken_is_said_in_chinese() -> None:
    for report in (leak(), check(Decoder(takes_mask=False), ids(), laws="all")):
        for answer in report.laws:
            assert not answer.reason or HAN.search(said(answer.reason, "zh")), answer.reason
        for finding in report.findings:
            assert all(HAN.search(said(text, "zh")) for text in (finding.message, finding.fix)), finding
        text = to_text(report, width=200, language="zh")
        assert not re.search(r"\b(broken|kept|not asked|moved)\b", text)


def test_equal_answers_fold_and_what_holds_is_one_row_with_each_law_once() -> None:
    rows = [(row.laws, row.answer.state, row.answer.about, row.abouts) for row in law_rows(lawless().laws)]
    assert rows == [
        (("causal",), BROKEN, "input_ids", ()),
        (("padding",), BROKEN, "encoder_attention_mask", ()),
        (("finite", "padding"), KEPT, "", ((), ("attention_mask",))),
        (("samples",), NOT_ASKED, "", ((),)),
        (("documents",), NOT_ASKED, "", ((),)),
    ]
    static = check(Decoder(), ids(), static=True, laws="all")
    of_masks, rest = law_rows(static.laws)
    assert (of_masks.laws, of_masks.answer.state) == (("configured",), KEPT)
    assert rest.laws == tuple(name for name, row in laws.LAWS.items() if name != "configured" and not row.by_name)
    assert counts(static.laws) == f"1 kept, 0 broken, {len(rest.laws)} not asked"


def test_what_was_not_asked_is_one_line_and_its_reasons_come_on_request() -> None:
    halves = [LawAnswer("place", Message(f"laws.place.about.{half}"), KEPT) for half in ("split", "merge")]
    partly = [LawAnswer("modes", "train mode", KEPT), LawAnswer("modes", "batch of one", NOT_ASKED, "no axis is known")]
    report = replace(lawless(), laws=(*lawless().laws, *halves, *partly))
    for language, line in (
        ("en", "2 not asked: samples, documents; in part: modes (batch of one); why: --laws-reasons"),
        ("zh", "2 条未检验："),
    ):
        text = to_text(report, width=200, language=language)  # type: ignore[arg-type]
        assert sum(line in row for row in text.splitlines()) == 1
        assert "no axis is known" not in text
        assert "no axis is known" in to_text(report, width=200, language=language, reasons=True)  # type: ignore[arg-type]
    assert "place (heads split, heads merged)" in to_text(report, width=200)
    page = to_html(report)
    assert page.index('<details class="more"><summary>', page.index('id="laws"')) < page.index("no axis is known")


@pytest.mark.parametrize("length", [1, 64, 65, 128, 1000])
def test_a_picture_has_at_most_64_marks_and_loses_no_position(length: int) -> None:
    for place in {0, length // 2, length - 1}:
        moved = tuple(position == place for position in range(length))
        drawn = picture(moved)
        assert len(drawn) <= 64
        assert sum(drawn) == 1
        assert drawn.index(True) == place // -(-length // 64)


def test_the_caption_names_the_positions() -> None:
    (causal,) = [row for row in law_rows(lawless().laws) if row.laws == ("causal",)]
    assert caption(causal) == "causal: positions 56-127 of 0-127 moved, 2 in one mark"


def test_junit_has_a_case_for_each_answer() -> None:
    cases = {case.get("name"): case for case in ElementTree.fromstring(to_junit(lawless()).encode()).iter("testcase")}
    outcomes = {
        name: next((kind for kind in ("failure", "skipped") if case.find(kind) is not None), "passed")
        for name, case in cases.items()
        if str(name).startswith("law ")
    }
    assert outcomes == {
        "law finite": "passed",
        "law samples": "skipped",
        "law causal (input_ids)": "failure",
        "law padding (attention_mask)": "passed",
        "law padding (encoder_attention_mask)": "passed",  # a warning, below the bar
        "law documents": "skipped",
    }
    skipped = cases["law samples"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "not asked: no output has one entry a sample"


def test_sarif_has_rules_and_states() -> None:
    (run,) = json.loads(to_sarif(lawless()))["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["law_causal", "law_padding"]
    assert run["properties"]["laws"]["causal (input_ids)"] == BROKEN


def test_a_baseline_holds_broken_laws_like_other_findings() -> None:
    before, now = check(leaking(), ids(), laws="none"), leak()
    comparison = compare_with_baseline(ledger_of(before), now, "b.json")
    assert [change.after for change in comparison.changes if change.fails] == ["critical law_causal"]
    assert compare_with_baseline(ledger_of(now), now, "b.json").exit_code == 0


def test_laws_are_asked_once_and_not_said_to_be_of_one_implementation() -> None:
    transformers = pytest.importorskip("transformers")

    class Deaf(transformers.LlamaForCausalLM):  # type: ignore[name-defined, misc]
        def forward(self, input_ids, attention_mask=None, **others):  # type: ignore[no-untyped-def]
            return super().forward(input_ids, **others)

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    report = check(Deaf(config).eval(), ids(), attn="both", laws="padding")
    (finding,) = [finding for finding in report.findings if finding.rule == "law_padding"]
    assert "(only with" not in finding.message


def test_a_graph_says_that_no_law_was_asked(tmp_path: Path) -> None:
    path = write(attention_model(), tmp_path / "a.onnx")
    (answer, other) = check(str(path), laws="causal,samples").laws
    assert (answer.state, answer.reason) == (
        NOT_ASKED,
        "an exported graph is run only on inputs that are given (--input)",
    )
    assert other.reason == answer.reason


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return called(*arguments, "--seq-len", "8", cwd=cwd)


def test_the_option_arrives() -> None:
    done = run("check", "demo", "--laws", "causal, samples", "--json")
    assert {entry["law"] for entry in json.loads(done.stdout)["laws"]} >= {"causal", "samples"}
    assert json.loads(run("check", "demo", "--laws", "none", "--json").stdout)["laws"] == []
    wrong = run("check", "demo", "--laws", "gravity")
    assert wrong.returncode == 2
    assert "there is no law 'gravity'" in wrong.stderr
    assert all(name in wrong.stderr for name in laws.LAWS)


def test_a_baseline_takes_the_option(tmp_path: Path) -> None:
    kept = ("check", "demo", "--baseline", "b.json", "--laws")
    assert run(*kept, "gravity", "--update", cwd=tmp_path).returncode == 2
    assert run(*kept, "causal", "--update", cwd=tmp_path).returncode == 0
    assert run(*kept, "causal", cwd=tmp_path).returncode == 0


def test_the_report_without_laws_has_no_part_on_them() -> None:
    assert "Laws" not in to_text(replace(lawless(), laws=(), findings=()))


@pytest.mark.full
def test_what_torch_imports_for_a_backward_pass_leaves_the_filters_of_warnings() -> None:
    """A fresh process: torch imports sympy for the first gradient that it is given, and sympy adds a filter."""
    code = """if True:
        import sys, warnings
        import torch
        from sqrtdk import laws

        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = torch.nn.Linear(16, 48)

            def forward(self, x):
                q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
                return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        model, before = Attention(), list(warnings.filters)
        report = laws.ask(model, (torch.randn(2, 6, 16),), "gradient")
        assert [answer.state for answer in report.answers] == ["kept"], report
        assert "sympy" in sys.modules
        assert list(warnings.filters) == before
    """
    subprocess.run([sys.executable, "-c", code], check=True)
