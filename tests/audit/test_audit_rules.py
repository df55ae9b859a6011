"""Every rule seen firing and not firing, on records made by hand."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import SEVERITIES, Finding
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.theory.gaussian import critical_sigma, expected_entropy_nats
from sqrtdk.tracing.records import Factor, Mask, Stage


class Layer(nn.Module):
    """A module with whatever attributes and children a test wants at `layers.0.attn`."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def model_with(layers=1, **attributes):
    root = nn.Module()
    root.layers = nn.ModuleList(Layer(attn=Layer(**attributes)) for _ in range(layers))
    return root


def run(name, calls, model=None, **context):
    model = model if model is not None else model_with()
    found = list(RULES[name](Context(model, judge_all(calls, model), "dynamic", **context)))
    for finding in found:
        assert isinstance(finding, Finding)
        assert finding.rule == name
        assert finding.severity in SEVERITIES
        assert finding.source
        assert finding.fix
        assert "\n" not in finding.message
    return found


def severities(found):
    return [finding.severity for finding in found]


def mask(**changes):
    return dataclasses.replace(Mask("causal", "float", 0, 0, 0.0, -math.inf), **changes)


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_healthy_call_has_no_finding(make_call, make_stats, name):
    call = make_call(stats=make_stats(), mask=mask(), future_weight=0.0, output_rms=1.0)
    assert run(name, [call], model_with(is_causal=True, scaling=0.25)) == []


ACCUSERS = sorted(set(RULES) - {"unmeasured"})


@pytest.mark.parametrize("name", ACCUSERS)
def test_a_call_without_statistics_has_no_finding(make_call, name):
    assert run(name, [make_call()]) == []


@pytest.mark.parametrize("name", ACCUSERS)
def test_an_unmeasured_call_is_not_accused(make_call, name):
    assert run(name, [make_call(None, reason="unknown(foo)")], model_with(scaling=0.25)) == []


def test_scale_ledger_fails_at_every_site(make_call):
    calls = [make_call(1.0, site=f"layers.{layer}.attn") for layer in range(3)]
    found = run("scale_ledger", calls, model_with(3))
    assert severities(found) == ["fail"] * 3
    assert [finding.site for finding in found] == [call.site for call in calls]
    assert all(finding.value == pytest.approx(4.0) for finding in found)
    assert all("missing" in finding.message for finding in found)


def test_the_largest_figure_comes_first(make_call, make_stats):
    def sites(rule, calls):
        return [finding.site[7] for finding in run(rule, calls, model_with(3, is_causal=True))]

    def calls(change):
        return [make_call(site=f"layers.{layer}.attn", **change(size)) for layer, size in enumerate((2.0, 3.0, 1.5))]

    assert sites("max_logit", calls(lambda x: {"stats": make_stats(max_logit=100 * x)})) == ["1", "0", "2"]
    assert sites("range_forecast", calls(lambda x: {"stats": make_stats(max_abs_logit=2e4 * x)})) == ["1", "0", "2"]
    assert sites("range_forecast", calls(lambda x: {"stats": make_stats(row_offset=50 * x)})) == ["1", "0", "2"]
    assert sites("mask_audit", calls(lambda x: {"future_weight": 0.1 * x})) == ["1", "0", "2"]


def test_scale_ledger_warns_of_an_attribute_that_holds_the_mistake(make_call):
    (finding,) = run("scale_ledger", [make_call(0.5)], model_with(scale=0.5))
    assert finding.severity == "warn"
    assert "head_count" in finding.message
    assert "attribute scale" in finding.message


def probed(calls, model):
    judged = judge_all(calls, model, lambda asked: dict.fromkeys(asked, True))
    return list(RULES["scale_ledger"](Context(model, judged, "dynamic")))


def test_scale_ledger_warns_of_a_scale_of_one_that_an_attribute_alone_declares(make_call):
    (finding,) = probed([make_call(1.0)], model_with(scaling=1.0))
    assert finding.severity == "warn"
    assert "nothing but attribute scaling" in finding.message
    assert probed([make_call(0.3)], model_with(scaling=0.3)) == []
    assert severities(probed([make_call(1 / 16)], model_with(scaling=1 / 16))) == ["note"]  # muP, or a forgotten root


