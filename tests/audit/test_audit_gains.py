"""What normalised q and k, and gains on their product, declare."""

import pytest
import torch
from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.context import Context
from sqrtdk.audit.explanations import judge_scale
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.tracing.records import Factor, Stage
from tests.attentions.each import each
from tests.audit.stranger_modules import Attention, module, told


@pytest.fixture
def x():
    return torch.randn(1, 6, 32)


BOTH = (Stage("q", "norm", "l2"), Stage("k", "norm", "l2"))


@each("side", ["q", "k"])
@each("effective, norm, mistake", [(1.0, "rms", "missing"), (4.0, "l2", "inverted"), (10.0, "l2", "unknown")])
def test_a_norm_declares_only_on_both_sides(make_call, side, effective, norm, mistake):
    one = make_call(effective, norm=norm, stages=(Stage(side, "norm", norm),))
    both = make_call(effective, norm=norm, stages=BOTH)
    assert told(judge_scale(one)) == ("unexplained", mistake)
    assert judge_scale(both).verdict == "declared"


def test_a_norm_on_q_only_in_a_run(x):
    class Normed(Attention):
        def logits(self, q, k):
            k = nn.functional.normalize(k, dim=-1) if self.width == self.number else k
            return nn.functional.normalize(q, dim=-1) @ k.mT * 8

    assert told(check(Normed(), x).calls[0]) == ("unexplained", "unknown")
    both = check(Normed(8), x).calls[0]
    assert told(both) == ("declared", None)
    assert both.declared_by == "q/k norm (l2): cosine with fixed gain 8 (learned in Henry et al. 2020, QKNorm)"


def test_a_norm_that_runs_on_one_side_leaves_the_other_idle(make_call):
    model = nn.Module()
    model.layers = nn.ModuleList([module(attn=module(q_norm=nn.LayerNorm(4), k_norm=nn.LayerNorm(4)))])

    def idle(stages):
        calls = judge_all([make_call(norm="layer", stages=stages)], model)
        return [f.message for f in RULES["unused"](Context(model, calls, "dynamic", ran=frozenset({q_norm})))]

    q_norm = "layers.0.attn.q_norm"
    assert idle((Stage("q", "norm", "layer"),)) == ["k_norm is built but never runs"]
    assert idle((Stage("q", "norm", "layer"), Stage("k", "norm", "layer"))) == []


@each("fixed, mistake", [(0.125, "model_dim"), (0.5, "head_count"), (24**-0.5, "padded_head"), (0.3, None)])
@each("heads", [None, (1.0,) * 4])
def test_a_learned_gain_of_one_excuses_no_mistake(make_call, fixed, mistake, heads):
    changes = {"padded_head_dim": 24, "norm": "rms"}
    one = Factor(1.0, "logits", "parameter attn.gain", heads, learned=True)
    verdict = "unexplained" if mistake else "declared"
    assert told(judge_scale(make_call(fixed, factors=(one, fixed), **changes))) == (verdict, mistake)
    two = Factor(3.0, "logits", "parameter attn.gain", heads and (1.0, 1.0, 9.0, 9.0), learned=True)
    assert judge_scale(make_call(3 * fixed, factors=(two, fixed), **changes)).verdict == "declared"
    spread = Factor(1.0, "logits", "parameter attn.gain", (0.5, 0.5, 2.0, 2.0), learned=True)
    assert judge_scale(make_call(fixed, factors=(spread, fixed), **changes)).verdict == "declared"


def test_a_gain_on_one_side_is_no_norm_of_both(make_call):
    q = Factor(0.125, "q", "tensor")
    assert told(judge_scale(make_call(0.125, norm="rms", factors=(q,)))) == ("unexplained", "model_dim")
    half = Factor(0.125**0.5, "q", "tensor"), Factor(0.125**0.5, "k", "tensor")
    assert judge_scale(make_call(0.125, norm="rms", factors=half)).verdict == "declared"


@each("effective, verdict", [(10.0, "declared"), (14.3, "declared"), (0.125, "unexplained"), (0.3, "unexplained")])
def test_the_fixed_gain_of_a_cosine(make_call, effective, verdict):
    assert judge_scale(make_call(effective, norm="l2")).verdict == verdict
    assert judge_scale(make_call(effective, norm="rms")).verdict == "unexplained"


def test_fixed_gains_of_a_cosine_by_head_and_by_layer(make_call):
    heads = make_call(10.0, norm="l2", per_head=(8.0, 9.0, 11.0, 12.0))
    assert "gain 8 to 12" in judge_scale(heads).declared_by
    calls = [make_call(15.0 / (layer + 1), norm="l2", site=f"layers.{layer}.attn") for layer in range(3)]
    assert [judged.mistake for judged in judge_all(calls, nn.Module())][1:] == ["layer_index", "layer_index"]
