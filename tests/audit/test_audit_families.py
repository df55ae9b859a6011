"""No false alarm on what is right: every family of `tests.hf.families`, variants of them, and other code.

Every attention is counted, its verdict is exact or declared by what the table names, and no finding is above a note.
"""

import importlib.util
import sys
import types
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from sqrtdk._check import check
from sqrtdk.errors import ModelError

hf = pytest.importorskip("transformers")
from tests.attentions.each import each  # noqa: E402
from tests.hf.families import (  # noqa: E402  (imports transformers)
    ATTENTION_CALLS,
    CASES,
    EAGER_ONLY,
    FAMILIES,
    GROUPED,
    LLAMA,
    TEXT,
    build,
)
from tests.support.needs import at_least  # noqa: E402

SIZES = {"seq_len": 24, "batch": 2}

# What has to be named as the declaration; a family that is not here is exact.
DECLARED = {
    "gpt_neo": "family gpt_neo: scale 1.0",
    "gemma2": "config.query_pre_attn_scalar = 20",
    "gemma3": "config.query_pre_attn_scalar = 20",
    "granite": "config.attention_multiplier = 0.0625",
    "deepseek_v2": "mscale_all_dim 0.707",
    "deepseek_v3": "mscale_all_dim 0.707",
    "t5": "family t5: scale 1.0",
    "deberta_v2": "family deberta-v2: 1/sqrt(head_dim * terms)",
    "swinv2": "attention.self.logit_scale (learned)",
}
NOT_MEASURED = {"falcon": "fixes its attention when it is built"}  # so eager and sdpa can't be compared in one model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [1.0] * 8,
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 32,
}
GPT2 = TEXT | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
FALCON = TEXT | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VARIANTS = {
    "llama_yarn": lambda: hf.LlamaConfig(**GROUPED, rope_parameters=dict(YARN)),
    "llama_bias": lambda: hf.LlamaConfig(**GROUPED, attention_bias=True),
    "phi3_longrope": lambda: hf.Phi3Config(
        **GROUPED, original_max_position_embeddings=32, rope_parameters=dict(LONGROPE)
    ),
    "gpt2_inverse_layer": lambda: hf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt2_no_scale": lambda: hf.GPT2Config(**GPT2, scale_attn_weights=False),
    "falcon_alibi": lambda: hf.FalconConfig(**FALCON, alibi=True, multi_query=False),
    "mpt": lambda: hf.MptConfig(vocab_size=160, d_model=64, n_heads=4, n_layers=2, max_seq_len=128, expansion_ratio=2),
    "mpt_softmax_scale": lambda: hf.MptConfig(
        vocab_size=160, d_model=64, n_heads=4, n_layers=2, expansion_ratio=2, attn_config={"softmax_scale": 0.1}
    ),
    "phi": lambda: hf.PhiConfig(**LLAMA, qk_layernorm=True),
    "gpt_oss": lambda: hf.GptOssConfig(
        **GROUPED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(YARN),
    ),
}
VARIANT_CALLS = dict.fromkeys(VARIANTS, 2) | {"gpt2_inverse_layer": 3, "gpt2_no_scale": 3}
VARIANT_DECLARED = {
    "llama_yarn": "attention factor 1.139 squared",
    "phi3_longrope": "attention factor 1.183 squared",
    "gpt2_inverse_layer": "config.scale_attn_by_inverse_layer_idx",
    "gpt2_no_scale": "config.scale_attn_weights = False",
    "mpt_softmax_scale": "softmax_scale = 0.1",
    "gpt_oss": "attention factor 1.139 squared",
}
SWITCHED = at_least("transformers", "4.57")  # eager and SDPA are compared in a model that is built
EAGER_ONLY_VARIANTS = ("mpt", "mpt_softmax_scale", "gpt_oss")

VARIANT_CASES = [
    (name, attn)
    for name in VARIANTS
    for attn in ("eager", "sdpa")
    if attn == "eager" or name not in EAGER_ONLY_VARIANTS
]


def assert_right(report, calls, declared=None, unmeasured=None):
    """Every attention found, each exact or declared by the text given, and nothing to complain of."""
    assert len(report.calls) == calls
    for judged in report.calls:
        assert judged.verdict in ("exact", "declared"), (judged.call.site, judged.mistake, judged.reason)
        if judged.verdict == "declared":
            assert declared is not None, judged.declared_by
            assert declared in judged.declared_by
    if declared is not None:
        assert "declared" in {judged.verdict for judged in report.calls}
    assert [finding for finding in report.findings if finding.severity != "note"] == []
    expected = (unmeasured, None if SWITCHED else "chooses the attention while it builds")
    missed = [entry.reason for entry in report.not_measured]
    assert [reason for reason in missed if not any(said is not None and said in reason for said in expected)] == []
    assert report.exit_code == 0


def kinds(report):
    return {judged.call.kind for judged in report.calls}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "attn"), CASES)
def test_a_family_is_right(name, attn):
    report = check(build(FAMILIES[name](), attn), **SIZES)
    assert_right(report, ATTENTION_CALLS[name], DECLARED.get(name), NOT_MEASURED.get(name))
    assert kinds(report) == {attn}
    assert report.calls[0].call.stats is not None
    report = check(build(FAMILIES[name](), attn), static=True, **SIZES)
    assert_right(report, ATTENTION_CALLS[name], DECLARED.get(name))
    assert report.mode == "static"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "attn"), VARIANT_CASES)
