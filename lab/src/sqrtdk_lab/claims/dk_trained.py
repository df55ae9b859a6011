"""dk-trained: after training, what has a layer lost whose logits are divided by d_k?"""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, QUICK, TASK_TEXTS, Arm, curve_plots, list_figures, loss_gap, train_arms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Place, Plot, series_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

# Of the entropy of uniform weights. Before training a layer has 0.99 and more divided by d_k, and about 0.85 divided by
# sqrt(d_k).
NEARLY_UNIFORM = 0.95
WORSE_NATS = 0.1  # nats a symbol; untrained models of two scales already differ by up to 0.1 from seed to seed
COMPARED_SCALES = {"none": "no scale", "sqrt_dk": r"$1/\sqrt{d_k}$", "dk": "$1/d_k$"}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Entropy of the weights before and after training, and held-out losses, each at its own best learning rate."""
    names = [(task, scale) for task in run["tasks"] for scale in COMPARED_SCALES]
    arms: dict[tuple[str, str], Arm] = train_arms(
        run, {(task, scale): {"task": task, "head_dim": run["d_k"], "scale": scale} for task, scale in names}
    )
    figures: list[Figure] = []
    for (task, scale), arm in arms.items():
        at: dict[str, Place] = {"task": task, "scale": scale, "d_k": run["d_k"]}
        figures.append(geometric_mean("held_out_loss_nats", arm.best, **at))
        figures.append(geometric_mean("best_rate", arm.chosen, **at))
        for when, step in (("start", 0), ("end", -1)):
            shares = [curve[step] for curve in arm.at_best("entropy_share")]
            figures.append(mean("entropy_share", shares, when=when, **at))
    figures += [
        loss_gap("loss_gap_nats", arms[task, "dk"], arms[task, "sqrt_dk"], task=task, d_k=run["d_k"])
        for task in run["tasks"]
    ]
    first = run["tasks"][0]
    pair = {label: arms[first, scale] for scale, label in COMPARED_SCALES.items()}
    curves = [plot for plot in curve_plots(pair, first, run["d_k"]) if plot.name in ("loss", "entropy")]
    return ExperimentResult(figures, (_plot(Figures(figures), run["tasks"]), *curves))


def _plot(figures: Figures, tasks: tuple[str, ...]) -> Plot:
    return Plot(
        "entropy-share",
        WORDS("plot.entropy"),
        "scale",
        r"entropy / $\log n$",
        tuple(
            series_over(
                f"{TASK_TEXTS[task].en}, {when}",
                figures.all("entropy_share", task=task, when=when),
                "scale",
                style="bars",
            )
            for task in tasks
            for when in ("start", "end")
        ),
        lines=(("uniform", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def shares(scale: str, when: str) -> Text:
        return list_figures(figures.all("entropy_share", scale=scale, when=when))

    gaps = figures.all("loss_gap_nats")
    rates = {scale: list_figures(figures.all("best_rate", scale=scale)) for scale in ("sqrt_dk", "dk")}
    return WORDS(
        "why",
        d_k=gaps[0].at["d_k"],
        start=shares("dk", "start"),
        end=shares("dk", "end"),
        usual=shares("sqrt_dk", "end"),
        gaps=list_figures(gaps),
        rate=rates["dk"],
        usual_rate=rates["sqrt_dk"],
    )


CLAIM = Claim(
    id="dk-trained",
    group="factors",
    sources=("S3",),
    statement=WORDS("statement"),
    formula=r"z = \frac{q \cdot k}{d_k}, \qquad \mathrm{sd}(z) = d_k^{-1/2} \; \text{at the start}",
    method=WORDS("method", nearly=NEARLY_UNIFORM, worse=WORSE_NATS),
    control=WORDS("control"),
    parameters={**FULL_TRAINING, "tasks": ("text", "strings"), "d_k": 512},
    quick={**QUICK, "tasks": ("strings",), "d_k": 64},
    flipped={
        # Two steps: the layer is as it was drawn.
        "rates": (1e-3,),
        "widened": 0,
        "text": {"steps": 2, "rows": 16, "length": 64, "points": 2},
        "strings": {"steps": 2, "rows": 32, "length": 12, "points": 2},
    },
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.uniform"),
            (Expect("entropy_share", low=NEARLY_UNIFORM, at={"scale": "dk", "when": "end"}),),
        ),
        ClaimPart(WORDS("part.worse"), (Expect("loss_gap_nats", low=WORSE_NATS),)),
    ),
    why=why,
)
