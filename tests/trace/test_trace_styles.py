"""Every style of attention: the record says what the float64 oracle knows of it."""

from __future__ import annotations

import math

import pytest
import torch

from sqrtdk.tracing import AttentionCall
from tests.attentions.cases import CASES, STYLES, traced
from tests.attentions.styles import B, H, case, scale_tolerance, tolerance

over_cases = pytest.mark.parametrize("name", CASES)


def records(name: str) -> list[tuple[AttentionCall, object]]:
    made, run = traced(name)
    assert len(run.calls) == len(made.expected), (run.not_attention, run.not_measured)
    return list(zip(run.calls, made.expected, strict=True))


def test_number_of_styles(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{len(CASES)} styles of attention, {len(STYLES)} written out and {len(CASES) - len(STYLES)} modules")
    assert len(CASES) >= 140


@pytest.mark.parametrize("name", STYLES)
def test_the_oracle_is_the_style(name: str) -> None:
    """The meaning that a style declares gives the same output as the way it is written."""
    made = case(STYLES[name])
    if made.output is None:
        assert STYLES[name].dropout
        return
    output = made.run().detach().double()
    error = (output - made.output).abs().max() / made.output.abs().max()
    assert float(error) <= tolerance(made.dtype)


@over_cases
def test_layout(name: str) -> None:
    for record, expected in records(name):
        rows, keys = expected.logits.shape[-2:]
        assert (record.site, record.index, record.kind) == (expected.site, 0, expected.style.kind)
        assert (record.batch, record.heads, record.kv_heads) == (B, expected.heads, expected.kv_heads)
        assert (record.query_len, record.key_len) == (rows, keys)
        assert record.head_dim == record.padded_head_dim == expected.head_dim
        assert record.value_dim == expected.style.value_dim
        assert record.dtype == str(traced(name)[0].dtype).removeprefix("torch.")
        assert record.device == "cpu"


@over_cases
def test_formula(name: str) -> None:
    for record, expected in records(name):
        assert record.formula == expected.style.formula


@over_cases
def test_scale(name: str) -> None:
    made, _ = traced(name)
    error = scale_tolerance(made.dtype)
    for record, expected in records(name):
        scale, true = record.scale, expected.scale
        mean = float(true.abs().log().mean().exp() * true[0].sign())  # the geometric mean where heads differ
        assert scale.symbolic == pytest.approx(mean, rel=error)
        assert scale.effective == scale.symbolic
        assert scale.ratio == pytest.approx(mean * math.sqrt(expected.head_dim), rel=error)
        assert math.prod(f.value for f in scale.factors if f.value is not None) == pytest.approx(mean, rel=error)
        if len(true) > 1:
            assert scale.per_head == pytest.approx(true.tolist(), rel=error)
        else:
            assert scale.per_head is None
        if not expected.numeric:
            assert scale.numeric is None
            assert scale.reason
            continue
        assert scale.agree is True
        assert scale.reason is None
        assert scale.r_squared is not None
        assert scale.r_squared > 0.999
        if len(true) == 1:
            assert scale.numeric == pytest.approx(mean, rel=error)


@over_cases
def test_terms(name: str) -> None:
    for record, expected in records(name):
        style = expected.style
        assert (record.score, record.terms) == (style.score, style.terms)
        assert (record.norm, record.rope) == (style.norm, style.rope)
        assert record.softcap == pytest.approx(style.cap)
        assert record.bias == style.bias
        assert record.bias_scaled_by is None
        assert record.sinks == (style.sinks is not None)
        assert record.dropout == pytest.approx(style.dropout)
        assert record.unknown == ()


@over_cases
def test_mask(name: str) -> None:
    for record, expected in records(name):
        style = expected.style
        if style.mask is None:
            assert record.mask is None
            continue
        assert record.mask is not None
        assert (record.mask.kind, record.mask.form) == (style.mask, style.form)
        assert record.mask.blind_rows == int((expected.logits == -math.inf).all(-1).sum())
        assert record.mask.uniform_rows == 0
        assert record.mask.scaled_by == style.scaled_mask
        if record.mask.masked_weight is not None:
            assert record.mask.masked_weight == pytest.approx(0.0, abs=1e-6)


@over_cases
def test_stages(name: str) -> None:
    """The stages run from the projections over the product to the logits, and name what the oracle knows of."""
    for record, expected in records(name):
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


@pytest.mark.parametrize("name", ["learned", "learned_on_q", "per_head", "l2_learned", "sdpa_learned"])
def test_learned_factors_are_named(name: str) -> None:
    (record, expected), *_ = records(name)
    learned = [factor for factor in record.scale.factors if factor.learned]
    assert [factor.source for factor in learned] == [f"parameter {'logit_scale' if name == 'l2_learned' else 'gain'}"]
    if len(expected.scale) == H:
        assert learned[0].per_head == pytest.approx(expected.scale.tolist(), rel=scale_tolerance(torch.float32))


@pytest.mark.parametrize(
    ("name", "places"),
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


@pytest.mark.parametrize("name", ["matmul", "sdpa", "mha_weights", "einsum_bihd_bjhd", "kv_cache"])
def test_projections_are_known(name: str) -> None:
    (record, _), *_ = records(name)
    assert record.self_attention is True
    assert record.model_dim == (64 if name.startswith("mha") else 24)


@pytest.mark.parametrize("name", ["mha_cross", "mha_kdim_vdim_weights"])
def test_cross_attention_is_known(name: str) -> None:
    (record, _), *_ = records(name)
    assert record.self_attention is False


def test_dtype_of_the_logits() -> None:
    (half, _), *_ = records("eager_bfloat16")
    (fused, _), *_ = records("sdpa_bfloat16")
    (single, _), *_ = records("matmul")
    assert (half.logits_dtype, fused.logits_dtype, single.logits_dtype) == ("bfloat16", "float32", "float32")
    assert torch.finfo(getattr(torch, half.dtype)).bits == 16
