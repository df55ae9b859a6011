"""Quantiles over rows and fractions above thresholds, a head, against numpy on float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats import row_summary
from tests.tolerances import allowed


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7), (2, 2, 3, 40), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_quantiles_mean_and_fractions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.randn(shape) * 30).to(dtype)
    found = row_summary(values, quantiles=[0.0, 0.1, 0.5, 0.99, 1.0], above=[-5.0, 0.0, 50.0])
    rows = values.double().movedim(-2, 0).flatten(1).numpy()
    assert found.rows == (rows.shape[1],) * 3
    room = allowed(torch.float64, length=rows.shape[1], logit=0.0, magnitude=float(abs(rows).max()))
    np.testing.assert_allclose(found.mean, rows.mean(1), rtol=0.0, atol=room)
    for quantile, of_heads in found.quantiles.items():
        np.testing.assert_allclose(of_heads, np.quantile(rows, quantile, axis=1), rtol=0.0, atol=room)
    for threshold, fractions in found.above.items():
        np.testing.assert_allclose(fractions, (rows > threshold).mean(1))


def test_rows_that_are_not_finite_are_left_out() -> None:
    values = torch.tensor([[1.0, math.nan, 3.0, -math.inf], [math.nan, math.inf, -math.inf, math.nan]])
    found = row_summary(values, quantiles=[0.5], above=[2.0])
    assert found.rows == (2, 0)
    assert found.quantiles[0.5][0] == 2.0
    assert found.above[2.0][0] == 0.5
    assert all(math.isnan(x) for x in (found.mean[1], found.quantiles[0.5][1], found.above[2.0][1]))


def test_no_rows_at_all() -> None:
    found = row_summary(torch.zeros(2, 0), above=[1.0])
    assert found.rows == (0, 0)
    assert all(math.isnan(x) for values in (*found.quantiles.values(), *found.above.values()) for x in values)


def test_of_measured_rows_that_see_nothing() -> None:
    q = torch.randn(1, 2, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)  # the first row sees nothing
    rows = sqrtdk.measure(q, q, attn_mask=mask)
    found = row_summary(rows.max_logit, above=[0.0])
    seen = rows.max_logit[0, :, 1:].double()
    assert found.rows == (5, 5)
    assert found.above[0.0] == pytest.approx((seen > 0).double().mean(-1).tolist())
    assert found.quantiles[0.5] == pytest.approx(seen.quantile(0.5, dim=-1).tolist())


@pytest.mark.parametrize(
    ("values", "options", "error", "words"),
    [
        (3.0, {}, InvalidTypeError, "values are a floating tensor; got float"),
        (torch.zeros(2, 2, dtype=torch.long), {}, InvalidTypeError, "got torch.int64"),
        (torch.zeros(2), {}, InvalidValueError, r"\(\.\.\., H, L\); got \(2,\)"),
        (torch.zeros(2, 2), {"quantiles": [1.5]}, InvalidValueError, "a quantile is from 0 to 1; got 1.5"),
        (torch.zeros(2, 2), {"quantiles": [math.nan]}, InvalidValueError, "got nan"),
        (torch.zeros(2, 2), {"above": [math.inf]}, InvalidValueError, "a threshold is finite; got inf"),
    ],
)
def test_bad_input(values: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        row_summary(values, **options)
