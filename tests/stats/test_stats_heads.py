"""Per-head summaries against a plain computation from dense rows."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from sqrtdk.stats import HeadStats, head_stats_from_logits, head_stats_from_qk
from tests.stats.stats_oracle import oracle
from tests.tolerances import allowed

ROWS = 2 * 30  # of a head, and keys of a row at most
TUPLES = [f.name for f in fields(HeadStats) if f.name not in ("heads", "rows")]


def assert_summary(stats: HeadStats, logits: torch.Tensor, visible: torch.Tensor) -> None:
    """`logits` (B, H, L, S) without bad rows."""
    rows = oracle(logits, visible)
    for head in range(logits.shape[1]):
        row = {name: values[:, head].flatten() for name, values in rows.items()}
        seen = row["keys"] > 0
        row = {name: values[seen] for name, values in row.items()}
        choice = row["keys"] > 1
        expected = {
            "blind_rows": (~seen).sum(),
            "nan_rows": torch.tensor(0),
            "keys": row["keys"].mean(),
            "max_logit": row["max_logit"].max(),
            "min_logit": row["min_logit"].min(),
            "max_abs_logit": torch.maximum(row["max_logit"].abs(), row["min_logit"].abs()).max(),
            "max_above_mean": (row["max_logit"] - row["mean"]).max(),
            "mean_logit": row["mean"].mean(),
            "std_logit": row["variance"].mean().sqrt(),
            "row_offset": row["mean"].abs().max(),
            "entropy_nats": row["entropy_nats"].mean(),
            "entropy_p05": row["entropy_nats"].quantile(0.05),
            "entropy_p50": row["entropy_nats"].quantile(0.50),
            "entropy_p95": row["entropy_nats"].quantile(0.95),
            "entropy_fraction": (row["entropy_nats"] / row["keys"].log())[choice].mean(),
            "effective_keys": row["effective_keys"].mean(),
            "peak": row["peak"].mean(),
            "peak_max": row["peak"].max(),
            "saturated": (row["peak"] > 0.99)[choice].double().mean(),
            "jacobian_norm": row["jacobian_norm"].mean(),
        }
        size = expected["max_abs_logit"].item()
        for name, value in expected.items():
            room = allowed(torch.float32, length=ROWS, logit=size, magnitude=max(1.0, abs(value.item())))
            assert abs(getattr(stats, name)[head] - value.item()) <= room, name


@pytest.mark.parametrize("mask", ["none", "causal", "random", "padding"])
def test_every_statistic_by_both_entries(mask: str) -> None:
    query, key = torch.randn(2, 4, 30, 8) * 3, torch.randn(2, 2, 30, 8)
    visible = {
        "none": torch.ones(30, 30, dtype=torch.bool),
        "causal": torch.ones(30, 30, dtype=torch.bool).tril(),
        "random": torch.rand(2, 1, 30, 30) > 0.97,
        "padding": (torch.arange(30) < torch.tensor([[30], [11]]))[:, None, None],
    }[mask]
    product = query.double() @ key.double().repeat_interleave(2, 1).mT
    logits = product * 0.4
    shown = visible.expand(logits.shape)
    if mask == "causal":
        from_qk = head_stats_from_qk(query, key, scale=0.4, is_causal=True, future=True)
    else:
        from_qk = head_stats_from_qk(query, key, scale=0.4, visible=visible, future=True)
    from_logits = head_stats_from_logits(logits.float(), visible, future=True)
    weights = logits.masked_fill(~shown, -math.inf).softmax(-1)
    seeing = ~weights.isnan().any(-1)
    future = weights.triu(1).sum(-1)[seeing].mean().item()
    for call in (from_qk, from_logits):
        assert (call.heads.heads, call.heads.rows) == (4, 60)
        assert_summary(call.heads, logits, shown)
        size = logits.abs().max().item()
        assert abs(call.future_weight - future) <= allowed(torch.float32, length=ROWS, logit=size, magnitude=1.0)
    largest = product.abs()[shown].max().item()
    assert abs(from_qk.max_product - largest) <= allowed(torch.float32, length=8, logit=0.0, magnitude=largest)
    assert from_logits.max_product is None


def test_results_are_plain_numbers() -> None:
    heads = head_stats_from_logits(torch.randn(1, 3, 5, 7)).heads
    for name in TUPLES:
        values = getattr(heads, name)
        assert type(values) is tuple
        assert len(values) == 3
        kinds = {
            "logit_histogram": "Histogram",
            "entropy_histogram": "Histogram",
            "blind_rows": "int",
            "nan_rows": "int",
        }
        assert {type(value).__name__ for value in values} == {kinds.get(name, "float")}, name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_logit_histogram_counts_every_visible_logit_of_a_small_call(masked: bool, fused: bool) -> None:
    query, key = torch.randn(2, 3, 16, 8, dtype=torch.float64), torch.randn(2, 3, 16, 8, dtype=torch.float64)
    logits = query @ key.mT
    visible = torch.ones(16, 16, dtype=torch.bool).tril() if masked else torch.ones(16, 16, dtype=torch.bool)
    if fused:
        call = head_stats_from_qk(query, key, scale=1.0, is_causal=masked)
    else:
        call = head_stats_from_logits(logits, visible if masked else None)
    for head, histogram in enumerate(call.heads.logit_histogram):
        values = logits[:, head][visible.expand(2, 16, 16)]
        assert (histogram.low, histogram.high) == pytest.approx((values.min().item(), values.max().item()))
        expected = torch.histc(values, 48, values.min().item(), values.max().item())
        assert len(histogram.counts) == 48
        assert sum(histogram.counts) == len(values)
        assert sum(abs(a - b) for a, b in zip(histogram.counts, expected.tolist(), strict=True)) <= 4  # at bin edges


def test_logit_histogram_of_a_causal_call_with_a_mask() -> None:
    query = torch.randn(2, 3, 16, 8)
    visible = torch.rand(2, 1, 1, 16) > 0.4
    heads = head_stats_from_qk(query, query, scale=1.0, is_causal=True, visible=visible).heads
    shown = visible.expand(2, 1, 16, 16).tril().sum().item()
    assert [sum(histogram.counts) for histogram in heads.logit_histogram] == [shown] * 3


def test_logit_histogram_samples_64_rows_evenly() -> None:
    logits = torch.zeros(1, 1, 640, 4)
    logits[:, :, :320] = 1.0
    (histogram,) = head_stats_from_logits(logits).heads.logit_histogram
    assert sum(histogram.counts) == 64 * 4
    assert histogram.counts[0] == histogram.counts[-1] == 128


def test_entropy_histogram() -> None:
    logits = torch.zeros(1, 1, 10, 8)
    logits[:, :, :4, 0] = 1e3
    (histogram,) = head_stats_from_logits(logits).heads.entropy_histogram
    assert (histogram.low, histogram.high) == pytest.approx((0.0, math.log(8)))
    assert len(histogram.counts) == 24
    assert (histogram.counts[0], histogram.counts[-1]) == (4, 6)


def test_bad_and_blind_rows_are_counted_and_left_out() -> None:
    logits = torch.randn(1, 2, 6, 5)
    visible = torch.ones(1, 2, 6, 5, dtype=torch.bool)
    logits[0, 0, 1, 3] = math.nan
    logits[0, 0, 2, 0] = math.inf
    logits[0, 0, 3] = -math.inf
    visible[0, 0, 4] = False
    call = head_stats_from_logits(logits, visible)
    alone = head_stats_from_logits(logits[:, :, [0, 5]])
    assert call.heads.nan_rows == (3, 0)
    assert call.heads.blind_rows == (1, 0)
    for name in TUPLES:
        if name not in ("nan_rows", "blind_rows", "logit_histogram", "entropy_histogram"):
            assert getattr(call.heads, name)[0] == pytest.approx(getattr(alone.heads, name)[0]), name
    assert sum(call.heads.logit_histogram[0].counts) == 10
    assert sum(call.heads.entropy_histogram[0].counts) == 2


def test_a_visible_minus_infinity_leaves_the_histogram_usable() -> None:
    logits = torch.randn(1, 1, 4, 5)
    logits[0, 0, 2, 1] = -math.inf
    heads = head_stats_from_logits(logits).heads
    assert heads.nan_rows == (0,)
    assert heads.min_logit == (-math.inf,)
    assert math.isfinite(heads.entropy_nats[0])
    assert math.isfinite(heads.logit_histogram[0].low)
    assert sum(heads.logit_histogram[0].counts) == 20


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (1, 0, 3, 4)])
def test_nothing_to_see_is_nan(shape: tuple[int, ...]) -> None:
    heads = head_stats_from_logits(torch.zeros(shape)).heads
    assert heads.heads == shape[1]
    assert all(math.isnan(x) for x in heads.entropy_nats + heads.max_logit + heads.peak_max + heads.entropy_p50)
    assert heads.blind_rows == (shape[0] * shape[2],) * shape[1]
    assert all(sum(h.counts) == 0 for h in heads.logit_histogram)


def test_one_key_rows_have_no_choice() -> None:
    heads = head_stats_from_logits(torch.randn(1, 2, 5, 1)).heads
    assert heads.peak == (1.0, 1.0)
    assert heads.entropy_nats == (0.0, 0.0)
    assert all(math.isnan(x) for x in heads.saturated + heads.entropy_fraction)


def test_autocast_changes_nothing() -> None:
    query = torch.randn(1, 2, 20, 8)
    plain = head_stats_from_qk(query, query, scale=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head_stats_from_qk(query, query, scale=0.3) == plain


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_largest_product_of_no_row_is_no_number(softcap: float | None) -> None:
    """Neither of rows that see nothing nor of rows of NaN: 0 would say that all is far from the end of the range."""
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8)
    blind = head_stats_from_qk(q, k, scale=0.3, softcap=softcap, visible=torch.zeros(4, 5, dtype=torch.bool))
    assert blind.max_product is None
    assert head_stats_from_qk(q * torch.nan, k, scale=0.3, softcap=softcap).max_product is None
    some = q.clone()
    some[..., 1:, :] = torch.nan
    found = head_stats_from_qk(some, k, scale=0.3, softcap=softcap)
    assert found.max_product == pytest.approx((q[..., :1, :] @ k.mT).abs().max().item(), rel=1e-5)
    assert found.heads.nan_rows == (3, 3)
