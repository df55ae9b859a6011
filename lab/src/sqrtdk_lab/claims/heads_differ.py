"""heads-differ: the heads of an attention attend to different positions or subspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqrtdk.messages import Text
from sqrtdk_lab._arms import train_arms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

APART, SHARED = 0.1, 0.5
TRAINING_STATES = {"start": "before training", "end": "after training"}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Divergence of the weights and overlap of the subspaces, over all pairs of heads, before and after training."""
    sizes = {"head_dim": run["head_dim"], "heads": run["heads"], "layers": run["layers"], "width": run["width"]}
    arm = train_arms(run, {"model": {"task": "text", "tied": run["tied"], **sizes}})["model"]
    models = [result["heads"] for result in arm.runs]
    figures = []
    for layer in range(run["layers"]):
        diverged, shared = {}, {}
        for state in TRAINING_STATES:
            pairs = [[pair for pair in model[state] if pair["layer"] == layer] for model in models]
            diverged[state], shared[state] = _means(pairs, "divergence"), _means(pairs, "query_overlap", "key_overlap")
            figures.append(mean("divergence", diverged[state], layer=layer, state=state))
            figures.append(mean("subspace_overlap", shared[state], layer=layer, state=state))
        for name, of in (("divergence_gained", diverged), ("subspace_overlap_gained", shared)):
            gained = [end - start for end, start in zip(of["end"], of["start"], strict=True)]
            figures.append(mean(name, gained, layer=layer))
    return ExperimentResult(figures, (_plot(Figures(figures), run["head_dim"] / run["width"]),))


def _means(models: Sequence[Sequence[Mapping[str, float]]], *names: str) -> list[float]:
    """For each model the mean over its pairs of heads and the names."""
    return [sum(pair[name] for pair in pairs for name in names) / (len(pairs) * len(names)) for pairs in models]


def _plot(figures: Figures, chance: float) -> Plot:
    return Plot(
        "heads",
        WORDS("plot.heads"),
        "layer",
        "0: none, 1: complete",
        tuple(
            series_over(f"{name}, {when}", figures.all(entry, state=state), "layer", style="bars")
            for name, entry in (("divergence", "divergence"), ("overlap", "subspace_overlap"))
            for state, when in TRAINING_STATES.items()
        ),
        lines=(("overlap of random subspaces", chance),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    first, last = (figures("divergence", layer=0, state=state) for state in TRAINING_STATES)
    shared, gained = figures("subspace_overlap", layer=0, state="end"), figures("subspace_overlap_gained", layer=0)
    return WORDS("why", last=last, first=first, shared=shared, gained=gained)


CLAIM = Claim(
    id="heads-differ",
    group="structure",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"\mathrm{JSD}(p, p') = \frac{H(\frac{p + p'}{2}) - \frac{1}{2} H(p) - \frac{1}{2} H(p')}{\log 2}, \qquad "
    r"\mathrm{overlap} = \frac{1}{d_k} \sum_{i=1}^{d_k} \cos^2 \theta_i",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "heads": 4,
        "head_dim": 16,
        "layers": 2,
        "width": 64,
        "tied": False,
        "seeds": 4,
        "rates": (3e-3,),
        "widened": 0,
        "text": {"steps": 400, "rows": 16, "length": 64, "points": 0},
    },
    quick={"layers": 1, "text": {"steps": 70, "rows": 16, "length": 64, "points": 0}},
    flipped={"tied": True},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.positions"),
            (Expect("divergence", low=APART, at={"state": "end"}), Expect("divergence_gained", low=0.0)),
        ),
        ClaimPart(
            WORDS("part.subspaces"),
            (Expect("subspace_overlap", high=SHARED, at={"state": "end"}),),
        ),
    ),
    why=why,
)
