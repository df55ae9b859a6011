"""Every rule seen firing and not firing, on records made by hand."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from sqrtdk import check
from sqrtdk.audit.rules import RULES
from sqrtdk.report.check.fold import fold_findings
from sqrtdk.stats.heads import SATURATED
from sqrtdk.theory.gaussian import critical_sigma, expected_entropy_nats
from sqrtdk.tracing.records import Factor, Stage
from tests.attentions.each import each
from tests.audit.rules_by_hand import mask, model_with, run, severities


@each("name", sorted(RULES))
def test_a_healthy_call_has_no_finding(make_call, make_stats, name):
    call = make_call(stats=make_stats(), mask=mask(), future_weight=0.0, output_rms=1.0)
    assert run(name, [call], model_with(is_causal=True, scaling=0.25)) == []


ACCUSERS = sorted(set(RULES) - {"unmeasured"})


@each("name", ACCUSERS)
def test_a_call_without_statistics_has_no_finding(make_call, name):
    assert run(name, [make_call()]) == []


@each("name", ACCUSERS)
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

    assert sites("max_logit", calls(lambda x: {"stats": make_stats(max_above_mean=100 * x)})) == ["1", "0", "2"]
    assert sites("range_forecast", calls(lambda x: {"stats": make_stats(max_abs_logit=2e4 * x)})) == ["1", "0", "2"]
    assert sites("range_forecast", calls(lambda x: {"stats": make_stats(row_offset=50 * x)})) == ["1", "0", "2"]
    assert sites("mask_audit", calls(lambda x: {"future_weight": 0.1 * x})) == ["1", "0", "2"]


@each(
    "scale, mistake",
    [(4.0, "inverted"), (64**-0.5, "model_dim"), (4**-0.5, "head_count"), (32**-0.5, "padded_head")],
)
def test_scale_ledger_fails_of_an_attribute_that_holds_the_mistake(make_call, scale, mistake):
    (finding,) = run("scale_ledger", [make_call(scale)], model_with(scale=scale))
    assert finding.severity == "fail"
    assert f": {mistake}, " in finding.message
    assert "attribute scale has that value, which declares nothing" in finding.message
    assert finding.fix.endswith(f"declare it in one line: softmax_scale = {scale:.6g} in the config")
    declared = model_with(scale=scale, config={"softmax_scale": float(f"{scale:.6g}")})
    assert run("scale_ledger", [make_call(scale)], declared) == []


@each(
    "scale, attributes, severity",
    [
        (0.3, {}, "warn"),  # odd
        (0.3, {"scaling": 0.3}, "warn"),
        (1.0, {"scaling": 1.0}, "fail"),
        (1 / 16, {"scaling": 1 / 16}, "fail"),  # muP, or a forgotten root: the config says which
        (1.0, {"use_scale": False}, "warn"),
        (-0.25, {"scaling": -0.25}, "fail"),
    ],
)
def test_scale_ledger_fails_of_a_mistake_and_warns_of_an_odd_number(make_call, scale, attributes, severity):
    (finding,) = run("scale_ledger", [make_call(scale)], model_with(**attributes))
    assert finding.severity == severity
    assert scale < 0 or f"softmax_scale = {scale:.6g}" in finding.fix
    if "use_scale" in attributes:
        assert "nothing but attribute use_scale = False" in finding.message


def test_scale_ledger_warns_of_one_layer_that_differs(make_call):
    calls = [make_call(1.0 if i == 2 else 0.25, site=f"layers.{i}.attn", norm="rms") for i in range(4)]
    (finding,) = run("scale_ledger", calls)
    assert (finding.severity, finding.site) == ("warn", "layers.2.attn")
    assert "differs from its 3 siblings" in finding.message


def test_scale_ledger_notes_an_unscaled_score_of_recurrent_states(make_call):
    from_a_gru = (Stage("q", "projection", "gru"), Stage("k", "projection", "attn.weight"))
    (finding,) = run("scale_ledger", [make_call(1.0, heads=1, kv_heads=1, stages=from_a_gru)])
    assert finding.severity == "note"
    assert "Luong" in finding.message


def test_a_contradicted_declaration_is_found_once(make_call):
    model = model_with(config={"query_pre_attn_scalar": 20})
    (finding,) = run("declared_vs_actual", [make_call(0.25)], model)
    assert (finding.severity, finding.threshold) == ("fail", pytest.approx(20**-0.5))
    assert "query_pre_attn_scalar" in finding.message
    assert run("scale_ledger", [make_call(0.25)], model) == []
    assert run("declared_vs_actual", [make_call(20**-0.5)], model) == []


@each(
    "value, severity",
    [(49.0, None), (51.0, "note"), (99.0, "note"), (101.0, "warn"), (1001.0, "fail"), (10001.0, "critical")],
)
def test_max_logit(make_call, make_stats, value, severity):
    found = run("max_logit", [make_call(stats=make_stats(max_above_mean=(1.0, value)))])
    assert severities(found) == ([severity] if severity else [])
    assert all("head 1" in finding.message for finding in found)


def test_max_logit_skips_nan_and_the_offset_of_a_row(make_call, make_stats):
    assert run("max_logit", [make_call(stats=make_stats(max_above_mean=(3.0, math.nan), max_logit=5000.0))]) == []


def test_far_keys_under_a_bias_are_no_large_logits(make_call, make_stats):
    """ALiBi at 1024 tokens: the nearest key has a logit of 3, the mean of the row is -300."""
    far = make_stats(max_above_mean=303.0, max_logit=3.0)
    assert severities(run("max_logit", [make_call(stats=far)])) == ["warn"]
    assert run("max_logit", [make_call(stats=far, bias="alibi")]) == []
    assert run("max_logit", [make_call(stats=far, mask=mask(fill=-100.0))]) == []
    both = make_stats(max_above_mean=303.0, max_logit=150.0)
    (finding,) = run("max_logit", [make_call(stats=both, bias="alibi")])
    assert finding.value == 150.0
    assert finding.message.startswith("head 1 has a logit of 150; a bias or a finite mask lowers the mean")
    (finding,) = run("max_logit", [make_call(stats=both)])
    assert finding.message == "head 1 has a logit 303 above the mean of its row"


class Offset(nn.Module):
    """Self-attention whose q and k share a large direction: every logit of a row has the same large part."""

    def __init__(self, size, fused):
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v, self.fused = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), fused
        self.requires_grad_(False)
        self.q.bias[::8] += size
        self.k.bias[::8] += size

    def logits(self, x):
        q, k = (one(x).unflatten(-1, (4, 8)).transpose(1, 2) for one in (self.q, self.k))
        return q @ k.mT / 8**0.5

    def forward(self, x):
        v = self.v(x).unflatten(-1, (4, 8)).transpose(1, 2)
        if not self.fused:
            return self.logits(x).softmax(-1) @ v
        q, k = (one(x).unflatten(-1, (4, 8)).transpose(1, 2) for one in (self.q, self.k))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@each("fused", [False, True])
def test_what_the_softmax_does_not_see_is_named_apart(fused):
    model, x = Offset(27.0, fused), torch.randn(2, 24, 32)
    report = check(model, x)
    logits = copy.deepcopy(model).double().logits(x.double())
    mean = logits.mean(-1, keepdim=True)
    stats = report.calls[0].call.stats
    assert max(stats.max_logit) == pytest.approx(float(logits.max()), rel=1e-5)
    assert max(stats.max_logit) > 250
    assert max(stats.max_above_mean) == pytest.approx(float((logits - mean).max()), rel=1e-3)
    assert [finding for finding in report.findings if finding.rule == "max_logit"] == []
    (offset,) = (finding for finding in report.findings if finding.rule == "range_forecast")
    assert (offset.severity, offset.value) == ("note", pytest.approx(float(mean.abs().max()), rel=1e-5))
    assert offset.message.endswith("stored in bf16, it would move in steps of 2")


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


@each("norm, effective", [("rms", 1.0), ("l2", 64.0)])
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
    assert severities(run("flat", [make_call(stats=flat)], trained())) == ["note"]
    assert run("flat", [make_call(stats=flat)]) == []  # fresh weights are flat by design
    assert run("flat", [make_call(stats=make_stats(entropy_fraction=0.9999, std_logit=0.5))], trained()) == []
    assert run("flat", [make_call(stats=make_stats(entropy_fraction=0.998, std_logit=0.01))], trained()) == []
    assert run("flat", [make_call(stats=dataclasses.replace(flat, keys=(8.0, 8.0)))], trained()) == []


def test_equal_logits_are_a_warning_of_fresh_weights_too(make_call, make_stats):
    """A buffer in front of q and k was erased, or a projection was not loaded."""
    equal = make_stats(entropy_fraction=1.0, std_logit=0.0, max_abs_logit=0.0)
    (finding,) = run("flat", [make_call(stats=equal, max_product=0.0)])
    assert (finding.severity, finding.message[:7]) == ("warn", "every q")
    biased = make_stats(entropy_fraction=1.0, std_logit=0.0, max_abs_logit=2.5)
    assert "all logits are equal" in run("flat", [make_call(stats=biased, max_product=10.0)])[0].message
    one_key = dataclasses.replace(equal, keys=tuple(1.0 for _ in equal.keys))
    assert run("flat", [make_call(stats=one_key)]) == []
    one_head = dataclasses.replace(equal, std_logit=(0.0, *(0.5 for _ in equal.std_logit[1:])))  # a pruned head
    assert run("flat", [make_call(stats=one_head)]) == []


def trained():
    """A model whose norm has learned a gain."""
    model = model_with(norm=nn.LayerNorm(4))
    nn.init.normal_(model.layers[0].attn.norm.weight)
    return model


@each("rule", ["flat", "saturation", "entropy"])
def test_heads_are_counted_by_the_call_and_summed_by_the_fold(make_call, make_stats, rule):
    sick = {"flat": {"entropy_fraction": 0.9999, "std_logit": 0.01}, "saturation": {"saturated": 0.9}}
    sick |= {"entropy": {"entropy_nats": 0.01}}
    calls = [make_call(site=f"h.{i}.attn", stats=make_stats(keys=64.0, **sick[rule])) for i in range(3)]
    found = run(rule, [*calls, make_call(site="pool", stats=make_stats(keys=64.0))], trained())
    assert [finding.site for finding in found] == [call.site for call in calls]
    heads = calls[0].stats.heads
    assert {finding.message.partition(" heads")[0] for finding in found} == {f"{heads} of {calls[0].heads}"}
    (fold,) = fold_findings(found)
    assert fold.message.startswith(f"{3 * heads} of {3 * calls[0].heads} heads in 3 attentions ")
    assert " of h.0.attn" in fold.message


def test_saturation(make_call, make_stats):
    assert severities(run("saturation", [make_call(stats=make_stats(saturated=0.6))])) == ["warn"]
    assert severities(run("saturation", [make_call(stats=make_stats(saturated=(0.0, 0.6)))])) == ["note"]
    assert run("saturation", [make_call(stats=make_stats(saturated=0.4))]) == []


def test_unused_norm(make_call):
    model = model_with(q_norm=nn.LayerNorm(16))
    assert severities(run("unused", [make_call()], model, ran=frozenset())) == ["warn"]
    assert run("unused", [make_call()], model, ran=frozenset({"layers.0.attn.q_norm"})) == []
    assert run("unused", [make_call(norm="layer")], model, ran=frozenset()) == []
    assert run("unused", [make_call()], model_with(q_norm=nn.Identity()), ran=frozenset()) == []
    assert run("unused", [make_call()], model, ran=None) == []


@each(
    "field, severity",
    [
        ({}, "warn"),
        ({"use_qk_norm": True}, "fail"),
        ({"qk_norm_type": "rms"}, "fail"),
        ({"qk_norm_type": "none"}, "warn"),
        ({"use_qk_norm": False}, "warn"),
    ],
)
def test_an_unused_norm_fails_where_the_config_declares_it(make_call, field, severity):
    model = model_with(q_norm=nn.LayerNorm(16), config=field)
    assert severities(run("unused", [make_call()], model, ran=frozenset())) == [severity]
    model.layers[0].attn.fc = nn.Linear(2, 2)
    unread = frozenset({"layers.0.attn.q_norm.weight"})
    ran = frozenset({"layers.0.attn.q_norm"})
    assert severities(run("unused", [make_call()], model, ran=ran, unread=unread)) == [severity]


CAPS = (
    "attn_logit_softcapping", "attention_logit_softcapping", "attn_logits_soft_cap", "attn_scores_soft_cap",
    "attention_logit_soft_cap", "atten_logit_cap", "conf_attention_logit_cap",
)  # fmt: skip


@each(
    "held, severity",
    [
        *(({"config": {name: 50.0}}, "fail") for name in CAPS),
        ({"config": {"attn_logits_soft_cap": 50.0}, "softcap": 50.0}, "fail"),
        ({"softcap": 50.0}, "warn"),
        ({"attn_logits_soft_cap": 50.0}, "warn"),
        ({"logit_soft_cap": 50.0}, "warn"),
        ({"logits_softcapping": 50.0}, "warn"),
        ({"scores_soft_cap": 50.0}, "warn"),
    ],
)
def test_unused_softcap(make_call, held, severity):
    assert severities(run("unused", [make_call()], model_with(**held))) == [severity]
    assert run("unused", [make_call(softcap=50.0)], model_with(**held)) == []
    by_logits = make_call(stages=(Stage("logits", "softcap", "z * tanh(z / 50)"),))
    (finding,) = run("unused", [by_logits], model_with(**held))
    assert finding.severity == severity
    assert "z * tanh(z / 50), not 50 * tanh(z / 50): it caps nothing" in finding.message
    (finding,) = run("unused", [make_call(softcap=30.0)], model_with(**held))
    assert (finding.severity, finding.value, finding.threshold) == (severity, 30.0, 50.0)
    assert "capped at 30" in finding.message
    assert run("unused", [make_call(unknown=("tanh",))], model_with(**held)) == []


@each(
    "held",
    [
        {"softcap": None},
        {"config": {"attn_logits_soft_cap": None}},
        {"config": {"attn_logits_soft_cap": 0.0}},
        {"config": {"final_logit_softcapping": 30.0, "logits_soft_cap": 30.0, "moe_router_logit_softcapping": 30.0}},
    ],
)
def test_a_softcap_of_something_else_or_of_nothing(make_call, held):
    assert run("unused", [make_call()], model_with(**held)) == []


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


def test_the_bound_on_the_jacobian_of_a_saturated_row():
    """2 p (1 - p) at p = 0.99, reached where all that is left is on one other key."""
    bound = 2 * SATURATED * (1 - SATURATED)
    left = torch.rand(500, 7, dtype=torch.float64) ** 8
    rest = left / left.sum(-1, keepdim=True) * (1 - SATURATED)
    p = torch.cat([torch.full((500, 1), SATURATED, dtype=torch.float64), rest], -1)
    norms = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).norm(dim=(-2, -1))
    assert norms.max() <= bound * (1 + 1e-12)
    assert norms.max() > 0.99 * bound
    assert bound == pytest.approx(0.0198)


def test_a_saturated_row_still_passes_a_gradient_to_q():
    """At 64 dimensions and 512 keys, without the scale: the rows above 0.99 against those of a scaled attention."""
    torch.manual_seed(0)
    q, k, v, to = torch.randn(4, 512, 64, dtype=torch.float64)

    def of_q(scale):
        leaf = q.clone().requires_grad_()
        weights = (leaf @ k.mT * scale).softmax(-1)
        (gradient,) = torch.autograd.grad((weights @ v * to).sum(), leaf)
        return weights.detach().amax(-1), gradient.norm(dim=-1)

    (_, scaled), (peak, plain) = of_q(64**-0.5), of_q(1.0)
    saturated = plain[peak > SATURATED].median() / scaled.median()
    assert 0.1 < float(saturated) < 0.3
