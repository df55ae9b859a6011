"""Arms of a comparison: one design, trained at several learning rates and from several seeds, judged at its best rate.

A rate that is bad for one scale must not be mistaken for a bad scale, so each arm has its own. If the best of the given
rates is the smallest or the largest, further rates beyond it are tried. The rate for a seed is chosen by the mean of
the other seeds, so that a run never takes part in choosing the rate that it is judged at. Every arm has the same seeds,
so differences are taken seed by seed.

Plots show the arms over their steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from sqrtdk.messages import Text
from sqrtdk_lab.claim import Cell, ExperimentRun
from sqrtdk_lab.figures import Axis, Figure, Place, Plot, Series, Style, curve_series
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.training.settings import TrainingSettings
from sqrtdk_lab.training.train import CHANCE_LOSS, train

SEEDS_APART = 1000  # first seeds of two runs of the lab differ by this, so that no seed is shared
TASKS = {"text": "decoder", "strings": "encoder_decoder"}

# The designs of all training claims: equal settings make equal cells, which are trained once for all claims.
FULL_TRAINING: dict[str, Any] = {
    "seeds": 5,
    "rates": (3e-4, 1e-3, 3e-3, 1e-2),
    "widened": 2,
    "text": {"steps": 200, "rows": 16, "length": 64, "points": 21},
    "strings": {"steps": 300, "rows": 32, "length": 12, "points": 21},
}
QUICK: dict[str, Any] = {
    "rates": (1e-3, 4e-3),
    "widened": 0,
    "text": {"steps": 150, "rows": 16, "length": 64, "points": 7},
    "strings": {"steps": 150, "rows": 32, "length": 8, "points": 7},
}
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Arm:
    """A trained arm.

    Attributes:
        results: results of `train` by rate, one per seed.
        model: "decoder" or "encoder_decoder".
    """

    results: Mapping[float, tuple[Mapping[str, Any], ...]]
    model: str

    def losses(self, rate: float) -> list[float]:
        """Return the held-out loss of each seed, in nats per symbol; a diverged run counts as guessing."""
        found = [result["held_out"] for result in self.results[rate]]
        return [CHANCE_LOSS[self.model] if loss is None else loss for loss in found]

    @property
    def rate(self) -> float:
        """The rate with the best mean over all seeds."""
        return min(self.results, key=lambda rate: sum(self.losses(rate)))

    @property
    def chosen(self) -> list[float]:
        """For each seed, the rate that is best for the other seeds."""
        return best_for_others({rate: self.losses(rate) for rate in self.results})

    @property
    def best(self) -> list[float]:
        """The held-out loss of each seed at the rate that is best for the other seeds."""
        return [self.losses(rate)[seed] for seed, rate in enumerate(self.chosen)]

    @property
    def diverged(self) -> list[bool]:
        """Whether the run of each seed diverged at that rate."""
        return [self.results[rate][seed]["held_out"] is None for seed, rate in enumerate(self.chosen)]

    def at_best(self, name: str) -> list[list[float]]:
        """Return one curve per seed, at the arm's best rate."""
        return [result["curves"][name] for result in self.results[self.rate]]

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        """The results of every rate and seed."""
        return [result for results in self.results.values() for result in results]


def best_for_others(losses: Mapping[float, Sequence[float]]) -> list[float]:
    """Return for each seed the rate with the smallest total loss over the other seeds.

    Args:
        losses: by rate, one per seed, for two or more seeds.

    Example:
        >>> best_for_others({1e-3: [0.5, 2.0, 2.0], 3e-3: [2.0, 1.0, 1.0]})
        [0.003, 0.001, 0.001]
    """
    seeds = range(len(next(iter(losses.values()))))
    return [min(losses, key=lambda rate: sum(losses[rate]) - losses[rate][left]) for left in seeds]


def train_arms(
    run: ExperimentRun,
    arms: Mapping[Name, Mapping[str, Any]],
    rates: Mapping[Name, Sequence[float]] | None = None,
    function: Callable[[Cell], dict[str, Any]] = train,
) -> dict[Name, Arm]:
    """Train all arms; equal runs are trained once, even across claims.

    Args:
        run: with the parameters of `FULL_TRAINING`; `widened` is the number of rates that may be added to an arm.
        arms: by any name: `task` ("text" or "strings"), and what differs from the defaults of `TrainingSettings`.
        rates: by name, instead of `run["rates"]`; ascending.
        function: trains one cell; its results are those of `train`, perhaps with more entries.

    Returns:
        The arms by name, each with ascending rates.
    """
    missing = {name: list(run["rates"] if rates is None else rates[name]) for name in arms}
    found: dict[Name, dict[float, tuple[Mapping[str, Any], ...]]] = {name: {} for name in arms}
    trained: dict[Name, Arm] = {}
    for _ in range(run["widened"] + 1):
        for name, rate, results in _results(run, arms, missing, function):
            found[name][rate] = results
        trained = {name: Arm(dict(sorted(found[name].items())), TASKS[arm["task"]]) for name, arm in arms.items()}
        missing = {name: [more] for name, arm in trained.items() if (more := beyond(arm)) is not None}
        if not missing:
            break
    return trained


