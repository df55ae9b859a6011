import dataclasses
import html
import re
import sys
import time
from pathlib import Path

import pytest

from lab_tests.report.sample_lab import hostile, records, undecided, unsound
from sqrtdk.errors import MissingExtraError
from sqrtdk.messages import Message, Text, word
from sqrtdk.report.plain import plain
from sqrtdk_lab.claim import EXPLANATION_IDS
from sqrtdk_lab.figures import Figure
from sqrtdk_lab.judge import Check
from sqrtdk_lab.record import Record
from sqrtdk_lab.report import markup
from sqrtdk_lab.report.page import bar_as_formula, both_with_indices, format_measured, strip, to_html
from sqrtdk_lab.report.plots import plot_files, write_plots
from tests.report.html_page import HtmlPage
from tests.report.sample_report import EVIL

WITHOUT_INTERVAL = {"exact": "exact精确", "observed": "extreme of the draws抽样中的极值"}


@pytest.fixture(scope="module")
def text() -> str:
    return to_html([*records(), unsound(records()[0]), undecided(records()[1])])


@pytest.fixture(scope="module")
def page(text: str) -> HtmlPage:
    return HtmlPage(text)


def _seen(found: str) -> str:
    """As one line, without what only the setting of letters changes."""
    return re.sub(r"\s+", " ", found).strip()


def _letters(text: Text | str, language: str = "en") -> str:
    shown = both_with_indices(text if isinstance(text, Text) else Text(text, text))
    inner = re.search(rf'<span class="{language}"[^>]*>(.*)</span>', shown.replace("</span><span", "</span>\n<span"))
    return html.unescape(re.sub(r"<[^>]*>", "", inner[1] if inner else shown))


@pytest.mark.full
def test_every_figure_stands_in_its_table_and_every_check_with_its_bar(page: HtmlPage) -> None:
    rows = {tuple(map(_seen, row)) for row in page.rows}
    results = {True: "✓ met成立", False: "✗ missed不成立", None: "? undecided未定"}
    for outcome in (outcome for record in records() for outcome in (record.outcome, record.control)):
        assert outcome.figures
        for figure in outcome.figures:
            place = _letters(", ".join(f"{key} = {value}" for key, value in figure.at.items()))
            values = (format_measured(figure.value), format_measured(figure.low), format_measured(figure.high))
            method = WITHOUT_INTERVAL.get(figure.method, figure.method)
            assert (figure.name, place, *values, method, str(figure.samples)) in rows
        for part in outcome.verdict.findings:
            assert any(_letters(part.text) in row[0] for row in rows if row)
            for check in part.checks:
                figure = check.figure
                interval = f"[{format_measured(figure.low)}, {format_measured(figure.high)}]"
                cells = (
                    format_measured(figure.value),
                    WITHOUT_INTERVAL.get(figure.method, interval),
                    bar_as_formula(check),
                    "",
                )
                assert any(row[0] == figure.name and row[2:] == (*cells, results[check.met]) for row in rows)


@pytest.mark.full
def test_every_text_stands_in_both_languages(page: HtmlPage) -> None:
    seen = _seen("".join(page.texts))
    for record in records():
        for words in (record.statement, record.method, record.control_method, record.why):
            for language in ("en", "zh"):
                assert _seen(_letters(words, language)) in seen
        for plot in record.plots:
            assert _seen(_letters(plot.caption, "zh")) in seen
        assert record.command in seen


def test_the_register_says_what_the_explanations_are_called(text: str) -> None:
    (key,) = re.findall(r'<ul class="lead" aria-labelledby="sources">(.*?)</ul>', text)
    names = [Message(f"lab.explanation.{source}.name") for source in EXPLANATION_IDS]
    assert re.findall(r'<span class="en"[^>]*>S\d ([^<]*)</span>', key) == names
    assert re.findall(r'<span class="zh"[^>]*>S\d ([^<]*)</span>', key) == [name.said("zh") for name in names]


def test_formulas_are_mathematics(page: HtmlPage) -> None:
    assert page.tags.count("math") == len(records()) + 2


