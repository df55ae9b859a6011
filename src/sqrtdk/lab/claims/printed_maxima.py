"""printed-maxima: six printed largest weights, compared with the distributions that they could come from."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.lab._rows import SIDES, factor, products
from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import Figure, Figures, Plot, Series, curve_series, format_figure
from sqrtdk.lab.intervals import exact, mean, proportion
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text
from sqrtdk.stats import row_stats

WORDS = words_of(__name__)

PRINTED_PEAKS = {"unscaled": (0.342, 0.891, 0.998), "scaled": (0.289, 0.276, 0.301)}
TAIL = 0.005  # of each side: a value outside the central 99% is not a plausible draw


def measure(run: ExperimentRun) -> ExperimentResult:
    """The share of draws below each printed value: for one row, for one row under both scales, and for a matrix."""
    figures, ranges = [exact("keys", run["keys"])], []
    for i, d_k in enumerate(run["dims"]):
        draws = run["numbers"] // (run["keys"] * d_k)
        single = _peaks(products(run.generator("rows", d_k), draws=draws, keys=run["keys"], d_k=d_k), run, d_k)
        matrix = _peaks(
            products(
                run.generator("matrices", d_k), draws=run["matrices"], keys=run["keys"], queries=run["keys"], d_k=d_k
            ),
            run,
            d_k,
        )
        printed = {side: run["printed"][side][i] for side in SIDES}
        for side in SIDES:
            rows, given = single[side][:, 0], printed[side]
            place = {"d_k": d_k, "side": side}
            figures.append(exact("printed", given, **place))
            figures += [
                _below(rows, given, reading="one row", **place),
                _below(matrix[side].mean(-1), given, reading="mean over the rows", **place),
                _below(matrix[side].amax(-1), given, reading="largest of the matrix", **place),
                mean("peak", rows, **place),
            ]
            ranges.append((side, d_k, *_quantiles(rows)))
        distance = (single["scaled"][:, 0] - printed["scaled"]).abs()
        # the rows whose scaled peak is close to the printed one
        near = distance.argsort()[: round(run["near"] * draws)]
        figures.append(_below(single["unscaled"][near, 0], printed["unscaled"], reading="same row", d_k=d_k))
    return ExperimentResult(figures, (_plot(ranges, run),))


def _peaks(product: Tensor, run: ExperimentRun, d_k: int) -> dict[str, Tensor]:
    return {side: row_stats(product * factor(run[side], d_k)).peak for side in SIDES}


def _below(peaks: Tensor, printed: float, **at: str | int) -> Figure:
    return proportion("share_below_the_printed", int((peaks <= printed).sum()), len(peaks), **at)


def _quantiles(peaks: Tensor) -> tuple[float, float, float]:
    low, middle, high = peaks.quantile(torch.tensor([TAIL, 0.5, 1 - TAIL], dtype=peaks.dtype)).tolist()
    return low, middle, high


def _plot(ranges: list[tuple[str, int, float, float, float]], run: ExperimentRun) -> Plot:
    series = []
    for side, shift in zip(SIDES, (0.95, 1.05), strict=True):  # side by side, not on top of one another
        dims, low, middle, high = zip(*(entry[1:] for entry in ranges if entry[0] == side), strict=True)
        x = tuple(shift * d_k for d_k in dims)
        series.append(Series(f"{side}: median and 99% of rows", x, middle, low, high, "points"))
        series.append(curve_series(f"{side}: printed", x, run["printed"][side], style="dashed"))
    return Plot(
        "largest-weight",
        WORDS("plot.largest-weight", keys=run["keys"]),
        "$d_k$",
        "largest weight",
        tuple(series),
        x_axis="log",
    )


def _word(possible: bool) -> Text:
    return WORDS("possible" if possible else "impossible")


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    first = min(figure.at["d_k"] for figure in figures.all("peak"))
    flat, given = (format_figure(figures("printed", d_k=first, side=side).value) for side in SIDES)
    possible = {
        name: all(f.low > TAIL and f.high < 1 - TAIL for f in figures.all("share_below_the_printed", reading=name))
        for name in ("mean over the rows", "largest of the matrix")
    }
    keys = format_figure(figures("keys").value)
    share = figures("share_below_the_printed", reading="one row", d_k=first, side="unscaled")
    typical = figures("peak", d_k=first, side="unscaled")
    last = max(figure.at["d_k"] for figure in figures.all("peak"))
    scaled, still = (figures("peak", d_k=d_k, side="scaled") for d_k in (first, last))
    grown = figures("peak", d_k=last, side="unscaled")
    both = figures("share_below_the_printed", reading="same row", d_k=first)
    return WORDS(
        "why",
        first=first,
        typical=typical,
        flat=flat,
        share=share,
        given=given,
        both=both,
        keys=keys,
        means=_word(possible["mean over the rows"]),
        largest=_word(possible["largest of the matrix"]),
        grown=grown,
        last=last,
        scaled=scaled,
        still=still,
    )


def _reading(name: str) -> ClaimPart:
    expect = Expect("share_below_the_printed", low=TAIL, high=1 - TAIL, at={"reading": name})
    return ClaimPart(WORDS("part." + name.replace(" ", "_")), (expect,))


CLAIM = Claim(
    id="printed-maxima",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"p_{\max} = \frac{1}{1 + \sum_{j \neq *} e^{-(z_{*} - z_j)}}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "dims": (16, 64, 256),
        "printed": PRINTED_PEAKS,
        "keys": 10,
        "numbers": 30_000_000,
        "matrices": 20_000,
        "near": 0.08,
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"numbers": 5_000_000, "matrices": 2000},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        _reading("one row"),
        _reading("same row"),
        _reading("mean over the rows"),
        _reading("largest of the matrix"),
    ),
    why=why,
    condition=WORDS("condition"),
)
