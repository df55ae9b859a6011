"""deep-models: does a missing scale cost more in a deeper model?"""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, SCALE_LEGEND, Arm, differences, train_arms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Place, Plot, enumerate_texts, series_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

TIMES = 2.0  # matters most: a gap twice as large, since gaps of one depth differ by a third from seed to seed


def measure(run: ExperimentRun) -> ExperimentResult:
    """Held-out losses of decoders of several depths, with and without the scale, each at its own best rate."""
    models = [tuple(model) for model in run["models"]]  # (layers, d_k), the shallowest first
    names = [(layers, d_k, scale) for layers, d_k in models for scale in SCALE_LEGEND.values()]
    arms: dict[tuple[int, int, str], Arm] = train_arms(
        run, {name: {"task": "text", "layers": name[0], "head_dim": name[1], "scale": name[2]} for name in names}
    )
    figures: list[Figure] = []
    gaps = {}
    for layers, d_k in models:
        at: dict[str, Place] = {"layers": layers, "d_k": d_k}
        pair = [arms[layers, d_k, scale] for scale in ("none", "sqrt_dk")]
        for scale, arm in zip(("none", "sqrt_dk"), pair, strict=True):
            figures.append(geometric_mean("held_out_loss_nats", arm.best, scale=scale, **at))
            figures.append(geometric_mean("best_rate", arm.chosen, scale=scale, **at))
        gaps[layers, d_k] = differences(*pair)
        figures.append(mean("loss_gap_nats", gaps[layers, d_k], **at))
    first, last = gaps[models[0]], gaps[models[-1]]
    pairs = list(zip(first, last, strict=True))
    figures.append(mean("gap_growth_nats", [b - a for a, b in pairs]))
    figures.append(mean("gap_beyond_twice_nats", [b - TIMES * a for a, b in pairs]))
    return ExperimentResult(figures, _plots(Figures(figures)))


def _plots(figures: Figures) -> tuple[Plot, ...]:
    losses = tuple(
        series_over(label, figures.all("held_out_loss_nats", scale=scale), "layers")
        for label, scale in SCALE_LEGEND.items()
    )
    gap = series_over(r"no scale minus $1/\sqrt{d_k}$", figures.all("loss_gap_nats"), "layers")
    return (
        Plot("loss", WORDS("plot.loss"), "layers", "held-out loss, nats a byte", losses, x_axis="log"),
        Plot("gap", WORDS("plot.gap"), "layers", "loss gap, nats a byte", (gap,), x_axis="log", lines=(("0", 0.0),)),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    gaps = figures.all("loss_gap_nats")
    shallow, deep = gaps[0], gaps[-1]
    return WORDS(
        "why",
        shallow=shallow,
        deep=deep,
        first=shallow.at["layers"],
        last=deep.at["layers"],
        d_k=deep.at["d_k"],
        growth=figures("gap_growth_nats"),
        scaled=_losses(figures, "sqrt_dk"),
        bare=_losses(figures, "none"),
    )


def _losses(figures: Figures, scale: str) -> Text:
    return enumerate_texts(f"{figure.value:.3f}" for figure in figures.all("held_out_loss_nats", scale=scale))


CLAIM = Claim(
    id="deep-models",
    group="gradients",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"\Delta L(N) = \min_{\eta} L_N(s = 1, \eta) - \min_{\eta} L_N(s = d_k^{-1/2}, \eta)",
    method=WORDS("method"),
    control=WORDS("control"),
    # many seeds, as a difference of differences is noisy; few rates, which are widened where the best is at an end
    parameters={**FULL_TRAINING, "seeds": 16, "rates": (3e-3, 1e-2), "models": ((1, 64), (2, 64), (4, 64))},
    quick={
        "seeds": 12,
        "rates": (4e-3,),
        "widened": 0,
        "text": {"steps": 100, "rows": 16, "length": 64, "points": 2},
        "models": ((1, 64), (2, 64)),
    },
    flipped={"models": ((1, 4), (1, 64))},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.deeper"), (Expect("gap_beyond_twice_nats", low=0.0),)),
        ClaimPart(WORDS("part.dozens"), reason=WORDS("reason.dozens")),
    ),
    why=why,
)
