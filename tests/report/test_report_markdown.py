import dataclasses
import html
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sqrtdk.audit.records import Finding
from sqrtdk.report.check.markdown import MOST_CHARACTERS, markdown_code, markdown_table, markdown_text, to_markdown
from sqrtdk.report.plain import plain
from tests.report.sample_report import EVIL, healthy, hostile, judged, lawless, leaking, sick, static, unjudged

REPORTS = (healthy, static, sick, hostile, lawless, leaking, unjudged)
OURS = {"h3", "p", "code", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "strong", "details", "summary"}
RENDER = MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough")


class Tags(HTMLParser):
    """The tags of a page, how deep `details` are, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)
        assert not attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def rendered(markdown: str) -> Tags:
    tags = Tags()
    tags.feed(RENDER.render(markdown))
    tags.close()
    assert tags.open == []
    return tags


@pytest.mark.parametrize("make", REPORTS)
def test_comments_are_of_our_own_tags(make) -> None:  # type: ignore[no-untyped-def]
    report = make()
    markdown = to_markdown(report)
    tags = rendered(markdown)
    assert tags.tags <= OURS
    assert f"Exit code {report.exit_code}" in tags.words.split("\n\n")[0] + tags.words
    assert len(markdown) <= MOST_CHARACTERS
    heading = markdown.split("\n")[0]
    assert ("failed" in heading) == bool(report.exit_code)


def test_the_verdict_comes_first_then_the_worst_then_the_fix() -> None:
    markdown = to_markdown(sick())
    order = ["failed", "Exit code 1", "unexplained: missing", "| exact", "**critical**", "**Fix:**", "<details>"]
    places = [markdown.index(words) for words in order]
    assert places == sorted(places)


def test_a_leak_under_a_right_scale_is_not_green() -> None:
    assert "| exact | critical |" in to_markdown(leaking())


def test_what_was_not_judged_is_in_the_heading_and_in_the_table() -> None:
    markdown = to_markdown(unjudged())
    assert "not all of it could be judged" in markdown.split("\n")[0]
    assert "| **unmeasured** | not measured |" in markdown


@settings(max_examples=50)
@given(st.text(max_size=60))
def test_a_strangers_text_is_shown_as_it_is(words: str) -> None:
    words = words.strip()
    code = markdown_code(words)
    tags = rendered(f"{code} and {markdown_text(words)}.\n\n{markdown_table(['a', 'b'], [[code, 'cell']])}")
    assert tags.tags <= OURS
    shown = re.sub("\u200b", "", tags.words)
    flat = re.sub(r"\s+", " ", f"{plain(words)} and {plain(words)}.")
    assert re.sub(r"\s+", " ", shown).startswith(flat)
    assert "cell" in shown


@pytest.mark.parametrize(
    "words",
    ["https://evil.example", "www.evil.example", "ftp://x.y", "[a](b)", "![a](b)", "<img src=x>", "a|b", "`a", "$x$",
     ":smile:", "~~a~~", "**a**", "_a_", "__a__", "___", "a\\", "<!-- x", "&lt;b&gt;", "[^1]", EVIL],
)  # fmt: skip
def test_nothing_that_markdown_obeys_is_left(words: str) -> None:
    for left in re.findall(r"https?://|www\.|[\[\]<>`|*~$\\]|:\w+:", markdown_text(words), re.IGNORECASE):
        raise AssertionError(left)
    assert html.unescape(markdown_text(words)).replace("\u200b", "") == plain(words)


@pytest.mark.parametrize("words", ["@someone", "a@b.c", "#12", "org/repo#12", "GH-12", "gh-1"])
def test_nobody_is_called_and_no_thread_is_linked(words: str) -> None:
    assert not re.search(r"@\w|#\w|\bGH-\d", html.unescape(markdown_text(words)), re.IGNORECASE)


def test_a_large_report_is_cut_and_says_so() -> None:
    calls = tuple(
        judged(f"h.{i}.{'|' * 300}{i % 7}{'x' * (i % 50)}", formula=f"softmax({'*' * 300}{i})") for i in range(500)
    )
    findings = tuple(
        Finding(
            f"rule{i}", "fail", call.call.site, 1.0, 1.0, f"{'<' * 500}{chr(97 + i % 26) * (i // 26)}", "[" * 500, "s"
        )
        for i, call in enumerate(calls)
    )
    report = dataclasses.replace(healthy(1), calls=calls, findings=findings)
    markdown = to_markdown(report)
    assert len(markdown) <= MOST_CHARACTERS
    assert "500 findings" in markdown
    assert rendered(markdown).tags <= OURS
