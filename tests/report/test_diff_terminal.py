import dataclasses
import re
from collections.abc import Callable
from functools import partial

import pytest

from sqrtdk.compare.paragraphs import paragraphs
from sqrtdk.compare.records import Cause, DiffReport, ModuleCause
from sqrtdk.report.diff.fold import changes_in_b
from sqrtdk.report.diff.html import to_html
from sqrtdk.report.diff.terminal import diff_summary_line, to_text
from tests.report.sample_diff import REPORTS, follows, hostile, same, softcap, two_causes, undecided, unpaired
from tests.report.terminal_text import check_colours, check_fits
from tests.support.optional import SnapshotAssertion

_NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*(?:e-?\d+)?(?![\w.])")


@pytest.mark.parametrize("name", REPORTS)
def test_looks(name: str, snapshot: SnapshotAssertion) -> None:
    """Also that no line is too wide, and that colours change no text."""
    report = REPORTS[name]()
    for width in (80, 160):
        assert to_text(report, width=width) == snapshot(name=str(width))
    for width in (60, 80, 100, 160):
        check_fits(to_text(report, width=width), width)
    check_colours(partial(to_text, report))


def test_like_sites_are_one_line_with_the_worst_of_their_figures() -> None:
    (line,) = [line for line in to_text(softcap(), width=140).splitlines() if line.startswith("model.layers.0-11")]
    assert line.split() == [
        *("model.layers.0-11.self_attn", "softcap", "softcap", "50", "->", "none", "99.99%", "3.2e-6", "8.2e-6"),
    ]  # fmt: skip


def test_causes_of_other_values_are_one_line_with_the_range_of_their_values() -> None:
    first, second, *rest = softcap().pairs
    other = dataclasses.replace(second, causes=(dataclasses.replace(second.causes[0], a=30.0),))
    lines = to_text(dataclasses.replace(softcap(), pairs=(first, other, *rest)), width=140).splitlines()
    assert sum("model.layers.0-11.self_attn  softcap           softcap 30 to 50 -> none" in line for line in lines) == 1


def test_a_cause_of_several_groups_is_one_sentence_and_one_change_with_all_its_layers() -> None:
    """What the layers have beside it does not split it, and all the proofs are summed up once."""
    window = Cause("window", 16.0, 8.0, 1.0, "has a window of 8 keys in place of 16", "mask")
    pairs = [
        dataclasses.replace(pair, causes=(window, *pair.causes) if layer in (2, 5) else pair.causes)
        for layer, pair in enumerate(softcap().pairs)
    ]
    texts = [str(text) for text in paragraphs(pairs, (), (), softcap().a, softcap().b)]
    assert sum("softcap (50)" in text for text in texts) == 1
    assert [text for text in texts if "window" in text] == [
        "B has a window of 8 keys in place of 16 at model.layers.2,5.self_attn."
    ]
    assert sum(text.startswith("With these, each where it is, the outputs of the attentions") for text in texts) == 1
    report = dataclasses.replace(softcap(), pairs=tuple(pairs))
    changes = changes_in_b(report)
    assert [(one.cause, str(one.sites)) for one in changes] == [
        ("softcap", "model.layers.0-11.self_attn"), ("window", "model.layers.2,5.self_attn")
    ]  # fmt: skip
    text = to_text(report, width=200)
    assert text.index("What to change in B") < text.index("first difference")
    page = to_html(report)
    assert page.index('class="changes"') < page.index('id="pairs"')


def test_names_of_both_sides_stand_there_where_they_differ() -> None:
    text = to_text(unpaired(), width=160)
    assert "model.layers.0,2.self_attn = transformer.h.0,2.attn  " in text
    assert "model.layers.0.self_attn = " not in to_text(follows(), width=160)


def test_what_has_no_partner_and_what_was_not_judged_is_counted_and_named() -> None:
    text = to_text(unpaired(), width=160)
    assert "Only in A, 3: model.vision.0-2.attn: no call of its shape, softmax(" in text
    assert "Only in B, 1: pool#1: softmax(q.k)" in text
    assert "Not compared, 1: model.layers.4.self_attn: B tells neither the formula nor the output" in text


