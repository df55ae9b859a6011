"""Estimates with confidence intervals: Student's t, the bootstrap, Clopper and Pearson. scipy does the statistics.

`exact` is for quantities without randomness; `largest_draw` for the extreme of some draws, without a claim beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from sqrtdk_lab.figures import CONFIDENCE, Figure, Place

RESAMPLES = 2000
Samples = Tensor | np.ndarray | Sequence[float]


def exact(name: str, value: float, **at: Place) -> Figure:
    """Make a figure in which nothing is random: its interval is the value.

    Example:
        >>> print(exact("parameters", 12))
        12
    """
    value = float(value)
    return Figure(name, value, value, value, "exact", 1, at)


def largest_draw(name: str, samples: Samples, **at: Place) -> Figure:
    """Make a figure of the largest draw: a bar on it asks whether any draw went beyond.

    It has no interval, as other draws could go further.

    Args:
        name: of the figure.
        samples: one-dimensional, two or more.
        at: where it was measured.

    Example:
        >>> print(largest_draw("rounding", [1e-16, 3e-16, 2e-16]))
        3e-16
    """
    values = _array(samples)
    most = float(values.max())
    return Figure(name, most, most, most, "observed", len(values), at)


def mean(name: str, samples: Samples, **at: Place) -> Figure:
    """Mean of independent samples, with Student's t interval.

    Args:
        name: of the figure.
        samples: one-dimensional, two or more.
        at: where it was measured.

    Example:
        >>> print(mean("error", [1.0, 2.0, 3.0]))
        2 [-3.73, 7.73]
    """
    return joint_mean(name, samples, 1, **at)


def joint_mean(name: str, samples: Samples, together: int, **at: Place) -> Figure:
    """Mean of independent samples, with an interval that holds jointly with others.

    Args:
        name: of the figure.
        samples: one-dimensional, two or more.
        together: number of such intervals; each is widened by Bonferroni's rule.
        at: where it was measured.

    Example:
        >>> print(joint_mean("error", [1.0, 2.0, 3.0], 6))
        2 [-12.12, 16.12]
    """
    from scipy import stats

    values = _array(samples)
    error = values.std(ddof=1) / math.sqrt(len(values))
    # Bonferroni: the chance of a miss, halved for two sides, is divided among the intervals.
    reach = float(stats.t.ppf(1 - (1 - CONFIDENCE) / (2 * together), len(values) - 1)) * error
    centre = float(values.mean())
    return Figure(name, centre, float(centre - reach), float(centre + reach), "t", len(values), at)


def geometric_mean(name: str, samples: Samples, **at: Place) -> Figure:
    """Geometric mean of positive samples: the exponential of the mean of their logarithms, and of its t interval.

    For errors and ratios, which scatter by factors; both ends of the interval are positive.

    Args:
        name: of the figure.
        samples: one-dimensional, positive, two or more.
        at: where it was measured.

    Example:
        >>> print(geometric_mean("ratio", [1.0, 2.0, 4.0]))
        2 [0.03768, 106.2]
    """
    values = _array(samples)
    assert (values > 0).all(), f"a geometric mean is of positive samples; got {values.min()}"
    found = mean(name, np.log(values), **at)
    value, low, high = (math.exp(end) for end in (found.value, found.low, found.high))
    return replace(found, value=value, low=low, high=high)


def ratio_of_means(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
    """Mean of one sample over the mean of another, a statistic for `bootstrap`."""
    return np.asarray(one.mean(axis) / other.mean(axis))


def bootstrap(
    name: str, samples: Samples | tuple[Samples, ...], statistic: Callable[..., Any], *, seed: int, **at: Place
) -> Figure:
    """Any statistic of independent samples, with a percentile bootstrap interval.

    Args:
        name: of the figure.
        samples: one-dimensional; or a tuple of several, resampled in pairs.
        statistic: a function of the samples and `axis`, vectorised as numpy's.
        seed: of the resampling.
        at: where it was measured.

    Example:
        >>> print(bootstrap("median", [1.0, 1.0, 1.0, 1.0], np.median, seed=0))
        1 [1, 1]
    """
    from scipy import stats

    data = tuple(_array(one) for one in samples) if isinstance(samples, tuple) else (_array(samples),)
    value = float(statistic(*data, axis=-1))
    result = stats.bootstrap(
        data,
        statistic,
        paired=len(data) > 1,
        vectorized=True,
        n_resamples=RESAMPLES,
        # Resamples at once: scipy would build all of them, RESAMPLES x samples numbers, in one array.
        batch=max(1, 4_000_000 // len(data[0])),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Figure(name, value, float(interval.low), float(interval.high), "bootstrap", len(data[0]), at)


def proportion(name: str, successes: int, trials: int, **at: Place) -> Figure:
    """A share of independent trials, with the exact interval of Clopper and Pearson (1934).

    Example:
        >>> print(proportion("rows_one_hot", 0, 100))
        0 [0, 0.0516]
    """
    from scipy import stats

    interval = stats.binomtest(int(successes), int(trials)).proportion_ci(CONFIDENCE, method="exact")
    value = successes / trials
    return Figure(name, value, float(interval.low), float(interval.high), "Clopper-Pearson", int(trials), at)


def _array(samples: Samples) -> np.ndarray:
    values = samples.detach().double().numpy() if isinstance(samples, Tensor) else np.asarray(samples, dtype=float)
    assert values.ndim == 1, f"samples are one-dimensional; got shape {values.shape}"
    assert len(values) > 1, "an interval needs two samples"
    return values
