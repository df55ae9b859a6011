"""Arms of a comparison: one design, trained at several learning rates and from several seeds, judged at its best rate.

A rate that is bad for one scale must not be mistaken for a bad scale, so each arm has its own. It is chosen without the
run that it is judged by: for each seed the rate that is best on the mean of the other seeds. Every arm sees the same
seeds, so differences are taken seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqrtdk.lab._run import Run
from sqrtdk.lab.figures import Figure, Place
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.training.settings import Settings
from sqrtdk.lab.training.train import CHANCE, train

SEEDS_APART = 1000  # seeds of one run of the lab; another run has others
TASKS = {"text": "decoder", "strings": "encoder_decoder"}

# The designs of all training claims: equal settings make equal cells, which are trained once for all of them.
FULL: dict[str, Any] = {
    "seeds": 5,
    "rates": (3e-4, 1e-3, 3e-3, 1e-2),
    "text": {"steps": 200, "rows": 16, "length": 64, "points": 21},
    "strings": {"steps": 300, "rows": 32, "length": 12, "points": 21},
}
QUICK: dict[str, Any] = {
    "rates": (1e-3, 4e-3),
    "text": {"steps": 150, "rows": 16, "length": 64, "points": 7},
    "strings": {"steps": 150, "rows": 32, "length": 8, "points": 7},
}
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Arm:
    """A trained arm.

    Attributes:
        results: of `train`, by rate, then one a seed.
        model: "decoder" or "encoder_decoder".
    """

    results: Mapping[float, tuple[Mapping[str, Any], ...]]
    model: str

    def losses(self, rate: float) -> list[float]:
        """Held-out loss of each seed, nats a symbol; a run that diverged counts as one that guesses."""
        found = [result["held_out"] for result in self.results[rate]]
        return [CHANCE[self.model] if loss is None or not math.isfinite(loss) else loss for loss in found]

    @property
    def rate(self) -> float:
        """The best rate on the mean of all seeds."""
        return min(self.results, key=lambda rate: sum(self.losses(rate)))

    @property
    def best(self) -> list[float]:
        """Held-out loss of each seed at the rate that is best for the others."""
        table = {rate: self.losses(rate) for rate in self.results}
        chosen = best_for_others(table)
        return [table[rate][seed] for seed, rate in enumerate(chosen)]

    def at_best(self, name: str) -> list[list[float]]:
        """A curve of each seed at the arm's best rate."""
        return [result["curves"][name] for result in self.results[self.rate]]

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        """All results, of every rate and seed."""
        return [result for results in self.results.values() for result in results]


def best_for_others(losses: Mapping[float, Sequence[float]]) -> list[float]:
    """For each seed the rate with the least total loss over the other seeds.

    Args:
        losses: by rate, one a seed, two seeds or more.

    Example:
        >>> best_for_others({1e-3: [0.5, 2.0, 2.0], 3e-3: [2.0, 1.0, 1.0]})
        [0.003, 0.001, 0.001]
    """
    seeds = range(len(next(iter(losses.values()))))
    return [min(losses, key=lambda rate: sum(losses[rate]) - losses[rate][left]) for left in seeds]


def train_arms(
    run: Run, arms: Mapping[Name, Mapping[str, Any]], rates: Mapping[Name, Sequence[float]] | None = None
) -> dict[Name, Arm]:
    """Train all arms; equal runs are trained once, also across claims.

    Args:
        run: with the parameters of `FULL`.
        arms: by any name: `task`, "text" or "strings", and what differs from the defaults of `Settings`.
        rates: by name, in place of `run["rates"]`.

    Returns:
        The arms by name.
    """
    seeds = [run.seed * SEEDS_APART + i for i in range(run["seeds"])]
    wanted = []
    for name, arm in arms.items():
        task, design = arm["task"], {entry: value for entry, value in arm.items() if entry != "task"}
        for rate in run["rates"] if rates is None else rates[name]:
            for seed in seeds:
                cell = {"model": TASKS[task], **run[task], **design, "rate": rate, "seed": seed}
                wanted.append((name, rate, Settings.of(cell)))
    wanted.sort(key=lambda one: -_cost(one[2]))  # long runs first: the last ones to end are short
    results = run.map(train, [settings.cell() for _, _, settings in wanted])
    found: dict[Name, dict[float, dict[int, Mapping[str, Any]]]] = {}
    for (name, rate, settings), result in zip(wanted, results, strict=True):
        found.setdefault(name, {}).setdefault(rate, {})[settings.seed] = result
    return {
        name: Arm({rate: tuple(of[seed] for seed in seeds) for rate, of in found[name].items()}, TASKS[arm["task"]])
        for name, arm in arms.items()
    }


def _cost(settings: Settings) -> float:
    """About how long a run takes, to sort by."""
    return settings.steps * settings.rows * settings.head_dim * (4 if settings.score == "additive" else 1)


def gap(name: str, worse: Arm, better: Arm, **at: Place) -> Figure:
    """Difference of the held-out losses of two arms, each at its own best rate, paired by seed."""
    return mean(name, [a - b for a, b in zip(worse.best, better.best, strict=True)], **at)


def geometric_mean(name: str, samples: Sequence[float], **at: Place) -> Figure:
    """Geometric mean of positive samples: Student's t interval of their logarithms.

    Example:
        >>> print(geometric_mean("ratio", [10.0, 10.0]))
        10 [10, 10]
    """
    found = mean(name, [math.log(sample) for sample in samples], **at)
    value, low, high = (math.exp(end) for end in (found.value, found.low, found.high))
    return Figure(name, value, low, high, "t", found.samples, at)
