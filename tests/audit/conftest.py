"""Records made by hand: a healthy call of head_dim 16 with 4 heads, and what to change in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sqrtdk.stats.heads import HeadStats, Histogram
from sqrtdk.tracing.records import AttentionCall, EffectiveScale, Factor, Stage


def build_call(effective: float | None = 0.25, **changes: Any) -> AttentionCall:
    """A call with this effective scale; `factors` are values or Factor; other names are fields."""
    head_dim = changes.get("head_dim", 16)
    given = changes.pop("factors", None)
    if given is None:
        given = () if effective is None else (effective,)
    factors = tuple(f if isinstance(f, Factor) else Factor(f, "logits", "number") for f in given)
    scale = EffectiveScale(
        effective=effective,
        ratio=None if effective is None else effective * head_dim**0.5,
        symbolic=effective,
        numeric=None,
        r_squared=None,
        factors=factors,
        per_head=changes.pop("per_head", None),
        agree=changes.pop("agree", None),
        reason=changes.pop("reason", None),
    )
    call = AttentionCall(
        site="layers.0.attn",
        index=0,
        module_class="Attention",
        kind="eager",
        op="aten.bmm",
        score="dot",
        batch=1,
        heads=4,
        kv_heads=4,
        head_dim=head_dim,
        padded_head_dim=changes.get("padded_head_dim", head_dim),
        value_dim=head_dim,
        model_dim=64,
        query_len=24,
        key_len=24,
        self_attention=True,
        dtype="float32",
        logits_dtype="float32",
        device="cpu",
        stages=(Stage("q", "projection"),),
        formula="",
        scale=scale,
    )
    return replace(call, **changes)


def build_stats(**changes: Any) -> HeadStats:
    """Healthy statistics of 2 heads; a number is repeated for each head."""
    histogram = Histogram(0.0, 1.0, (1,))
    values: dict[str, Any] = {
        "blind_rows": 0,
        "nan_rows": 0,
        "keys": 24.0,
        "max_logit": 3.0,
        "min_logit": -3.0,
        "max_abs_logit": 3.0,
        "max_above_mean": 3.0,
        "mean_logit": 0.0,
        "std_logit": 1.0,
        "row_offset": 0.5,
        "entropy_nats": 2.7,
        "entropy_p05": 2.5,
        "entropy_p50": 2.7,
        "entropy_p95": 2.9,
        "entropy_fraction": 0.85,
        "effective_keys": 12.0,
        "peak": 0.2,
        "peak_max": 0.4,
        "saturated": 0.0,
        "jacobian_norm": 0.2,
        "logit_histogram": histogram,
        "entropy_histogram": histogram,
    } | changes
    return HeadStats(heads=2, rows=24, **{name: v if isinstance(v, tuple) else (v, v) for name, v in values.items()})


@pytest.fixture(name="make_call")
def _make_call() -> Callable[..., AttentionCall]:
    return build_call


@pytest.fixture(name="make_stats")
def _make_stats() -> Callable[..., HeadStats]:
    return build_stats