def test_ids_differ_and_references_lead_somewhere(text: str, page: HtmlPage) -> None:
    ids = [value for _, attributes in page.elements if (value := attributes.get("id"))]
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r'(?:href="#|url\(#|aria-labelledby=")([^")]+)', text))
    assert len(asked) > 100
    assert asked <= set(ids)


def test_drawings_keep_the_pages_colours(text: str) -> None:
    drawn = "".join(re.findall(r'<svg role="img".*?</svg>', text))
    assert len(re.findall(r'<svg role="img"', text)) == sum(len(r.plots) for r in records()) + 1
    colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', drawn))
    assert {"currentColor", "var(--c0)", "none"} <= colours
    assert all(colour in ("currentColor", "none") or colour.startswith("var(--") for colour in colours)


@pytest.mark.parametrize("answer", ["partly", "depends"])
def test_a_mixed_verdict_shows_what_holds_and_what_does_not(answer: str) -> None:
    (record,) = [record for record in records() if record.outcome.verdict.answer == answer]
    listed = re.findall(r'<div class="parts-(\w+)">.*?<ul>(.*?)</ul>', to_html([record]), flags=re.DOTALL)
    for kind, met in (("good", True), ("bad", False)):
        (found,) = [items for name, items in listed if name == kind]
        for part in record.outcome.verdict.findings:
            assert (str(both_with_indices(part.text)) in found) == (part.met is met)
    assert "parts-good" not in to_html(records()[:1]).split("<main>")[1]


def test_what_depends_names_its_condition_in_both_languages() -> None:
    for record in records():
        said = re.findall(r'<p class="condition">(.*?)</p>', to_html([record]))
        if record.outcome.verdict.answer == "depends":
            assert record.condition is not None
            assert said == [str(both_with_indices(record.condition))]
        else:
            assert record.condition is None
            assert said == []


def test_an_unsound_control_is_flagged(text: str) -> None:
    first = records()[0]
    undecided_control = undecided(dataclasses.replace(first, outcome=first.control)).outcome
    other = to_html([dataclasses.replace(first, control=undecided_control)])
    means = {
        name: html.escape(word(f"lab.control_{name}", "en")).replace("&#x27;", "&#39;")
        for name in ("same", "undecided")
    }
    assert [text.count(means[name]) for name in means] == [1, 0]
    assert [other.count(means[name]) for name in means] == [0, 1]
    assert "var-linear-unsound" in text.split("<main>")[0]
    alone = to_html(records()[:2])
    assert not any(words in alone for words in means.values())
    assert word("lab.unsound", "en") not in alone
    assert 'class="badge warning"' not in alone


def test_settings_that_differ_are_named() -> None:
    first, second = records()[:2]
    assert 'id="mixed"' not in to_html([first, second])
    others = {
        "Seed种子": dataclasses.replace(second, seed=7),
        "quick": dataclasses.replace(second, quick=False),
        "torch": dataclasses.replace(second, environment={**second.environment, "torch": "9.9"}),
    }
    for name, other in others.items():
        found = re.search(r'id="mixed">(.*?)</section>', to_html([first, other]), flags=re.DOTALL)
        assert found, name
    assert "9.9 (1)" in found[1]  # type: ignore[index]
    assert "Seed" not in found[1]  # type: ignore[index]


def test_the_level_is_that_of_the_records() -> None:
    first, second = (dataclasses.replace(record, level=0.875) for record in records()[:2])
    text = to_html([first, second])
    assert "87.5%" in text
    assert "99%" not in text
    mixed = to_html([first, records()[1]])
    assert "87.5%, 99%" in mixed
    assert "87.5% (1), 99% (1)" in mixed.split('id="mixed">')[1]
    assert "Confidence level" in mixed.split('id="mixed">')[1].split("</section>")[0]


def test_claims_without_a_record_are_listed_as_not_run() -> None:
    assert 'id="missing"' not in to_html(records()[:1])
    notice = to_html(records()[:1], ["a-claim", "<b>"]).split('id="missing">')[1].split("</section>")[0]
    assert "Not run: 2 of the 3 claims" in notice
    assert "未运行：3 条说法中的 2 条" in notice
    assert "<code>a-claim</code> <code>&lt;b&gt;</code>" in notice


