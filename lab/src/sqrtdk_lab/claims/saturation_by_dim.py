"""saturation-by-dim: the largest weight of a row as the dimension grows, without and with the scale."""

from __future__ import annotations

from itertools import pairwise

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk.theory import expected_peak
from sqrtdk_lab._rows import SIDES, factor, products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """The mean largest weight of independent rows at each dimension; both sides see the same queries and keys."""
    dims, off = run["dims"], {}
    for d_k in dims:
        product = products(run.generator("rows", d_k), draws=run["rows"], keys=run["keys"], d_k=d_k)
        for side in SIDES:
            off[side, d_k] = row_stats(product * factor(run[side], d_k)).off_peak.flatten()
    figures = []
    for side in SIDES:
        figures += [mean("peak", 1 - off[side, d_k], d_k=d_k, side=side) for d_k in dims]
        figures += [mean("peak_rise", off[side, a] - off[side, b], d_k=b, side=side) for a, b in pairwise(dims)]
        figures.append(mean("peak_at_the_largest", 1 - off[side, dims[-1]], side=side))
        figures.append(mean("peak_change_over_all", off[side, dims[0]] - off[side, dims[-1]], side=side))
        figures.append(mean("off_peak_times_root_d_k", off[side, dims[-1]] * dims[-1] ** 0.5, d_k=dims[-1], side=side))
    return ExperimentResult(figures, (_plot(Figures(figures), run),))


def _plot(figures: Figures, run: ExperimentRun) -> Plot:
    dims, keys = run["dims"], run["keys"]
    series = []
    for side in SIDES:
        sigmas = [factor(run[side], d_k) * d_k**0.5 for d_k in dims]
        series.append(series_over(side, figures.all("peak", side=side), "d_k", style="points"))
        series.append(curve_series(f"{side}, theory", dims, expected_peak(keys, sigmas), style="dashed"))
    return Plot(
        "peak",
        WORDS("plot.peak", keys=keys),
        "$d_k$",
        "largest weight",
        tuple(series),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    fall = figures("off_peak_times_root_d_k", side="unscaled")
    large = figures("peak_at_the_largest", side="unscaled")
    scaled = figures("peak_change_over_all", side="scaled")
    return WORDS("why", large=large, d_k=fall.at["d_k"], fall=fall, scaled=scaled)


CLAIM = Claim(
    id="saturation-by-dim",
    group="saturation",
    sources=("S1", "S2"),
    statement=WORDS("statement"),
    formula=r"z_j = s \, q \cdot k_j, \qquad \sigma_z = s \sqrt{d_k}, \qquad "
    r"1 - \mathrm{E}[p_{\max}] \propto \frac{1}{\sigma_z} \quad (\sigma_z \gg \sqrt{2 \log n})",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "dims": (16, 64, 256, 1024, 4096),
        "keys": 10,
        "rows": 2500,
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"dims": (16, 128, 1024), "rows": 1500},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.unscaled"),
            (
                Expect("peak_rise", low=0.0, at={"side": "unscaled"}),
                Expect("peak_at_the_largest", low=0.95, at={"side": "unscaled"}),
            ),
        ),
        ClaimPart(
            WORDS("part.scaled"),
            (Expect("peak_change_over_all", low=-0.04, high=0.04, at={"side": "scaled"}),),
        ),
    ),
    why=why,
)
