"""Every verdict and every mistake, on records made by hand, with the look-alikes of each."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.explanations import judge_scale
from sqrtdk.audit.mistakes import MISTAKES, told_of
from sqrtdk.audit.verdicts import judge_all, strangers
from sqrtdk.tracing.records import Factor
from tests.attentions.each import each
from tests.audit.stranger_modules import module, told


def test_ranks_are_those_of_the_mistakes_that_a_value_shows(make_call):
    by_value = [mistake for mistake in MISTAKES.values() if mistake.values(make_call(model_dim=96))]
    assert sorted(mistake.rank for mistake in by_value) == list(range(1, 1 + len(by_value)))
    assert {mistake.rank for mistake in MISTAKES.values() if mistake not in by_value} == {0}


def written(formula, **values):
    """What a formula like `1/sqrt(h d)` gives: letters side by side are multiplied."""
    return eval(re.sub(r"(?<=[\w)]) (?=\w)", "*", formula), {"sqrt": math.sqrt} | values)


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.rank])
def test_what_a_row_writes_is_what_it_computes(make_call, name):
    mistake, call = MISTAKES[name], make_call(model_dim=96 if name == "derived_head" else 64)
    sizes = {"d": call.head_dim, "h": call.heads, "w": call.model_dim, "d_pad": 32}
    scale = written(mistake.table[0], **sizes)
    assert scale == pytest.approx(next(value for value in mistake.values(call) if math.isclose(value, scale)))
    assert written(mistake.table[1], **sizes) == pytest.approx(scale * call.head_dim**0.5)


def test_the_factor_of_a_layer_is_the_textbook_scale_times_its_ratio():
    row = MISTAKES["layer_index"]
    assert written(row.table[0], l=2, d=16) * 4 == pytest.approx(written(row.table[1], l=2))


@each(
    "effective, verdict",
    [(0.25, "exact"), (0.2524, "exact"), (0.2476, "exact"), (0.2526, "unexplained"), (0.2474, "unexplained")],
)
def test_exact_is_within_one_percent(make_call, effective, verdict):
    assert judge_scale(make_call(effective)).verdict == verdict


def test_quarter_root_on_both_is_exact(make_call):
    assert told(judge_scale(make_call(0.25, factors=(0.5, 0.5)), module(scaling=0.5))) == ("exact", None)


@each("effective, changes, mistake", [
        (1.0, {}, "missing"),
        (1.0, {"factors": ()}, "missing"),
        (1.0, {"kv_heads": 1}, "missing"),  # not the root of one key head
        (4.0, {}, "inverted"),
        (1 / 16, {"factors": (0.25, 0.25)}, "twice"),
        (1 / 16, {}, "twice"),
        (1 / 8, {}, "model_dim"),
        (1 / 8, {"heads": 2, "kv_heads": 2}, "model_dim"),  # 32^-1/2 is by value padding to 32, 64^-1/2 the input's
        (0.5, {}, "head_count"),
        (2**-0.5, {"kv_heads": 2}, "head_count"),
        (24**-0.5, {"padded_head_dim": 24}, "padded_head"),
        (32**-0.5, {"padded_head_dim": 32, "heads": 2, "kv_heads": 2, "model_dim": 32}, "padded_head"),
        (32**-0.5, {}, "padded_head"),
        (128**-0.5, {}, "padded_head"),
        (0.3, {}, "unknown"),
        (0.25 / 3, {}, "unknown"),
    ])  # fmt: skip
def test_each_mistake_is_named(make_call, effective, changes, mistake):
    assert told(judge_scale(make_call(effective, **changes))) == ("unexplained", mistake)


def test_padding_evidence_beats_the_value_alone(make_call):
    sizes = {"heads": 2, "kv_heads": 2, "model_dim": 32}
    assert judge_scale(make_call(32**-0.5, **sizes)).mistake == "model_dim"
    assert judge_scale(make_call(32**-0.5, padded_head_dim=32, **sizes)).mistake == "padded_head"


def test_padded_but_rightly_scaled_is_exact(make_call):
    assert told(judge_scale(make_call(0.25, padded_head_dim=32))) == ("exact", None)


def test_one_over_d_is_twice_by_two_factors_and_else_points_at_mup(make_call):
    two = judge_scale(make_call(1 / 16, factors=(Factor(0.25, "q", "number"), Factor(0.25, "op", "sdpa scale"))))
    one = judge_scale(make_call(1 / 16))
    assert (two.mistake, one.mistake) == ("twice", "twice")
    assert "2 factors" in two.reason
    assert "muP" in one.reason
    number = judge_scale(make_call(1 / 16, factors=(Factor(1 / 16, "op", "sdpa scale"),)))
    unread = judge_scale(make_call(1 / 16, factors=(Factor(None, "logits", "tensor"),)))
    for of_calls, words in (
        ((two,), "it is 1/head_dim, 1/sqrt(head_dim) applied twice"),
        ((number,), "it is 1/head_dim in place of 1/sqrt(head_dim)"),
        ((unread,), "it is 1/head_dim: 1/sqrt(head_dim) applied twice, or 1/head_dim in place of 1/sqrt(head_dim)"),
        ((two, number), "it is 1/head_dim: 1/sqrt(head_dim) applied twice, or 1/head_dim in place of 1/sqrt(head_dim)"),
    ):
        assert told_of("twice", [judged.call for judged in of_calls]).happened == words


def test_model_dim_equal_to_d_squared_is_told_by_the_factors(make_call):
    square = {"heads": 16, "kv_heads": 16, "model_dim": 256}
    assert judge_scale(make_call(1 / 16, **square)).mistake == "model_dim"
    assert judge_scale(make_call(1 / 16, factors=(0.25, 0.25), **square)).mistake == "twice"


def test_mup_is_declared_by_the_config_and_not_by_an_attribute(make_call):
    assert judge_scale(make_call(1 / 16), config={"mup_scale_qk_dot_by_d": True}).verdict == "declared"
    assert judge_scale(make_call(1 / 16), module(scale=1 / 16)).mistake == "twice"
    assert judge_scale(make_call(1 / 16, factors=(0.25, 0.25)), module(scale=1 / 16)).mistake == "twice"


@each("effective, mistake", [(4.0, "inverted"), (0.5, "head_count"), (0.125, "model_dim"), (32**-0.5, "padded_head")])
def test_an_attribute_does_not_excuse_a_signature(make_call, effective, mistake):
    judged = judge_scale(make_call(effective), module(scale=effective))
    assert told(judged) == ("unexplained", mistake)
    assert "attribute scale has that value" in judged.reason


def test_attributes_declare_nothing(make_call):
    """They are what the code does. The verdict names the one that holds the number."""
    for holder, text in (
        (module(scaling=0.3), "scaling"),
        (module(norm_factor=1 / 0.3), "1/norm_factor"),
        (module(scale=torch.tensor(0.3)), "scale"),
        (module(attend=module(scale=0.3)), "attend.scale"),
    ):
        judged = judge_scale(make_call(0.3), holder)
        assert (*told(judged), judged.attribute) == ("unexplained", "unknown", text)
    assert judge_scale(make_call(0.3), module(q_norm=module(scale=0.3))).attribute is None
    assert told(judge_scale(make_call(1.0), module(scaling=1.0))) == ("unexplained", "missing")
    assert told(judge_scale(make_call(1.0), module(use_scale=False))) == ("unexplained", "missing")


def test_a_parameter_of_the_module_is_a_rule(make_call):
    learned = module(scale=nn.Parameter(torch.tensor(0.3)))
    assert judge_scale(make_call(0.3), learned).declared_by == "attribute scale = 0.3 (learned)"
    fresh = module(scale=nn.Parameter(torch.tensor(1.0)))  # and the logits were never multiplied by it
    assert told(judge_scale(make_call(1.0), fresh)) == ("unexplained", "missing")


@pytest.mark.full
@each(
    "scale, mistake",
    [
        (32**-1.0, "twice"), (64**-0.5, "model_dim"), (4**-0.5, "head_count"), (1.0, "missing"),
        (16**-0.5, "derived_head"), (0.1, "unknown"),
    ],
)  # fmt: skip
def test_a_family_of_transformers_has_a_rule(scale, mistake):
    """Llama's is 1/sqrt(head_dim), with a head_dim of its own; another number needs a field."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    for family, config in ((hf.LlamaForCausalLM, hf.LlamaConfig), (hf.Qwen3ForCausalLM, hf.Qwen3Config)):
        model = family(config(**sizes, **heads))
        model.model.layers[0].self_attn.scaling = scale
        report = check(model, seq_len=8)
        (judged,) = report.calls
        assert told(judged) == ("unexplained", mistake)
        (finding,) = (f for f in report.findings if f.severity == "fail")
        assert finding.rule == "declared_vs_actual"
        assert "1/sqrt(head_dim)" in finding.message
        assert mistake == "unknown" or f"({mistake})" in finding.message
        assert f"softmax_scale = {scale:.6g}" in finding.fix
        model.config.softmax_scale = float(f"{scale:.6g}")
        assert check(model, seq_len=8).exit_code == 0


