"""train-instability: without the scale, training is slow or unstable if d_k is large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, QUICK, Arm, curve_plots, differences, list_figures, loss_gap, train_arms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Place, Plot, series_over
from sqrtdk_lab.intervals import geometric_mean, mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

Name = tuple[str, int, str, str]  # task, d_k, scale, start of the weights of q and k
Arms = Mapping[Name, Arm]
SLOWER = 0.02  # nats per symbol; seeds of one arm of the decoder scatter by about as much
COSTLIER = 0.05  # nats per symbol; the growth is a difference of two gaps, and scatters more than one


def measure(run: ExperimentRun) -> ExperimentResult:
    """Held-out losses with and without the scale, each at its own best learning rate."""
    bare, dims = run["bare"], run["dims"]
    names: list[Name] = []
    for task in run["tasks"]:
        names += [(task, d_k, scale, "unit") for d_k in dims for scale in (bare, "sqrt_dk")]
        names += [(task, max(dims), scale, "unit") for scale in run["others"]]
        names += [_name(task, max(dims), scale, start) for start in run["starts"] for scale in (bare, "sqrt_dk")]
    arms = train_arms(
        run,
        {name: dict(zip(("task", "head_dim", "scale", "init"), name, strict=True)) for name in dict.fromkeys(names)},
    )
    figures: list[Figure] = []
    for name, arm in arms.items():
        place: dict[str, Place] = dict(zip(("task", "d_k", "scale", "start"), name, strict=True))
        figures.append(geometric_mean("held_out_loss_nats", arm.best, **place))
        figures.append(geometric_mean("best_rate", arm.chosen, **place))
    for task in run["tasks"]:
        figures += _gaps(arms, task, run) + _states(arms, task, bare, max(dims))
    figures.append(_diverged([arm for (_, _, scale, _), arm in arms.items() if scale == bare]))
    first = run["tasks"][0]
    pair = {
        label: arms[first, max(dims), scale, "unit"]
        for label, scale in (("no scale", bare), (r"$1/\sqrt{d_k}$", "sqrt_dk"))
    }
    return ExperimentResult(figures, (*_plots(Figures(figures), run), *curve_plots(pair, first, max(dims))))


def _name(task: str, d_k: int, scale: str, start: str) -> Name:
    """Return the name of an arm; the factor is either in the weights or in the scale, never in both."""
    return task, d_k, scale, "unit" if start == "folded" and scale != "none" else start


def _gaps(arms: Arms, task: str, run: ExperimentRun) -> list[Figure]:
    found, large = [], max(run["dims"])
    for d_k in run["dims"]:
        for start in ("unit", *run["starts"]) if d_k == large else ("unit",):
            pair = (arms[_name(task, d_k, scale, start)] for scale in (run["bare"], "sqrt_dk"))
            size = "large" if d_k == large else "smaller"
            name = "folded_gap_nats" if start == "folded" else "loss_gap_nats"
            found.append(loss_gap(name, *pair, task=task, d_k=d_k, start=start, size=size))
    sides = (run["bare"], "sqrt_dk")
    least, most = (differences(*(arms[task, d, side, "unit"] for side in sides)) for d in (min(run["dims"]), large))
    return [*found, mean("gap_growth_nats", [b - a for a, b in zip(least, most, strict=True)], task=task)]


def _diverged(arms: Sequence[Arm]) -> Figure:
    """Share of seeds with a diverged run without the scale; the runs of one seed are not independent."""
    runs = [(seed, one) for arm in arms for results in arm.results.values() for seed, one in enumerate(results)]
    lost = {seed for seed, one in runs if one["diverged_at"] is not None}
    return proportion("seeds_that_diverged", len(lost), len(arms[0].chosen))


def _states(arms: Arms, task: str, bare: str, d_k: int) -> list[Figure]:
    """Largest logit of a run, entropy of its weights and gradient at the start, without and with the scale."""
    found: list[Figure] = []
    first = [[curve[0] for curve in arms[task, d_k, s, "unit"].at_best("gradient_p50")] for s in (bare, "sqrt_dk")]
    ratios = [a / b for a, b in zip(*first, strict=True)]
    found.append(geometric_mean("median_gradient_ratio", ratios, task=task, d_k=d_k))
    for label, scale in (("none", bare), ("sqrt_dk", "sqrt_dk")):
        arm = arms[task, d_k, scale, "unit"]
        at: dict[str, Place] = {"task": task, "d_k": d_k, "arm": label}
        logits, shares = arm.at_best("max_logit"), arm.at_best("entropy_share")
        found.append(geometric_mean("largest_logit", [max(curve) for curve in logits], **at))
        for when, step in (("start", 0), ("end", -1)):
            found.append(mean("entropy_share", [curve[step] for curve in shares], when=when, **at))
    return found


def _plots(figures: Figures, run: ExperimentRun) -> tuple[Plot, ...]:
    large, losses = max(run["dims"]), "held_out_loss_nats"
    return (
        Plot(
            "gap",
            WORDS("plot.gap"),
            "$d_k$",
            "loss gap, nats a symbol",
            tuple(
                series_over(task, figures.all("loss_gap_nats", task=task, start="unit"), "d_k") for task in run["tasks"]
            ),
            x_axis="log",
        ),
        Plot(
            "scales",
            WORDS("plot.scales", large=large),
            "scale",
            "held-out loss, nats a symbol",
            tuple(
                series_over(task, figures.all(losses, task=task, start="unit", d_k=large), "scale", style="bars")
                for task in run["tasks"]
            ),
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    gaps = figures.all("loss_gap_nats", size="large", start="unit")
    one = gaps[0]
    places = {"task": one.at["task"], "d_k": one.at["d_k"]}
    bare, scaled = (figures("largest_logit", arm=arm, **places) for arm in ("none", "sqrt_dk"))
    sharp, soft = (figures("entropy_share", arm=arm, when="start", **places) for arm in ("none", "sqrt_dk"))
    in_large = list_figures(gaps)
    least = figures.all("loss_gap_nats", start="unit")[0].at["d_k"]
    small = list_figures(figures.all("loss_gap_nats", d_k=least, start="unit"))
    gradients = list_figures(figures.all("median_gradient_ratio"))
    lost = figures("seeds_that_diverged")
    text = WORDS(
        "why",
        d_k=one.at["d_k"],
        gaps=in_large,
        least=least,
        small=small,
        sharp=sharp,
        soft=soft,
        bare=bare,
        scaled=scaled,
        gradients=gradients,
        lost=lost,
    )
    folded = figures.all("folded_gap_nats")
    if not folded:
        return text
    return WORDS("folded", text=text, folded=list_figures(folded))


CLAIM = Claim(
    id="train-instability",
    group="gradients",
    sources=("S1", "S2"),
    statement=WORDS("statement"),
    formula=r"\Delta L = \min_{\eta} L(s = 1, \eta) - \min_{\eta} L(s = d_k^{-1/2}, \eta) > 0",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        **FULL_TRAINING,
        "bare": "none",
        "others": ("dk", "learned"),
        "tasks": ("text", "strings"),
        "dims": (4, 64, 512),
        "starts": ("folded", "0.02"),
    },
    quick={**QUICK, "seeds": 8, "others": (), "tasks": ("strings",), "dims": (4, 64), "starts": ()},
    # Starts are left out to save trainings: "folded" is defined without a scale only.
    flipped={"bare": "dk", "starts": ()},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.slower"),
            (Expect("loss_gap_nats", low=SLOWER, at={"size": "large"}),),
        ),
        ClaimPart(
            WORDS("part.grows"),
            (Expect("gap_growth_nats", low=COSTLIER),),
        ),
        ClaimPart(WORDS("part.unstable"), reason=WORDS("reason.unstable")),
    ),
    why=why,
)
