"""onehot-64: five logits of the size that d_k = 64 gives, and their softmax."""

from __future__ import annotations

import math

import torch

from sqrtdk.lab._random_rows import products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import exact, proportion
from sqrtdk.lab.text import Text
from sqrtdk.stats import row_stats

ONE_HOT = 0.999


def measure(run: Run) -> Measured:
    """The softmax and the exponentials of the logits, and how often random rows are as sharp."""
    logits = torch.tensor(run["logits"], dtype=torch.float64) * run["factor"]
    row = row_stats(logits[None])
    drawn = products(run.generator("rows"), draws=run["rows"], keys=len(logits), d_k=run["d_k"]) * run["factor"]
    sharp = int((row_stats(drawn).peak > ONE_HOT).sum())
    top, second = logits.sort(descending=True).values[:2].tolist()
    return Measured(
        [
            exact("peak", float(row.peak)),
            exact("weight_off_peak", float(row.off_peak)),
            exact("gap_of_the_two_largest", top - second),
            exact("exp_of_largest", math.exp(max(logits.tolist()))),
            exact("exp_of_smallest", math.exp(min(logits.tolist()))),
            proportion("random_rows_one_hot", sharp, run["rows"], d_k=run["d_k"]),
        ]
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    off, gap = number(figures("weight_off_peak").value), number(figures("gap_of_the_two_largest").value)
    share = figures("random_rows_one_hot")
    needed, std = math.log(ONE_HOT / (1 - ONE_HOT)), float(share.at["d_k"]) ** 0.5
    more = needed > std
    return Text(
        f"The softmax sees differences only. The two largest logits are {gap} apart, so all other keys together get "
        f"about e^-{gap}: the weight off the peak is {off}. The two exponentials are right to the digits given, but "
        f"they do not decide: two logits 0 and {gap} are as sharp. It takes a gap of about {number(needed)} to pass "
        f"{ONE_HOT}, {'more' if more else 'less'} than one standard deviation of the logits at d_k = "
        f"{share.at['d_k']}, {number(std)}; of rows of five random keys the share that passes is {share}.",
        f"softmax 只取决于 logits 之差。最大的两个 logits 相差 {gap}，其余各键的权重合计约为 e^-{gap}："
        f"峰值以外的权重是 {off}。两个指数值在所给的位数内是正确的，但起决定作用的不是它们：logits 为 0 和 {gap} "
        f"的一行同样尖锐。最大权重超过 {ONE_HOT} 需要约 {number(needed)} 的差距，{'大于' if more else '小于'} d_k = "
        f"{share.at['d_k']} 时 logits 的一个标准差 {number(std)}；由五个随机键构成的行中，达到这一点的占 {share}。",
    )


CLAIM = Claim(
    id="onehot-64",
    group="saturation",
    sources=("S1",),
    statement=Text(
        "Unscaled logits at d_k = 64 such as [-24, -10, 0, 10, 24] give a one-hot softmax; e^24 is about 2.6e10 and "
        "e^-24 about 3.8e-11.",
        "在 d_k = 64 时，[-24, -10, 0, 10, 24] 这样的未缩放 logits 经 softmax 后成为 one-hot；e^24 约为 2.6e10，"
        "e^-24 约为 3.8e-11。",
    ),
    formula=r"\mathrm{softmax}(z)_i = \frac{e^{z_i}}{\sum_j e^{z_j}}, \qquad "
    r"1 - p_{\max} \approx e^{-(z_{(1)} - z_{(2)})}",
    method=Text(
        f"The softmax of the five numbers in float64; one-hot means a weight above {ONE_HOT}. The exponentials are "
        "held against their printed digits. Beside it, how many rows of five random keys are as sharp.",
        f"用 float64 计算这五个数的 softmax；最大权重超过 {ONE_HOT} 即视为 one-hot。两个指数值与所给的位数比较。"
        "另外统计由五个随机键构成的行中有多少同样尖锐。",
    ),
    control=Text(
        "The logits are divided by sqrt(64) = 8 first: the row is then not one-hot, and the exponentials are others.",
        "先把 logits 除以 sqrt(64) = 8：这一行不再是 one-hot，两个指数值也随之改变。",
    ),
    parameters={"logits": (-24.0, -10.0, 0.0, 10.0, 24.0), "factor": 1.0, "d_k": 64, "rows": 200_000},
    quick={"rows": 10_000},
    flipped={"factor": 0.125},
    measure=measure,
    parts=(
        Part(Text("the softmax is one-hot", "softmax 的结果是 one-hot"), (Expect("peak", low=ONE_HOT),)),
        Part(
            Text("the exponentials are 2.6e10 and 3.8e-11, rounded", "两个指数值四舍五入后为 2.6e10 和 3.8e-11"),
            (
                Expect("exp_of_largest", low=2.55e10, high=2.65e10),
                Expect("exp_of_smallest", low=3.75e-11, high=3.85e-11),
            ),
        ),
    ),
    why=why,
)