def test_a_users_attention_in_a_family_follows_the_rules_of_its_kind(make_call):
    """QK norm with 1.0 is a rule, but not that of Qwen3's own attention."""
    config = hf.Qwen3Config()
    assert judge_scale(make_call(1.0, norm="rms"), module(), config).verdict == "declared"
    assert judge_scale(make_call(0.3), module(), config).declared_by.startswith("family qwen3: 1/sqrt(head_dim)")
    assert judge_scale(make_call(0.3), module(), config).mistake == "unknown"


@each("effective, word", [(0.0, "scale 0"), (-0.25, "negative"), (-1.0, "negative")])
def test_nothing_excuses_a_scale_of_zero_or_below(make_call, effective, word):
    judged = judge_scale(make_call(effective), module(scale=effective, scaling=effective))
    assert told(judged) == ("unexplained", "unknown")
    assert word in judged.reason


def layers_of(make_call, *scales):
    """Layers with q and k of length 1, where any gain above 1 is a rule; 4 and more are sqrt(head_dim) and others."""
    model = nn.Module()
    model.layers = nn.ModuleList(module(attn=module()) for scale in scales)
    calls = [make_call(scale, site=f"layers.{layer}.attn", norm="l2") for layer, scale in enumerate(scales)]
    return judge_all(calls, model)