def test_scale_ledger_warns_of_one_layer_that_differs(make_call):
    model = model_with(4, scaling=0.25)
    model.layers[2].attn.scaling = 0.3
    calls = [make_call(0.3 if layer == 2 else 0.25, site=f"layers.{layer}.attn") for layer in range(4)]
    (finding,) = probed(calls, model)
    assert (finding.severity, finding.site) == ("warn", "layers.2.attn")
    assert "differs from its 3 siblings" in finding.message


def test_a_contradicted_declaration_is_found_once(make_call):
    model = model_with(config={"query_pre_attn_scalar": 20})
    (finding,) = run("declared_vs_actual", [make_call(0.25)], model)
    assert (finding.severity, finding.threshold) == ("fail", pytest.approx(20**-0.5))
    assert "query_pre_attn_scalar" in finding.message
    assert run("scale_ledger", [make_call(0.25)], model) == []
    assert run("declared_vs_actual", [make_call(20**-0.5)], model) == []


@pytest.mark.parametrize(
    ("value", "severity"),
    [(49.0, None), (51.0, "note"), (99.0, "note"), (101.0, "warn"), (1001.0, "fail"), (10001.0, "critical")],
)
def test_max_logit(make_call, make_stats, value, severity):
    found = run("max_logit", [make_call(stats=make_stats(max_logit=(1.0, value)))])
    assert severities(found) == ([severity] if severity else [])
    assert all("head 1" in finding.message for finding in found)


def test_max_logit_is_signed_and_skips_nan(make_call, make_stats):
    assert run("max_logit", [make_call(stats=make_stats(max_logit=(-5000.0, math.nan)))]) == []


def test_range_forecast_fp16(make_call, make_stats):
    stats = make_stats(max_abs_logit=20000.0)
    assert severities(run("range_forecast", [make_call(stats=stats)])) == ["warn"]
    assert severities(run("range_forecast", [make_call(stats=stats, logits_dtype="float16")])) == ["fail"]
    scaled_before = make_call(stats=stats, factors=(Factor(0.25, "q", "number"),))
    assert run("range_forecast", [scaled_before]) == []
    assert run("range_forecast", [make_call(stats=stats, kind="sdpa")]) == []
    assert run("range_forecast", [make_call(stats=make_stats(max_abs_logit=16000.0))]) == []


def test_range_forecast_bf16(make_call, make_stats):
    stats = make_stats(row_offset=60.0)
    (note,) = run("range_forecast", [make_call(stats=stats)])
    (warn,) = run("range_forecast", [make_call(stats=stats, logits_dtype="bfloat16")])
    assert (note.severity, warn.severity) == ("note", "warn")
    assert "0.25" in warn.message
    assert run("range_forecast", [make_call(stats=make_stats(row_offset=49.0), logits_dtype="bfloat16")]) == []
    assert run("range_forecast", [make_call(stats=stats, kind="sdpa", logits_dtype="float32")]) == []


def test_entropy(make_call, make_stats):
    bar = expected_entropy_nats(64, critical_sigma(64))
    low = make_stats(keys=64.0, entropy_nats=0.9 * bar)
    high = make_stats(keys=64.0, entropy_nats=1.1 * bar)
    one = make_stats(keys=64.0, entropy_nats=(0.9 * bar, 1.1 * bar))
    few = make_stats(keys=15.0, entropy_nats=0.0)
    assert severities(run("entropy", [make_call(stats=low)])) == ["warn"]
    assert severities(run("entropy", [make_call(stats=one)])) == ["note"]
    assert run("entropy", [make_call(stats=high)]) == []
    assert run("entropy", [make_call(stats=few)]) == []
    rest = [make_call(stats=high, site=f"layers.{layer}.attn") for layer in range(1, 4)]
    assert run("entropy", [make_call(stats=one), *rest], model_with(4)) == []


