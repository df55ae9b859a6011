"""any-dk: with the scale, does the quality of a model depend on d_k?"""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, QUICK, SCALE_LEGEND, TASK_TEXTS, Arm, differences, list_figures, train_arms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Place, Plot, series_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.training.train import CHANCE_LOSS
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

SAME = 0.02  # nats a symbol: what counts as slower in train-instability
# What counts as worse in small-dk: a fifth of the log 16 nats a letter of a guess.
ROUGHLY = round(CHANCE_LOSS["encoder_decoder"] / 5, 2)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Held-out losses over d_k, each at its own best learning rate, and their change from the smallest d_k."""
    dims = run["dims"]
    names = [(task, d_k, scale) for task in run["tasks"] for d_k in dims for scale in SCALE_LEGEND.values()]
    arms: dict[tuple[str, int, str], Arm] = train_arms(
        run, {name: dict(zip(("task", "head_dim", "scale"), name, strict=True)) for name in names}
    )
    figures: list[Figure] = []
    for (task, d_k, scale), arm in arms.items():
        at: dict[str, Place] = {"task": task, "d_k": d_k, "scale": scale}
        figures.append(geometric_mean("held_out_loss_nats", arm.best, **at))
        figures.append(geometric_mean("best_rate", arm.chosen, **at))
        if d_k == dims[0]:
            continue
        change = differences(arm, arms[task, dims[0], scale])
        # Both sides are listed; the bars are put to the judged one alone, which the control replaces.
        side = "judged" if scale == run["judged"] else "beside"
        size = "large" if d_k == dims[-1] else "between"
        figures.append(mean("change_nats", change, size=size, side=side, **at))
    return ExperimentResult(figures, (_plot(Figures(figures), run["tasks"]),))


def _plot(figures: Figures, tasks: tuple[str, ...]) -> Plot:
    return Plot(
        "loss",
        WORDS("plot.loss"),
        "$d_k$",
        "held-out loss, nats a symbol",
        tuple(
            series_over(
                f"{TASK_TEXTS[task].en}, {label}", figures.all("held_out_loss_nats", task=task, scale=scale), "d_k"
            )
            for task in tasks
            for label, scale in SCALE_LEGEND.items()
        ),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    judged = figures.all("change_nats", side="judged", size="large")
    bare = figures.all("change_nats", side="beside", size="large")
    return WORDS(
        "why",
        least=figures.all("held_out_loss_nats")[0].at["d_k"],
        most=judged[0].at["d_k"],
        judged=list_figures(judged),
        beside=list_figures(bare),
    )


CLAIM = Claim(
    id="any-dk",
    group="gradients",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\min_{\eta} L(d_k, s = d_k^{-1/2}, \eta) = \mathrm{const}",
    method=WORDS("method", same=SAME, roughly=ROUGHLY),
    control=WORDS("control"),
    parameters={**FULL_TRAINING, "judged": "sqrt_dk", "tasks": ("text", "strings"), "dims": (4, 64, 512)},
    quick={**QUICK, "seeds": 8, "tasks": ("strings",), "dims": (4, 64)},
    flipped={"judged": "none"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.same", same=SAME),
            (Expect("change_nats", low=-SAME, high=SAME, at={"side": "judged", "size": "large"}),),
        ),
        ClaimPart(
            WORDS("part.roughly", roughly=ROUGHLY),
            (Expect("change_nats", low=-ROUGHLY, high=ROUGHLY, at={"side": "judged", "size": "large"}),),
        ),
    ),
    why=why,
)
