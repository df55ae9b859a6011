"""Statistics of sharp logits, of rows that see nothing, and numbers beside them: future weight, product, output."""

from __future__ import annotations

import math

import pytest
import torch

import sqrtdk
from tests.attentions.cases import CASES, STYLES, traced
from tests.attentions.each import each
from tests.attentions.styles import Case, case, dense, tolerance
from tests.trace.stats_by_hand import compare, oracle

SHARP = ("matmul", "sdpa", "sdpa_causal", "sdpa_gqa", "sdpa_float_bias", "softcap", "alibi_and_causal", "flex_softcap",
         "baddbmm_alpha", "k_q_transposed", "gqa_repeat_interleave", "spots_fill", "sdpa_bool_mask")  # fmt: skip


def sharpened(name: str, factor: float = 30.0) -> Case:
    """A style with large logits, where a lost softcap, mask or scale shows."""
    made = case(STYLES[name])
    with torch.no_grad():
        made.model.q.weight.mul_(factor)
    made.expected[0].logits, made.output = dense(made.model, *made.inputs)
    return made


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SHARP)
def test_statistics_of_sharp_logits(name: str) -> None:
    made = sharpened(name)
    with sqrtdk.trace(made.model) as run:
        made.run()
    (record,) = run.calls
    compare(record.stats, made.expected[0], made.dtype)
    assert record.stats is not None
    true = oracle(made.expected[0].logits, None)
    assert record.stats.saturated == pytest.approx(true["saturated"])
    if STYLES[name].cap is None:
        assert max(true["saturated"]) > 0


@each("name", ["matmul", "sdpa", "sdpa_bool_padding", "flex", "k_q_transposed", "einsum_keys_first"])
def test_future_weight(name: str) -> None:
    """Mean weight on keys after the row's own, where nothing hides them."""
    made, run = traced(name)
    weights = made.expected[0].logits.softmax(-1)
    true = float(weights.triu(1).sum(-1).mean())
    assert run.calls[0].future_weight == pytest.approx(true, rel=tolerance(torch.float32))


@each("name", ["sdpa_causal", "causal_fill", "flex_causal", "kv_cache"])
def test_no_future_weight_under_a_causal_mask(name: str) -> None:
    _, run = traced(name)
    assert run.calls[0].future_weight is None


@each("name, factor", [("matmul", 1.0), ("scale_on_q", 0.25), ("twice", 0.25), ("scale_on_both", 0.25), ("sdpa", 1.0)])
def test_largest_product_as_it_was_stored(name: str, factor: float) -> None:
    """Before the scale where the scale comes after the product, with it where the scale stands on q or k."""
    made, run = traced(name)
    true = float(made.expected[0].logits.abs().max() / abs(STYLES[name].scale)) * factor
    assert run.calls[0].max_product == pytest.approx(true, rel=tolerance(torch.float32))


@each("name", ["matmul", "sdpa", "flex", "sdpa_gqa", "einsum_bihd_bjhd", "sdpa_wide_values"])
def test_output_size(name: str) -> None:
    made, run = traced(name)
    assert made.output is not None
    true = float(made.output.square().mean().sqrt())
    assert run.calls[0].output_rms == pytest.approx(true, rel=tolerance(torch.float32))


@each("attend", ["sdpa", "eager"])
def test_rows_that_see_nothing(attend: str) -> None:
    """Blind rows are counted in the mask and left out of the averages."""
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    visible = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    visible[..., 3, :] = False
    with sqrtdk.trace() as run:
        if attend == "sdpa":
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        else:
            z = (q @ k.mT * 8**-0.5).masked_fill(~visible, -math.inf)
            _ = z.softmax(-1).nan_to_num() @ v
    (record,) = run.calls
    assert record.mask is not None
    assert record.stats is not None
    assert (record.mask.blind_rows, record.mask.uniform_rows) == (2, 0)
    assert record.stats.blind_rows == (1, 1)
    logits = (q.double() @ k.double().mT * 8**-0.5).masked_fill(~visible, -math.inf)
    assert record.stats.entropy_nats == pytest.approx(
        oracle(logits, None)["entropy_nats"], rel=tolerance(torch.float32)
    )


@each("attend", ["sdpa", "eager"])
def test_uniform_rows_and_leaked_weight(attend: str) -> None:
    """A row whose every key is at `finfo.min` averages masked keys; a mask of -5 hides nothing."""
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    mask = torch.zeros(5, 5)
    mask[2] = torch.finfo(torch.float32).min
    mask[3, 0] = torch.finfo(torch.float32).min
    with sqrtdk.trace() as run:
        if attend == "sdpa":
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            _ = (q @ k.mT * 8**-0.5 + mask).softmax(-1) @ v
    (record,) = run.calls
    assert record.mask is not None
    assert record.mask.uniform_rows == 2
    assert record.mask.fill == torch.finfo(torch.float32).min


def test_a_weak_mask_leaks() -> None:
    """Large logits and a mask of -100: the weight that hidden keys get is measured."""
    q = torch.randn(1, 1, 6, 8)
    k = q.clone()
    k[..., 5, :] = 60 * q[..., 0, :]
    mask = torch.zeros(6)
    mask[5] = -100.0
    with sqrtdk.trace() as run:
        z = q @ k.mT + mask
        weights = z.softmax(-1)
        _ = weights @ q
    (record,) = run.calls
    assert record.mask is not None
    assert float(weights[..., 5].max()) > 0.5
    assert record.mask.masked_weight == pytest.approx(float(weights[..., 5].max()), rel=tolerance(torch.float32))


def test_statistics_can_be_left_out() -> None:
    made = CASES["matmul"]()
    with sqrtdk.trace(made.model, stats=False, numeric=False) as run:
        made.run()
    (record,) = run.calls
    assert record.stats is None
    assert record.scale.numeric is None
    assert record.scale.symbolic == pytest.approx(0.25)
