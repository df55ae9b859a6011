"""Strangers' modules and odd records: nothing crashes the audit, and nothing unrelated excuses a mistake."""

import dataclasses
import math
import types
import typing
import warnings

import pytest
import torch
from torch import nn

from sqrtdk.audit.attributes import scale_attributes
from sqrtdk.audit.check import check
from sqrtdk.audit.configs import field, held, module_at, number, present
from sqrtdk.audit.context import Context, Rerun
from sqrtdk.audit.declared import declared
from sqrtdk.audit.families import FAMILIES
from sqrtdk.audit.layers import layer_of
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.verdicts import judge, judge_all
from sqrtdk.errors import ModelError
from sqrtdk.tracing.records import AttentionCall, Factor, Mask, Scale, Stage

ROOT = 8**-0.5


class Attention(nn.Module):
    """Self-attention with 4 heads of 8; `scale` is a number, or the name of what holds it."""

    def __init__(self, scale=ROOT, width=8):
        super().__init__()
        self.num_heads, self.width, self.number = 4, width, scale
        self.q, self.k, self.v = nn.Linear(32, 4 * width), nn.Linear(32, 4 * width), nn.Linear(32, 32)

    def logits(self, q, k):
        return q @ k.mT * (getattr(self, self.number) if isinstance(self.number, str) else self.number)

    def forward(self, x):
        q, k = (part(x).view(*x.shape[:2], 4, self.width).transpose(1, 2) for part in (self.q, self.k))
        v = self.v(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return (self.logits(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


def module(**attributes):
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def told(judged):
    return judged.verdict, judged.mistake


@pytest.fixture
def x():
    return torch.randn(1, 6, 32)


# --- no head dimension, or no product of q and k ---


class Additive(Attention):
    def logits(self, q, k):
        return torch.tanh(q[:, :, :, None] + k[:, :, None]).sum(-1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("made", [lambda: Attention(1.0, width=0), Additive])
def test_nothing_to_scale_is_unmeasured(x, made, static):
    report = check(made(), x, static=static)
    (judged,) = report.calls
    assert told(judged) == ("unmeasured", None)
    assert "q . k" in judged.reason or "q and k" in judged.reason
    assert [(f.rule, f.severity) for f in report.findings] == [("unmeasured", "note")] * (made is Additive)


@pytest.mark.parametrize("effective", [1.0, 0.0, None])
@pytest.mark.parametrize("config", [None, {"model_type": "zamba2"}, {"mup_use_scaling": True}])
def test_a_head_without_dimensions_is_unmeasured_whatever_is_declared(make_call, effective, config):
    call = make_call(effective, head_dim=0)
    assert told(judge(call, module(scale=1.0, temperature=1.0), config)) == ("unmeasured", None)
    model = module(scale=1.0, temperature=1.0)
    context = Context(model, judge_all([call], model), "dynamic", rerun=lambda *_: Rerun((call,), ()))
    assert [entry for rule in RULES.values() for entry in rule(context)] == []


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_no_family_divides_by_nothing(make_call, name):
    call = make_call(1.0, head_dim=0, heads=0, terms=0)
    assert all(math.isnan(value) or value == 1.0 for value in FAMILIES[name].values(call, {}))


# --- records with gaps ---

OPTIONAL = [
    (kind, name)
    for kind in (AttentionCall, Scale, Mask)
    for name, hint in typing.get_type_hints(kind).items()
    if isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
]


def full(make_call, make_stats):
    """A call that has everything, all of it wrong."""
    call = make_call(
        1.0, stats=make_stats(max_logit=2e4, saturated=1.0, entropy_nats=0.01), future_weight=0.5, bias="alibi",
        bias_scaled_by=0.25, norm="rms", softcap=30.0, max_product=1e5, output_rms=1.0, stats_reason="",
        mask=Mask("causal", "float", 3, 3, 0.5, -1e4, 0.25, 0, 23, True, 0),
    )  # fmt: skip
    numeric = dataclasses.replace(call.scale, numeric=1.0, r_squared=1.0, per_head=(1.0,) * 4, agree=True, reason="")
    return dataclasses.replace(call, scale=numeric, product_at="port.py:3", softmax_at="port.py:4")


def without(call, kind, name):
    if kind is AttentionCall:
        return dataclasses.replace(call, **{name: None})
    part = "scale" if kind is Scale else "mask"
    return dataclasses.replace(call, **{part: dataclasses.replace(getattr(call, part), **{name: None})})


def test_the_fields_that_may_be_none_are_those_of_the_records():
    assert {"mask", "stats", "future_weight", "model_dim", "effective", "fill", "blind_rows"} <= {
        n for _, n in OPTIONAL
    }


@pytest.mark.parametrize(("kind", "name"), OPTIONAL, ids=[f"{k.__name__}.{n}" for k, n in OPTIONAL])
def test_any_field_may_be_none(make_call, make_stats, kind, name):
    whole = full(make_call, make_stats)
    call = without(whole, kind, name)
    assert call != whole
    model = nn.Module()
    model.layers = nn.ModuleList([module(attn=module(is_causal=True, scaling=0.25, softcap=50.0))])
    context = Context(model, judge_all([call], model), "dynamic", rerun=lambda *_: Rerun((call,), ()), ran=frozenset())
    found = [entry for rule in RULES.values() for entry in rule(context)]
    assert ("future keys" in "".join(entry.message for entry in found)) is (name != "future_weight")
    assert ("logit of" in "".join(entry.message for entry in found)) is (name != "stats")


def test_unread_factors_name_no_mistake(make_call):
    learned = Factor(1.0, "logits", "parameter attn.gain", learned=True)
    judged = judge(make_call(0.5, factors=(learned, Factor(None, "q", "tensor"))))
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


@pytest.mark.parametrize(
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
@pytest.mark.parametrize("name", ["q", "act", "c_attn", "attn_act"])
def test_a_strange_child_excuses_no_missing_scale(make_call, name, child):
    made = child()
    holder = module(**{name: made})
    assert scale_attributes(holder, 4) == ()
    assert told(judge(make_call(1.0), holder)) == ("unexplained", "missing")


def test_another_attention_beneath_declares_nothing(make_call):
    beneath = Attention()
    beneath.scale = 1.0
    assert told(judge(make_call(1.0), module(attn=beneath))) == ("unexplained", "missing")


@pytest.mark.parametrize(("name", "verdict"), [("act", "unexplained"), ("q", "unexplained"), ("attn_fn", "declared")])
def test_a_child_of_no_telling_class_is_known_by_its_name(make_call, name, verdict):
    assert judge(make_call(1.3), module(**{name: Booster(1.3)})).verdict == verdict


def test_a_lora_layer_excuses_no_missing_scale_in_a_run(x):
    model = Attention(1.0)
    model.v = LoraLinear(32, 32)
    assert told(check(model, x).calls[0]) == ("unexplained", "missing")


@pytest.mark.parametrize("name", ["attend", "core_attention", "attn_fn", "softmax", "scaled_dot_product", "scale"])
def test_a_child_that_attends_declares(make_call, name):
    assert judge(make_call(10.0), module(**{name: module(scale=10)})).declared_by == f"attribute {name}.scale = 10"


def test_odd_attributes_are_no_scales(x):
    model = Attention()
    model.scale, model.scaling, model.gain = 10**400, torch.ones(4).to_sparse(), torch.tensor(3)
    assert scale_attributes(model, 4) == ()
    assert [judged.verdict for judged in check(model, x).calls] == ["exact"]
    assert number({"scale": 10**400}, "scale") is None


# --- TorchScript, and modules that raise when they are asked ---


class StrangeError(Exception):
    """Of no built-in kind that a reader of attributes would expect."""


class Hostile(Attention):
    error: type[Exception] = RuntimeError

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise self.error(name) from None


class Strange(Hostile):
    error = StrangeError


class Lenient(Attention):
    """It has an answer to everything."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None


class Answering(Attention):
    """Whatever it is asked for, it can be called."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return lambda *_: None


class Itself(Attention):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self


@pytest.mark.parametrize("attn", [None, "both"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", [Hostile, Strange, Lenient, Answering, Itself])
def test_a_module_whose_getattr_is_odd(x, kind, depth, attn):
    model = kind(1.0) if depth == 0 else Net(kind(1.0), kind())
    report = check(model, x, attn=attn)
    assert [told(judged) for judged in report.calls] == [("unexplained", "missing"), ("exact", None)][: depth + 1]
    assert {f.rule for f in report.findings} - {"flat"} == {"scale_ledger"}


@pytest.mark.parametrize("kind", [Hostile, Strange])
def test_a_module_that_cannot_be_copied_to_meta_is_one_clear_error(x, kind):
    with pytest.raises(ModelError, match="can't be copied to the meta device"):
        check(kind(), x, static=True)


def test_the_readers():
    hostile = Net(Strange())
    assert field(hostile, "parts.0.nothing") is None
    assert not present(hostile.parts[0], "nothing")
    assert present(hostile.parts[0], "v")
    assert held(hostile.parts[0])["width"] == 8
    assert held(3) == {}
    assert module_at(hostile, "parts.0.v") is hostile.parts[0].v
    assert module_at(hostile, "") is hostile
    assert module_at(hostile, "parts.0.number") is None
    assert module_at(hostile, "parts.7") is None


def test_a_mapping_that_raises_is_no_config(make_call):
    class Odd(dict):
        def get(self, *_):
            raise StrangeError

    assert declared(make_call(), None, Odd(attention_multiplier=0.5)) is None


class Scriptable(nn.Module):
    def __init__(self, scale: float = ROOT):
        super().__init__()
        self.qkv, self.q_norm, self.scale = nn.Linear(32, 96), nn.LayerNorm(8), scale

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, [3, 4, 8]).permute(2, 0, 3, 1, 4)
        logits = self.q_norm(qkv[0]) @ qkv[1].transpose(-1, -2) * self.scale
        return (logits.softmax(-1) @ qkv[2]).transpose(1, 2).flatten(2)


def script(made, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(made)


def traced(made, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(made, x)


@pytest.mark.parametrize("compiled", [script, traced])
@pytest.mark.parametrize(("scale", "verdicts"), [(ROOT, {"exact"}), (0.3, {"declared", "unexplained"})])
def test_a_torchscript_attention_is_audited(x, compiled, scale, verdicts):
    model = Net(Attention(), compiled(Scriptable(scale), x))
    report = check(model, x)
    assert [judged.call.site for judged in report.calls] == ["parts.0", "parts.1"]
    assert report.calls[0].verdict == "exact"
    assert report.calls[1].verdict in verdicts  # a traced module holds its scale as a constant of the graph
    assert not {"unused", "responsiveness"} & {f.rule for f in report.findings}
    assert not any("responsiveness" in entry.reason for entry in report.not_measured)


def test_a_scripted_scale_is_a_declaration_and_a_module_below_it_is_found(x):
    model = Net(script(Scriptable(0.3), x))
    assert check(model, x).calls[0].declared_by == "attribute scale = 0.3"
    assert isinstance(module_at(model, "parts.0.q_norm"), nn.Module)
    assert told(check(Net(script(Scriptable(8**0.5), x)), x).calls[0]) == ("unexplained", "inverted")


@pytest.mark.parametrize("freeze", [False, True])
def test_torchscript_beside_an_attention_is_left_alone(x, freeze):
    beside = script(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)), x)
    if freeze:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            beside = torch.jit.freeze(beside.eval())
    model = Net(Attention(), beside)
    report = check(model, x)
    assert [judged.verdict for judged in report.calls] == ["exact"]
    assert freeze or beside.training


def test_torchscript_cannot_be_copied_to_meta(x):
    with pytest.raises(ModelError, match=r"parts\.1 is TorchScript") as caught:
        check(Net(Attention(), script(Scriptable(), x)), x, static=True)
    assert "without static" in caught.value.hint


# --- what normalised q and k, and gains, declare ---

BOTH = (Stage("q", "norm", "l2"), Stage("k", "norm", "l2"))


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize(
    ("effective", "norm", "mistake"), [(1.0, "rms", "missing"), (4.0, "l2", "inverted"), (10.0, "l2", "unknown")]
)
def test_a_norm_declares_only_on_both_sides(make_call, side, effective, norm, mistake):
    one = make_call(effective, norm=norm, stages=(Stage(side, "norm", norm),))
    both = make_call(effective, norm=norm, stages=BOTH)
    assert told(judge(one)) == ("unexplained", mistake)
    assert judge(both).verdict == "declared"


def test_a_norm_on_q_only_in_a_run(x):
    class Normed(Attention):
        def logits(self, q, k):
            k = nn.functional.normalize(k, dim=-1) if self.width == self.number else k
            return nn.functional.normalize(q, dim=-1) @ k.mT * 8

    assert told(check(Normed(), x).calls[0]) == ("unexplained", "unknown")
    both = check(Normed(8), x).calls[0]
    assert told(both) == ("declared", None)
    assert both.declared_by == "q/k norm (l2): cosine with fixed gain 8 (Henry et al. 2020, QKNorm)"


def test_a_norm_that_runs_on_one_side_leaves_the_other_idle(make_call):
    model = nn.Module()
    model.layers = nn.ModuleList([module(attn=module(q_norm=nn.LayerNorm(4), k_norm=nn.LayerNorm(4)))])

    def idle(stages):
        calls = judge_all([make_call(norm="layer", stages=stages)], model)
        return [f.message for f in RULES["unused"](Context(model, calls, "dynamic", ran=frozenset({q_norm})))]

    q_norm = "layers.0.attn.q_norm"
    assert idle((Stage("q", "norm", "layer"),)) == ["k_norm is built but never runs"]
    assert idle((Stage("q", "norm", "layer"), Stage("k", "norm", "layer"))) == []


@pytest.mark.parametrize(
    ("fixed", "mistake"), [(0.125, "model_dim"), (0.5, "head_count"), (24**-0.5, "padded_head"), (0.3, None)]
)
@pytest.mark.parametrize("heads", [None, (1.0,) * 4])
def test_a_learned_gain_of_one_excuses_no_mistake(make_call, fixed, mistake, heads):
    changes = {"padded_head_dim": 24, "norm": "rms"}
    one = Factor(1.0, "logits", "parameter attn.gain", heads, learned=True)
    verdict = "unexplained" if mistake else "declared"
    assert told(judge(make_call(fixed, factors=(one, fixed), **changes))) == (verdict, mistake)
    two = Factor(3.0, "logits", "parameter attn.gain", heads and (1.0, 1.0, 9.0, 9.0), learned=True)
    assert judge(make_call(3 * fixed, factors=(two, fixed), **changes)).verdict == "declared"
    spread = Factor(1.0, "logits", "parameter attn.gain", (0.5, 0.5, 2.0, 2.0), learned=True)
    assert judge(make_call(fixed, factors=(spread, fixed), **changes)).verdict == "declared"


def test_a_gain_on_one_side_is_no_norm_of_both(make_call):
    q = Factor(0.125, "q", "tensor")
    assert told(judge(make_call(0.125, norm="rms", factors=(q,)))) == ("unexplained", "model_dim")
    half = Factor(0.125**0.5, "q", "tensor"), Factor(0.125**0.5, "k", "tensor")
    assert judge(make_call(0.125, norm="rms", factors=half)).verdict == "declared"


@pytest.mark.parametrize(
    ("effective", "verdict"), [(10.0, "declared"), (14.3, "declared"), (0.125, "unexplained"), (0.3, "unexplained")]
)
def test_the_fixed_gain_of_a_cosine(make_call, effective, verdict):
    assert judge(make_call(effective, norm="l2")).verdict == verdict
    assert judge(make_call(effective, norm="rms")).verdict == "unexplained"


def test_fixed_gains_of_a_cosine_by_head_and_by_layer(make_call):
    heads = make_call(10.0, norm="l2", per_head=(8.0, 9.0, 11.0, 12.0))
    assert "gain 8 to 12" in judge(heads).declared_by
    calls = [make_call(15.0 / (layer + 1), norm="l2", site=f"layers.{layer}.attn") for layer in range(3)]
    assert [judged.mistake for judged in judge_all(calls, nn.Module())][1:] == ["layer_index", "layer_index"]


# --- configs of strangers ---


@pytest.mark.parametrize(
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
    assert declared(make_call(rope=True), None, config, layer=1) is None


def test_a_length_factor_of_zero_is_a_contradiction(make_call):
    config = {"rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": 0.0}}
    assert judge(make_call(rope=True), config=config).verdict == "unexplained"
    assert judge(make_call(1.0, rope=True), config=config).mistake == "missing"


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


# --- inputs without anything, and the meta device ---


class Reshaping(Attention):
    def forward(self, x):
        return super().forward(x.view(x.shape[0], -1, 32))  # ambiguous when there is nothing


class Fused(Attention):
    def forward(self, x):
        q, k = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k))
        return nn.functional.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", [Attention, Reshaping, Fused])
@pytest.mark.parametrize("shape", [(0, 6, 32), (1, 0, 32), (0, 0, 32)])
def test_empty_inputs_are_named(kind, shape, static):
    with pytest.raises(ModelError, match="nothing to measure") as caught:
        check(kind(1.0), torch.randn(shape), static=static)
    assert f"0 {shape}" in str(caught.value)
    assert "at least one row and one token" in caught.value.hint


def test_an_empty_input_beside_a_full_one_is_no_error(x):
    class Two(Attention):
        def forward(self, x, extra):
            return super().forward(x)

    assert check(Two(), (x, torch.randn(0, 3))).calls[0].verdict == "exact"


@pytest.mark.parametrize("place", ["buffer", "plain"])
@pytest.mark.parametrize(
    ("value", "verdict", "mistake"),
    [(ROOT, "exact", None), (0.3, "declared", None), (8**0.5, "unexplained", "inverted")],
)
def test_a_scale_in_a_buffer_is_read_on_meta(x, place, value, verdict, mistake):
    model = Attention("scale")
    if place == "buffer":
        model.register_buffer("scale", torch.tensor(value))
    else:
        model.scale = torch.tensor(value)
    kept = model.scale
    report = check(model, x, static=True)
    assert (report.mode, told(report.calls[0])) == ("static", (verdict, mistake))
    assert model.scale is kept
    assert not model.scale.is_meta


@pytest.mark.parametrize("place", ["buffer", "plain"])
@pytest.mark.parametrize("shape", [(1,), (4, 1, 1)])
def test_a_scale_in_a_larger_buffer_is_unmeasured_on_meta(x, place, shape):
    model = Attention("scale")
    if place == "buffer":
        model.register_buffer("scale", torch.full(shape, ROOT))
    else:
        model.scale = torch.full(shape, ROOT)
    judged = check(model, x, static=True).calls[0]
    assert judged.verdict == "unmeasured"
    assert "no data on the meta device" in judged.reason
    assert check(model, x).calls[0].verdict == "exact"


def test_static_is_static_without_weights_and_for_a_model_that_is_on_meta_already(x):
    class Bare(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT * ROOT).softmax(-1) @ v

    report = check(Bare(), tuple(torch.randn(3, 1, 4, 6, 8)), static=True)
    assert (report.mode, report.calls[0].verdict, report.calls[0].call.stats) == ("static", "exact", None)
    for model in (Attention().to("meta"), Lenient().to("meta")):
        report = check(model, x)
        assert (report.mode, report.calls[0].verdict) == ("static", "exact")


def test_a_counter_counts_the_forward_passes(x):
    """As `check` says of itself: it restores what the audit sets, not what a forward pass does."""

    class Counting(Attention):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    model = Counting()
    check(model, x)
    assert int(model.seen) == 1
    check(model, x, static=True)
    assert int(model.seen) == 1
