"""What a notebook shows of a record: a table without a script, in which a stranger's names are text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk import AuxRequest
from sqrtdk.report.notebook import MOST_NOTEBOOK_ROWS
from sqrtdk.report.plain import plain
from sqrtdk.stats import AuxOutput
from tests.report import sample_diff, sample_report
from tests.report.sample_report import EVIL

NOTEBOOK = """
import torch, sqrtdk
from sqrtdk import _progress
_progress.AFTER_S = 1e6
---
sqrtdk.check("demo:unscaled", seq_len=16)
---
_.calls[0]
---
_.call
---
sqrtdk.diff("demo", "demo:unscaled", seq_len=16)
---
q = torch.randn(1, 2, 8, 4)
output, aux = sqrtdk.attention(q, q, q, return_aux=sqrtdk.AuxRequest(entropy_nats=True, peak=True))
aux
---
_progress.AFTER_S = _progress.EVERY_S = 0.0
sent = []
get_ipython().display_pub.register_hook(lambda message: sent.append(message["content"]["data"]) or message)
report = sqrtdk.check("demo", seq_len=16)
[any("check: applying the rules" in data.get("text/html", "") for data in sent), sent[-1]["text/html"]]
"""
SHOWN = ("CheckReport(", "JudgedCall(", "AttentionCall(", "DiffReport(", "AuxOutput(")


class Elements(HTMLParser):
    """Names of the elements, their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "wbr":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += f"{data} "


def aux() -> AuxOutput:
    query = torch.randn(1, 2, 4, 8)
    mask = torch.arange(4).view(4, 1) > 0  # the first row sees no key
    return sqrtdk.attention(query, query, query, mask, return_aux=AuxRequest.all())[1]


def records() -> list[Any]:
    checks = [make() for make in (sample_report.sick, sample_report.static, sample_report.hostile)]
    differences = [make() for make in (sample_diff.two_causes, sample_diff.unpaired, sample_diff.hostile)]
    calls = [judged for report in checks for judged in report.calls]
    return [*checks, *calls, *(judged.call for judged in calls), *differences, aux(), AuxOutput()]


def check_table(record: Any) -> None:
    """What every table is, those of claims included."""
    shown = Elements(record._repr_html_())
    assert shown.open == []
    assert "table" in shown.names
    assert shown.names <= {
        "b", "code", "div", "li", "p", "small", "span", "style", "sub", "sup", "table", "tbody", "td", "th",
        "thead", "tr", "ul", "wbr",
    }  # fmt: skip
    assert shown.attributes <= {"class", "scope", "colspan", "title", "aria-hidden"}
    assert not re.search(r"url\(|@import|https?:", record._repr_html_())


def test_each_record_is_a_table_that_is_all_there() -> None:
    for record in records():
        check_table(record)


def test_names_of_a_stranger_are_text() -> None:
    for record in (sample_report.hostile(), sample_diff.hostile()):
        html = record._repr_html_()
        assert "<script" not in html
        assert not set(html) & {"\x1b", "\u202e", "\u2028"}
        assert plain(EVIL) in Elements(html).text


def test_a_check_shows_what_its_page_shows() -> None:
    report = sample_report.sick()
    text = " ".join(Elements(report._repr_html_()).text.split())
    for word in ("org/sick-125m", "Failed", "10 attention calls, 12 findings", "decoder.h.3-6.attn", "missing", "inf"):
        assert word in text
    assert "The scale is 8 times too large in 4 of 10 attentions: no 1/sqrt(head_dim) was applied; " in text
    assert re.search(r"the ratio is sqrt\(64\) = 8.* which leads to critical decoder.h.3-6.attn head 3 ", text)
    assert "2 not judged" in Elements(sample_report.unjudged()._repr_html_()).text
    nothing = sample_report._report("nothing", "Net", 1, ())
    assert "No attention call was seen." in Elements(nothing._repr_html_()).text


def test_a_call_shows_its_steps_and_no_verdict_of_nobody() -> None:
    judged = sample_report.sick().calls[0]
    assert "exact" in Elements(judged._repr_html_()).text
    text = Elements(judged.call._repr_html_()).text
    assert "exact" not in text
    assert "verdict" not in text
    assert "projection" in text


def test_a_long_table_ends() -> None:
    calls = tuple(sample_report.judged(f"layer_{chr(97 + i)}.attn" + "x" * i) for i in range(MOST_NOTEBOOK_ROWS + 3))
    text = Elements(sample_report._report("long", "Net", 1, calls)._repr_html_()).text
    assert "and 3 more lines" in text


def test_what_is_no_number_is_counted() -> None:
    text = " ".join(Elements(aux()._repr_html_()).text.split())
    assert "lse logits 1 x 2 x 4" in text
    assert re.search(r"lse logits 1 x 2 x 4 \S+ \S+ \S+ 2 ", text)  # the blind row of two heads, minus infinity
    assert re.search(r"keys keys 1 x 2 x 4 0 3 4 0 ?$", text)
    none = AuxOutput(entropy_nats=torch.empty(2, 3, device="meta"))
    assert "entropy_nats nats 2 x 3 - - - -" in " ".join(Elements(none._repr_html_()).text.split())


def test_badges_can_be_read_on_any_ground() -> None:
    css = files("sqrtdk.report").joinpath("templates/notebook/notebook.css").read_text()
    pairs = re.findall(r"color: #(\w{6}); background: #(\w{6})", css)
    assert len(pairs) == 6
    for text, ground in pairs:
        light, dark = sorted((_luminance(text), _luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.full
def test_a_notebook_shows_them() -> None:
    """A kernel runs the cells; what has taken long has shown a bar, of which nothing stays."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in NOTEBOOK.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell, start in zip(notebook.cells[1:], SHOWN, strict=False):
        (output,) = cell.outputs
        assert output["data"]["text/plain"].startswith(start)
        assert len(output["data"]["text/plain"]) < 300
        assert '<div class="sqrtdk">' in output["data"]["text/html"]
    *bars, last = notebook.cells[-1].outputs
    assert last["data"]["text/plain"] == "[True, '']"
    assert [bar["data"].get("text/html") for bar in bars] == [""]


ENGLISH = (
    "attention call",
    "finding",
    "Fix",
    "leads to",
    "scale ratio",
    "saturated",
    "unexplained",
    "effective",
    "quer",
)
ENGLISH += ("against", "explained", "residue", "differs", "follows from", "outputs agree", "not judged", "more lines")


@pytest.mark.full
def test_in_chinese_nothing_english_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sqrtdk.check("demo:unscaled", seq_len=16)
    records = (report, report.calls[0], sqrtdk.diff("demo", "demo:unscaled", seq_len=16), sample_diff.unpaired())
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    for record in records:
        text = re.sub(r"(?s)<style>.*?</style>|<[^>]+>", "", record._repr_html_())
        assert [word for word in ENGLISH if word in text] == []
        assert re.search("[\u4e00-\u9fff]", text)
