"""The config readers and the family table, each against a value computed here."""

import importlib
import math

import pytest
from torch import nn

import sqrtdk
from sqrtdk.audit.declared import declared_scale
from sqrtdk.audit.explanations import judge_scale
from sqrtdk.audit.families import FAMILIES, MLA_YARN
from sqrtdk.audit.multipliers import LENGTH_FACTORS, rope_block, yarn_mscale
from sqrtdk.tracing.records import Stage
from tests.attentions.each import each

hf = pytest.importorskip("transformers")


@each(
    "config, expected",
    [
        ({"query_pre_attn_scalar": 144}, 144**-0.5),
        ({"attention_scores_scalar": 168}, 168**-0.5),
        ({"use_attn_scale": True, "attn_scale": 12.0}, 1 / 12),
        ({"use_attn_scale": False, "attn_scale": 12.0}, 1.0),
        ({"use_scale": False}, 1.0),
        ({"rope_adjustments": {"factor": 40.0, "mscale_all_dim": 1.0}}, 0.25 * (0.1 * math.log(40) + 1) ** 2),
        ({"base_seqlen": 256, "proportional_attn": True}, 0.25 * math.sqrt(math.log(24) / math.log(256))),
        ({"attention_multiplier": 0.0078125}, 0.0078125),
        ({"attn_config": {"softmax_scale": 0.2}}, 0.2),
        ({"scale_attn_weights": False}, 1.0),
        ({"mup_use_scaling": True, "mup_attn_multiplier": 2.0}, 2 / 16),
        ({"mup_scale_qk_dot_by_d": True}, 1 / 16),
        ({"key_multiplier": 0.5}, 0.125),
        ({"qk_scale_factor": 3.87}, 3.87 / 4),
        ({"model_type": "t5"}, 1.0),
        ({"model_type": "gpt_neo"}, 1.0),
        ({"model_type": "zamba2"}, 8**-0.5),
        ({"model_type": "longcat_flash", "hidden_size": 64, "q_lora_rank": 16}, 0.5),
        ({"model_type": "longcat_flash"}, 0.25),
        ({"model_type": "cvt"}, 64**-0.5),
        ({"model_type": "inkling_text"}, 1 / 16),
        ({"rope_scaling": {"mscale": 1.2}}, 0.25 * 1.44),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, 0.25 * (0.1 * math.log(8) + 1) ** 2),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": 1.5}}, 0.25 * 2.25),
        ({"rope_factor": 40, "mscale": 1.0}, 0.25 * (0.1 * math.log(40) + 1) ** 2),
        (
            {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
            1 / 3,
        ),
    ],
)
def test_declared_value(make_call, config, expected):
    found = declared_scale(make_call(rope=True), None, config, layer=2)
    assert found.values == pytest.approx((expected,))


@each(
    "config",
    [
        None,
        {},
        {"query_pre_attn_scalar": None, "attention_multiplier": None},
        {"query_pre_attn_scalar": "256", "attention_multiplier": True, "softmax_scale": float("nan")},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        {"attention_scores_scalar": -4, "attn_scale": 12.0, "use_scale": 0, "scaling": False},
        {"attention_scores_scalar": None, "use_attn_scale": True, "attn_scale": -1.0},  # its own sign for the default
        {"base_seqlen": 256, "proportional_attn": False},
        {"base_seqlen": 1},
        {"rope_adjustments": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        {"use_logn_attn": True, "seq_length": 24},
        {"use_logn_attn": False, "seq_length": 8},
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_scaling": {"type": "yarn", "factor": 1.0}},
    ],
)
def test_nothing_declared(make_call, config):
    assert declared_scale(make_call(rope=True), None, config, layer=2) is None


@each("own", [False, True])
def test_an_attention_factor_of_one_is_a_declaration(make_call, own):
    """YaRN's formula gives another factor, which such a config switches off."""
    block = YARN | {"attention_factor": 1.0}
    config = {"rope_scaling": block} if own else hf.LlamaConfig(**LLAMA, rope_parameters=dict(block))
    stages = (Stage("q", "rope", ""), Stage("k", "rope", ""))
    right = judge_scale(make_call(0.25, rope=True, stages=stages), None, config)
    wrong = judge_scale(make_call(0.25 * (0.1 * math.log(4.0) + 1) ** 2, rope=True, stages=stages), None, config)
    assert (right.verdict, wrong.verdict) == ("exact", "unexplained")
    assert "attention_factor = 1" in wrong.declared_by
    assert "declared 0.25, the run applied 0.3241" in wrong.reason


def test_disentangled_terms(make_call):
    found = declared_scale(make_call(terms=3, score="disentangled"), None, {"model_type": "deberta-v2"})
    assert found.values == pytest.approx((48**-0.5,))


def test_learned_family_admits_any_value(make_call):
    assert declared_scale(make_call(), None, {"model_type": "swinv2"}).values == ()


def test_a_family_rule_may_hold_for_one_class_only(make_call):
    config = {"model_type": "evolla"}
    assert declared_scale(make_call(), None, config) is None
    assert declared_scale(make_call(module_class="EvollaSequenceAlignerCrossAttention"), None, config).values == (0.5,)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}


