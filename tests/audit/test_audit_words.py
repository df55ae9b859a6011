"""What a check says to the one who audits a released model: no training advice, and which call of a shared layer."""

import dataclasses

import torch
from torch import nn

from sqrtdk import check
from sqrtdk.audit.baseline import ledger_of
from sqrtdk.audit.records import CheckReport, Finding, ModelInfo
from sqrtdk.report.check.fold import fold_calls, fold_findings
from sqrtdk.report.check.places import calls_of_finding
from sqrtdk.report.html import to_html
from sqrtdk.report.terminal import to_text
from sqrtdk.tracing.records import Stage
from tests.attentions.each import each
from tests.audit.rules_by_hand import run


class Shared(nn.Module):
    """One attention that is every layer; the second has sharp logits, as the first grows what it gets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.requires_grad_(False)

    def forward(self, x):
        for size in (1.0, 40.0, 1.0):
            x = self.attention(size * x, size * x, x)[0] / x.norm() + x
        return x


def test_a_finding_at_a_shared_layer_names_its_call():
    report = check(Shared().eval(), torch.randn(2, 24, 32))
    assert [judged.health in ("ok", "note") for judged in report.calls] == [True, False, True]
    (large,) = (finding for finding in report.findings if finding.rule == "max_logit")
    assert large.message.endswith("(call 2 of 3 here)")
    assert [judged.call.index for judged in report.calls if judged.health == large.severity] == [1]


class Scaled(nn.Module):
    """One attention that is both layers; it is told its scale, and the second one is wrong."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(self.attention(x, 16**-0.5), 1.0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, scale):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def test_each_call_of_a_shared_layer_has_its_own_health_and_findings():
    report = check(Scaled().eval(), torch.randn(2, 12, 32), laws="none")
    assert [judged.verdict for judged in report.calls] == ["exact", "unexplained"]
    assert [judged.health for judged in report.calls] == ["ok", "fail"]
    (wrong,) = (finding for finding in report.findings if finding.rule == "scale_ledger")
    assert (wrong.site, wrong.call, wrong.message[-18:]) == ("attention", 1, "(call 2 of 2 here)")
    assert [line.findings[:1] for line in ledger_of(report).lines] == [(), ("fail scale_ledger",)]
    assert [judged.call.index for judged in calls_of_finding(report, wrong)] == [1]


def test_calls_of_one_site_are_counted_as_calls():
    """Six calls of a layer that ALBERT shares are no six sites."""
    told = [Finding("flat", "note", "layer", 1.0, 0.5, f"m (call {i} of 6 here)", "f", "s", call=i) for i in range(6)]
    (fold,) = fold_findings(told)
    assert (fold.site, fold.several) == ("layer", "6 calls")
    (layers,) = fold_findings(dataclasses.replace(one, site=f"h.{one.call // 2}") for one in told)
    assert layers.several == "6 calls at 3 sites"


@each("norm", [None, "rms"])
def test_the_fix_fits_a_model_that_is_trained_already(make_call, make_stats, norm):
    stages = (Stage("q", "norm", "rms"), Stage("k", "norm", "rms")) if norm else ()
    hot = make_stats(max_above_mean=500.0, entropy_nats=0.01, keys=64.0)
    call = make_call(norm=norm, stages=stages, stats=hot)
    for rule in ("max_logit", "entropy"):
        (finding,) = run(rule, [call])
        assert not {"train", "learning rate", "step"} & set(finding.fix.split())
        assert ("q_norm.weight" in finding.fix) is (norm is not None)


def test_equal_layers_of_a_graph_are_folded(make_call):
    report = check(nn.MultiheadAttention(16, 2), [torch.randn(5, 1, 16)] * 3)
    (judged,) = report.calls
    at = [f"<node>:{10 * layer}" for layer in range(3)]
    calls = [
        dataclasses.replace(judged, call=make_call(site=f"h.{i}", product_at=at[i], softmax_at=at[i])) for i in range(3)
    ]
    assert [fold.site for fold in fold_calls(calls)] == ["h.0-2"]
    findings = [Finding("unused", "warn", f"h.{i}", None, None, "m", "f", "s", at[i]) for i in range(3)]
    assert [fold.site for fold in fold_findings(findings)] == ["h.0-2"]
    lines = [
        dataclasses.replace(one, call=dataclasses.replace(one.call, product_at=f"a.py:{i}", softmax_at=f"a.py:{i}"))
        for i, one in enumerate(calls)
    ]
    assert len(fold_calls(lines)) == 3
    text = to_text(CheckReport(ModelInfo("m", "M", 1), "static", tuple(calls), (), (), ()))
    assert "<node>" not in text


def test_no_parameters_are_counted_where_none_are_known():
    report = CheckReport(ModelInfo("m.gguf", "llama", 0), "static", (), (), (), ())
    assert "parameter" not in to_text(report)
    assert "0 parameters" not in to_html(report)