def test_what_has_just_run_comes_first_and_what_did_not_run_last() -> None:
    """As `sqrtdk lab run` makes the page of a directory that holds earlier records too."""
    shown = records()
    ran = [shown[3].id, shown[0].id]
    text = to_html(shown, ["a-claim"], ran=ran)
    listed = re.findall(r'<tr data-claim="([^"]+)"', text)
    assert listed[:2] == ran
    assert sorted(listed) == sorted(record.id for record in shown)
    assert text.index("measured earlier") > text.index(f'data-claim="{ran[1]}"')
    assert text.index('id="claims"') < text.index('id="missing"') < text.index('id="run"')
    assert "measured earlier" not in to_html(shown)


def test_what_is_undecided_is_listed(text: str) -> None:
    listed = re.findall(r'<div class="parts-(\w+)">.*?<ul>(.*?)</ul>', text.split("onehot-64-undecided.title")[2])
    assert str(both_with_indices(records()[1].outcome.verdict.findings[0].text)) in dict(listed)["open"]


def test_an_observed_extreme_has_no_interval() -> None:
    first = records()[0]
    figure = dataclasses.replace(first.outcome.figures[0], method="observed", value=3.0, low=3.0, high=3.0)
    outcome = dataclasses.replace(first.outcome, figures=(figure, *first.outcome.figures[1:]))
    rows = HtmlPage(to_html([dataclasses.replace(first, outcome=outcome)])).rows
    assert any(row[:1] == [figure.name] and WITHOUT_INTERVAL["observed"] in map(_seen, row) for row in rows)


def test_hostile_texts_are_texts() -> None:
    text = to_html([records()[0], hostile()])
    page = HtmlPage(text)
    assert page.tags.count("script") == 1
    assert "<script>document" not in text
    assert "javascript:" not in text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\u2029\x00-\x08\x0b-\x1f\x7f]", text)
    assert sum(plain(EVIL) in part for part in page.texts) > 20
    assert not any(key.startswith("on") or key == "style" for _, given in page.elements for key in given)