def _results(
    run: ExperimentRun,
    arms: Mapping[Name, Mapping[str, Any]],
    rates: Mapping[Name, Sequence[float]],
    function: Callable[[Cell], dict[str, Any]],
) -> Iterator[tuple[Name, float, tuple[Mapping[str, Any], ...]]]:
    """Yield name, rate, and one result per seed."""
    seeds = [run.seed * SEEDS_APART + i for i in range(run["seeds"])]
    wanted = []
    for name, of in rates.items():
        task, design = arms[name]["task"], {entry: value for entry, value in arms[name].items() if entry != "task"}
        for rate, seed in product(of, seeds):
            cell = {"model": TASKS[task], **run[task], **design, "rate": rate, "seed": seed}
            wanted.append((name, rate, TrainingSettings.of(cell)))
    # longest first, so that no worker is left with a long run at the end
    order = sorted(range(len(wanted)), key=lambda i: -_cost(wanted[i][2]))
    results = dict(zip(order, run.map(function, [wanted[i][2].cell() for i in order]), strict=True))
    for first in range(0, len(wanted), len(seeds)):
        name, rate, _ = wanted[first]
        yield name, rate, tuple(results[first + i] for i in range(len(seeds)))


def beyond(arm: Arm) -> float | None:
    """Return the next rate to try if the best of two or more is the smallest or the largest; otherwise None.

    Example:
        >>> runs = {rate: ({"held_out": rate},) * 2 for rate in (3e-4, 1e-3, 3e-3)}
        >>> beyond(Arm(runs, "decoder"))
        9e-05
    """
    rates = list(arm.results)
    if len(rates) < 2 or arm.rate not in (rates[0], rates[-1]):
        return None
    edge, inner = (rates[0], rates[1]) if arm.rate == rates[0] else (rates[-1], rates[-2])
    return float(f"{edge * edge / inner:.1g}")


def _cost(settings: TrainingSettings) -> float:
    """Estimate how long a run takes, for sorting."""
    return settings.steps * settings.rows * settings.head_dim * (4 if settings.score == "additive" else 1)


def loss_gap(name: str, worse: Arm, better: Arm, **at: Place) -> Figure:
    """Return the difference of two arms' held-out losses, each at its own best rate, paired by seed."""
    return mean(name, differences(worse, better), **at)


def differences(worse: Arm, better: Arm) -> list[float]:
    """Return the differences of two arms' held-out losses, seed by seed; NaN if both runs diverged."""
    pairs = zip(worse.best, better.best, worse.diverged, better.diverged, strict=True)
    return [math.nan if lost and lost_too else a - b for a, b, lost, lost_too in pairs]


SMALLEST = 1e-10  # lower end of a logarithmic axis; quantiles of gradients may be 0
SCALE_LEGEND = {"no scale": "none", r"$1/\sqrt{d_k}$": "sqrt_dk"}  # words of a legend, and the scale that they name
TASK_TEXTS = {"text": Text("text", "文本"), "strings": Text("strings", "字符串")}
Entries = Mapping[str, tuple[str, Style]]  # curves of a run: their words in the legend, and their style
GRADIENT_SERIES: Entries = {
    "gradient_p10": ("quantile .1", "dashed"),
    "gradient_p50": ("median", "curve"),
    "gradient_p90": ("quantile .9", "dashed"),
}


def averaged(curves: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean over runs, up to the end of the shortest.

    Example:
        >>> averaged([[1.0, 2.0], [3.0]])
        (2.0,)
    """
    return tuple(sum(values) / len(values) for values in zip(*curves, strict=False))


def list_figures(figures: Sequence[Figure]) -> Text:
    """Return figures with their tasks.

    Example:
        >>> list_figures([Figure("gap", 0.5, 0.4, 0.6, "t", 9, {"task": "text"})]).en
        '0.5 [0.4, 0.6] (text)'
    """
    pairs = [(figure, TASK_TEXTS[str(figure.at["task"])]) for figure in figures]
    english = ", ".join(f"{figure} ({task.en})" for figure, task in pairs)
    return Text(english, "、".join(f"{figure}（{task.zh}）" for figure, task in pairs))


def curve_plots(arms: Mapping[str, Arm], task: str, d_k: int) -> tuple[Plot, ...]:
    """Plot loss, largest logit, entropy and gradients over the steps, each arm at its best rate.

    Args:
        arms: by their label in the legend.
        task: "text" or "strings".
        d_k: of all arms.
    """

    def plot(name: str, what: Text, label: str, entries: Entries, axis: Axis = "linear") -> Plot:
        caption = Text(
            f"{what.en}: mean over the seeds, each arm at its best learning rate ({TASK_TEXTS[task].en}, d_k = {d_k}).",
            f"{what.zh}：各种子的平均，各自取最佳学习率（{TASK_TEXTS[task].zh}任务，d_k = {d_k}）。",
        )
        series = tuple(
            _over_steps(arm, entry, f"{legend}, {of}" if of else legend, style, axis)
            for legend, arm in arms.items()
            for entry, (of, style) in entries.items()
        )
        return Plot(name, caption, "step", label, series, y_axis=axis)

    return (
        plot("loss", Text("Training loss", "训练损失"), "loss, nats a symbol", {"loss": ("", "curve")}),
        plot("max-logit", Text("Largest logit", "最大的 logit"), "largest logit", {"max_logit": ("", "curve")}, "log"),
        plot(
            "entropy",
            Text("Entropy of the weights over log n", "注意力权重的熵与 log n 之比"),
            r"entropy / $\log n$",
            {"entropy_share": ("", "curve")},
        ),
        plot(
            "gradient",
            Text("Quantiles of the gradient over the entries of W_q", "W_q 各元素梯度绝对值的分位数"),
            r"$|\partial L / \partial W_q|$",
            GRADIENT_SERIES,
            "log",
        ),
    )


def _over_steps(arm: Arm, entry: str, legend: str, style: Style, axis: Axis) -> Series:
    values = averaged(arm.at_best(entry))
    # max returns its first argument if the two don't compare, so a NaN stays NaN and is not drawn, rather than drawn as
    # the smallest value
    shown = [max(value, SMALLEST) for value in values] if axis == "log" else values
    return curve_series(legend, averaged(arm.at_best("step")), shown, style=style)
