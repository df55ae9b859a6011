"""What is said of a comparison, beside the samples whose text tests/report holds as a whole."""

import dataclasses

import pytest

from sqrtdk.compare.paragraphs import paragraphs
from sqrtdk.compare.records import PairDiff, SideInfo
from sqrtdk.compare.words import groups
from tests.report.sample_diff import REPORTS, SOFTCAP, differing, follower, pair, report


def test_a_residue_over_the_bar_is_never_called_agreement() -> None:
    over = differing(0, SOFTCAP, first="softcap", differ=("softcap",), residue=9e-6, explained=0.99)
    (text,) = report((over,)).paragraphs
    assert "agree" not in text
    assert "9e-6 is left, the rounding of float32 allows 8.2e-6: the cause of the rest is unknown" in text


def test_no_pair_at_all() -> None:
    assert report(()).paragraphs == ("No attention of A has a partner in B: nothing was compared.",)


def test_numbers_that_differ_from_site_to_site_are_one_paragraph() -> None:
    causes = [dataclasses.replace(SOFTCAP, text=f"multiplies by 1/{layer + 1}") for layer in range(4)]
    pairs = tuple(differing(i, cause, first="scale", differ=("scale",)) for i, cause in enumerate(causes))
    (only,) = report(pairs).paragraphs
    assert "B multiplies by 1/1 from model.layers.0.self_attn on (the numbers are those of the first" in only


def test_some_layers_are_named_and_not_called_all_that_follow() -> None:
    pairs = tuple(differing(i, SOFTCAP, first="softcap", differ=("softcap",)) if i % 2 else pair(i) for i in range(8))
    first, rest = report(pairs).paragraphs
    assert " at model.layers.1,3,..,7.self_attn; " in first
    assert rest.startswith("The other 4 attentions agree")


def test_a_follower_of_what_is_in_no_group_is_told_apart() -> None:
    one = report((pair(0), follower(1, "elsewhere"))).paragraphs[0]
    assert one == "The difference at model.layers.1.self_attn follows from elsewhere."


def test_the_root_is_named() -> None:
    root = dataclasses.replace(differing(0, SOFTCAP, first="softcap", differ=("softcap",)), site_a="")
    after = follower(1, "")
    (text,) = report((root, after)).paragraphs
    assert " at (root); " in text
    assert text.endswith("The difference at model.layers.1.self_attn follows from it.")


@pytest.mark.parametrize("name", REPORTS)
def test_every_pair_is_in_one_place(name: str) -> None:
    one = REPORTS[name]()
    found = groups(one.pairs)
    own: list[PairDiff] = [item for group in found for item in group.pairs]
    assert len(own) == sum(item.same is False and item.follows_from is None for item in one.pairs)
    assert len({id(item) for item in own}) == len(own)


def test_without_a_dtype_rounding_is_just_that() -> None:
    side = SideInfo("a", "model")
    (text,) = paragraphs([pair(0)], (), (), side, side)
    same = "for the same q, k and v the outputs differ by at most 2.1e-7, rounding allows 9e-7."
    assert text == f"The one attention agrees: {same}"
