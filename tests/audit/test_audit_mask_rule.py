"""The rule on masks, seen firing and not firing on records made by hand."""

import dataclasses

from sqrtdk.audit.context import Context
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.tracing.records import Stage
from tests.attentions.each import each
from tests.audit.rules_by_hand import mask, model_with, run, severities


@each(
    "changes, severity, word",
    [
        ({"blind_rows": 3}, "note", "no key"),
        ({"uniform_rows": 3, "fill": -3.4e38}, "note", "average masked keys"),
        ({"uniform_rows": 96, "fill": -3.4e38}, "fail", "average masked keys"),
        ({"masked_weight": 0.01, "fill": -10.0}, "fail", "masked keys"),
        ({"uniform_rows": 95, "fill": -3.4e38}, "note", "average masked keys"),
        ({"uniform_rows": 3, "blind_rows": 3, "fill": -3.4e38}, "note", "average masked keys"),
        ({"scaled_by": 0.25}, "note", "mask was multiplied"),
        ({"scaled_by": 0.25, "fill": -1e4}, "warn", "mask was multiplied"),
        ({"scaled_by": 0.25, "fill": None}, "note", "mask was multiplied by 0.25 (fill not known)"),
    ],
)
def test_mask_audit(make_call, changes, severity, word):
    (finding,) = run("mask_audit", [make_call(mask=mask(**changes))])
    assert finding.severity == severity
    assert word in finding.message


def test_mask_audit_lets_a_hair_of_weight_and_a_factor_of_one_pass(make_call):
    assert run("mask_audit", [make_call(mask=mask(masked_weight=1e-6, scaled_by=1.0), bias_scaled_by=1.0)]) == []


L = 24


