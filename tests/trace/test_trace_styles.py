"""Every style of attention: its record says what the float64 oracle knows of it, with data and without."""

from __future__ import annotations

import math

import pytest
import torch

import sqrtdk
from sqrtdk.tracing import AttentionCall
from tests.attentions.cases import CASES, STYLES, traced
from tests.attentions.each import each
from tests.attentions.styles import DIM, Attention, B, Expected, H, L, scale_tolerance, tolerance
from tests.trace.stats_by_hand import compare

# Styles whose scale is a tensor of values: on the meta device they are not there.
HELD = ("divided_by_0d_tensor", "0d_tensor", "0d_tensor_on_the_left", "buffer")


def records(name: str) -> list[tuple[AttentionCall, Expected]]:
    made, run = traced(name)
    assert len(run.calls) == len(made.expected), (run.not_attention, run.not_measured)
    return list(zip(run.calls, made.expected, strict=True))


def check_oracle(name: str) -> None:
    """The meaning that a style declares gives the same output as the way it is written."""
    made, _ = traced(name)
    if made.output is None:
        assert STYLES[name].dropout
        return
    output = made.run().detach().double()
    error = (output - made.output).abs().max() / made.output.abs().max()
    assert float(error) <= tolerance(made.dtype)


def check_layout(record: AttentionCall, expected: Expected, dtype: torch.dtype) -> None:
    rows, keys = expected.logits.shape[-2:]
    assert (record.site, record.index, record.kind) == (expected.site, 0, expected.style.kind)
    assert (record.batch, record.heads, record.kv_heads) == (B, expected.heads, expected.kv_heads)
    assert (record.query_len, record.key_len) == (rows, keys)
    assert record.head_dim == record.padded_head_dim == expected.head_dim
    assert record.value_dim == expected.style.value_dim
    assert (record.dtype, record.device) == (str(dtype).removeprefix("torch."), "cpu")


def check_scale(record: AttentionCall, expected: Expected, dtype: torch.dtype) -> None:
    scale, true, error = record.scale, expected.scale, scale_tolerance(dtype)
    mean = float(true.abs().log().mean().exp() * true[0].sign())  # the geometric mean where heads differ
    assert scale.symbolic == pytest.approx(mean, rel=error)
    assert scale.effective == scale.symbolic
    assert scale.ratio == pytest.approx(mean * math.sqrt(expected.head_dim), rel=error)
    assert math.prod(f.value for f in scale.factors if f.value is not None) == pytest.approx(mean, rel=error)
    assert scale.per_head == (pytest.approx(true.tolist(), rel=error) if len(true) > 1 else None)
    if not expected.numeric:
        assert scale.numeric is None
        assert scale.reason
        return
    assert (scale.agree, scale.reason) == (True, None)
    assert scale.r_squared is not None
    assert scale.r_squared > 0.999
    if len(true) == 1:
        assert scale.numeric == pytest.approx(mean, rel=error)


def check_terms(record: AttentionCall, expected: Expected) -> None:
    style = expected.style
    assert (record.formula, record.score, record.terms) == (style.formula, style.score, style.terms)
    assert (record.norm, record.rope) == (style.norm, style.rope)
    assert record.softcap == pytest.approx(style.cap)
    assert (record.bias, record.bias_scaled_by) == (style.bias, None)
    assert record.sinks == (style.sinks is not None)
    assert record.dropout == pytest.approx(style.dropout)
    assert record.unknown == ()


def check_mask(record: AttentionCall, expected: Expected) -> None:
    style = expected.style
    if style.mask is None:
        assert record.mask is None
        return
    assert record.mask is not None
    assert (record.mask.kind, record.mask.form) == (style.mask, style.form)
    assert record.mask.blind_rows == int((expected.logits == -math.inf).all(-1).sum())
    assert record.mask.uniform_rows == 0
    assert record.mask.scaled_by == style.scaled_mask
    if record.mask.masked_weight is not None:
        assert record.mask.masked_weight == pytest.approx(0.0, abs=1e-6)


def check_stages(record: AttentionCall, expected: Expected) -> None:
    """The stages run from the projections over the product to the logits, and name what the oracle knows of."""
    style = expected.style
    at = [stage.where for stage in record.stages]
    names = [stage.name for stage in record.stages]
    first = names.index("product") if "product" in names else at.index("logits")
    assert set(at[:first]) == {"q", "k"}
    assert set(at[first:]) <= {"logits", *(["weights"] if style.mixing is not None else [])}
    for side in ("q", "k"):
        sources = [s.name for s in record.stages if s.where == side]
        assert sources[0] == "projection"
        assert ("rope" in sources) == style.rope
        assert ("norm" in sources) == (style.norm is not None)
    assert ("softcap" in names[first:]) == (style.cap is not None)
    assert ("sinks" in names[first:]) == (style.sinks is not None)
    assert "unknown" not in names
    if style.mask is not None:
        assert "mask" in names[first:]