@each("static", [False, True])
def test_a_variant_is_right(name, attn, static):
    report = check(build(VARIANTS[name](), attn), static=static, **SIZES)
    unmeasured = NOT_MEASURED["falcon"] if name == "falcon_alibi" and not static else None
    assert_right(report, VARIANT_CALLS[name], VARIANT_DECLARED.get(name), unmeasured)
    if name == "gpt_oss":
        assert all(judged.call.sinks for judged in report.calls)
    if name == "gpt2_inverse_layer":
        assert [judged.call.scale.ratio for judged in report.calls] == pytest.approx([1, 1 / 2, 1 / 3])


# --- outside transformers ---


def _x(*shape):
    return torch.randn(2, *shape)


def _decoder(**options):
    pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts a function when it is imported
        from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=32, **options)
    return TransformerWrapper(num_tokens=96, max_seq_len=64, attn_layers=layers), (torch.randint(0, 96, (2, 24)),)


@contextmanager
def vit_pytorch_without_its_init():
    """Import submodules of vit_pytorch past its `__init__`, which imports a package without a CPU build."""
    spec = importlib.util.find_spec("vit_pytorch")
    if spec is None:
        pytest.skip("vit-pytorch is not installed")
    package = types.ModuleType("vit_pytorch")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["vit_pytorch"] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vit_pytorch"]:
            del sys.modules[name]


def _vit(module, name):
    with vit_pytorch_without_its_init():
        cls = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
    model = cls(image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, dim_head=16, mlp_dim=96)
    return model, (_x(3, 32, 32),)


def _torch(name):
    if name == "MultiheadAttention":
        return nn.MultiheadAttention(64, 4, batch_first=True), (_x(24, 64),) * 3
    if name == "Transformer":
        return nn.Transformer(64, 4, 2, 2, 96, batch_first=True), (_x(24, 64),) * 2
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2), (_x(24, 64),)


# name -> (builder of model and inputs, number of attentions, declaration)
OUTSIDE = {
    "nn.MultiheadAttention": (lambda: _torch("MultiheadAttention"), 1, None),
    "nn.TransformerEncoder": (lambda: _torch("TransformerEncoder"), 2, None),
    "nn.Transformer": (lambda: _torch("Transformer"), 2 + 2 * 2, None),
    "x_transformers plain": (lambda: _decoder(), 2, None),
    "x_transformers qk_norm": (
        lambda: _decoder(attn_qk_norm=True),
        2,
        "q/k norm (l2): cosine with fixed gain 10",
    ),
    "x_transformers softclamp": (lambda: _decoder(attn_softclamp_logits=True), 2, None),
    "x_transformers alibi": (lambda: _decoder(alibi_pos_bias=True, alibi_num_heads=4), 2, None),
    "x_transformers rotary": (lambda: _decoder(rotary_pos_emb=True), 2, None),
    "x_transformers gqa": (lambda: _decoder(attn_kv_heads=2), 2, None),
    "x_transformers flash": (lambda: _decoder(attn_flash=True), 2, None),
    "vit_pytorch ViT": (lambda: _vit("vit", "ViT"), 2, None),
    "vit_pytorch SimpleViT": (lambda: _vit("simple_vit", "SimpleViT"), 2, None),
}
SHOWN = {  # what the record has to say beside the scale
    "x_transformers qk_norm": lambda call: call.norm == "l2",
    "x_transformers softclamp": lambda call: call.softcap == 50.0,
    "x_transformers alibi": lambda call: call.bias == "alibi",
    "x_transformers rotary": lambda call: call.rope,
    "x_transformers gqa": lambda call: (call.heads, call.kv_heads) == (4, 2),
    "x_transformers flash": lambda call: call.kind == "sdpa",
}
# it asks for autocast on the device of its ids, and torch has none on meta
NO_META = {"x_transformers rotary": "unsupported scalarType"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_model_outside_transformers_is_right(name):
    made, calls, declared = OUTSIDE[name]
    for train in (False, True):
        model, inputs = made()
        report = check(model.train(train), inputs)
        assert_right(report, calls, declared)
        assert model.training is train
        assert all(SHOWN.get(name, bool)(judged.call) for judged in report.calls)
    model, inputs = made()
    if name in NO_META:
        with pytest.raises(ModelError, match=NO_META[name]):
            check(model, inputs, static=True)
    else:
        assert_right(check(model, inputs, static=True), calls, declared)


def test_the_tables_are_whole(capsys):
    assert FAMILIES.keys() == ATTENTION_CALLS.keys()
    assert DECLARED.keys() | set(EAGER_ONLY) | NOT_MEASURED.keys() <= FAMILIES.keys()
    assert VARIANT_DECLARED.keys() | set(EAGER_ONLY_VARIANTS) <= VARIANTS.keys()
    assert SHOWN.keys() | NO_META.keys() <= OUTSIDE.keys()
    for name in EAGER_ONLY:
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            build(FAMILIES[name](), "sdpa")
    with capsys.disabled():
        print(
            f"\nhealthy models checked: {len(CASES)} ({len(FAMILIES)} families, eager and sdpa), {len(VARIANT_CASES)} "
            f"({len(VARIANTS)} variants), {2 * len(OUTSIDE)} ({len(OUTSIDE)} outside transformers, train and eval); "
            f"and {len(CASES) + len(VARIANT_CASES) + len(OUTSIDE)} on meta"
        )
