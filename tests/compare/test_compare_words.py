import dataclasses

import pytest

from sqrtdk.compare.records import PairDiff, SideInfo
from sqrtdk.compare.words import groups, paragraphs
from tests.report.sample_diff import (
    REPORTS,
    SOFTCAP,
    cancelling,
    differing,
    follower,
    follows,
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


def test_the_softcap_that_is_missing_everywhere() -> None:
    assert softcap().paragraphs == (
        "B leaves out the softcap (50) from model.layers.0.self_attn on; with it the outputs agree to 3.2e-6, the "
        "rounding of float32 allows 8.2e-6.",
    )


def test_what_follows_is_said_to() -> None:
    (only,) = follows().paragraphs
    assert only.startswith("B leaves out the softcap (50) at model.layers.0.self_attn; with it the outputs agree to")
    assert only.endswith(" The differences at model.layers.1-11.self_attn follow from it.")


def test_what_cancels_and_what_is_left_out_is_said() -> None:
    assert cancelling().paragraphs[1:] == (
        "The stages query and key differ at model.layers.0-2.self_attn and make no difference: from the input to the "
        "output both sides are the same.",
        "5 of 24 rows, which see no key, are left out at model.layers.0-1.self_attn.",
        "1 of 24 rows, which sees no key, is left out at model.layers.3.self_attn.",
    )


def test_nothing_differs() -> None:
    assert same().paragraphs == (
        "All 12 attentions agree: the largest difference is 2.2e-7, the rounding of float32 allows 1e-6.",
    )


def test_two_causes_are_one_sentence_and_other_causes_another() -> None:
    both, mask, rest = two_causes().paragraphs
    assert "instead of 0.125 (twice) and rotates by the base 500000 instead of 10000 at" in both
    assert "; with both the outputs agree to 3.1e-6" in both
    assert mask.endswith("The difference at model.layers.3.self_attn follows from it.")
    assert rest.startswith("The other attention agrees")


def test_what_is_left_is_not_hidden() -> None:
    partly, nothing, _ = unknown().paragraphs
    assert "87.1% of the difference goes away. 0.057 is left" in partly
    assert partly.endswith("the cause of the rest is unknown, at the stage weights.")
    assert "first at the stage weights, and the cause is unknown: by 0.44" in nothing


def test_a_residue_over_the_bar_is_never_called_agreement() -> None:
    over = differing(0, SOFTCAP, first="softcap", differ=("softcap",), residue=9e-6, explained=0.99)
    (text,) = report((over,)).paragraphs
    assert "agree" not in text
    assert "9e-6 is left, the rounding of float32 allows 8.2e-6: the cause of the rest is unknown" in text


def test_nan_is_called_so() -> None:
    first, _ = not_finite().paragraphs
    assert "the difference is NaN, as a side holds values that are not finite" in first


def test_calls_that_are_alone_or_not_judged_are_counted() -> None:
    alone, unjudged, rest = unpaired().paragraphs
    assert alone == "3 attentions of A have no partner in B, 2 attentions of B have no partner in A."
    assert unjudged == "1 of 5 attentions could not be compared: B tells neither the formula nor the output."
    assert rest.startswith("The other 4 attentions agree")
    assert "the rounding of float32 and bfloat16 allows" in rest
    assert undecided().paragraphs[0].startswith("1 of 2 attentions could not be compared: dropout ran")


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
    assert text == "The one attention agrees: the largest difference is 2.1e-7, rounding allows 9e-7."
