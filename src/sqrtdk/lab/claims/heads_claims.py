"""heads-claims: what several heads are said to bring, against one head of the same width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.lab._arms import Arm, averaged, loss_gap, train_arms
from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import Figures, Plot, Series, curve_series
from sqrtdk.lab.intervals import geometric_mean, mean
from sqrtdk.lab.training.heads import NOISE, SHARES, train_heads
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text

WORDS = words_of(__name__)

APART = 1.5  # between the distances of two heads; of heads with random weights they differ by a few per cent
GAINED = 0.02  # nats a byte; runs that differ in their seed alone are about that far apart
OVER = "_over_that_of_one_head"
LESS = 0.9  # of what a single head has: less that is not worth a tenth is not counted


def measure(run: ExperimentRun) -> ExperimentResult:
    """Losses of models with several heads and with one, whole, disturbed and overfitted; distances of the heads."""
    width, heads = run["width"], run["heads"]
    sizes = {"task": "text", "layers": run["layers"], "width": width}
    several = {**sizes, "heads": heads, "head_dim": width // heads, "tied": run["tied"]}
    designs = {"one": {**sizes, "heads": 1, "head_dim": width}, "several": several}
    arms = train_arms(run, designs, function=train_heads)
    short = {name: {**design, "text_bytes": run["short_bytes"]} for name, design in designs.items()}
    fitted = train_arms(run, short, {name: run["short_rates"] for name in short}, function=train_heads)
    figures = [
        loss_gap("loss_less_than_of_one_head", arms["one"], arms["several"]),
        mean("farthest_over_nearest_head", [_apart(probed["distances"]) for probed in _probed(arms["several"])]),
    ]
    for name, entry, of in (
        ("overfitting", "training", fitted),
        ("rise_with_noise", "noisy", arms),
        ("rise_without_a_share", "removed", arms),
    ):
        rises = {arm: [abs(p[entry] - p["held_out"]) for p in _probed(of[arm])] for arm in designs}
        figures += [mean(name, values, heads=arm) for arm, values in rises.items()]
        ratios = [a / b for a, b in zip(rises["several"], rises["one"], strict=True)]
        figures.append(geometric_mean(f"{name}{OVER}", ratios))
    return ExperimentResult(figures, (_ratios(Figures(figures)), _distances(_probed(arms["several"]))))


def _probed(arm: Arm) -> list[Mapping[str, Any]]:
    """The probes of each seed, at the learning rate that is best for the other seeds."""
    found = [arm.results[rate][seed]["probed"] for seed, rate in enumerate(arm.chosen)]
    assert None not in found, "a model at its best rate does not diverge"
    return found


def _apart(distances: Sequence[Sequence[float]]) -> float:
    """The largest ratio of the distances of two heads of one layer."""
    return max(max(heads) / min(heads) for heads in distances)


def _ratios(figures: Figures) -> Plot:
    bars = (
        ("overfitting", "overfitting"),
        ("noise on the input", "rise_with_noise"),
        (f"1/{SHARES} of the channels lost", "rise_without_a_share"),
    )
    found = [figures(f"{name}{OVER}") for _, name in bars]
    ends = (tuple(getattr(figure, end) for figure in found) for end in ("value", "low", "high"))
    series = Series("several heads over one", tuple(label for label, _ in bars), *ends, style="bars")
    return Plot("ratios", WORDS("plot.ratios"), "", "ratio", (series,), lines=(("as one head", 1.0),))


def _distances(probed: Sequence[Mapping[str, Any]]) -> Plot:
    layers = range(len(probed[0]["distances"]))
    ranked = {layer: [sorted(model["distances"][layer]) for model in probed] for layer in layers}
    series = tuple(
        curve_series(f"layer {layer + 1}", range(1, len(models[0]) + 1), averaged(models), style="line")
        for layer, models in ranked.items()
    )
    return Plot(
        "distances",
        WORDS("plot.distances"),
        "head, by its distance",
        "distance over that of equal weights",
        series,
        lines=(("equal weights", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    names = ("overfitting", "rise_with_noise", "rise_without_a_share")
    one, several = ([figures(name, heads=count) for name in names] for count in ("one", "several"))
    overfitting, noise, share = (figures(f"{name}{OVER}") for name in names)
    return WORDS(
        "why",
        gained=figures("loss_less_than_of_one_head"),
        apart=figures("farthest_over_nearest_head"),
        gap_one=one[0],
        gap_several=several[0],
        overfitting=overfitting,
        noise=noise,
        share_one=one[2],
        share_several=several[2],
        share=share,
    )


def _less(part: str, name: str) -> ClaimPart:
    return ClaimPart(WORDS(f"part.{part}"), (Expect(f"{name}{OVER}", high=LESS),))


CLAIM = Claim(
    id="heads-claims",
    group="structure",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"\mathrm{MultiHead} = [\mathrm{head}_1, \dots, \mathrm{head}_h] \, W_O, \qquad "
    r"\mathrm{distance} = \frac{\sum_{j \le i} p_{ij} (i - j)}{i / 2}",
    method=WORDS("method", noise=f"{NOISE:g}", apart=APART, gained=GAINED, less=f"{1 - LESS:.0%}"),
    control=WORDS("control"),
    parameters={
        "heads": SHARES,
        "width": 64,
        "layers": 2,
        "tied": False,
        "seeds": 6,
        "rates": (1e-3, 3e-3, 1e-2),
        "widened": 0,
        "text": {"steps": 400, "rows": 16, "length": 64, "points": 0},
        "short_bytes": 8192,
        "short_rates": (3e-3,),
    },
    quick={
        "layers": 1,
        "seeds": 4,
        "rates": (3e-3,),
        "text": {"steps": 100, "rows": 16, "length": 64, "points": 0},
        "short_bytes": 2048,
    },
    flipped={"tied": True},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.syntax"), reason=WORDS("reason.syntax")),
        ClaimPart(WORDS("part.distances", apart=APART), (Expect("farthest_over_nearest_head", low=APART),)),
        _less("overfitting", "overfitting"),
        _less("noise", "rise_with_noise"),
        _less("share", "rise_without_a_share"),
        ClaimPart(WORDS("part.expression", gained=GAINED), (Expect("loss_less_than_of_one_head", low=GAINED),)),
    ),
    why=why,
)