ATTACKS = (
    r"\text{<img src=x onerror=alert(1)>}",
    r"\text{&lt;script&gt;alert(1)&lt;/script&gt;}",
    r"\style{background:url(x)}{y}",
    r"\class{a}{b}",
    r"\href{javascript:alert(1)}{x}",
    r"\href{page}{x}",
    r'\color{red" onclick="alert(1)}{x}',
    r"</math><script>alert(1)</script>",
    r"x\mspace{1em\" onload=\"a}",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_formula_brings_nothing_along(attack: str) -> None:
    drawn = str(markup.math(attack))
    assert not re.search(r"<\w+ [^>]*(class|href|style|onclick|onload)=", drawn)
    page = HtmlPage(to_html([dataclasses.replace(records()[1], formula=attack)]))
    assert page.tags.count("script") == 1
    assert not set(page.tags) & {"img", "image"}
    for tag, attributes in page.elements:
        assert not any(key.startswith("on") or key == "style" for key in attributes)
        assert tag != "math" or set(attributes) == {"display"}
    assert not any("javascript" in (value or "") for _, given in page.elements for value in given.values())


@pytest.mark.parametrize("formula", [r"\frac{", r"\nonsense{x}", "{" * 3000, r"\begin{align}"])
def test_a_formula_that_cannot_be_converted_is_code(formula: str) -> None:
    assert markup.math(formula) is None
    text = to_html([dataclasses.replace(records()[1], formula=formula)])
    assert f'<div class="formula"><code>{formula}</code></div>' in html.unescape(text)


def test_names_stay_upright_and_whole() -> None:
    assert "<mtext>Var</mtext>" in (markup.math(r"\mathrm{Var}[q]") or "")
    assert "<mtext>E</mtext>" in (markup.math(r"\mathrm{E}[q]") or "")


def test_letters_with_an_index() -> None:
    assert both_with_indices(Text("q . k over sqrt(d_k), e^-10, sqrt(2 d_k)", "q_i")) == (
        '<span class="en" lang="en">q\u00a0·\u00a0k over √d<sub>k</sub>, e<sup>-10</sup>, √(2 d<sub>k</sub>)</span>'
        '<span class="zh" lang="zh-CN">q<sub>i</sub></span>'
    )
    assert both_with_indices(Text("d_k^-0.88, of sigma^2, d^(-1/4).", "d_k^-0.88, of sigma^2, d^(-1/4).")) == (
        "d<sub>k</sub><sup>-0.88</sup>, of sigma<sup>2</sup>, d<sup>-1/4</sup>."
    )
    assert (
        both_with_indices(Text("variance_over_d_k <x_y>", "variance_over_d_k <x_y>"))
        == "variance_over_d_k &lt;x<sub>y</sub>&gt;"
    )


def test_the_strip_places_the_interval_on_the_bar() -> None:
    def parts(low: float, high: float, bar_low: float, bar_high: float) -> list[float]:
        drawn = strip(Check(Figure("a", (low + high) / 2, low, high, "t", 9), bar_low, bar_high, None))
        return [float(value) for value in re.findall(r'(?:[^r]x1?|width|x2)="([\d.-]+)"', drawn)]

    start, width, left, right, *_ = parts(2.0, 3.0, 1.0, 4.0)
    assert start < left < right < start + width
    start, width, left, *_ = parts(5.0, 6.0, 1.0, 4.0)
    assert start + width < left
    start, width, left, right, *_ = parts(2.0, 3.0, 1.0, float("inf"))
    assert start + width == pytest.approx(120)
    assert strip(Check(Figure("a", float("nan"), 1, 2, "t", 9), 0, 1, None)) == ""
    assert strip(Check(Figure("a", 0.0, -1e308, 1e308, "t", 9), 0, 1, None)) == ""
    assert "nan" not in strip(Check(Figure("a", 0.0, -1e307, 1e307, "t", 9), 0, 1, None))


def test_equal_ids_get_anchors_of_their_own() -> None:
    record = records()[1]
    page = HtmlPage(to_html([record, dataclasses.replace(record, seed=1), dataclasses.replace(record, id="register")]))
    anchors = [given["id"] for tag, given in page.elements if tag == "article"]
    assert len(set(anchors)) == 3
    assert anchors[0] == "onehot-64"


def test_a_record_of_no_known_group_or_answer_is_shown() -> None:
    verdict = dataclasses.replace(records()[1].outcome.verdict, answer="perhaps")
    record = dataclasses.replace(
        records()[1], group="news", outcome=dataclasses.replace(records()[1].outcome, verdict=verdict)
    )
    assert {"perhaps", "news"} <= set(HtmlPage(to_html([record])).texts)


@pytest.mark.parametrize("library", ["latex2mathml.converter", "matplotlib.figure"])
def test_without_its_libraries(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=library.split(".")[0]) as caught:
        to_html(records()[:1])
    assert "pip install 'sqrtdk[lab]'" in caught.value.hint


@pytest.mark.slow
def test_the_whole_register_fits() -> None:
    two = records()[3].plots
    many: list[Record] = [
        dataclasses.replace(records()[index % 6], id=f"claim-{index}", plots=two) for index in range(43)
    ]
    begin = time.process_time()
    assert len(to_html(many).encode()) < 8_000_000
    assert time.process_time() - begin < 60


SCRIPT = '<svg viewBox="0 0 1 1"><script>1</script></svg>'


@pytest.mark.parametrize("content", [None, "", "<svg/>", "no drawing", "\x00", SCRIPT])
def test_plots_come_from_their_files_or_are_drawn_anew(tmp_path: Path, content: str | None) -> None:
    record = next(one for one in records() if one.plots)
    anew = to_html([record])
    write_plots(record, tmp_path)
    assert to_html([record], drawn_in=tmp_path) == anew
    svg, _ = plot_files(record, record.plots[0], tmp_path)
    if content is None:
        svg.unlink()
    else:
        svg.write_text(content)
    page = to_html([record], drawn_in=tmp_path)
    assert "<script>1" not in page
    assert (page == anew) == (content != SCRIPT)  # of which an empty drawing is left
