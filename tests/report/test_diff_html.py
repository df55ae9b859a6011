import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.compare.records import UNKNOWN_CAUSE, DiffReport, MaskPicture
from sqrtdk.messages import Message
from sqrtdk.report.diff.fold import CANCELS, DIFFERS, FOLLOWS, SAME, STAGE_MARKS, UNJUDGED, fold_pairs, mark
from sqrtdk.report.diff.html import ladder, marked_formulas, to_html
from sqrtdk.report.diff.payload import diff_page_data
from sqrtdk.report.plain import plain
from tests.report.html_page import HtmlPage
from tests.report.sample_diff import (
    EVIL,
    REPORTS,
    cancelling,
    differing,
    follows,
    hostile,
    not_finite,
    pair,
    report,
    same,
    softcap,
    two_causes,
    undecided,
    unknown,
    unpaired,
)

ROOT = Path(__file__).parents[2]


def test_hostile_texts_are_texts() -> None:
    text = to_html(hostile())
    page = HtmlPage(text)
    assert not any("owned" in script for script in page.inside["script"][1:])
    assert "<script>document" not in text
    assert sum(plain(EVIL) in part for part in page.texts) > 30
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\u2029\x00-\x08\x0b-\x1f\x7f]", text)
    block = page.inside["script"][0]
    assert not set("<>&\u2028\u2029") & set(block)
    picture = json.loads(block)["folds"][0][0]["picture"]
    assert {len(row) for row in picture["rows"]} == {len(EVIL)}
    assert set("".join(picture["rows"])) <= set(".+ab")


def test_every_paragraph_stands_in_both_languages() -> None:
    for make in (softcap, follows, two_causes, unknown, unpaired, not_finite, undecided, same, cancelling):
        one = make()
        text = to_html(one)
        seen = "".join(HtmlPage(text).texts)
        assert all(paragraph in seen for paragraph in one.paragraphs)
        assert text.count('<p class="said">') == 2 * len(one.paragraphs)


def test_what_stands_between_backticks_is_code() -> None:
    text = Message("outputs.sentence.first", place="`model.norm` (<a>)")
    page = to_html(dataclasses.replace(softcap(), paragraphs=(text,)))
    assert "The first difference is in <code>model.norm</code> (&lt;a&gt;)." in page
    assert "首个差异在 <code>model.norm</code> (&lt;a&gt;)。" in page


def test_the_causes_are_counted_in_both_languages() -> None:
    counted = HtmlPage(to_html(softcap())).texts
    assert counted.index("软上限（softcap）") < counted.index("Pairs")


def test_a_cause_without_words_is_shown_by_its_name() -> None:
    (cause,) = softcap().pairs[0].causes
    added = dataclasses.replace(softcap().pairs[0], causes=(dataclasses.replace(cause, name="cap"),))
    assert (
        HtmlPage(to_html(dataclasses.replace(softcap(), pairs=(added,)))).texts.count("cap") == 3
    )  # tile, line, table


def test_what_differs_in_the_formulas_is_marked() -> None:
    a, b = marked_formulas(softcap().pairs[0])
    assert str(a) == "softmax(<mark>softcap(</mark>0.125 * rope(q).rope(k)<mark>, 50)</mark> + causal)"
    assert str(b) == "softmax(0.125 * rope(q).rope(k) + causal)"


def test_a_formula_that_is_not_known_leaves_the_other_unmarked() -> None:
    assert marked_formulas(unpaired().pairs[-1]) == ("softmax(0.125 * rope(q).rope(k) + causal)", None)


def test_an_endless_formula_is_shown_without_marks() -> None:
    endless = pair(0, formula_a="a+" * 50_000, formula_b="b+" * 50_000)
    a, b = marked_formulas(endless)
    assert "<mark>" not in str(a) + str(b)


def test_marks_tell_a_difference_from_what_follows() -> None:
    one = two_causes()
    by_stage = {stage.stage: mark(one.pairs[1], stage) for stage in one.pairs[1].stages}
    assert [name for name, sign in by_stage.items() if sign == DIFFERS] == ["query rotation", "key rotation", "scale"]
    assert [name for name, sign in by_stage.items() if sign == FOLLOWS] == ["weights", "output"]
    assert mark(follows().pairs[3], follows().pairs[3].stages[0]) == FOLLOWS
    blind = unpaired().pairs[-1]
    assert {mark(blind, stage) for stage in blind.stages} == {SAME, UNJUDGED}


def test_what_cancels_has_a_mark_of_its_own_and_no_red() -> None:
    first = cancelling().pairs[0]
    assert [stage.stage for stage in first.stages if mark(first, stage) == CANCELS] == ["query", "key"]
    page = HtmlPage(to_html(cancelling()))
    classes = [attributes.get("class") or "" for _, attributes in page.elements]
    assert classes.count("mark m-differs") == 1  # the legend's
    assert classes.count("mark m-cancels") == 9  # that, and two stages of two folds, in the strip and in the table


