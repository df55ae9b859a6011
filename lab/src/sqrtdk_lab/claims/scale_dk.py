"""scale-dk: how uniform the weights are when the product is divided by d_k."""

from __future__ import annotations

import math

import sqrtdk
from sqrtdk.messages import Text
from sqrtdk.scales import SCALES
from sqrtdk.theory import expected_effective_keys
from sqrtdk_lab._rows import own_keys
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, format_figure, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

GROWN = 4.0  # standard deviation of the components after growth
LARGE_DIMS = (64, 256)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Effective keys, entropy and peak of random rows, relative to uniform weights."""
    figures = []
    cases = [(d_k, 1.0) for d_k in run["dims"]] + [(LARGE_DIMS[0], GROWN)]
    for d_k, std in cases:
        query, key = own_keys(run.generator("rows", d_k, std), run["rows"], run["keys"], d_k, std=std)
        rows = sqrtdk.measure(query, key, scale=SCALES[run["scale"]]())
        at = {"d_k": d_k, "component_std": std}
        figures += [
            mean("effective_key_share", rows.effective_keys.flatten() / run["keys"], **at),
            mean("entropy_share", rows.entropy_nats.flatten() / math.log(run["keys"]), **at),
            mean("peak_over_uniform", rows.peak.flatten() * run["keys"], **at),
        ]
    return ExperimentResult(figures, (_plot(Figures(figures), run),))


def _plot(figures: Figures, run: ExperimentRun) -> Plot:
    keys = run["keys"]
    return Plot(
        "share",
        WORDS("plot.share", keys=keys),
        "$d_k$",
        "effective keys / keys",
        (
            series_over(
                f"measured, scale {run['scale']}", figures.all("effective_key_share", component_std=1.0), "d_k"
            ),
            *(
                curve_series(
                    label,
                    run["dims"],
                    (expected_effective_keys(keys, s(d)) / keys for d in run["dims"]),
                    style="dashed",
                )
                for label, s in (("theory, $1/d_k$", lambda d: d**-0.5), (r"theory, $1/\sqrt{d_k}$", lambda d: 1.0))
            ),
        ),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def share(d_k: int, std: float = 1.0) -> str:
        return str(figures("effective_key_share", d_k=d_k, component_std=std))

    peak = figures("peak_over_uniform", d_k=64, component_std=1.0)
    return WORDS(
        "why", at_64=share(64), peak=peak, at_4=share(4), grown=format_figure(GROWN), at_64_grown=share(64, GROWN)
    )


CLAIM = Claim(
    id="scale-dk",
    group="factors",
    sources=("S3",),
    statement=WORDS("statement"),
    formula=r"\mathrm{Var}\left[ \frac{q \cdot k}{d_k} \right] = \frac{1}{d_k}, \qquad "
    r"\frac{1}{n \sum_i p_i^2} \approx e^{-\sigma^2}, \quad "
    r"\sigma = \frac{\mathrm{std}[q] \, \mathrm{std}[k]}{\sqrt{d_k}}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (4, 16, 64, 256), "keys": 64, "rows": 1000, "scale": "dk"},
    quick={"dims": (4, 64, 256), "rows": 200},
    flipped={"scale": "sqrt_dk"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.start"),
            tuple(Expect("effective_key_share", low=0.95, at={"d_k": d_k, "component_std": 1.0}) for d_k in LARGE_DIMS),
        ),
        ClaimPart(
            WORDS("part.small"),
            (Expect("effective_key_share", low=0.95, at={"d_k": 4}),),
        ),
        ClaimPart(
            WORDS("part.grown", grown=format_figure(GROWN)),
            (Expect("effective_key_share", low=0.95, at={"component_std": GROWN}),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
