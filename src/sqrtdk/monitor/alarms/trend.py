"""When a rising series passes a bar, with an interval: a robust straight line, never extended far beyond the samples.

Slope and interval: the median of the slopes between all pairs of points (Theil 1950), and its order statistics by the
variance of Kendall's tau, n(n - 1)(2n + 5) / 18 (Sen 1968), so that one wild sample moves neither. Scatter: the median
absolute residual as a standard deviation (1.4826), widened for two fitted numbers and a new point. The bar is passed
where the line through the window's middle meets it: at the earliest with the steepest slope and upward scatter, at the
latest with the smallest slope and downward scatter. The smallest slope is also at most the slope of the later half, so
that a curve that flattens is not extended as if it did not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, median

from sqrtdk.messages import Message
from sqrtdk.monitor.samples import CallSample, StepSample

WINDOW = 24  # newest samples that a line is fitted to
LEAST_POINTS = 8  # with fewer, the lower end of the slope's interval at this level is the smallest slope itself
SLOPE_CONFIDENCE = 0.99  # confidence of the interval
HORIZON = 1.0  # the latest passing lies within this many sampled spans from now
_DEVIATION = 1.4826  # standard deviations in a median absolute residual of Gaussian scatter
_Z = NormalDist().inv_cdf((1 + SLOPE_CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Passing:
    """When a bar is passed, in steps.

    Attributes:
        step: where the fitted line meets the bar.
        earliest: lower end of the interval.
        latest: upper end of the interval.
    """

    step: float
    earliest: float
    latest: float

    def message(self) -> str:
        """Return when the bar is passed, as part of a sentence: a step, and the interval around it."""
        ends = {"earliest": f"{self.earliest:.0f}", "latest": f"{self.latest:.0f}"}
        return Message("alarms.place.when", step=f"{self.step:.0f}", **ends)


def passing(steps: Sequence[int], values: Sequence[float], bar: float) -> Passing | None:
    """Return when a rising series passes a bar; None if it does not clearly rise, or not within the horizon.

    Args:
        steps: ascending numbers of the samples.
        values: finite numbers; the last is below the bar.
        bar: in the unit of the values.

    Example:
        >>> passing(range(0, 100, 10), [0.1 * step for step in range(0, 100, 10)], 15.0).message()
        'step 150 (150 to 150)'
        >>> passing(range(0, 100, 10), [5.0, 4.0] * 5, 15.0) is None
        True
    """
    steps, values = list(steps)[-WINDOW:], list(values)[-WINDOW:]
    count = len(steps)
    if count < LEAST_POINTS or values[-1] >= bar:
        return None
    slopes = _slopes(steps, values)
    reach = _Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    out = math.floor((len(slopes) - reach) / 2)
    least, slope, most = slopes[max(0, out - 1)], median(slopes), slopes[min(len(slopes) - 1, len(slopes) - out)]
    least = min(least, median(_slopes(steps[count // 2 :], values[count // 2 :])))
    if least <= 0:
        return None
    middle = (steps[0] + steps[-1]) / 2
    level = median(value - slope * (step - middle) for step, value in zip(steps, values, strict=True))
    residuals = (value - level - slope * (step - middle) for step, value in zip(steps, values, strict=True))
    spread = _DEVIATION * median(map(abs, residuals)) * math.sqrt(count / (count - 2) * (1 + 1 / count))
    latest = middle + (bar - level + _Z * spread) / least
    if latest - steps[-1] > HORIZON * (steps[-1] - steps[0]):
        return None
    earliest = max(float(steps[-1]), middle + (bar - level - _Z * spread) / most)
    expected = min(max(earliest, middle + (bar - level) / slope), latest)
    return Passing(expected, earliest, max(earliest, latest))


def _slopes(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    points = combinations(zip(steps, values, strict=True), 2)
    return sorted((late[1] - early[1]) / (late[0] - early[0]) for early, late in points)


def largest_of_column(call: CallSample, column: str) -> tuple[float, int]:
    """Return the largest finite number of a column and its head; minus infinity if no number is finite.

    Example:
        >>> largest_of_column(CallSample("attn", 0, 3, {"peak": [0.1, float("nan"), 0.3]}, 1.0, ""), "peak")
        (0.3, 2)
    """
    finite = [(value, head) for head, value in enumerate(call.columns.get(column, ())) if math.isfinite(value)]
    return max(finite, default=(-math.inf, 0))


def same_place(samples: Iterable[StepSample], call: CallSample) -> Iterator[tuple[int, CallSample]]:
    """Yield (step, sample) of one attention for each sample that has it, in the order of the samples.

    Args:
        samples: Samples of the model.
        call: The attention, found by its site and index.
    """
    for sample in samples:
        found = next((one for one in sample.calls if one.place == call.place), None)
        if found is not None:
            yield sample.step, found


def first_of(samples: Sequence[StepSample], call: CallSample) -> CallSample | None:
    """Return the sample of an attention (by site and index) in the earliest of `samples`; None if no sample has it."""
    return next((one for _, one in same_place(samples, call)), None)
