"""The Chinese of what rules, alarms and the trace say: nothing that they can say lacks its template."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sqrtdk
from sqrtdk.report.markdown import to_markdown
from sqrtdk.report.said import placeholders, said, templates
from sqrtdk.report.terminal import summary_line, to_text

SOURCE = Path(sqrtdk.__file__).parent
SPEAKERS = (  # what is in them in English, and has a blank, is read by people
    "audit/rules/*.py",
    "audit/attribute_verdict.py",
    "audit/layers.py",
    "audit/like.py",
    "audit/mistakes.py",
    "audit/sight.py",
    "audit/verdicts.py",
    "compare/direct.py",
    "compare/pair.py",
    "kv/blame.py",
    "kv/call.py",
    "kv/findings.py",
    "models/attentions.py",
    "models/build.py",
    "models/tokens.py",
    "monitor/alarms/*.py",
    "monitor/forwards.py",
    "monitor/checkpoints/_records.py",
    "tracing/tell/scale.py",
    "tracing/tell/slope.py",
    "tracing/tell/keep.py",
    "tracing/tell/places.py",
    "tracing/tell/proof.py",
    "tracing/watch/recorder.py",
)
NO_SENTENCES = {  # names, sources, hints of errors, and what `diff_chinese` says in its own words
    "differs at the {} by what is not known: {}, rounding allows {}",
    "the model that was named",
    "what was not judged is not known to hold",
    "figures of one model on the same inputs can be compared",
    "zero-one mask",
    "its name",
    "any attribute",
    "--kv-scale {}",
    "the text {}",
    "Check config.json and the weight files; --static builds without weights.",
    "Install the package that the message names, or audit another model.",
    "A weight file is damaged or incomplete: download the model again, or pass --static.",
}


def spoken(path: Path) -> Iterator[str]:
    """The texts of a file: no docstrings, errors, sources of thresholds; places in them as {}."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    passed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Subscript) or (
            isinstance(node, ast.Assign) and _is_source(node.targets[0])
        ):
            passed.update(map(id, ast.walk(node)))
        if isinstance(node, ast.AnnAssign) and _is_source(node.target):
            passed.update(map(id, ast.walk(node)))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            for part in node.values:
                passed.add(id(part))
                if isinstance(part, ast.FormattedValue) and part.format_spec is not None:
                    passed.update(map(id, ast.walk(part.format_spec)))
        if isinstance(node, ast.keyword) and node.arg in ("summary", "scale", "ratio", "excuse", "source"):
            passed.update(map(id, ast.walk(node.value)))
    for node in ast.walk(tree):
        if id(node) in passed:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _has_template(text: str) -> bool:
    """Whether what a text says itself stands in one template, in its order; what is put in may stand there too."""
    literals = [re.escape(literal.strip(" ,:;")) for literal in text.split("{}") if re.search("[a-z]", literal)]
    pattern = re.compile(".*".join(literals), re.DOTALL)
    return any(pattern.search(template.english) for template in templates())


def _is_source(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.rstrip("_").endswith(("SOURCE", "NAMES", "LEVELS", "ATTRIBUTES"))


@pytest.mark.parametrize("pattern", SPEAKERS)
def test_every_text_of_a_rule_is_in_a_template(pattern: str) -> None:
    paths = sorted(SOURCE.glob(pattern))
    assert paths
    missing = [
        f"{path.relative_to(SOURCE)}: {text!r}"
        for path in paths
        for text in dict.fromkeys(spoken(path))
        if " " in text.strip() and re.search("[a-z]{2}", text) and text not in NO_SENTENCES and not _has_template(text)
    ]
    assert not missing, "\n".join(missing)


def test_what_stands_in_a_sentence_is_put_over_too() -> None:
    message = (
        "the scale could not be judged: the scale could not be read; seen up to there: softmax(q) (call 2 of 3 here)"
    )
    assert (
        said(message, "zh")
        == "无法判定缩放因子：无法读出缩放因子；到此为止看到的公式：softmax(q)（此处共 3 次调用，这是第 2 次）"
    )
    assert said(message, "en") == message


def test_two_sentences_stay_two() -> None:
    message = "twice, it is 1/head_dim, 1/sqrt(head_dim) applied twice; 2 factors of 64^-1/2 along the lineage"
    assert said(message, "zh") == (
        "twice，实际为 1/head_dim，即 1/sqrt(head_dim) 用了两次；计算路径上有 2 个 64^-1/2 因子"
    )


@pytest.mark.parametrize("text", ["", "h.0.attn", "a; b", "scale 3", "x" * 5000, "{name}", "one, or other"])
def test_what_is_no_sentence_of_ours_is_kept(text: str) -> None:
    assert said(text, "zh") == text


def test_a_strangers_long_text_takes_no_time() -> None:
    for text in ("head has rows of at step; in and, " * 120, "{" * 4000, ": " * 2000):
        said(text, "zh")


def test_both_languages_have_the_same_places() -> None:
    seen = set()
    for template in templates():
        assert placeholders(template.english) == placeholders(template.chinese), template.english
        assert re.search(r"[\u4e00-\u9fff]|--kv-scale|；", template.chinese), template.english
        assert template.english not in seen, template.english
        seen.add(template.english)


@pytest.mark.parametrize("model", ["demo:unscaled", "demo:twice", "demo:inverted"])
def test_every_finding_of_a_model_is_said_in_chinese(model: str) -> None:
    report = sqrtdk.check(model)
    assert report.findings
    for finding in report.findings:
        for text in (finding.message, finding.fix):
            assert said(text, "zh") != text, text


WORDS = ("attention calls", "Exit code", "fail-on:", "finding", "found ", "expected ", "fix:", "leads to", "Figures of")


@pytest.mark.parametrize("model", ["demo", "demo:unscaled"])
def test_a_check_in_chinese_leaves_no_english_words(model: str) -> None:
    report = sqrtdk.check(model)
    for text in (to_text(report, width=100, language="zh"), to_markdown(report, "zh")):
        assert [word for word in WORDS if word in text] == []
        assert f"退出码 {report.exit_code}（fail-on：fail）。" in text
    assert summary_line(report, "zh").endswith(to_text(report, width=400, language="zh").splitlines()[-1])