def test_a_layer_that_differs_from_its_siblings(make_call):
    def odd(*scales):
        return strangers(layers_of(make_call, *scales))

    assert odd(4.0, 4.0, 10.0, 4.0) == {2: 3}
    assert odd(10.0, 10.0, 10.0, 12.0) == {3: 3}
    assert odd(4.0, 10.0, 4.0, 10.0) == {}  # local and global
    assert odd(9.0, 10.0) == {}
    assert odd(10.0, 10.0, 10.0) == {}
    assert odd(10.0) == {}


def test_one_normed_layer_without_the_scale_of_the_others_is_a_stranger(make_call):
    """A rewrite of Qwen3 whose third layer has `self.scale = 1.0`."""
    calls = [make_call(1.0 if i == 2 else 0.25, site=f"layers.{i}.attn", norm="rms") for i in range(4)]
    assert strangers(judge_all(calls, nn.Module())) == {2: 3}
    assert strangers(judge_all(calls[1:3], nn.Module())) == {1: 1}


def test_a_divisor_that_holds_the_textbook_value_does_not_excuse_the_inverse(make_call):
    assert judge_scale(make_call(4.0), module(scale=0.25)).mistake == "inverted"


def test_learned_gains_are_declared_but_not_a_mistake_beside_them(make_call):
    gain = Factor(7.0, "logits", "parameter attn.logit_scale", (5.0, 6.0, 8.0, 9.0), learned=True)
    judged = judge_scale(make_call(7.0, per_head=gain.per_head, factors=(gain,)))
    assert (judged.verdict, judged.declared_by) == ("declared", "parameter attn.logit_scale (learned)")
    inverted = judge_scale(make_call(28.0, factors=(Factor(7.0, "q", "attn.gain", learned=True), 4.0)))
    assert told(inverted) == ("unexplained", "inverted")
    twice = judge_scale(make_call(7 / 16, factors=(Factor(7.0, "q", "attn.gain", learned=True), 0.25, 0.25)))
    assert told(twice) == ("unexplained", "twice")


