"""Draws random queries and keys, measures them with the library, and computes what theory expects."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk import AuxRequest, attention, measure
from sqrtdk.scales import sqrt_dk
from sqrtdk.stats import HeadStats, RowSummary, head_stats, head_stats_from_qk, row_summary
from sqrtdk.theory import (
    LogitDistribution,
    RangeForecast,
    expected_entropy_nats,
    expected_jacobian_norm,
    expected_peak,
    logit_distribution,
    range_forecast,
)
from sqrtdk.theory.ranges import RANGE_DTYPES
from sqrtdk_lab._rows import COMPONENTS
from sqrtdk_lab.app.settings import ExplorerSettings

SETS, QUERIES = 4, 32  # sets of keys, and queries for each set
SAMPLE_VALUE_DIM = 64  # the same at every d_k, so that gradients through the values do not grow with d_k
SHOWN_DIMS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
RANGE_DIMS = (4, 16, 64, 256, 1024)
SHOWN_ROWS = 3


@dataclass(frozen=True, slots=True)
class AtDim:
    """Measured and expected statistics at one d_k.

    Attributes:
        d_k: the head dimension.
        heads: statistics of the measured rows.
        entropy: entropy of the rows in nats.
        peak: largest weight of the rows.
        jacobian: squared Frobenius norm of the softmax Jacobian of each row.
        gradient: norm of dL/dq of each row, for L = output . g with a random g of norm 1.
        expected: entropy, peak and norm of the Jacobian for Gaussian logits without softcap.
    """

    d_k: int
    heads: HeadStats
    entropy: RowSummary
    peak: RowSummary
    jacobian: RowSummary
    gradient: RowSummary
    expected: tuple[float, float, float]


def distribution(settings: ExplorerSettings, d_k: int | None = None) -> LogitDistribution:
    """Return the distribution of Gaussian logits under scale and temperature, before any softcap."""
    dim = settings.d_k if d_k is None else d_k
    factor = logit_distribution(dim, settings.scale_rule(), keys=settings.keys).scale / settings.temperature
    variances = settings.query_variance, settings.key_variance
    return logit_distribution(dim, factor, query_variance=variances[0], key_variance=variances[1])


def textbook(settings: ExplorerSettings) -> LogitDistribution:
    """Return the distribution of the same logits under 1/sqrt(d_k), without temperature and softcap."""
    variances = settings.query_variance, settings.key_variance
    return logit_distribution(settings.d_k, sqrt_dk(), query_variance=variances[0], key_variance=variances[1])


def gaussian_expectations(keys: int, std: float) -> tuple[float, float, float]:
    """Return mean entropy (nats), largest weight and norm of the Jacobian for rows of Gaussian logits."""
    return expected_entropy_nats(keys, std), expected_peak(keys, std), expected_jacobian_norm(keys, std)


@functools.lru_cache(maxsize=64)
def draw_vectors(settings: ExplorerSettings, d_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw query (sets, 1, queries, d_k), key (sets, 1, keys, d_k) and value (sets, 1, keys, E_v) in the dtype."""
    rng = torch.Generator().manual_seed(settings.seed)
    dtype = RANGE_DTYPES[settings.dtype]
    draw = COMPONENTS[settings.components]
    sides = ((QUERIES, settings.query_variance), (settings.keys, settings.key_variance))
    query, key = (
        (draw(rng, (SETS * n, d_k)) * math.sqrt(variance)).view(SETS, 1, n, d_k).to(dtype) for n, variance in sides
    )
    return query, key, torch.randn(SETS, 1, settings.keys, SAMPLE_VALUE_DIM, generator=rng).to(dtype)


def logit_statistics(settings: ExplorerSettings) -> HeadStats:
    """Return statistics of the logits at the chosen d_k, with a histogram."""
    query, key, _ = draw_vectors(settings, settings.d_k)
    scale = distribution(settings).scale
    return head_stats_from_qk(query, key, scale=scale, softcap=settings.softcap).heads


def sorted_weights(settings: ExplorerSettings) -> list[list[float]]:
    """Return the weights of a few rows, largest first. With unit vectors as values, the output is the weights."""
    query, key, _ = draw_vectors(settings, settings.d_k)
    unit = torch.eye(settings.keys, dtype=key.dtype).expand(1, 1, -1, -1)
    scale = distribution(settings).scale
    found = attention(query[:1, :, :SHOWN_ROWS], key[:1], unit, scale=scale, softcap=settings.softcap)
    assert isinstance(found, Tensor)
    rows: list[list[float]] = found[0, 0].double().sort(-1, descending=True).values.tolist()
    return rows


def dims(settings: ExplorerSettings) -> list[int]:
    """Return the d_k of the curves, including the chosen one."""
    return sorted({*SHOWN_DIMS, settings.d_k})


@functools.lru_cache(maxsize=512)
def at_dim(settings: ExplorerSettings, d_k: int) -> AtDim:
    """Return measured and expected statistics at one d_k, with all other settings as chosen."""
    query, key, value = draw_vectors(settings, d_k)
    logit = distribution(settings, d_k)
    rows = measure(query, key, scale=logit.scale, softcap=settings.softcap)
    return AtDim(
        d_k,
        head_stats(rows),
        row_summary(rows.entropy_nats),
        row_summary(rows.peak),
        row_summary(rows.jacobian_norm**2),
        row_summary(_gradients(settings, query, key, value, logit.scale)),
        gaussian_expectations(settings.keys, logit.std),
    )


def _gradients(settings: ExplorerSettings, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the norm of dL/dq of each row, (sets, 1, queries)."""
    with torch.enable_grad():
        query = query.detach().clone().requires_grad_()
        output, _ = attention(query, key, value, scale=scale, softcap=settings.softcap, return_aux=AuxRequest(lse=True))
        rng = torch.Generator().manual_seed(settings.seed + 1)  # another stream than that of q, k and v
        upstream = torch.nn.functional.normalize(torch.randn(output.shape, generator=rng), dim=-1)
        (output * upstream.to(output.dtype)).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    lengths: Tensor = query.grad.double().norm(dim=-1)
    return lengths


def rounding(settings: ExplorerSettings) -> float:
    """Return the largest difference between the outputs in the chosen dtype and in float64, on the same inputs."""
    query, key, value = draw_vectors(settings, settings.d_k)
    scale, softcap = distribution(settings).scale, settings.softcap
    low = attention(query, key, value, scale=scale, softcap=softcap)
    exact = attention(query.double(), key.double(), value.double(), scale=scale, softcap=softcap)
    assert isinstance(low, Tensor)
    assert isinstance(exact, Tensor)
    return float((low.double() - exact).abs().max())


@functools.lru_cache(maxsize=256)
def forecast(settings: ExplorerSettings, d_k: int, dtype: str, before: bool) -> RangeForecast:
    """Forecast the range of n x n products in a dtype, scaled before (`before`) or after they are stored.

    Pass settings from `of_range`: only moments, scale and d_k matter, and other settings would miss the cache.
    """
    scale = distribution(settings, d_k).scale if before else 1.0
    return range_forecast(
        d_k,
        settings.keys**2,
        dtype,
        scale_before=scale,
        query_variance=settings.query_variance,
        key_variance=settings.key_variance,
    )