def test_a_later_difference_without_a_cause_is_no_more_than_following() -> None:
    """Unless it is the stage that the unknown cause names."""
    partly = unknown().pairs[1]
    signs = {stage.stage: mark(partly, stage) for stage in partly.stages}
    assert (signs["softcap"], signs["weights"], signs["output"]) == (DIFFERS, DIFFERS, FOLLOWS)


@pytest.mark.parametrize("name", REPORTS)
def test_each_fold_has_a_mark_for_each_of_its_stages(name: str) -> None:
    one = REPORTS[name]()
    page = HtmlPage(to_html(one))
    signs = [attributes.get("class", "") for tag, attributes in page.elements if tag == "svg"]
    in_strips = sum(len({stage.stage for stage in fold.first.stages} & set(STAGES)) for fold in fold_pairs(one.pairs))
    in_tables = sum(len(fold.first.stages) for fold in fold_pairs(one.pairs))
    legend = len(STAGE_MARKS) if one.pairs else 0
    assert sum((sign or "").startswith("mark ") for sign in signs) == in_strips + in_tables + legend


def test_the_ladder_says_whether_what_is_left_is_within() -> None:
    within = differing(0, first="scale", differ=("scale",))
    assert 'class="left good"' in str(ladder(within))
    assert 'class="left bad"' in str(ladder(dataclasses.replace(within, residue=1.0)))
    assert ladder(dataclasses.replace(within, allowed=None)) is None
    assert ladder(not_finite().pairs[1]) is None
    for size in (0.0, 1e-300, 1e300):
        assert "nan" not in str(ladder(dataclasses.replace(within, residue=size, difference=size, allowed=0.0)))


def test_points_and_masks_are_there_and_what_is_not_finite_is_counted() -> None:
    data = diff_page_data(fold_pairs(two_causes().pairs))
    (second,) = data["folds"][2]
    assert second["label"] == "model.layers.2.self_attn"
    assert [head["head"] for head in second["heads"]] == [0, 3]
    scatter = two_causes().pairs[2].scatter[0]
    assert second["heads"][0]["points"][5][:2] == [scatter.rows[5], scatter.keys[5]]
    assert second["heads"][0]["points"][5][2] == pytest.approx(scatter.a[5], rel=1e-5)
    assert second["picture"]["rows"][0] == "+b.............."
    assert data["folds"][0] == []
    (broken,) = diff_page_data(fold_pairs(not_finite().pairs))["folds"][1]
    assert (len(broken["heads"][0]["points"]), broken["heads"][0]["dropped"]) == (1, 2)
    json.dumps(data, allow_nan=False)


def test_an_empty_picture_is_one() -> None:
    empty = differing(0, first="mask", differ=("mask",), picture=MaskPicture(0, 0, ()))
    assert diff_page_data(fold_pairs([empty]))["folds"][0][0]["picture"]["rows"] == []


@pytest.mark.parametrize(
    ("make", "word", "tone"),
    [
        (same, "Same", "good"),
        (softcap, "Different", "bad"),
        (unpaired, "Different", "bad"),
        (undecided, "Not judged", "doubtful"),
    ],
)
def test_the_word_for_the_whole(make: Callable[[], DiffReport], word: str, tone: str) -> None:
    text = to_html(make())
    assert f'class="outcome {tone}">\n    <p class="word"><span class="en" lang="en">{word}</span>' in text


def test_what_is_not_judged_or_alone_is_nowhere_green() -> None:
    page = HtmlPage(to_html(undecided()))
    classes = [attributes.get("class") or "" for _, attributes in page.elements]
    assert "outcome good" not in classes
    assert {"outcome doubtful", "tile doubtful"} <= set(classes)
    assert classes.count("badge o-not-compared") == 1


@pytest.mark.full
def test_many_layers_fit() -> None:
    layers = report(tuple(differing(i, softcap().pairs[0].causes[0], first="softcap", differ=()) for i in range(96)))
    assert len(to_html(layers)) < 3_000_000


def test_the_causes_are_those_of_the_schema_and_of_the_page_of_the_documentation() -> None:
    schema = json.loads((ROOT / "docs" / "diff.schema.json").read_text())
    names = schema["$defs"]["cause"]["properties"]["name"]["enum"]
    assert set(names) == {*CAUSES, "input", UNKNOWN_CAUSE}
    text = (ROOT / "docs" / "en" / "diff.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", text[text.index("| cause |") :], re.MULTILINE)
    assert rows[: len(names)] == [(name, Message(f"causes.{name}.meaning")) for name in names]