def test_a_norm_after_the_rotation_takes_the_factor_away():
    sizes = {
        "vocab_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = hf.NanoChatConfig(**LLAMA, **sizes, rope_parameters=dict(YARN))
    report = sqrtdk.check(hf.NanoChatForCausalLM(config))
    (call,) = report.calls
    assert call.formula == "softmax(0.25 * rms(rope(q)).rms(rope(k)) + causal)"
    assert (call.call.rope, call.verdict, report.findings) == (True, "exact", ())


@each("own", [False, True])
@each("normed, power", [("", 2), ("q", 1), ("k", 1), ("qk", 0)])
def test_each_side_that_is_not_normed_again_has_the_factor(make_call, own, normed, power):
    gain = 0.1 * math.log(4.0) + 1.0
    config = {"rope_scaling": dict(YARN), **LLAMA} if own else hf.LlamaConfig(**LLAMA, rope_parameters=dict(YARN))
    stages = [Stage(side, name, "") for side in "qk" for name in ("rope", *("norm" if side in normed else "",)) if name]
    found = declared_scale(make_call(rope=True, stages=tuple(stages)), None, config)
    assert found is None if power == 0 else found.values == pytest.approx((0.25 * gain**power,))


def test_the_rows_of_rope_types_give_what_transformers_computes():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lists = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
    block = YARN | lists | {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert {"yarn", "longrope", "llama3", "linear"} <= set(ROPE_INIT_FUNCTIONS)
    for rope_type, compute in ROPE_INIT_FUNCTIONS.items():
        config = hf.LlamaConfig(**LLAMA, rope_parameters=block | {"rope_type": rope_type})
        _, gain = compute(config, "cpu")
        read = LENGTH_FACTORS.get(rope_type, lambda block: 1.0)
        assert read(rope_block(config, None, None)) == pytest.approx(gain), rope_type


@each("other, rope_type", [("deepseek_yarn", "yarn"), ("su", "longrope")])
def test_a_rope_type_of_two_names_is_one_row(other, rope_type):
    assert LENGTH_FACTORS[other] is LENGTH_FACTORS[rope_type]


def test_llama_ignores_mscale_all_dim_in_the_softmax_and_deepseek_does_not(make_call):
    block = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
    llama = hf.LlamaConfig(**LLAMA, rope_parameters=dict(block))
    assert declared_scale(make_call(rope=True), None, llama) is None
    deepseek = hf.DeepseekV3Config(**LLAMA, rope_parameters=dict(block))
    square = yarn_mscale(4.0, 0.7) ** 2
    assert declared_scale(make_call(rope=True), None, deepseek).values == pytest.approx((0.25 * square,))


def test_a_length_factor_is_of_rotated_calls_alone(make_call):
    config = hf.LlamaConfig(**LLAMA, rope_parameters=dict(YARN))
    assert declared_scale(make_call(rope=True), None, config) is not None
    assert declared_scale(make_call(rope=False), None, config) is None


def test_partial_rotation_admits_what_lies_between(make_call):
    config = hf.LlamaConfig(**LLAMA, rope_parameters=YARN | {"partial_rotary_factor": 0.5})
    found = declared_scale(make_call(rope=True), None, config)
    assert found.interval
    assert found.values == pytest.approx((0.25, 0.25 * yarn_mscale(4.0) ** 2))


def test_rope_by_layer_type(make_call):
    config = {
        "rope_parameters": {"full": YARN, "sliding": {"rope_type": "default"}},
        "layer_types": ["full", "sliding"],
    }
    assert declared_scale(make_call(rope=True), None, config, layer=0) is not None
    assert declared_scale(make_call(rope=True), None, config, layer=1) is None
    module = nn.Module()
    module.layer_type = "full"
    assert declared_scale(make_call(rope=True), module, config, layer=1) is not None


def test_temperature_by_position_is_an_interval_that_starts_past_the_floor(make_call):
    config = {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8}
    assert declared_scale(make_call(key_len=24), None, config).values == pytest.approx(
        (0.25, 0.25 * (1 + 0.1 * math.log(4)))
    )
    assert declared_scale(make_call(key_len=4), None, config) is None


@each("name", sorted(set(FAMILIES) | MLA_YARN))
def test_every_family_of_the_tables_exists(name):
    known = {"kimi_k2", "diffusion_gemma_text"}  # not of transformers, or of a later release
    source = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    assert name in source or name in known or name.rpartition("_")[0] in source or name.split("_")[0] in source


def test_logarithm_of_the_position_is_an_interval_that_starts_past_the_trained_length(make_call):
    found = declared_scale(make_call(key_len=64), None, {"use_logn_attn": True, "seq_length": 8})
    assert found.interval
    assert found.values == pytest.approx((0.25, 0.25 * 2.0))  # log_8 64 = 2


def test_no_scaling_explains_a_run_without_a_scale_and_promises_nothing(make_call):
    assert declared_scale(make_call(1.0), None, {"scaling": False}).values == (1.0,)
    assert declared_scale(make_call(0.25), None, {"scaling": False}) is None
    inputs = hf.TimeSeriesTransformerConfig(prediction_length=4, scaling=False)  # of the series, not of the scores
    assert declared_scale(make_call(1.0), None, inputs) is None


def test_a_config_that_raises_is_no_declaration(make_call):
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError(name)

    assert declared_scale(make_call(), None, Odd()) is None
