"""entropy-table: six printed entropies, compared at the length of their example and at every other length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk.theory import expected_entropy_nats
from sqrtdk_lab._rows import SIDES, factor, products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Plot, Series, curve_series, enumerate_texts, format_figure
from sqrtdk_lab.intervals import exact, joint_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

DIMS = (16, 64, 256)
PRINTED_ENTROPIES = {"unscaled": (2.1, 0.8, 0.2), "scaled": (2.3, 2.3, 2.3)}
CLAIMED_LENGTH = 10
AT_LENGTH = {
    side: tuple(round(expected_entropy_nats(CLAIMED_LENGTH, d**0.5 if side == "unscaled" else 1.0), 2) for d in DIMS)
    for side in SIDES
}
UNITS = {"nats": 1.0, "bits": math.log(2)}
Cells = dict[tuple[str, int], Tensor]  # entropies of independent rows, by side and d_k


def measure(run: ExperimentRun) -> ExperimentResult:
    """Theory finds the length that fits best; the entropies are measured there and at the example's length."""
    lengths = np.arange(2, run["longest"] + 1)
    cells = [(side, d_k, run["printed"][side][i]) for i, d_k in enumerate(run["dims"]) for side in SIDES]
    sigmas = {(side, d_k): factor(run[side], d_k) * d_k**0.5 for side, d_k, _ in cells}
    curves = {sigma: np.array(expected_entropy_nats(lengths.tolist(), sigma)) for sigma in set(sigmas.values())}
    theory = {cell: curves[sigma] for cell, sigma in sigmas.items()}
    figures = []
    for side, d_k, printed in cells:
        own = int(np.abs(theory[side, d_k] - printed).argmin())
        figures.append(exact("length_that_fits_the_cell", int(lengths[own]), side=side, d_k=d_k))
    measured: dict[int, Cells] = {}
    for unit, nats in UNITS.items():
        misses = np.max([np.abs(theory[side, d_k] - printed * nats) for side, d_k, printed in cells], axis=0)
        best = int(lengths[misses.argmin()])
        figures.append(exact("length_that_fits_best", best, unit=unit))
        for length, where in ((run["length"], "example"), (best, "best")):
            entropies = measured.setdefault(length, _entropies(run, length))
            printed_nats = [printed * nats for *_, printed in cells]
            figures.append(_largest_error(entropies, printed_nats, unit=unit, length_of=where))
    for length, entropies in measured.items():
        for (side, d_k), samples in entropies.items():
            figures.append(mean("entropy_nats", samples, side=side, d_k=d_k, length=length))
    return ExperimentResult(figures, (_plot(figures, run, lengths.tolist(), theory),))


def _entropies(run: ExperimentRun, length: int) -> Cells:
    cells = {}
    for d_k in run["dims"]:
        draws = max(run["least_rows"], run["numbers"] // (length * d_k))
        product = products(run.generator("rows", length, d_k), draws=draws, keys=length, d_k=d_k)
        for side in SIDES:
            cells[side, d_k] = row_stats(product * factor(run[side], d_k)).entropy_nats.flatten()
    return cells


def _largest_error(entropies: Cells, printed: Sequence[float], *, unit: str, length_of: str) -> Figure:
    """The largest distance of a cell from its printed value, in nats, within the ends of the cells' joint intervals."""
    figures = [joint_mean("entropy_nats", samples, len(entropies)) for samples in entropies.values()]
    cells = list(zip(figures, printed, strict=True))
    value = max(abs(figure.value - given) for figure, given in cells)
    low = max(max(0.0, figure.low - given, given - figure.high) for figure, given in cells)
    high = max(max(given - figure.low, figure.high - given) for figure, given in cells)
    samples = min(figure.samples for figure in figures)
    at = {"unit": unit, "length_of": length_of}
    return Figure("largest_error_of_the_table_nats", value, low, high, "t", samples, at)


def _plot(
    figures: Sequence[Figure], run: ExperimentRun, lengths: list[int], theory: dict[tuple[str, int], np.ndarray]
) -> Plot:
    some = sorted({round(2 * 2 ** (i / 8)) for i in range(8 * 11 + 1)} & set(lengths))
    series = []
    for (side, d_k), entropies in theory.items():
        if side == "unscaled" or d_k == run["dims"][0]:
            name = f"unscaled, $d_k$ = {d_k}" if side == "unscaled" else "scaled, every $d_k$"
            series.append(curve_series(name, some, entropies[np.array(some) - 2]))
    own = Figures([figure for figure in figures if figure.name in ("length_that_fits_the_cell", "entropy_nats")])
    points = own.all("entropy_nats", length=run["length"])
    series.append(
        Series(
            "measured",
            tuple(float(f.at["length"]) for f in points),
            tuple(f.value for f in points),
            tuple(f.low for f in points),
            tuple(f.high for f in points),
            "points",
        )
    )
    fits = own.all("length_that_fits_the_cell")
    given = [run["printed"][f.at["side"]][run["dims"].index(f.at["d_k"])] for f in fits]
    series.append(Series("printed, where it fits", tuple(f.value for f in fits), tuple(given), style="points"))
    return Plot(
        "entropy",
        WORDS("plot.entropy"),
        "keys",
        "entropy, nats",
        tuple(series),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    measured = {
        side: enumerate_texts(map(str, figures.all("entropy_nats", side=side, length=CLAIMED_LENGTH))) for side in SIDES
    }
    own = {
        side: enumerate_texts(format_figure(f.value) for f in figures.all("length_that_fits_the_cell", side=side))
        for side in SIDES
    }
    uniform = format_figure(round(math.log(CLAIMED_LENGTH), 1))
    best = format_figure(figures("length_that_fits_best", unit="nats").value)
    error, in_bits = (figures("largest_error_of_the_table_nats", unit=unit, length_of="best") for unit in UNITS)
    return WORDS(
        "why",
        length=CLAIMED_LENGTH,
        unscaled=measured["unscaled"],
        scaled=measured["scaled"],
        uniform=uniform,
        unscaled_lengths=own["unscaled"],
        scaled_lengths=own["scaled"],
        best=best,
        error=error,
        in_bits=in_bits,
    )


CLAIM = Claim(
    id="entropy-table",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"H = -\sum_j p_j \log p_j, \qquad H(n, \sigma) \approx \log n - \frac{\sigma^{2}}{2} \quad "
    r"(\sigma \ll \sqrt{2 \log n})",
    method=WORDS("method", length=CLAIMED_LENGTH),
    control=WORDS("control", length=CLAIMED_LENGTH),
    parameters={
        "dims": DIMS,
        "printed": PRINTED_ENTROPIES,
        "length": CLAIMED_LENGTH,
        "longest": 4096,
        "numbers": 20_000_000,
        "least_rows": 1000,
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"numbers": 1_500_000, "least_rows": 200},
    flipped={"printed": AT_LENGTH},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.at_length", length=CLAIMED_LENGTH),
            (Expect("largest_error_of_the_table_nats", high=0.1, at={"unit": "nats", "length_of": "example"}),),
        ),
        ClaimPart(
            WORDS("part.some_length"),
            (Expect("largest_error_of_the_table_nats", high=0.1, at={"unit": "nats", "length_of": "best"}),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
