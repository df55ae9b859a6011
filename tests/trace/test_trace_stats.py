"""Statistics in the records equal those of the dense float64 logits, for every style, and for sharp logits too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk.stats.heads import HeadStats
from tests.attentions.cases import CASES, STYLES, traced
from tests.attentions.styles import Case, Expected, case, dense, tolerance

SHARP = ("matmul", "sdpa", "sdpa_causal", "sdpa_gqa", "sdpa_float_bias", "softcap", "alibi_and_causal", "flex_softcap",
         "baddbmm_alpha", "k_q_transposed", "gqa_repeat_interleave", "spots_fill", "sdpa_bool_mask")  # fmt: skip


def oracle(logits: Tensor, rows: Tensor | None) -> dict[str, list[float]]:
    """Statistics a head of (B, H, L, S) float64 logits, -inf where hidden, from the definitions, row by row."""
    result: dict[str, list[float]] = {}
    for head in range(logits.shape[1]):
        lines = logits[:, head].flatten(0, 1)
        if rows is not None:
            lines = lines[rows.flatten()]
        seeing = [z[z > -math.inf] for z in lines if bool((z > -math.inf).any())]
        weights = [z.softmax(-1) for z in seeing]
        choices = [(z, p) for z, p in zip(seeing, weights, strict=True) if len(z) > 1]
        entropy = [float(torch.special.entr(p).sum()) for p in weights]
        values = {
            "blind_rows": len(lines) - len(seeing),
            "keys": mean([len(z) for z in seeing]),
            "max_logit": max(float(z.max()) for z in seeing),
            "min_logit": min(float(z.min()) for z in seeing),
            "max_abs_logit": max(float(z.abs().max()) for z in seeing),
            "mean_logit": mean([float(z.mean()) for z in seeing]),
            "std_logit": math.sqrt(mean([float(z.var(correction=0)) for z in seeing])),
            "row_offset": max(abs(float(z.mean())) for z in seeing),
            "entropy_nats": mean(entropy),
            "entropy_fraction": mean([float(torch.special.entr(p).sum()) / math.log(len(p)) for _, p in choices]),
            "effective_keys": mean([1 / float(p.square().sum()) for p in weights]),
            "peak": mean([float(p.max()) for p in weights]),
            "peak_max": max(float(p.max()) for p in weights),
            "saturated": mean([float(p.max() > 0.99) for _, p in choices]),
            "jacobian_norm": mean([float((torch.diag(p) - torch.outer(p, p)).norm()) for p in weights]),
        }
        for name, value in values.items():
            result.setdefault(name, []).append(value)
    return result


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def compare(stats: HeadStats | None, expected: Expected, dtype: torch.dtype) -> None:
    """Every statistic, relative to the largest number that went into it: logits up to their largest, weights to 1."""
    assert stats is not None
    true = oracle(expected.logits, expected.rows)
    size = max(1.0, max(true["max_abs_logit"]))
    single = dtype if dtype == torch.bfloat16 else torch.float32
    error = tolerance(single) * size
    for name, values in true.items():
        read = getattr(stats, name)
        if name == "saturated":  # a count of rows past a threshold
            continue
        room = error * (expected.logits.shape[-1] if name in ("effective_keys", "entropy_nats") else 1)
        assert read == pytest.approx(values, abs=room), name
    assert stats.heads == expected.heads


@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_the_true_logits(name: str) -> None:
    made, run = traced(name)
    assert len(run.calls) == len(made.expected), run.not_measured
    for record, expected in zip(run.calls, made.expected, strict=True):
        assert record.stats_reason is None
        compare(record.stats, expected, made.dtype)


def sharpened(name: str, factor: float = 30.0) -> Case:
    """A style with large logits, where a lost softcap, mask or scale shows."""
    made = case(STYLES[name])
    with torch.no_grad():
        made.model.q.weight.mul_(factor)
    made.expected[0].logits, made.output = dense(made.model, *made.inputs)
    return made


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


@pytest.mark.parametrize("name", ["matmul", "sdpa", "sdpa_bool_padding", "flex", "k_q_transposed", "einsum_keys_first"])
def test_future_weight(name: str) -> None:
    """Mean weight on keys after the row's own, where nothing hides them."""
    made, run = traced(name)
    weights = made.expected[0].logits.softmax(-1)
    true = float(weights.triu(1).sum(-1).mean())
    assert run.calls[0].future_weight == pytest.approx(true, rel=tolerance(torch.float32))


@pytest.mark.parametrize("name", ["sdpa_causal", "causal_fill", "flex_causal", "kv_cache"])
def test_no_future_weight_under_a_causal_mask(name: str) -> None:
    _, run = traced(name)
    assert run.calls[0].future_weight is None


@pytest.mark.parametrize(
    ("name", "factor"), [("matmul", 1.0), ("scale_on_q", 0.25), ("twice", 0.25), ("scale_on_both", 0.25), ("sdpa", 1.0)]
)
def test_largest_product_as_it_was_stored(name: str, factor: float) -> None:
    """Before the scale where the scale comes after the product, with it where the scale stands on q or k."""
    made, run = traced(name)
    true = float(made.expected[0].logits.abs().max() / abs(STYLES[name].scale)) * factor
    assert run.calls[0].max_product == pytest.approx(true, rel=tolerance(torch.float32))


@pytest.mark.parametrize("name", ["matmul", "sdpa", "flex", "sdpa_gqa", "einsum_bihd_bjhd", "sdpa_wide_values"])
def test_output_size(name: str) -> None:
    made, run = traced(name)
    assert made.output is not None
    true = float(made.output.square().mean().sqrt())
    assert run.calls[0].output_rms == pytest.approx(true, rel=tolerance(torch.float32))


@pytest.mark.parametrize("attend", ["sdpa", "eager"])
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


@pytest.mark.parametrize("attend", ["sdpa", "eager"])
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