def on_meta(name: str) -> AttentionCall:
    """The record of a style's run without data."""
    style = STYLES[name]
    with torch.device("meta"):
        model = Attention(style).to(style.dtype)
        with style.context(), sqrtdk.trace(model) as found:
            model(torch.empty(B, L, DIM, dtype=style.dtype))
    (call,) = found.calls
    return call


def check_meta(name: str) -> None:
    """The meta device gives the same formula and scale."""
    call, (real,) = on_meta(name), traced(name)[1].calls
    same = ("formula", "kind", "heads", "kv_heads", "head_dim", "norm", "rope", "softcap", "score", "terms", "unknown")
    assert {f: getattr(call, f) for f in same} == {f: getattr(real, f) for f in same}
    assert call.scale.symbolic == pytest.approx(real.scale.symbolic)
    assert (call.scale.numeric, call.scale.agree, call.stats) == (None, None, None)
    assert (call.stats_reason, call.device) == ("no data on the meta device", "meta")


def known_without_data(name: str) -> bool:
    """The style holds nothing that its record depends on in a tensor."""
    style = STYLES[name]
    plain = style.mask is None and style.bias is None and style.kind != "flex"
    return plain and isinstance(style.scale, float) and name not in HELD


def test_number_of_styles(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{len(CASES)} styles of attention, {len(STYLES)} written out and {len(CASES) - len(STYLES)} modules")
    assert len(CASES) >= 140


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_the_record_is_what_the_oracle_knows(name: str) -> None:
    made, _ = traced(name)
    if name in STYLES:
        check_oracle(name)
    for record, expected in records(name):
        check_layout(record, expected, made.dtype)
        check_scale(record, expected, made.dtype)
        check_terms(record, expected)
        check_mask(record, expected)
        check_stages(record, expected)
        assert record.stats_reason is None
        compare(record.stats, expected, made.dtype)
    if name in STYLES and known_without_data(name):
        check_meta(name)


@each("name", ["learned", "per_head", "l2_learned", *HELD])
def test_a_scale_without_data_is_not_guessed(name: str) -> None:
    call = on_meta(name)
    assert call.scale.symbolic is None
    assert call.scale.effective is None
    assert call.scale.reason
    assert [factor.learned for factor in call.scale.factors] == [name not in HELD]
    assert "?" in call.formula or name not in HELD


@each("name", ["learned", "learned_on_q", "per_head", "l2_learned", "sdpa_learned"])
def test_learned_factors_are_named(name: str) -> None:
    (record, expected), *_ = records(name)
    learned = [factor for factor in record.scale.factors if factor.learned]
    assert [factor.source for factor in learned] == [
        f"parameter {'exp(logit_scale)' if name == 'l2_learned' else 'gain'}"
    ]
    if len(expected.scale) == H:
        assert learned[0].per_head == pytest.approx(expected.scale.tolist(), rel=scale_tolerance(torch.float32))


@each(
    "name, places",
    [
        ("scale_on_q", ["q"]),
        ("scale_on_k", ["k"]),
        ("scale_on_both", ["q", "k"]),
        ("matmul", ["logits"]),
        ("twice", ["q", "logits"]),
        ("baddbmm_alpha", ["logits"]),
        ("sdpa", ["op"]),
        ("sdpa_math", ["op"]),
        ("sdpa_scaled_q", ["q", "op"]),
        ("rope_after_scale", ["q"]),
    ],
)
def test_a_factor_stands_where_it_was_written(name: str, places: list[str]) -> None:
    (record, _), *_ = records(name)
    assert [factor.where for factor in record.scale.factors] == places


def test_projections_and_cross_attention_are_known() -> None:
    for name in ("matmul", "sdpa", "mha_weights", "einsum_bihd_bjhd", "kv_cache"):
        (record, _), *_ = records(name)
        assert (record.self_attention, record.model_dim) == (True, 64 if name.startswith("mha") else 24), name
    for name in ("mha_cross", "mha_kdim_vdim_weights"):
        (record, _), *_ = records(name)
        assert record.self_attention is False, name


def test_dtype_of_the_logits() -> None:
    (half, _), *_ = records("eager_bfloat16")
    (fused, _), *_ = records("sdpa_bfloat16")
    (single, _), *_ = records("matmul")
    assert (half.logits_dtype, fused.logits_dtype, single.logits_dtype) == ("bfloat16", "float32", "float32")
    assert torch.finfo(getattr(torch, half.dtype)).bits == 16