@each(
    "kind, blind, reach, severity, word",
    [
        ("window", 4, (1 - L, -1, True), "critical", "rows see the future and not the past"),  # triu(1)
        ("mask", 4, (-5, -2, False), "critical", "rows see the future and not the past"),
        ("window", 0, (1 - L, 0, True), "critical", "rows see themselves and the future"),  # triu(0)
        ("window", 4, (1, L - 1, True), "warn", "off by one: no row sees its own key"),  # tril(-1)
        ("window", 12, (3, L - 1, True), "warn", "off by 3: no row sees the 3 keys"),  # tril(-3)
        ("mask", 0, (-1, L - 1, True, 4), "critical", "off by one: every row sees the key after"),  # tril(1)
        ("mask", 0, (-1, L - 1, False, 1), "critical", "off by one in some heads or sequences"),
        ("mask", 0, (-1, L - 1, False), None, ""),  # a prefix of 2, or blocks of 2
        ("mask", 0, (-4, L - 1, False), None, ""),  # a prefix of 5
        ("mask", 0, (-3, L - 1, True), "fail", "every row sees the 3 keys after its own"),  # tril(3)
        ("mask", 0, (-L // 2, L - 1, True), None, ""),
        ("window", 0, (0, 4, True), None, ""),  # a band
        ("window", 0, (-1, 1, True), None, ""),  # a band on both sides
        ("window", 0, (-4, 0, True), None, ""),  # a band on the far side
        ("mask", 0, (1 - L, L - 1, False), None, ""),  # all but the row's own
        ("causal", 0, (0, L - 1, True), None, ""),
        ("window", 4, (1, 5, True), "note", "see no key"),  # a band beside the diagonal
        ("causal", 12, (0, L - 1, True), "note", "see no key"),
        ("mask", None, (None, None, None), None, ""),  # unread
    ],
)
def test_patterns_of_a_mask(make_call, kind, blind, reach, severity, word):
    least, greatest, band, *ahead = reach
    changes = {"least": least, "greatest": greatest, "band": band, "ahead_by_one": ahead[0] if ahead else 0}
    call = make_call(mask=mask(kind=kind, blind_rows=blind, **changes))
    found = run("mask_audit", [call])
    assert severities(found) == ([severity] if severity else [])
    assert all(word in finding.message for finding in found)
    for other in ({"self_attention": False}, {"key_len": L + 1}):
        assert set(severities(run("mask_audit", [dataclasses.replace(call, **other)]))) <= {"note"}


def ahead(count, **changes):
    """tril(count)."""
    return mask(kind="mask", least=-count, greatest=L - 1, band=True, ahead_by_one=4 * (count == 1), **changes)


@each("declared", [{"right_context": 2}, {"att_context_size": [-1, 2]}, {"window_size": (-1, 2)}])
@each("place", ["module", "config"])
def test_a_declared_lookahead_is_believed_as_far_as_it_goes(make_call, declared, place):
    model = model_with(is_causal=True, **(declared if place == "module" else {"config": declared}))
    for count, expected in ((1, []), (2, []), (3, ["fail"])):
        assert severities(run("mask_audit", [make_call(mask=ahead(count), future_weight=0.1)], model)) == expected


def test_what_declares_no_lookahead_excuses_none(make_call):
    call = make_call(mask=ahead(1), future_weight=0.1)
    for other in ({"right_context": 0}, {"bidirectional": True}, {"is_causal": False}, {"config": {"causal": False}}):
        (finding,) = run("mask_audit", [call], model_with(**other))
        assert finding.severity == "critical"


def test_a_leak_past_cached_keys(make_call):
    """Six rows at the end of 24 keys: the first may see 18 keys before its own place among the rows."""
    causal = model_with(is_causal=True)
    for least, expected in ((-18, []), (-10, []), (-19, ["critical"]), (-23, ["critical"])):
        call = make_call(query_len=6, mask=mask(kind="mask", least=least, greatest=5, band=True))
        assert severities(run("mask_audit", [call], causal)) == expected
        assert run("mask_audit", [call], model_with()) == []
    assert severities(run("mask_audit", [make_call(query_len=6)], causal)) == ["critical"]
    assert run("mask_audit", [make_call(query_len=1)], causal) == []
    assert run("mask_audit", [make_call(query_len=6, self_attention=False)], causal) == []


def test_one_row_that_sees_one_key_too_many(make_call):
    """Its weight is nothing in the mean over all rows."""
    call = make_call(future_weight=1e-6, mask=mask(kind="mask", least=-1, greatest=L - 1, band=False, ahead_by_one=0))
    assert severities(run("mask_audit", [call], model_with(is_causal=True))) == ["critical"]
    assert run("mask_audit", [call]) == []


def test_a_causal_module_without_a_mask_is_seen_without_values(make_call):
    model = model_with(is_causal=True)
    judged = judge_all([make_call()], model)
    (finding,) = RULES["mask_audit"](Context(model, judged, "static"))
    assert (finding.severity, "no mask" in finding.message) == ("critical", True)
    assert list(RULES["mask_audit"](Context(model, judged, "dynamic"))) == []


def test_an_inverted_mask_is_told_once(make_call):
    band = mask(kind="window", blind_rows=4, least=1 - L, greatest=-1, band=True)
    (finding,) = run("mask_audit", [make_call(future_weight=1.0, mask=band)], model_with(is_causal=True))
    assert "inverted" in finding.message


def test_blind_rows_of_a_band_are_not_laid_on_padding(make_call):
    band, padded = (
        run("mask_audit", [make_call(mask=mask(kind=kind, blind_rows=4))])[0] for kind in ("window", "mask")
    )
    assert "own key" in band.fix
    assert "expected of padding" in padded.fix


def test_masks_that_hide_nothing(make_call):
    (added,) = run("mask_audit", [make_call(bias="zero-one mask")])
    assert (added.severity, "0 and 1" in added.message) == ("fail", True)
    after = make_call(stages=(Stage("weights", "mask", "after the softmax"),))
    (late,) = run("mask_audit", [after])
    assert (late.severity, "after the softmax" in late.message) == ("fail", True)
    divided = (*after.stages, Stage("weights", "normalise", "divided by their sum"))
    assert run("mask_audit", [dataclasses.replace(after, stages=divided)]) == []
    assert severities(run("mask_audit", [dataclasses.replace(after, mask=mask())])) == ["note"]
    assert run("mask_audit", [make_call(bias="relative", stages=(Stage("logits", "mask"),))]) == []


def test_future_weight_is_wrong_only_where_the_module_says_causal(make_call):
    leak = make_call(future_weight=0.5)
    assert severities(run("mask_audit", [leak], model_with(is_causal=True))) == ["critical"]
    assert run("mask_audit", [leak], model_with(is_causal=False)) == []
    assert run("mask_audit", [leak], model_with()) == []
    assert run("mask_audit", [dataclasses.replace(leak, self_attention=False)], model_with(is_causal=True)) == []


@each(
    "declared",
    [
        {"use_bidirectional_attention": True},
        {"use_bidirectional_attention": "vision"},
        {"attn_config": {"prefix_lm": True}},
        {"causal": False},
        {"attn_type": "bi"},
        {"attention_type": "block-causal"},
        {"prefix_length": 4},
    ],
)
def test_a_declared_look_ahead_is_no_leak(make_call, declared):
    leak = make_call(future_weight=0.5)
    assert run("mask_audit", [leak], model_with(is_causal=True, config=declared)) == []
    refused = {name: {bool: not value, int: 0}.get(type(value), "causal") for name, value in declared.items()}
    assert severities(run("mask_audit", [leak], model_with(is_causal=True, config=refused))) == ["critical"]


def test_images_declare_blocks_and_no_lost_mask(make_call):
    model = model_with(is_causal=True, config={"image_token_index": 7})
    model.config = {"image_token_index": 7}
    blocks = make_call(future_weight=0.1, mask=mask(kind="mask", least=-4, greatest=L - 1, band=False))
    assert run("mask_audit", [blocks], model) == []
    for lost in (
        make_call(future_weight=0.5),
        make_call(future_weight=0.5, mask=mask(least=-4, greatest=9, band=True)),
    ):
        assert severities(run("mask_audit", [lost], model)) == ["critical"]


def test_scaled_bias(make_call):
    call = make_call(bias="alibi", bias_scaled_by=0.25)
    assert severities(run("mask_audit", [call])) == ["warn"]
    falcon = model_with(config={"model_type": "falcon"})
    assert run("mask_audit", [call], falcon) == []
    assert run("mask_audit", [make_call(mask=mask(scaled_by=0.25, fill=None))], falcon) == []  # ALiBi on meta
    assert severities(run("mask_audit", [make_call(mask=mask(scaled_by=0.25, fill=-1e4))], falcon)) == ["warn"]