GREEN = "\x1b[1;32m"


@pytest.mark.parametrize(
    ("make", "word", "green"),
    [
        (same, "Same", True),
        (two_causes, "Different", False),
        (undecided, "Not judged", False),
        (unpaired, "Different", False),
    ],
)
def test_the_word_for_the_whole(make: Callable[[], DiffReport], word: str, green: bool) -> None:
    report = make()
    assert f" {word}. Exit code {report.exit_code} (fail-on: different)." in diff_summary_line(report)
    assert (GREEN in to_text(report, width=140, color=True).splitlines()[-1]) is green


def test_summary_counts() -> None:
    assert diff_summary_line(two_causes()) == (
        "4 pairs of attentions: 2 differ, 1 follows from these, 1 same. Different. Exit code 1 (fail-on: different)."
    )
    assert "5 without a partner" in diff_summary_line(unpaired())


def test_a_difference_is_nowhere_green() -> None:
    for report in (two_causes(), undecided()):
        lines = to_text(report, width=160, color=True).splitlines()
        (line,) = [line for line in lines if line.startswith("\x1b[1mmodel.layers.1.self_attn")]
        assert "\x1b[32m" not in line


def test_what_was_made_up_stands_under_the_sides() -> None:
    notes = ["there are no weights: they are random, with seed 0", "\x1b[2J"]
    environment = {**same().environment, "notes": [*notes, *notes, *(f"n{i}" for i in range(20))]}
    text = to_text(dataclasses.replace(same(), environment=environment), width=120)
    assert text.splitlines()[2:4] == [f"! {notes[0]}", "! \\x1b[2J"]
    assert "... and 14 more: see --json or --html" in text


def test_what_to_change_names_the_causes_outside_attention_too() -> None:
    eps = ModuleCause("norm_eps", "norm", "out_norm", 1e-6, 1e-3, True, "", (), "port.py:9", "set `eps` to 1e-06")
    unknown = ModuleCause("unknown", "mlp", "mlp", None, None, False, "")
    text = to_text(dataclasses.replace(softcap(), module_causes=(unknown, eps)), width=120)
    _, _, fixes = text.partition("What to change in B:")
    assert next(line.split()[0] for line in fixes.splitlines()[1:] if line.startswith("  ")) == "softcap"
    assert "  norm_eps  port.py:9  set `eps` to 1e-06\n" in fixes
    assert "unknown" not in fixes


def test_markup_in_names_is_text() -> None:
    assert "[red]{{7*7}}" in to_text(hostile(), width=200)


@pytest.mark.parametrize("make", [same, two_causes, undecided, unpaired])
def test_chinese_says_the_same(make: Callable[[], DiffReport]) -> None:
    report = make()
    english, chinese = (to_text(report, width=120, language=language) for language in ("en", "zh"))
    for words in (" attention", "pair of", "pairs of", "follows", "Exit code", "first difference", "rounding allows"):
        assert words not in chinese
    assert f"退出码 {report.exit_code}（fail-on：different）。" in chinese
    assert chinese.splitlines()[-1] == diff_summary_line(report, "zh")
    numbers = [
        re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text) for text in (diff_summary_line(report), chinese.splitlines()[-1])
    ]
    assert numbers[0] == numbers[1]
    for pair in report.pairs:
        assert pair.site_a.split(".")[-1] in english
        assert pair.site_a.split(".")[-1] in chinese


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "hostile"])
def test_chinese_breaks_no_number_and_begins_no_line_with_a_mark(name: str) -> None:
    report = REPORTS[name]()
    whole = set(_NUMBER.findall(to_text(report, width=400, language="zh")))
    for width in range(60, 101, 4):
        lines = to_text(report, width=width, language="zh").splitlines()
        assert {number for line in lines for number in _NUMBER.findall(line)} <= whole, width
        assert [line for line in lines if line.lstrip()[:1] in tuple("，。；：、）")] == [], width
