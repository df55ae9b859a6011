"""Compares two runs, statistic by statistic, over the last samples of the steps that both reached.

Runs may differ in length and in the steps that were sampled. The samples compared are the last ones, within the shared
steps, of the run with fewer samples, and the samples of the other run that lie nearest to them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sqrtdk.report.watch.sites import Site
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN, Array
from sqrtdk.report.watch.summary import Summary

NOTABLE_DIFFERENCE = 0.10  # differences above this share of the larger value are counted
SAMPLES_COMPARED = 5  # samples compared: several, so that one batch or one NaN sample decides little


@dataclass(frozen=True, slots=True)
class Pair:
    """One attention in two runs.

    Attributes:
        label: Name of the attention.
        a: The median over the samples of the first run of its worst head's value; None if it was not measured.
        b: The same of the second run.
    """

    label: str
    a: float | None
    b: float | None

    @property
    def apart(self) -> float | None:
        """The difference as a share of the larger value: |b - a| / max(|a|, |b|), from 0 to 2.

        None if a value is missing.

        Example:
            >>> Pair("h.0", 2.0, 8.0).apart, Pair("h.0", 1.0, -1.0).apart, Pair("h.0", None, 8.0).apart
            (0.75, 2.0, None)
        """
        if self.a is None or self.b is None:
            return None
        if self.a == self.b:
            return 0.0
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            return math.inf
        # of the larger one: symmetric, and defined where one value is 0
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b))

    @property
    def ratio(self) -> float | None:
        """The ratio b / a; None if a value is missing or infinite, or if a is 0."""
        if self.a is None or self.b is None or not self.a or not (math.isfinite(self.a) and math.isfinite(self.b)):
            return None
        return self.b / self.a


@dataclass(frozen=True, slots=True)
class StatisticDifference:
    """The difference of two runs in one statistic.

    Attributes:
        column: key of `STATISTIC_BY_COLUMN`.
        pairs: all attentions that both runs have.
    """

    column: str
    pairs: tuple[Pair, ...]

    @property
    def known(self) -> tuple[Pair, ...]:
        """The attentions with a value in both runs."""
        return tuple(pair for pair in self.pairs if pair.apart is not None)

    @property
    def measured(self) -> int:
        """Number of attentions with a value in both runs."""
        return len(self.known)

    @property
    def count(self) -> int:
        """Number of attentions that differ by more than `NOTABLE_DIFFERENCE` (see `Pair.apart`)."""
        return sum((pair.apart or 0.0) > NOTABLE_DIFFERENCE for pair in self.known)

    @property
    def typical(self) -> float | None:
        """The median difference over attentions; unlike a mean, it survives an infinite one.

        Example:
            >>> pairs = (Pair("a", 1.0, 2.0), Pair("b", 3.0, 4.0), Pair("c", 1.0, math.inf))
            >>> StatisticDifference("peak", pairs).typical
            0.5
        """
        return statistics.median(pair.apart or 0.0 for pair in self.known) if self.known else None

    @property
    def farthest(self) -> Pair | None:
        """The attention with the largest difference (see `Pair.apart`); None if none has a value in both runs."""
        return max(self.known, key=lambda pair: pair.apart or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs, compared.

    Attributes:
        steps_a: steps of A's compared samples.
        steps_b: steps of B's compared samples, as many.
        overlap: whether both runs reached these steps. If not, each run's newest samples are compared.
        by: how attentions are matched: by "name", or by "order" (n-th with n-th) if no name occurs in both runs.
        differences: one for each statistic, the largest typical difference first.
        only_a: attentions that B does not have.
        only_b: attentions that A does not have.
    """

    steps_a: tuple[int, ...]
    steps_b: tuple[int, ...]
    overlap: bool
    by: str
    differences: tuple[StatisticDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def measured(self) -> bool:
        """Whether any statistic has a value in both runs, so that the runs could be compared at all."""
        return any(one.measured for one in self.differences)


def compare_runs(a: Summary, b: Summary) -> RunComparison:
    """Compare two runs: for each statistic and attention, the median over samples of the worst head.

    Attentions are paired by name. If no name is shared and both runs have equally many, they are paired by their order,
    because a port renames modules but keeps their order.
    """
    sites_a, sites_b = ({(site.site, site.index): site for site in run.sites} for run in (a, b))
    shared = [(sites_a[place], sites_b[place]) for place in sites_a if place in sites_b]
    by = "name"
    # a port gives its modules other names, but keeps their order
    if not shared and len(a.sites) == len(b.sites):
        by, shared = "order", list(zip(a.sites, b.sites, strict=True))
    steps_a, steps_b, overlap = _steps(_measured(a), _measured(b))
    differences = [
        StatisticDifference(
            column,
            tuple(
                Pair(
                    one.label if by == "name" else f"{one.label} | {other.label}",
                    _at(one, column, steps_a),
                    _at(other, column, steps_b),
                )
                for one, other in shared
            ),
        )
        for column in STATISTIC_BY_COLUMN
    ]
    # by identity: names may occur in both runs and still be paired by order
    together = {id(site) for pair in shared for site in pair}
    return RunComparison(
        steps_a,
        steps_b,
        overlap,
        by,
        tuple(sorted(differences, key=_rank)),
        _labels(a.sites, together),
        _labels(b.sites, together),
    )


def _rank(one: StatisticDifference) -> tuple[float, float]:
    """Return the sort key: largest typical difference first, statistics without values last."""
    farthest = one.farthest
    if one.typical is None or farthest is None or farthest.apart is None:
        return math.inf, 0.0
    return -one.typical, -farthest.apart


def _measured(run: Summary) -> Array:
    """Return the steps at which any attention was measured."""
    return np.unique(np.concatenate([np.empty(0, np.int64), *(site.steps for site in run.sites)]))


def _steps(a: Array, b: Array) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Return the steps of each run to compare, and whether both runs reached them.

    Example:
        >>> _steps(np.array([1, 10, 20, 30]), np.array([1, 7, 14, 21, 28, 35, 42]))
        ((1, 10, 20, 30), (1, 7, 21, 28), True)
        >>> _steps(np.arange(1, 21), np.array([1, 10, 20, 30, 40, 50, 60, 70]))
        ((1, 10, 20), (1, 10, 20), True)
        >>> _steps(np.array([1, 10]), np.array([110, 120, 130]))
        ((1, 10), (120, 130), False)
    """
    if not len(a) or not len(b):
        return (), (), False
    low, high = max(a[0], b[0]), min(a[-1], b[-1])  # the steps that both runs cover
    within = [steps[(low <= steps) & (steps <= high)] for steps in (a, b)]
    if not all(map(len, within)):  # no shared steps: compare the newest samples of each
        most = min(len(a), len(b), SAMPLES_COMPARED)
        return tuple(a[-most:].tolist()), tuple(b[-most:].tolist()), False
    sparser = min(within, key=len)[-SAMPLES_COMPARED:]  # the run with fewer samples sets the steps
    near = [steps[np.abs(steps[None] - sparser[:, None]).argmin(1)] for steps in within]
    return tuple(near[0].tolist()), tuple(near[1].tolist()), True


def _at(site: Site, column: str, steps: Sequence[int]) -> float | None:
    """Return the median of the worst head's value over the samples that have one."""
    values = site.worst(column)[0][np.isin(site.steps, steps)]
    known = values[~np.isnan(values)].tolist()
    # median_low never averages two samples, so a finite one is not mixed with an infinite one
    return statistics.median_low(known) if known else None


def _labels(sites: Sequence[Site], together: set[int]) -> tuple[str, ...]:
    return tuple(site.label for site in sites if id(site) not in together)
