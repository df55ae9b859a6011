"""printed-maxima: six printed largest weights, against the distribution that each could come from."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.lab._random_rows import SIDES, factor, products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figure, Figures, number
from sqrtdk.lab.intervals import exact, mean, proportion
from sqrtdk.lab.plots import Plot, Series, curve
from sqrtdk.lab.text import Text
from sqrtdk.stats import row_stats

PRINTED = {"unscaled": (0.342, 0.891, 0.998), "scaled": (0.289, 0.276, 0.301)}
TAIL = 0.005  # of either side: a value outside the central 99% is not a plausible draw


def measure(run: Run) -> Measured:
    """The share of draws below each printed value, for one row, for one row seen by both scales, and for a matrix."""
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
        near = distance.argsort()[: round(run["near"] * draws)]  # the rows whose scaled peak is the printed one
        figures.append(_below(single["unscaled"][near, 0], printed["unscaled"], reading="same row", d_k=d_k))
    return Measured(figures, (_plot(ranges, run),))


def _peaks(product: Tensor, run: Run, d_k: int) -> dict[str, Tensor]:
    return {side: row_stats(product * factor(run[side], d_k)).peak for side in SIDES}


def _below(peaks: Tensor, printed: float, **at: str | int) -> Figure:
    return proportion("share_below_the_printed", int((peaks <= printed).sum()), len(peaks), **at)


def _quantiles(peaks: Tensor) -> tuple[float, float, float]:
    low, middle, high = peaks.quantile(torch.tensor([TAIL, 0.5, 1 - TAIL], dtype=peaks.dtype)).tolist()
    return low, middle, high


def _plot(ranges: list[tuple[str, int, float, float, float]], run: Run) -> Plot:
    series = []
    for side, shift in zip(SIDES, (0.95, 1.05), strict=True):  # side by side, not on top of one another
        dims, low, middle, high = zip(*(entry[1:] for entry in ranges if entry[0] == side), strict=True)
        x = tuple(shift * d_k for d_k in dims)
        series.append(Series(f"{side}: median and 99% of rows", x, middle, low, high, "points"))
        series.append(curve(f"{side}: printed", x, run["printed"][side], style="dashed"))
    return Plot(
        "largest-weight",
        Text(
            f"Largest weight of one random row of {run['keys']} keys: median and central 99%, with the printed values.",
            f"{run['keys']} 个随机键构成的一行的最大权重：中位数与中间 99% 的范围，以及原文给出的值。",
        ),
        "$d_k$",
        "largest weight",
        tuple(series),
        x_axis="log",
    )


def _word(possible: bool, yes: str = "possible", no: str = "impossible") -> str:
    return yes if possible else no


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    first = min(figure.at["d_k"] for figure in figures.all("peak"))
    flat, given = (number(figures("printed", d_k=first, side=side).value) for side in SIDES)
    possible = {
        name: all(f.low > TAIL and f.high < 1 - TAIL for f in figures.all("share_below_the_printed", reading=name))
        for name in ("mean over the rows", "largest of the matrix")
    }
    keys = number(figures("keys").value)
    share = figures("share_below_the_printed", reading="one row", d_k=first, side="unscaled")
    typical = figures("peak", d_k=first, side="unscaled")
    last = max(figure.at["d_k"] for figure in figures.all("peak"))
    scaled, still = (figures("peak", d_k=d_k, side="scaled") for d_k in (first, last))
    grown = figures("peak", d_k=last, side="unscaled")
    both = figures("share_below_the_printed", reading="same row", d_k=first)
    return Text(
        "A largest weight of one random row scatters so widely that nearly any number is a possible draw. At d_k = "
        f"{first} the unscaled mean is {typical}; a row as flat as the printed {flat} or flatter has the share "
        f"{share}. Among the rows that give the printed {given} with the scale that share is {both}: such a row would "
        f"need three nearly equal largest logits. As means over {keys} rows the numbers are "
        f"{_word(possible['mean over the rows'])}, as the largest of a {keys} x {keys} matrix "
        f"{_word(possible['largest of the matrix'])}. In the mean the unscaled weight goes from {typical} at d_k = "
        f"{first} to {grown} at {last}, the scaled one from {scaled} to {still}; one draw a cell cannot show it.",
        f"单独一行的最大权重波动很大，几乎任何数都可能抽到。在 d_k = {first} 时，未缩放的均值为 {typical}；"
        f"像原文给出的 {flat} 那样平坦或更平坦的行所占比例为 {share}。在缩放后给出 {given} 的行中，这个比例为 {both}："
        f"这样的行需要三个几乎相等的最大 logits。若当作 {keys} 行的均值，"
        f"这些数{_word(possible['mean over the rows'], '可能', '不可能')}出现；若当作 {keys} x {keys} 矩阵中的最大值，"
        f"则{_word(possible['largest of the matrix'], '可能', '不可能')}。就均值而言，d_k 从 {first} 到 {last}，"
        f"未缩放的权重从 {typical} 变为 {grown}，缩放后的从 {scaled} 变为 {still}。每格只抽一次，这些都显示不出来。",
    )


def _reading(name: str, en: str, zh: str) -> Part:
    return Part(Text(en, zh), (Expect("share_below_the_printed", low=TAIL, high=1 - TAIL, at={"reading": name}),))


CLAIM = Claim(
    id="printed-maxima",
    group="saturation",
    sources=("S1",),
    statement=Text(
        "With random q and k, length 10 and d_k 16 / 64 / 256, the largest weight comes out as 0.342 / 0.891 / 0.998 "
        "unscaled and 0.289 / 0.276 / 0.301 scaled.",
        "取随机的 q 与 k，长度为 10，d_k 为 16 / 64 / 256，最大权重在未缩放时为 0.342 / 0.891 / 0.998，"
        "缩放后为 0.289 / 0.276 / 0.301。",
    ),
    formula=r"p_{\max} = \frac{1}{1 + \sum_{j \neq *} e^{-(z_{*} - z_j)}}",
    method=Text(
        "The share of random draws that lie below each printed value; a value is a possible draw if it lies in the "
        "central 99%. Four readings: one row for each number; one row for both scales, among the rows whose scaled "
        "weight is nearest to the printed one; the mean over ten rows; the largest of a 10 x 10 matrix.",
        "计算随机样本中低于原文各个值的比例；若某个值落在中间 99% 的范围内，则视为可能的样本。共有四种读法："
        "每个数各取一行；两种缩放取同一行（只看缩放后的权重最接近原文的行）；十行的均值；10 x 10 矩阵中的最大值。",
    ),
    control=Text(
        "The two scales change places: the printed numbers are then impossible under every reading.",
        "两种缩放互换：此时无论哪种读法，原文的数都不可能出现。",
    ),
    parameters={
        "dims": (16, 64, 256),
        "printed": PRINTED,
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
        _reading("one row", "as one row drawn for each number", "每个数各取一行"),
        _reading("same row", "as one row seen with both scales", "两种缩放取同一行"),
        _reading("mean over the rows", "as the mean over the ten rows", "十行的均值"),
        _reading("largest of the matrix", "as the largest weight of the 10 x 10 matrix", "10 x 10 矩阵中的最大权重"),
    ),
    why=why,
)