def test_a_learned_gain_without_data_is_declared(make_call):
    factor = Factor(None, "logits", "parameter attn.logit_scale", learned=True)
    judged = judge_scale(make_call(None, factors=(factor,), reason="no data on the meta device"))
    assert (judged.verdict, judged.reason) == ("declared", "value not read")


def test_heads_that_differ(make_call):
    heads = (0.25, 0.25, 0.5, 0.5)
    assert told(judge_scale(make_call(0.354, per_head=heads, factors=()))) == ("unexplained", "unknown")
    assert judge_scale(make_call(0.25, per_head=(0.25, 0.2501, 0.25, 0.25))).verdict == "exact"
    assert judge_scale(make_call(0.354, per_head=heads), module(scale=torch.tensor(heads))).verdict == "unexplained"
    learned = module(scale=nn.Parameter(torch.tensor(heads)))
    assert judge_scale(make_call(0.354, per_head=heads), learned).declared_by == "attribute scale (per head) (learned)"


def test_normalised_q_and_k(make_call):
    assert judge_scale(make_call(1.0, norm="rms")).declared_by == "q/k norm (rms): scale 1.0"
    assert judge_scale(make_call(1.0, norm="rms"), module(scaling=0.25)).mistake == "missing"  # held, and dropped
    assert judge_scale(make_call(1.0, norm="rms"), module(scaling=1.0)).verdict == "declared"
    assert judge_scale(make_call(0.25, norm="rms")).verdict == "exact"
    assert judge_scale(make_call(4.0, norm="l2")).verdict == "declared"
    assert judge_scale(make_call(4.0, norm="rms")).mistake == "inverted"
    assert judge_scale(make_call(10.0, norm="l2"), module(scale=10)).verdict == "declared"


def test_gains_of_the_norm_are_no_mistake(make_call):
    gains = (Factor(0.25, "q", "tensor"), Factor(0.25, "k", "tensor"))
    assert (
        judge_scale(make_call(1 / 16, norm="rms", factors=gains)).verdict == "declared"
    )  # rms with d^-1/2 on both is l2
    assert judge_scale(make_call(1 / 16, factors=gains)).mistake == "twice"
    beside = (Factor(2.0, "q", "tensor"), Factor(2.0, "k", "tensor"), 0.25)
    assert judge_scale(make_call(1.0, norm="l2", factors=beside), module(scale=0.25)).verdict == "declared"
    assert judge_scale(make_call(1.0, factors=beside)).mistake == "missing"
    numbers = (Factor(0.25, "q", "number"), Factor(0.25, "op", "sdpa scale"))
    assert judge_scale(make_call(1 / 16, norm="rms", factors=numbers)).mistake == "twice"


def test_unmeasured(make_call):
    assert judge_scale(make_call(None, reason="unknown(foo)")).reason == "unknown(foo)"
    disagree = judge_scale(make_call(0.25, agree=False, reason="symbolic 0.25, numeric 0.3"))
    assert (disagree.verdict, disagree.reason) == ("unmeasured", "symbolic 0.25, numeric 0.3")
    assert judge_scale(make_call(float("nan"))).verdict == "unmeasured"


YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
MSCALE = 0.1 * math.log(40) + 1


@each("key", ["rope_scaling", "rope_parameters"])
@each("as_dict", [True, False])
def test_length_factor(make_call, key, as_dict):
    config = {key: YARN} if as_dict else SimpleNamespace(**{key: YARN})
    right = judge_scale(make_call(0.25 * MSCALE**2, rope=True), config=config)
    assert (right.verdict, "mscale" in right.declared_by) == ("declared", True)
    assert told(judge_scale(make_call(0.25, rope=True), config=config)) == ("unexplained", "length_factor")
    assert told(judge_scale(make_call(0.25 * MSCALE, rope=True), config=config)) == ("unexplained", "unknown")
    assert told(judge_scale(make_call(MSCALE**2, rope=True), config=config)) == ("unexplained", "missing")


def test_layer_index_needs_the_pattern_of_the_layers(make_call):
    model = nn.Module()
    calls = [make_call(0.25 / (layer + 1), site=f"layers.{layer}.attn") for layer in range(4)]
    assert [judged.mistake for judged in judge_all(calls, model)] == [None, "layer_index", "layer_index", "layer_index"]
    same = [make_call(0.125, site=f"layers.{layer}.attn") for layer in range(4)]
    assert {judged.mistake for judged in judge_all(same, model)} == {"model_dim"}
    grows = [make_call(0.25 * (layer + 1), site=f"layers.{layer}.attn") for layer in range(3)]
    assert [judged.mistake for judged in judge_all(grows, model)] == [None, "layer_index", "layer_index"]
    reasons = [judge_all(found, model)[2].reason for found in (calls, grows)]
    assert reasons == ["r falls as 1/(layer + 1) over the layers", "r rises as layer + 1 over the layers"]
    single = make_call(0.125, site="layers.1.attn")
    assert judge_all([single], model)[0].mistake == "model_dim"


@each("second, mistake", [(0.5, "head_count"), (0.125, "model_dim")])
def test_two_layers_show_no_pattern(make_call, second, mistake):
    calls = [make_call(0.25, site="layers.0.attn"), make_call(second, site="layers.1.attn")]
    assert [told(judged) for judged in judge_all(calls, nn.Module())] == [("exact", None), ("unexplained", mistake)]


def test_declared_inverse_layer_rule(make_call):
    config = {"scale_attn_by_inverse_layer_idx": True}
    assert judge_scale(make_call(0.25 / 3), config=config, layer=2).verdict == "declared"
    assert judge_scale(make_call(0.25), config=config, layer=0).verdict == "exact"
    assert told(judge_scale(make_call(0.25), config=config, layer=2)) == ("unexplained", "layer_index")


def test_a_contradicted_declaration_is_unexplained_even_at_the_textbook_value(make_call):
    config = {"query_pre_attn_scalar": 20}
    assert judge_scale(make_call(20**-0.5), config=config).verdict == "declared"
    wrong = judge_scale(make_call(0.25), config=config)
    assert told(wrong) == ("unexplained", "unknown")
    assert wrong.expected == pytest.approx(20**-0.5)
    assert told(judge_scale(make_call(1.0), config=config)) == ("unexplained", "missing")


def test_the_config_is_that_of_the_nearest_module_and_of_the_named_part(make_call):
    text, vision = {"attention_multiplier": 0.3}, {"attention_multiplier": 0.7}
    model = nn.Module()
    model.config = SimpleNamespace(text_config=text, vision_config=vision)
    model.text_model, model.vision_model = nn.Linear(1, 1), nn.Linear(1, 1)
    calls = [make_call(0.3, site="text_model"), make_call(0.7, site="vision_model")]
    assert [judged.verdict for judged in judge_all(calls, model)] == ["declared", "declared"]
    model.text_model.config = {"attention_multiplier": 0.9}
    assert [judged.verdict for judged in judge_all(calls, model)] == ["unexplained", "declared"]
