"""small-dk: unscaled dot products train as well as additive scores where d_k is small, and worse where it is large."""

from __future__ import annotations

from typing import Any

from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, QUICK, curve_plots, loss_gap, train_arms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Plot, series_over
from sqrtdk_lab.intervals import geometric_mean
from sqrtdk_lab.training.train import CHANCE_LOSS
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

# nats per letter behind additive attention: less counts as "as well", more as "worse"
BEHIND = round(CHANCE_LOSS["encoder_decoder"] / 5, 2)
LEGEND = {
    "dot": "dot product",
    "additive": "additive",
    "cosine": "cosine, learned gain",
    "scaled": r"dot product, $1/\sqrt{d_k}$",
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Held-out losses of the scores on the string task, each at its own best learning rate."""
    dims = run["dims"]
    kinds = {
        "dot": {"score": "dot", "scale": run["dot_scale"]},
        "additive": {"score": "additive", "scale": "none"},
        "cosine": {"score": "cosine", "scale": "none"},
        "scaled": {"score": "dot", "scale": "sqrt_dk"},
    }
    scores = ("dot", "additive", *run["others"])
    names = [(score, d_k) for score in scores for d_k in dims]
    arms = train_arms(
        run,
        {(score, d_k): {"task": "strings", "head_dim": d_k, **kinds[score]} for score, d_k in names},
        {name: run["additive_rates" if name[0] == "additive" else "rates"] for name in names},
    )
    figures = []
    for (score, d_k), arm in arms.items():
        figures.append(geometric_mean("held_out_loss_nats", arm.best, score=score, d_k=d_k))
        figures.append(geometric_mean("best_rate", arm.chosen, score=score, d_k=d_k))
    sizes = {run["least"]: "least", run["small"]: "small", max(dims): "large"}
    figures += [
        loss_gap("excess_over_additive_nats", arms["dot", d], arms["additive", d], d_k=d, size=sizes.get(d, "between"))
        for d in dims
    ]
    pair = {LEGEND[score]: arms[score, max(dims)] for score in ("dot", "additive")}
    return ExperimentResult(figures, (_plot(Figures(figures), scores), curve_plots(pair, "strings", max(dims))[0]))


def _plot(figures: Figures, scores: tuple[str, ...]) -> Plot:
    return Plot(
        "score",
        WORDS("plot.score"),
        "$d_k$",
        "held-out loss, nats a letter",
        tuple(series_over(LEGEND[score], figures.all("held_out_loss_nats", score=score), "d_k") for score in scores),
        x_axis="log",
        lines=((r"guess, $\log 16$", CHANCE_LOSS["encoder_decoder"]),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    sizes = [figures("excess_over_additive_nats", size=size) for size in ("least", "small", "large")]
    stands = [WORDS("size", excess=one, d_k=one.at["d_k"], stand=_stand(one)) for one in sizes]
    both = Text(", ".join(one.en for one in stands), "，".join(one.zh for one in stands))
    spread = float(sizes[1].at["d_k"]) ** 0.5
    return WORDS("why", sizes=both, d_k=sizes[1].at["d_k"], spread=f"{spread:.0f}")


def _stand(excess: Figure) -> Text:
    """Return on which side of the bar the whole interval lies."""
    if excess.high <= BEHIND:
        return WORDS("as_well")
    return WORDS("worse" if excess.low >= BEHIND else "undecided")


def _part(size: str) -> ClaimPart:
    def expect(at: str, **bar: Any) -> Expect:
        return Expect("excess_over_additive_nats", at={"size": at}, **bar)

    return ClaimPart(WORDS(f"part.{size}"), (expect(size, high=BEHIND), expect("large", low=BEHIND)))


CLAIM = Claim(
    id="small-dk",
    group="gradients",
    sources=("S1", "arXiv:1706.03762", "arXiv:1703.03906"),
    statement=WORDS("statement"),
    formula=r"\mathrm{sd}(q \cdot k) = \sqrt{d_k}, \qquad \mathrm{Var}(v_i) = 1 / d_k \Rightarrow "
    r"\mathrm{sd}(v \cdot \tanh(q + k)) < 1",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        **FULL_TRAINING,
        "seeds": 6,
        "dot_scale": "none",
        "others": ("cosine", "scaled"),
        "additive_rates": (1e-3, 3e-3, 1e-2, 3e-2),
        "dims": (4, 16, 64, 512),
        "least": 4,
        "small": 16,
    },
    quick={**QUICK, "additive_rates": (4e-3, 1.2e-2), "others": (), "dims": (4, 16, 64)},
    flipped={"dot_scale": "sqrt_dk"},
    measure=measure,
    parts=(
        _part("least"),
        _part("small"),
    ),
    why=why,
    condition=WORDS("condition"),
)