@pytest.mark.parametrize(("norm", "effective"), [("rms", 1.0), ("l2", 64.0)])
def test_entropy_of_normalised_q_and_k_is_held_against_their_scale(make_call, make_stats, norm, effective):
    """With a scale of 1 the logits of RMS-normalised q and k have the deviation sqrt(64) = 8, far beyond sigma_c."""
    healthy = expected_entropy_nats(64, 8.0)
    stages = (Stage("q", "norm", norm), Stage("k", "norm", norm))
    changes = {"head_dim": 64, "norm": norm, "stages": stages}
    at = {share: make_stats(keys=64.0, entropy_nats=share * healthy) for share in (0.8, 0.3)}
    assert healthy < expected_entropy_nats(64, critical_sigma(64))
    assert run("entropy", [make_call(effective, stats=at[0.8], **changes)]) == []
    assert severities(run("entropy", [make_call(effective, stats=at[0.3], **changes)])) == ["warn"]
    assert severities(run("entropy", [make_call(effective, head_dim=64, stats=at[0.8])])) == ["warn"]


def test_flat(make_call, make_stats):
    flat = make_stats(entropy_fraction=0.9999, std_logit=0.01)
    assert severities(run("flat", [make_call(stats=flat)])) == ["note"]
    assert run("flat", [make_call(stats=make_stats(entropy_fraction=0.9999, std_logit=0.5))]) == []
    assert run("flat", [make_call(stats=make_stats(entropy_fraction=0.998, std_logit=0.01))]) == []
    assert run("flat", [make_call(stats=dataclasses.replace(flat, keys=(8.0, 8.0)))]) == []


def test_saturation(make_call, make_stats):
    assert severities(run("saturation", [make_call(stats=make_stats(saturated=0.6))])) == ["warn"]
    assert severities(run("saturation", [make_call(stats=make_stats(saturated=(0.0, 0.6)))])) == ["note"]
    assert run("saturation", [make_call(stats=make_stats(saturated=0.4))]) == []


@pytest.mark.parametrize(
    ("changes", "severity", "word"),
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


@pytest.mark.parametrize(
    ("kind", "blind", "reach", "severity", "word"),
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


@pytest.mark.parametrize("declared", [{"right_context": 2}, {"att_context_size": [-1, 2]}, {"window_size": (-1, 2)}])
@pytest.mark.parametrize("place", ["module", "config"])
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


@pytest.mark.parametrize(
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


def test_unused_norm(make_call):
    model = model_with(q_norm=nn.LayerNorm(16))
    assert severities(run("unused", [make_call()], model, ran=frozenset())) == ["warn"]
    assert run("unused", [make_call()], model, ran=frozenset({"layers.0.attn.q_norm"})) == []
    assert run("unused", [make_call(norm="layer")], model, ran=frozenset()) == []
    assert run("unused", [make_call()], model_with(q_norm=nn.Identity()), ran=frozenset()) == []
    assert run("unused", [make_call()], model, ran=None) == []


@pytest.mark.parametrize("place", ["config", "attribute"])
def test_unused_softcap(make_call, place):
    held = {"config": {"attn_logit_softcapping": 50.0}} if place == "config" else {"softcap": 50.0}
    assert severities(run("unused", [make_call()], model_with(**held))) == ["warn"]
    assert run("unused", [make_call(softcap=50.0)], model_with(**held)) == []
    (finding,) = run("unused", [make_call(softcap=30.0)], model_with(**held))
    assert (finding.value, finding.threshold) == (30.0, 50.0)
    assert run("unused", [make_call(unknown=("tanh",))], model_with(**held)) == []
    assert run("unused", [make_call()], model_with(softcap=None)) == []


def test_nonfinite(make_call, make_stats):
    sick = model_with(proj=nn.Linear(2, 2))
    with torch.no_grad():
        sick.layers[0].attn.proj.weight[0, 0] = math.nan
    (finding,) = run("nonfinite", [make_call()], sick)
    assert (finding.severity, finding.site) == ("critical", "layers.0.attn.proj")
    assert finding.message == "parameter layers.0.attn.proj.weight holds NaN or infinity"
    with torch.no_grad():
        sick.layers[0].attn.proj.bias[0] = math.inf
    assert run("nonfinite", [make_call()], sick)[0].message.startswith("2 parameters hold NaN or infinity, first ")
    rows = make_call(stats=make_stats(nan_rows=(0, 2), max_logit=(1.0, math.nan)))
    assert severities(run("nonfinite", [rows])) == ["critical"]
