"""Two runs, statistic by statistic, over the last samples of the steps that both went through.

Runs may be of different length and sampled at different steps. The samples compared are the last ones of the run that
has fewer of them up to the step that both reached, and of the other the ones nearest to these.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sqrtdk.report.watch_statistics import STATISTICS, Array
from sqrtdk.report.watch_summary import Site, Summary

APART = 0.10  # a difference of more than this share of the larger value is counted
SAMPLES = 5  # so that one batch, or one sample with NaN, says little


@dataclass(frozen=True, slots=True)
class Pair:
    """One attention of each run: the median over the samples of its worst head's value; None: not measured."""

    label: str
    a: float | None
    b: float | None

    @property
    def apart(self) -> float | None:
        """The difference as a share of the larger value, from 0 to 2; None where one is not measured.

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
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b))

    @property
    def ratio(self) -> float | None:
        """B as a multiple of A; None where there is none."""
        if self.a is None or self.b is None or not self.a or not (math.isfinite(self.a) and math.isfinite(self.b)):
            return None
        return self.b / self.a


@dataclass(frozen=True, slots=True)
class Difference:
    """One statistic.

    Attributes:
        column: of `STATISTICS`.
        pairs: every attention that both runs have.
    """

    column: str
    pairs: tuple[Pair, ...]

    @property
    def known(self) -> tuple[Pair, ...]:
        """Attentions with a value in both runs."""
        return tuple(pair for pair in self.pairs if pair.apart is not None)

    @property
    def measured(self) -> int:
        """How many they are."""
        return len(self.known)

    @property
    def count(self) -> int:
        """Attentions that are more than `APART` apart."""
        return sum((pair.apart or 0.0) > APART for pair in self.known)

    @property
    def typical(self) -> float | None:
        """Median over attentions of the difference: one that is infinite, or not measured, can't lead it astray.

        Example:
            >>> Difference("peak", (Pair("a", 1.0, 2.0), Pair("b", 3.0, 4.0), Pair("c", 1.0, math.inf))).typical
            0.5
        """
        return statistics.median(pair.apart or 0.0 for pair in self.known) if self.known else None

    @property
    def farthest(self) -> Pair | None:
        """The pair that is farthest apart; None: none has two values."""
        return max(self.known, key=lambda pair: pair.apart or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs.

    Attributes:
        steps_a: of the samples of A that are compared.
        steps_b: of those of B, as many.
        overlap: whether both runs reached these steps; else the newest samples of each are compared.
        by: "name", or "order": no attention has the same name in both, and the n-th of A stands beside the n-th of B.
        differences: one a statistic, the one that typically differs most first.
        only_a: attentions that B does not have.
        only_b: attentions that A does not have.
    """

    steps_a: tuple[int, ...]
    steps_b: tuple[int, ...]
    overlap: bool
    by: str
    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def measured(self) -> bool:
        """Whether anything could be compared."""
        return any(one.measured for one in self.differences)


def compare(a: Summary, b: Summary) -> Comparison:
    """Hold the worst heads of two runs against each other."""
    sites_a, sites_b = ({(site.site, site.index): site for site in run.sites} for run in (a, b))
    shared = [(sites_a[place], sites_b[place]) for place in sites_a if place in sites_b]
    by = "name"
    if not shared and len(a.sites) == len(b.sites):
        by, shared = "order", list(zip(a.sites, b.sites, strict=True))
    steps_a, steps_b, overlap = _steps(_measured(a), _measured(b))
    differences = [
        Difference(
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
        for column in STATISTICS
    ]
    together = {id(site) for pair in shared for site in pair}
    return Comparison(
        steps_a,
        steps_b,
        overlap,
        by,
        tuple(sorted(differences, key=_rank)),
        _labels(a.sites, together),
        _labels(b.sites, together),
    )


def _rank(one: Difference) -> tuple[float, float]:
    """The least is listed first."""
    farthest = one.farthest
    if one.typical is None or farthest is None or farthest.apart is None:
        return math.inf, 0.0
    return -one.typical, -farthest.apart


def _measured(run: Summary) -> Array:
    """Steps at which any attention was measured."""
    return np.unique(np.concatenate([np.empty(0, np.int64), *(site.steps for site in run.sites)]))


def _steps(a: Array, b: Array) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """The samples of two runs to compare, and whether both reached them.

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
    low, high = max(a[0], b[0]), min(a[-1], b[-1])
    within = [steps[(low <= steps) & (steps <= high)] for steps in (a, b)]
    if not all(map(len, within)):
        most = min(len(a), len(b), SAMPLES)
        return tuple(a[-most:].tolist()), tuple(b[-most:].tolist()), False
    sparser = min(within, key=len)[-SAMPLES:]
    near = [steps[np.abs(steps[None] - sparser[:, None]).argmin(1)] for steps in within]
    return tuple(near[0].tolist()), tuple(near[1].tolist()), True


def _at(site: Site, column: str, steps: Sequence[int]) -> float | None:
    """The worst head's value: the median over the samples that have one."""
    values = site.worst(column)[0][np.isin(site.steps, steps)]
    known = values[~np.isnan(values)].tolist()
    return statistics.median_low(known) if known else None


def _labels(sites: Sequence[Site], together: set[int]) -> tuple[str, ...]:
    return tuple(site.label for site in sites if id(site) not in together)
