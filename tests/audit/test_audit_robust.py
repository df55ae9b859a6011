"""Strangers' modules and odd records: nothing crashes the audit, and nothing unrelated excuses a mistake."""

import dataclasses
import math
import types
import typing
import warnings

import pytest
import torch
from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.attributes import scale_attributes
from sqrtdk.audit.configs import number_at
from sqrtdk.audit.context import Context, Rerun
from sqrtdk.audit.declared import declared_scale
from sqrtdk.audit.explanations import judge_scale
from sqrtdk.audit.families import FAMILIES
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.verdicts import judge_all, layer_of
from sqrtdk.tracing.records import AttentionCall, EffectiveScale, Factor, Mask
from tests.attentions.each import each
from tests.audit.stranger_modules import Attention, module, told


@pytest.fixture
def x():
    return torch.randn(1, 6, 32)


# --- no head dimension, or no product of q and k ---


class Additive(Attention):
    def logits(self, q, k):
        return torch.tanh(q[:, :, :, None] + k[:, :, None]).sum(-1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each("static", [False, True])
@each("made", [lambda: Attention(1.0, width=0), Additive])
def test_nothing_to_scale_is_unmeasured(x, made, static):
    report = check(made(), x, static=static)
    (judged,) = report.calls
    assert told(judged) == ("unmeasured", None)
    assert "q . k" in judged.reason or "q and k" in judged.reason
    assert [(f.rule, f.severity) for f in report.findings] == [("unmeasured", "note")] * (made is Additive)


@each("effective", [1.0, 0.0, None])
@each("config", [None, {"model_type": "zamba2"}, {"mup_use_scaling": True}])
def test_a_head_without_dimensions_is_unmeasured_whatever_is_declared(make_call, effective, config):
    call = make_call(effective, head_dim=0)
    assert told(judge_scale(call, module(scale=1.0, temperature=1.0), config)) == ("unmeasured", None)
    model = module(scale=1.0, temperature=1.0)
    context = Context(model, judge_all([call], model), "dynamic", rerun=lambda *_: Rerun((call,), ()))
    assert [entry for rule in RULES.values() for entry in rule(context)] == []


@each("name", sorted(FAMILIES))
def test_no_family_divides_by_nothing(make_call, name):
    call = make_call(1.0, head_dim=0, heads=0, terms=0)
    assert all(math.isnan(value) or value == 1.0 for value in FAMILIES[name].values(call, {}))


# --- records with gaps ---

OPTIONAL = [
    (kind, name)
    for kind in (AttentionCall, EffectiveScale, Mask)
    for name, hint in typing.get_type_hints(kind).items()
    if isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
]


def full(make_call, make_stats):
    """A call that has everything, all of it wrong."""
    call = make_call(
        1.0, stats=make_stats(max_logit=2e4, max_above_mean=2e4, saturated=1.0, entropy_nats=0.01),
        future_weight=0.5, bias="alibi",
        bias_scaled_by=0.25, norm="rms", softcap=30.0, max_product=1e5, output_rms=1.0, stats_reason="",
        padding_seen=0, tokens_hidden=0,
        mask=Mask("causal", "float", 3, 3, 0.5, -1e4, 0.25, 0, 23, True, 0),
    )  # fmt: skip
    numeric = dataclasses.replace(call.scale, numeric=1.0, r_squared=1.0, per_head=(1.0,) * 4, agree=True, reason="")
    return dataclasses.replace(call, scale=numeric, product_at="port.py:3", softmax_at="port.py:4")


def without(call, kind, name):
    if kind is AttentionCall:
        return dataclasses.replace(call, **{name: None})
    part = "scale" if kind is EffectiveScale else "mask"
    return dataclasses.replace(call, **{part: dataclasses.replace(getattr(call, part), **{name: None})})


def test_the_fields_that_may_be_none_are_those_of_the_records():
    assert {"mask", "stats", "future_weight", "model_dim", "effective", "fill", "blind_rows"} <= {
        n for _, n in OPTIONAL
    }


@each("kind, name", OPTIONAL)
def test_any_field_may_be_none(make_call, make_stats, kind, name):
    whole = full(make_call, make_stats)
    call = without(whole, kind, name)
    assert call != whole
    model = nn.Module()
    model.layers = nn.ModuleList([module(attn=module(is_causal=True, scaling=0.25, softcap=50.0))])
    context = Context(model, judge_all([call], model), "dynamic", rerun=lambda *_: Rerun((call,), ()), ran=frozenset())
    found = [entry for rule in RULES.values() for entry in rule(context)]
    assert ("future keys" in "".join(entry.message for entry in found)) is (name != "future_weight")
    assert ("above the mean" in "".join(entry.message for entry in found)) is (name != "stats")


def test_unread_factors_name_no_mistake(make_call):
    learned = Factor(1.0, "logits", "parameter attn.gain", learned=True)
    judged = judge_scale(make_call(0.5, factors=(learned, Factor(None, "q", "tensor"))))
    assert told(judged) == ("declared", None)


# --- whose numbers declare a scale ---


class LoraLinear(nn.Linear):
    scaling = None

    def __init__(self, *size):
        super().__init__(*size)
        self.scaling = 1


class LoraWrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.scaling, self.alpha = nn.Linear(4, 4), 1.0, 1.0


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0


class Booster(nn.Module):
    """Nothing in the name says that it attends."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.gain = gain


def quantizer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is on its way out
        from torch.ao.quantization import FakeQuantize
    return FakeQuantize()


@each(
    "child",
    [
        lambda: nn.ELU(),
        quantizer,
        lambda: LoraLinear(4, 4),
        LoraWrapper,
        LayerScale,
        lambda: nn.Sequential(nn.Linear(4, 4)),
    ],
)
@each("name", ["q", "act", "c_attn", "attn_act"])
def test_a_strange_child_excuses_no_missing_scale(make_call, name, child):
    made = child()
    holder = module(**{name: made})
    assert scale_attributes(holder, 4) == ()
    assert told(judge_scale(make_call(1.0), holder)) == ("unexplained", "missing")


def test_another_attention_beneath_declares_nothing(make_call):
    beneath = Attention()
    beneath.scale = 1.0
    assert told(judge_scale(make_call(1.0), module(attn=beneath))) == ("unexplained", "missing")


@each("name, held", [("act", False), ("q", False), ("attn_fn", True)])
def test_a_child_of_no_telling_class_is_known_by_its_name(make_call, name, held):
    judged = judge_scale(make_call(1.3), module(**{name: Booster(1.3)}))
    assert (judged.verdict, judged.attribute is not None) == ("unexplained", held)


def test_a_lora_layer_excuses_no_missing_scale_in_a_run(x):
    model = Attention(1.0)
    model.v = LoraLinear(32, 32)
    assert told(check(model, x).calls[0]) == ("unexplained", "missing")


@each("name", ["attend", "core_attention", "attn_fn", "softmax", "scaled_dot_product", "scale"])
def test_a_child_that_attends_is_named(make_call, name):
    assert judge_scale(make_call(10.0), module(**{name: module(scale=10)})).attribute == f"{name}.scale"


def test_odd_attributes_are_no_scales(x):
    model = Attention()
    model.scale, model.scaling, model.gain = 10**400, torch.ones(4).to_sparse(), torch.tensor(3)
    assert scale_attributes(model, 4) == ()
    assert [judged.verdict for judged in check(model, x).calls] == ["exact"]
    assert number_at({"scale": 10**400}, "scale") is None


# --- configs of strangers ---


@each(
    "config",
    [
        {"rope_scaling": {"type": "longrope", "factor": 8.0, "original_max_position_embeddings": 1}},
        {"rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": 1e200}},
        {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": -3},
        {"attention_multiplier": 1e300, "key_multiplier": 1e300},
        {"query_pre_attn_scalar": 10**400},
    ],
)
def test_a_config_of_impossible_numbers_declares_nothing(make_call, config):
    assert declared_scale(make_call(rope=True), None, config, layer=1) is None


def test_a_length_factor_of_zero_is_a_contradiction(make_call):
    config = {"rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": 0.0}}
    assert judge_scale(make_call(rope=True), config=config).verdict == "unexplained"
    assert judge_scale(make_call(1.0, rope=True), config=config).mistake == "missing"


def test_a_layer_number_below_zero_is_none(make_call):
    assert layer_of(module(layer_idx=-1), 3) == 3
    assert layer_of(module(layer_idx=2), 3) == 2
    model = nn.Module()
    model.layers = nn.ModuleList(module(attn=module(layer_idx=-1)) for _ in range(2))
    calls = [make_call(0.25, site=f"layers.{layer}.attn") for layer in range(2)]
    assert [judged.verdict for judged in judge_all(calls, model)] == ["exact", "exact"]


# --- what a finding says ---


def ledger(make_call, effective, **changes):
    model = nn.Module()
    (finding,) = RULES["scale_ledger"](Context(model, judge_all([make_call(effective, **changes)], model), "dynamic"))
    return finding


def test_the_ledger_says_what_a_person_would(make_call):
    finding = ledger(make_call, 1.0)
    wanted = "scale 1 instead of 1/sqrt(16) = 0.25, 4 times too large: missing, no 1/sqrt(head_dim) was applied"
    assert finding.message == wanted
    assert (finding.value, finding.threshold) == (4.0, 1.0)
    assert ledger(make_call, 0.125).message.startswith("scale 0.125 instead of 1/sqrt(16) = 0.25, 2 times too small: ")
    assert ledger(make_call, -0.25).message.startswith("scale -0.25 instead of 1/sqrt(16) = 0.25: nothing declares")


def test_entropy_is_held_against_entropy(make_call, make_stats):
    model = nn.Module()
    stats = make_stats(keys=64.0, entropy_nats=(0.0, 0.5))
    (finding,) = RULES["entropy"](Context(model, judge_all([make_call(stats=stats)], model), "dynamic"))
    assert finding.value == 0.0
    assert 1.0 < finding.threshold < math.log(64)
    assert f"{finding.threshold:.3g}" in finding.message


def test_a_row_of_a_single_key_has_no_share_in_a_message(x):
    for seq in (1, 2):
        report = check(Attention(1.0), x[:, :seq])
        assert not any("nan" in f.message for f in report.findings)
        assert {f.rule for f in report.findings} == {"scale_ledger"}
