"""One cell of a sweep: random rows, their logits under a scale rule, and the expectations of the theory.

Every row has its own query and keys, so that rows are independent and a standard error over them is valid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sqrtdk.stats import row_stats
from sqrtdk.theory import (
    expected_effective_keys,
    expected_entropy_nats,
    expected_jacobian_norm,
    expected_peak,
    logit_distribution,
)
from sqrtdk_lab.claim import Cell, stable_seed
from sqrtdk_lab.sweep._grid import DISTRIBUTIONS, GRID_AXES, Distribution, rule

SWEEP_FIGURES = (  # each with its value, standard error over rows, and expectation
    "logit_mean",
    "logit_std",
    "excess_kurtosis",
    "entropy_nats",
    "entropy_share",  # of log n
    "peak",
    "effective_keys",
    "jacobian_norm",  # root mean square over rows of the Frobenius norm
)
MEASURED = ("peak_above_99",)  # with value and standard error only; the fraction of rows
EXTREME_COLUMNS = ("scale_factor", "max_abs_logit")  # with the value only
_AT_ONCE = 2**21  # components of keys in memory at once, 16 MiB


def measure(cell: Cell) -> dict[str, Any]:
    """Compute the figures of a cell.

    The logits are z = s q . k with components of mean 0 and variance 1. The Gaussian model treats the logits of a row
    as independent N(0, s^2 d_k). It neglects that rows differ in |q|, which matters at small d_k, and for sparse and
    heavy-tailed components.

    Args:
        cell: d_k, keys (per row), scale (a rule's name, with its number as in "fixed=0.1"), distribution, seed, rows.

    Returns:
        The cell without its rows, then float64 figures: NAME, NAME_se (standard error over rows) and NAME_expected for
        `SWEEP_FIGURES`. The fraction of rows with a peak above 0.99 has no expectation; `max_abs_logit` is the largest
        over all rows.

    Example:
        >>> cell = {"d_k": 64, "keys": 16, "scale": "sqrt_dk", "distribution": "normal", "seed": 0, "rows": 256}
        >>> figures = measure(cell)
        >>> abs(figures["logit_std"] - figures["logit_std_expected"]) < 4 * figures["logit_std_se"]
        True
    """
    d_k, keys, rows = cell["d_k"], cell["keys"], cell["rows"]
    distribution = DISTRIBUTIONS[cell["distribution"]]
    generator = torch.Generator().manual_seed(stable_seed(dict(cell)))
    model = logit_distribution(d_k, rule(cell["scale"]), keys=keys)
    logits = _products(d_k, keys, rows, distribution, generator).mul_(model.scale)
    sigma = model.std
    entropy = expected_entropy_nats(keys, sigma)
    expected = {
        "logit_mean": model.mean,
        "logit_std": sigma,
        "excess_kurtosis": distribution.excess_kurtosis(d_k) if sigma else math.nan,
        "entropy_nats": entropy,
        "entropy_share": entropy / math.log(keys),
        "peak": expected_peak(keys, sigma),
        "effective_keys": expected_effective_keys(keys, sigma),
        "jacobian_norm": expected_jacobian_norm(keys, sigma),
    }
    figures = {axis: cell[axis] for axis in GRID_AXES}
    figures["scale_factor"] = model.scale
    figures["max_abs_logit"] = float(logits.abs().amax())
    for name, (value, error) in _estimates(logits).items():
        figures[name], figures[f"{name}_se"] = float(value), float(error)
        if name in expected:
            figures[f"{name}_expected"] = expected[name]
    return figures


def _products(d_k: int, keys: int, rows: int, distribution: Distribution, generator: torch.Generator) -> Tensor:
    """Return the products of `rows` queries, each with its own keys: (rows, keys)."""
    queries = distribution.draw((rows, d_k, 1), generator)
    chunk = max(1, _AT_ONCE // (keys * d_k))
    products = torch.empty(rows, keys, dtype=torch.float64)
    for start in range(0, rows, chunk):
        part = queries[start : start + chunk]
        products[start : start + chunk] = (distribution.draw((len(part), keys, d_k), generator) @ part).squeeze(-1)
    return products


def _estimates(logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (value, standard error) by name; for values that are no mean over rows, by the delta method."""
    rows = row_stats(logits)
    share = rows.entropy_nats / math.log(logits.shape[1])
    squares = logits.sub(logits.mean()).square_()
    second, fourth = squares.mean(1), squares.square_().mean(1)
    variance, tail = second.mean(), fourth.mean()
    std, jacobian = variance.sqrt(), rows.jacobian_norm.square()
    return {
        "logit_mean": _mean(rows.mean),
        "logit_std": (std, _mean(second)[1] / (2.0 * std)),
        "excess_kurtosis": (
            tail / variance**2 - 3.0,
            _mean(fourth / variance**2 - 2.0 * tail / variance**3 * second)[1],
        ),
        "entropy_nats": _mean(rows.entropy_nats),
        "entropy_share": _mean(share),
        "peak": _mean(rows.peak),
        "effective_keys": _mean(rows.effective_keys),
        "jacobian_norm": (jacobian.mean().sqrt(), _mean(jacobian)[1] / (2.0 * jacobian.mean().sqrt())),
        "peak_above_99": _mean((rows.peak > 0.99).double()),
    }


def _mean(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.mean(), values.std() / math.sqrt(len(values))
