"""heads-claims: what several heads are said to bring, against one head of the same width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sqrtdk.messages import Text
from sqrtdk.models.demo import DemoModel, load_demo
from sqrtdk_lab._arms import Arm, loss_gap, train_arms
from sqrtdk_lab._rows import demo_weights, factor, windows
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun, stable_seed
from sqrtdk_lab.figures import Figure, Figures, Plot, Series, series_over
from sqrtdk_lab.intervals import bootstrap, geometric_mean, mean, ratio_of_means
from sqrtdk_lab.training.heads import NOISE, SHARES, train_heads
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

LENGTH, D_K = 64, 64  # bytes of a window; of the embedded model
HEADS_APART = 1.5  # between the distances of two heads; with random weights they differ by about a tenth
GAINED = 0.02  # nats a byte; runs that differ in their seed alone are about that far apart
LESS = 0.5  # of what a single head has: these ratios scatter from seed to seed, by up to a third
LEAST_RISE = 1e-4  # nats; smaller rises count as this: a model that has hardly been trained may have none to divide by
OVER = "_over_that_of_one_head"


def measure(run: ExperimentRun) -> ExperimentResult:
    """Losses of models with several heads and with one, whole, disturbed and overfitted; distances of the heads."""
    sizes = {"task": "text", "layers": run["layers"], "width": run["width"]}
    heads = {"one": 1, "several": SHARES} if not run["exchanged"] else {"one": SHARES, "several": 1}
    designs = {arm: {**sizes, "heads": count, "head_dim": run["width"] // count} for arm, count in heads.items()}
    arms = train_arms(run, designs, function=train_heads)
    short = {name: {**design, **run["short"]} for name, design in designs.items()}
    fitted = train_arms(run, short, dict.fromkeys(short, run["short_rates"]), function=train_heads)
    figures = [
        loss_gap("loss_less_than_of_one_head", arms["one"], arms["several"]),
        *_distances(run),
    ]
    for name, entry, of in (
        ("overfitting", "training", fitted),
        ("rise_with_noise", "noisy", arms),
        ("rise_without_a_share", "removed", arms),
    ):
        sign = -1.0 if entry == "training" else 1.0
        rises = {arm: [sign * (p[entry] - p["held_out"]) for p in _probed(of[arm])] for arm in designs}
        figures += [mean(name, values, heads=arm) for arm, values in rises.items()]
        several, one = ([max(rise, LEAST_RISE) for rise in rises[arm]] for arm in ("several", "one"))
        ratios = [a / b for a, b in zip(several, one, strict=True)]
        figures.append(geometric_mean(f"{name}{OVER}", ratios))
    found = Figures(figures)
    return ExperimentResult(figures, (_ratios(found), _by_layer(found)))


def _probed(arm: Arm) -> list[Mapping[str, Any]]:
    """The probes of each seed, at the learning rate that is best for the other seeds."""
    found = [arm.results[rate][seed]["probed"] for seed, rate in enumerate(arm.chosen)]
    assert None not in found, "a model at its best rate does not diverge"
    return found


def _distances(run: ExperimentRun) -> list[Figure]:
    """Distances of the heads of the embedded model, and their ratio in the layer where it is largest."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_seed([run.seed, "weights"]))
        model = load_demo("demo") if run["trained"] else DemoModel("demo")
    text = windows(run["windows"], LENGTH, run.generator("text"))
    maps = demo_weights(model, text, factor("sqrt_dk", D_K))[..., 1:, :].double()  # the first row sees one key
    rows, keys = torch.arange(1, LENGTH, dtype=torch.float64), torch.arange(LENGTH, dtype=torch.float64)
    apart = (rows[:, None] - keys).clamp(min=0.0)
    # Over the mean of 0, 1, ..., i, the distance of equal weights.
    found = ((maps * apart).sum(-1) / (rows / 2)).mean(-1)
    means = found.mean(0)
    layer = int((means.amax(-1) / means.amin(-1)).argmax())
    ends = tuple(found[:, layer, int(head)] for head in (means[layer].argmax(), means[layer].argmin()))
    return [
        *(
            mean("distance", found[:, layer, head], layer=layer + 1, head=head + 1)
            for layer in range(found.shape[1])
            for head in range(found.shape[2])
        ),
        bootstrap("farthest_over_nearest_head", ends, ratio_of_means, seed=run.seed),
    ]


def _ratios(figures: Figures) -> Plot:
    bars = (
        ("overfitting", "overfitting"),
        ("noise on the input", "rise_with_noise"),
        (f"1/{SHARES} of the channels lost", "rise_without_a_share"),
    )
    found = [figures(f"{name}{OVER}") for _, name in bars]
    series = Series(
        "several heads over one",
        tuple(label for label, _ in bars),
        tuple(figure.value for figure in found),
        tuple(figure.low for figure in found),
        tuple(figure.high for figure in found),
        "bars",
    )
    return Plot("ratios", WORDS("plot.ratios"), "", "ratio", (series,), lines=(("as one head", 1.0),))


def _by_layer(figures: Figures) -> Plot:
    heads = sorted({int(figure.at["head"]) for figure in figures.all("distance")})
    return Plot(
        "distances",
        WORDS("plot.distances"),
        "layer",
        "distance over that of equal weights",
        tuple(series_over(f"head {head}", figures.all("distance", head=head), "layer", style="bars") for head in heads),
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
    formula=r"\mathrm{MultiHead} = [\mathrm{head}_1, ..., \mathrm{head}_h] \, W_O, \qquad "
    r"\mathrm{distance} = \frac{\sum_{j \le i} p_{ij} (i - j)}{i / 2}",
    method=WORDS("method", noise=f"{NOISE:g}", apart=HEADS_APART, gained=GAINED, less=LESS),
    control=WORDS("control"),
    parameters={
        "exchanged": False,
        "width": 64,
        "layers": 2,
        "trained": True,
        "windows": 200,
        "seeds": 6,
        "rates": (1e-3, 3e-3, 1e-2),
        "widened": 0,
        "text": {"steps": 400, "rows": 16, "length": 64, "points": 0},
        "short": {"text_bytes": 8192, "steps": 300},
        "short_rates": (3e-3,),
    },
    quick={
        "layers": 1,
        "windows": 50,
        "seeds": 6,
        "rates": (3e-3,),
        "text": {"steps": 100, "rows": 16, "length": 64, "points": 0},
        "short": {"text_bytes": 2048, "steps": 60, "rows": 8},
    },
    flipped={"exchanged": True, "trained": False},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.syntax"), reason=WORDS("reason.syntax")),
        ClaimPart(WORDS("part.distances", apart=HEADS_APART), (Expect("farthest_over_nearest_head", low=HEADS_APART),)),
        _less("overfitting", "overfitting"),
        _less("noise", "rise_with_noise"),
        ClaimPart(WORDS("part.expression", gained=GAINED), (Expect("loss_less_than_of_one_head", low=GAINED),)),
    ),
    why=why,
)
