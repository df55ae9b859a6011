"""printed-maxima: six printed largest weights, compared with what the code beside them prints."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk_lab._rows import SIDES, factor, products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, Series, enumerate_texts, format_figure
from sqrtdk_lab.intervals import exact, mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

PRINTED_PEAKS = {"unscaled": (0.342, 0.891, 0.998), "scaled": (0.289, 0.276, 0.301)}
# What the code does print for torch.manual_seed(0): q, k = torch.randn(1, 10, d_k), torch.randn(1, 10, d_k)
PEAKS_OF_SEED_0 = {"unscaled": (0.968, 1.0, 1.0), "scaled": (0.532, 0.522, 0.638)}
DIGITS = 3
TAIL = 0.005  # of each side: a number outside the central 99% is not a plausible draw


def measure(run: ExperimentRun) -> ExperimentResult:
    """Shares of runs of the code that print the number or less, and the number or more."""
    figures, ranges = [], []
    for i, d_k in enumerate(run["dims"]):
        rng = run.generator("matrices", d_k)
        product = products(rng, draws=run["runs"], keys=run["keys"], queries=run["keys"], d_k=d_k)
        for side in SIDES:
            rows = row_stats(product * factor(run[side], d_k)).peak
            peaks = rows.amax(-1)
            given = run["printed"][side][i]
            # A weight of 0.9999 is printed as 1.0, so digits are compared with digits.
            shown = peaks.round(decimals=DIGITS)
            place = {"d_k": d_k, "side": side}
            figures += [
                exact("printed", given, **place),
                mean("largest_of_the_matrix", peaks, **place),
                proportion("runs_at_or_below", int((shown <= given + 1e-9).sum()), run["runs"], **place),
                proportion("runs_at_or_above", int((shown >= given - 1e-9).sum()), run["runs"], **place),
                mean("largest_of_a_row", rows[:, 0], **place),
            ]
            ranges.append((side, d_k, *_quantiles(peaks)))
    return ExperimentResult(figures, (_plot(ranges, run),))


def _quantiles(peaks: Tensor) -> tuple[float, float, float]:
    low, middle, high = peaks.quantile(torch.tensor([TAIL, 0.5, 1 - TAIL], dtype=peaks.dtype)).tolist()
    return low, middle, high


def _plot(ranges: list[tuple[str, int, float, float, float]], run: ExperimentRun) -> Plot:
    series = []
    for side, shift in zip(SIDES, (0.95, 1.05), strict=True):  # side by side, not on top of one another
        dims, low, middle, high = zip(*(entry[1:] for entry in ranges if entry[0] == side), strict=True)
        x = tuple(shift * d_k for d_k in dims)
        series.append(Series(f"{side}: median and 99% of runs", x, middle, low, high, "points"))
        series.append(Series(f"{side}: printed", x, run["printed"][side], style="points"))
    return Plot(
        "largest-weight",
        WORDS("plot.largest-weight", keys=run["keys"]),
        "$d_k$",
        "largest weight of the matrix",
        tuple(series),
        x_axis="log",
    )


def _list(figures: Figures, name: str, side: str) -> Text:
    return enumerate_texts(format_figure(figure.value) for figure in figures.all(name, side=side))


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    rows = figures.all("largest_of_a_row", side="scaled")
    return WORDS(
        "why",
        unscaled=_list(figures, "largest_of_the_matrix", "unscaled"),
        scaled=_list(figures, "largest_of_the_matrix", "scaled"),
        below_unscaled=_list(figures, "runs_at_or_below", "unscaled"),
        below_scaled=_list(figures, "runs_at_or_below", "scaled"),
        runs=figures.all("runs_at_or_below")[0].samples,
        row=min(rows, key=lambda figure: figure.value),
    )


def _part(side: str) -> ClaimPart:
    at = {"side": side}
    expects = (Expect("runs_at_or_below", low=TAIL, at=at), Expect("runs_at_or_above", low=TAIL, at=at))
    return ClaimPart(WORDS(f"part.{side}"), expects)


CLAIM = Claim(
    id="printed-maxima",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\max_{i,j} \mathrm{softmax}\left(s \, Q K^{T}\right)_{ij}, \qquad s = 1, \; \frac{1}{\sqrt{d_k}}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "dims": (16, 64, 256),
        "printed": PRINTED_PEAKS,
        "keys": 10,
        "runs": 40_000,
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"runs": 4000},
    flipped={"printed": PEAKS_OF_SEED_0},
    measure=measure,
    parts=tuple(map(_part, SIDES)),
    why=why,
    condition=WORDS("condition"),
)
