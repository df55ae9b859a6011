"""The Chinese of what rules, alarms and the trace say: nothing that they can say lacks its template."""

from __future__ import annotations

import ast
import dataclasses
import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sqrtdk
from sqrtdk.audit.baseline import compare, ledger
from sqrtdk.audit.declared import BASE_FIELDS, BASE_SWITCHES
from sqrtdk.audit.families import FAMILIES, by_family
from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.multipliers import by_config
from sqrtdk.lab.register import CLAIMS
from sqrtdk.messages import Message, joined
from sqrtdk.messages._catalogue import topic
from sqrtdk.report import baseline, diff_words
from sqrtdk.report.diff import to_text as diff_text
from sqrtdk.report.diff_causes import CATALOGUE, CAUSES, caused
from sqrtdk.report.diff_fold import cause_name
from sqrtdk.report.lab import claim_text
from sqrtdk.report.markdown import to_markdown
from sqrtdk.report.said import CATALOGUES, TITLES, Catalogues, placeholders, said, templates
from sqrtdk.report.terminal import summary_line, to_text

SOURCE = Path(sqrtdk.__file__).parent
BLANK = re.compile(r"\{\w*\}")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
SPEAKERS = (  # what is in them in English, and has a blank, is read by people
    "compare/unknown_steps.py",
    "compare/pair.py",
    "monitor/alarms/*.py",
    "monitor/forwards.py",
    "monitor/checkpoints/_records.py",
    "monitor/journal.py",
)
NO_SENTENCES = {  # names, sources, hints of errors, and what `diff_chinese` says in its own words
    "differs at the {} by what is not known: {}, rounding allows {}",
    "figures of one model on the same inputs can be compared",
    "{} * tanh(z / {})",
    "z * tanh(z / {})",
    "an ALiBi",
    "[head][q, k, v]",
    "[q, k, v][head]",
    "the text {}",
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
        if isinstance(node, ast.keyword) and node.arg in ("summary", "scale", "ratio", "table", "excuse", "source"):
            passed.update(map(id, ast.walk(node.value)))
    for node in ast.walk(tree):
        if id(node) in passed:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _has_template(text: str, catalogues: Catalogues) -> bool:
    """Whether what a text says itself stands in one template, in its order; what is put in may stand there too."""
    literals = [re.escape(literal.strip(" ,:;")) for literal in BLANK.split(text) if re.search("[a-z]", literal)]
    pattern = re.compile(".*".join(literals), re.DOTALL)
    return any(pattern.search(template.english) for template in templates(catalogues))


def _missing(pattern: str, catalogues: Catalogues) -> list[str]:
    """What the files of a pattern say that no template has."""
    paths = sorted(SOURCE.glob(pattern))
    assert paths
    return [
        f"{path.relative_to(SOURCE)}: {text!r}"
        for path in paths
        for text in dict.fromkeys(spoken(path))
        if " " in text.strip() and re.search("[a-z]{2}", text)
        if text not in NO_SENTENCES and not _has_template(text, catalogues)
    ]


def _is_source(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.rstrip("_").endswith(("SOURCE", "NAMES", "LEVELS", "ATTRIBUTES"))


@pytest.mark.parametrize("pattern", SPEAKERS)
def test_every_text_of_a_rule_is_in_a_template(pattern: str) -> None:
    missing = _missing(pattern, CATALOGUES)
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "pattern", ["compare/causes/*.py", "compare/measured.py", "compare/changes.py", "compare/stages.py"]
)
def test_every_text_of_a_cause_is_in_a_template(pattern: str) -> None:
    missing = _missing(pattern, (*CATALOGUE, *TITLES, *CATALOGUES))
    assert not missing, "\n".join(missing)


def test_every_cause_has_a_name_in_chinese() -> None:
    for name in CAUSES:
        assert CHINESE.search(cause_name(name, "zh")), name
        assert cause_name(name, "zh").endswith(f"（{name}）")
        assert cause_name(name, "en") == name


SAID_OF_CAUSES = {  # with the sizes of the English, in its order
    "turns q and k with base 500000 instead of base 10000": "旋转 q 和 k 时用基数 500000，而不是基数 10000",
    "leaves the scale out (1 in place of 0.125)": "漏掉了缩放因子（A：0.125，B：1）",
    "multiplies by factors of each head and row (0.1 to 0.2 by head and row in place of 1)": (
        "多乘了按头、行变化的因子（A：1，B：按头、行变化的 0.1 到 0.2）"
    ),
    "takes the last 1 to 3 keys for padding, not the first 1 to 3": "把最后 1 到 3 个键当作填充，而不是最前 1 到 3 个",
    "has another weight for q, k and v, h.0.qkv.weight: 8 of 24 rows differ, by 0.5 of its size in all": (
        "q、k 和 v 的权重 h.0.qkv.weight 不同：24 行中有 8 行不同，总体相差其大小的 0.5 倍"
    ),
    "has another weight for q and k, h.0.qk.weight: 2 times A's": "q 和 k 的权重 h.0.qk.weight 不同：为 A 的 2 倍",
    "turns channels 0 to 15 of 64 of q instead of all 64 channels": (
        "旋转 q 的通道 0 到 15（共 64 个），而不是全部 64 个通道"
    ),
    "counts the positions of q and k from 0, then from 0 at row 4 instead of from 1: off by -1": (
        "q 和 k 的位置从 0 起，第 4 行又从 0 起，而不是从 1 起：相差 -1"
    ),
    "gives the query heads the heads 0 1 0 1 of k and v instead of 0 0 1 1": (
        "让各查询头依次读取 k 和 v 的头 0 1 0 1，而不是 0 0 1 1"
    ),
    "is called otherwise": "is called otherwise",
}


@pytest.mark.parametrize("text", SAID_OF_CAUSES)
def test_a_cause_says_in_chinese_what_it_says_in_english(text: str) -> None:
    assert caused(text, "zh") == SAID_OF_CAUSES[text]


@pytest.mark.parametrize("b", ["demo:unscaled", pytest.param("demo:twice", marks=pytest.mark.full)])
def test_a_comparison_in_chinese_has_the_sizes_and_no_english_words(b: str) -> None:
    report = sqrtdk.diff("demo", b, seq_len=16)
    (cause,) = (cause for cause in report.pairs[0].causes if cause.name == "scale")
    chinese = diff_text(report, width=200, language="zh")
    sizes = re.search(r"\((\S+) in place of (\S+)\)", " ".join(report.paragraphs))
    assert sizes is not None
    assert f"（A：{sizes[2]}，B：{sizes[1]}）" in chinese
    assert f"缩放因子（scale）{cause.a:.4g} -> {cause.b:.4g}" in chinese
    words = ("attention,", "rounding", "in place of", "differ", "has other", "leaves out", "allows", " none")
    assert [word for word in words if word in chinese] == ["differ"]  # fail-on: different


SOURCES = ("monitor/**/*.py",)


def thresholds() -> Iterator[str]:
    """Where every threshold comes from: the constants of that name."""
    for path in sorted(path for pattern in SOURCES for path in SOURCE.glob(pattern)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(name, ast.Name) and name.id.endswith("SOURCE") and isinstance(node.value, ast.Constant):
                yield str(node.value.value)


def test_the_source_of_every_threshold_is_said_in_chinese() -> None:
    assert [source for source in thresholds() if said(source, "zh") == source] == []


def test_every_family_and_field_that_declares_a_scale_is_said_in_chinese() -> None:
    families = [by_family(name, rule) for name, rule in FAMILIES.items()]
    fields = [by_config(path, "2", source) for path, _, source in BASE_FIELDS]
    switches = [by_config(path, "False", source) for path, _, _, source in BASE_SWITCHES]
    for text in (*families, *fields, *switches):
        chinese = said(text, "zh")
        assert chinese != text, text
        assert not re.search(
            r"\b(the|of|a|with|is|are|scale|gain|learned|no)\b(?! =)", chinese.replace("scale=", "")
        ), chinese
    first = by_config("attention_multiplier", "2", "sources.field.granite")
    second = Message("sources.declared.mscale", field="rope_scaling", mscale="2", square="1.3")
    both = Message("sources.declared.and", first=first, second=second)
    assert both == "config.attention_multiplier = 2 (Granite: the scale itself) and config.rope_scaling: mscale 2: x1.3"
    assert said(both, "zh") == (
        "config.attention_multiplier = 2（Granite：就是缩放因子本身），以及 config.rope_scaling：mscale 2：x1.3"
    )


ONE_FORM = (
    "fix", "found", "source", "site", "verdict", "health", "seed", "saturated", "max logit", "peak", "formula",
    "declared by", "no reason given", "model run", "ok", "exact", "declared", "unexplained", "unmeasured",
)  # fmt: skip


def test_the_terminal_and_the_page_have_one_chinese_word_for_one_thing() -> None:
    tables = (topic("words"), topic("terminal"), topic("pages"), diff_words.TERMINAL)
    for english in ONE_FORM:
        forms = {
            re.sub(r"\{\w+\}|[：。 ]", "", text.zh)
            for table in tables
            for text in table.values()
            if "{count}" not in text.en and re.sub(r"\{\w+\}|[:.]", "", text.en).strip().lower() == english
        }
        assert len(forms) == 1 or (english == "unmeasured" and forms == {"未测量"}), (english, forms)
    assert topic("terminal")["mode.static"].zh == topic("pages")["mode.static"].zh


HALF_WIDTH = re.compile(r"[\u4e00-\u9fff] ?[,;:!?(]|[,;:!?] ?[\u4e00-\u9fff]")


SEPARATED = re.compile(r".*[\w)%][,;] .*")
NO_MEASURE_WORD = re.compile(r"\d (?:相符|已声明|无法解释|未测量|提示|警告|失败|严重)")


WORDS = ("attention calls", "Exit code", "fail-on:", "finding", "found ", "expected ", "fix:", "leads to", "Figures of")


@pytest.mark.parametrize("model", ["demo", "demo:unscaled", "demo:twice", "demo:inverted"])
def test_a_check_is_all_in_chinese_with_chinese_punctuation(model: str) -> None:
    report = sqrtdk.check(model, seq_len=32)
    assert report.findings or model == "demo"
    for finding in report.findings:
        assert all(said(text, "zh") != text for text in (finding.message, finding.fix)), finding
    placed = tuple(dataclasses.replace(finding, at="a.py:3, b.py:14") for finding in report.findings)
    report = dataclasses.replace(report, findings=placed)
    for text in (*(to_text(report, width=width, language="zh") for width in (60, 400)), to_markdown(report, "zh")):
        assert [word for word in WORDS if word in text] == []
        assert HALF_WIDTH.findall(text) == []
        assert SEPARATED.findall(html.unescape(text)) == []
        assert NO_MEASURE_WORD.findall(text) == []
        assert ("a.py:3、b.py:14" in text) is bool(placed)
        assert f"退出码{report.exit_code}（fail-on：fail）。" in "".join(text.split())
    assert summary_line(report, "zh").endswith(to_text(report, width=400, language="zh").splitlines()[-1])


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_in_chinese_has_chinese_punctuation(name: str) -> None:
    claim = CLAIMS[name]
    text = re.sub(r"\[(\S+), (\S+)\]", r"\1 \2", claim_text(claim, "zh", width=2000))  # an interval
    for place in {str(place) for part in claim.parts for expect in part.expects for place in expect.at.values()}:
        text = text.replace(place, place.replace(",", ""))
    lines = [line for number, line in enumerate(text.splitlines()) if not number or line.startswith("判据")]
    assert len(lines) == 1 + len(claim.parts)
    assert [line for line in lines if SEPARATED.search(line) or " at " in line] == []


TOLD = ("tell", "working", "counting")


def told() -> Iterator[str]:
    """What is told while something runs and where it was written: the texts given to these functions."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func if isinstance(node, ast.Call) else None
            if isinstance(name, ast.Name) and name.id in TOLD and node.args:
                text = node.args[0]
                if isinstance(text, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in text.values)
                elif isinstance(text, ast.Constant):
                    yield str(text.value)


def test_what_is_told_on_stderr_is_in_a_template() -> None:
    every = set(told())
    assert {"loading", "running {}", "Trace file: {}", "Checking {}", "{} report: {}"} <= every
    assert [text for text in every if not _has_template(text, CATALOGUES)] == []


def test_a_baseline_in_chinese_says_the_same() -> None:
    kept = ledger(sqrtdk.check("demo", seq_len=16))
    comparison = compare(kept, sqrtdk.check("demo:unscaled", seq_len=16), "baseline.json")
    assert comparison.exit_code == 1
    chinese = baseline.to_text(comparison, width=200, language="zh")
    assert "- 判定：相符" in chinese
    assert "+ 判定：无法解释：missing" in chinese
    assert "3 处相符" in baseline.ledger_line(kept, "zh")
    for text in (chinese, baseline.to_markdown(comparison, "zh")):
        assert SEPARATED.findall(html.unescape(text)) == []
        assert baseline.summary_line(comparison, "zh").partition("。")[0] in text
        for word in (" changed", " against ", "fails", "Exit code", "attentions", "review", "new finding:", "before"):
            assert word not in text, word
    numbers = [re.findall(r"\d+", baseline.summary_line(comparison, language)) for language in ("en", "zh")]
    assert numbers[0] == numbers[1]
    assert "会因此失败" in baseline.ledger_line(kept, "zh")


def test_what_stands_in_a_sentence_is_put_over_too() -> None:
    lost = Message("rules.unmeasured.scale", reason=Message("rules.verdict.not_read"))
    seen = Message("rules.joined.seen", text=lost, formula="softmax(q)")
    message = Message("rules.joined.call", text=seen, number=2, total=3)
    assert message == (
        "the scale could not be judged: the scale could not be read; seen up to there: softmax(q) (call 2 of 3 here)"
    )
    assert (
        said(message, "zh")
        == "无法判定缩放因子：无法读出缩放因子；到此为止看到的公式：softmax(q)（此处共 3 次调用，这是第 2 次）"
    )
    assert said(message, "en") == message


def test_two_sentences_stay_two() -> None:
    mistake = Message("rules.mistakes.named", mistake="twice", happened=MISTAKES["twice"].happened)
    message = joined([mistake, Message("rules.alike.factors", number=2, dims=64)])
    assert message == "twice, it is 1/head_dim, 1/sqrt(head_dim) applied twice; 2 factors of 64^-1/2 along the lineage"
    assert said(message, "zh") == (
        "twice，实际为 1/head_dim，即 1/sqrt(head_dim) 用了两次；计算路径上有 2 个 64^-1/2 因子"
    )


@pytest.mark.parametrize("text", ["", "h.0.attn", "a; b", "scale 3", "x" * 5000, "{name}", "one, or other"])
def test_what_is_no_sentence_of_ours_is_kept(text: str) -> None:
    assert said(text, "zh") == text


def test_a_strangers_long_text_takes_no_time() -> None:
    for text in ("head has rows of at step; in and, " * 120, "{" * 4000, ": " * 2000):
        said(text, "zh")


@pytest.mark.parametrize("text", ["a; " * 600, "a: " * 600, "a (" * 300 + ")" * 300, "x and config." * 150])
def test_a_strangers_nested_text_is_kept(text: str) -> None:
    assert said(text, "zh") == text


def test_a_list_of_our_sentences_is_said_to_its_end() -> None:
    assert "; " not in said("; ".join(["no reason given"] * 20), "zh")


def test_both_languages_have_the_same_places() -> None:
    for template in (*templates(), *templates(TITLES), *templates(CATALOGUE)):
        assert placeholders(template.english) == placeholders(template.chinese), template.english
        assert re.search(r"[\u3000-\u9fff\uff00-\uffef]|logit|nat", template.chinese), template.english
    for catalogue in (CATALOGUES, TITLES, CATALOGUE):
        every = [template.english for template in templates(catalogue)]
        assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    "note", ["q of 'h.0#0' holds 3 NaN and 0 infinite of 96 numbers", "2 more tensors hold NaN or infinity"]
)
def test_what_is_odd_in_a_trace_file_is_said_in_chinese(note: str) -> None:
    chinese = said(f"A: {note}", "zh")
    assert CHINESE.search(chinese)
    assert sorted(re.findall(r"\d+", chinese)) == sorted(re.findall(r"\d+", note))
