"""Two runs, statistic by statistic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sqrtdk.report.watch_summary import STATISTICS, Site, Summary

APART = 0.10  # a difference of more than this share of the larger value is counted


@dataclass(frozen=True, slots=True)
class Pair:
    """One attention that both runs have: the values of its worst head, None where it was not measured."""

    label: str
    a: float | None
    b: float | None

    @property
    def apart(self) -> float:
        """The difference as a share of the larger value; 0 where one is not measured.

        Example:
            >>> Pair("h.0", 2.0, 8.0).apart, Pair("h.0", None, 8.0).apart
            (0.75, 0.0)
        """
        if self.a is None or self.b is None or self.a == self.b:
            return 0.0
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            return math.inf
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b))


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
    def measured(self) -> int:
        """Attentions with a value in both runs."""
        return sum(pair.a is not None and pair.b is not None for pair in self.pairs)

    @property
    def count(self) -> int:
        """Attentions that are more than `APART` apart."""
        return sum(pair.apart > APART for pair in self.pairs)

    @property
    def farthest(self) -> Pair | None:
        """The pair that is farthest apart; None: none has two values."""
        known = [pair for pair in self.pairs if pair.a is not None and pair.b is not None]
        return max(known, key=lambda pair: pair.apart, default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs.

    Attributes:
        step: the last that both measured, at which they are compared; None: the newest sample of each is.
        differences: one a statistic.
        only_a: attentions that B does not have.
        only_b: attentions that A does not have.
    """

    step: int | None
    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare(a: Summary, b: Summary) -> Comparison:
    """Hold the worst heads of two runs against each other."""
    sites_a, sites_b = ({(site.site, site.index): site for site in run.sites} for run in (a, b))
    shared = [place for place in sites_a if place in sites_b]
    measured_a, measured_b = ({int(step) for site in run.sites for step in site.steps} for run in (a, b))
    step = max(measured_a & measured_b, default=None)
    differences = tuple(
        Difference(
            column,
            tuple(
                Pair(sites_a[place].label, _at(sites_a[place], column, step), _at(sites_b[place], column, step))
                for place in shared
            ),
        )
        for column in STATISTICS
    )
    return Comparison(step, differences, _labels(a.sites, sites_b), _labels(b.sites, sites_a))


def _at(site: Site, column: str, step: int | None) -> float | None:
    """The worst head's value at a step, or at the newest sample."""
    at = np.flatnonzero(site.steps == step) if step is not None else np.array([len(site.steps) - 1])
    if not len(at):
        return None
    value = float(site.worst(column)[0][at[-1]])
    return None if math.isnan(value) else value


def _labels(sites: Sequence[Site], others: object) -> tuple[str, ...]:
    return tuple(site.label for site in sites if (site.site, site.index) not in others)  # type: ignore[operator]
