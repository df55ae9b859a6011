"""scale-dk: how uniform the weights are when the product is divided by d_k."""

from __future__ import annotations

import math

import sqrtdk
from sqrtdk.lab._random_rows import own_keys
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.scales import SCALES
from sqrtdk.theory import expected_effective_keys

GROWN = 4.0  # standard deviation of the components after growth
LARGE = (64, 256)


def measure(run: Run) -> Measured:
    """Effective keys, entropy and peak of random rows, as shares of what uniform weights have."""
    figures = []
    cases = [(d_k, 1.0) for d_k in run["dims"]] + [(LARGE[0], GROWN)]
    for d_k, std in cases:
        query, key = own_keys(run.generator("rows", d_k, std), run["rows"], run["keys"], d_k, std=std)
        rows = sqrtdk.measure(query, key, scale=SCALES[run["scale"]]())
        at = {"d_k": d_k, "component_std": std}
        figures += [
            mean("effective_key_share", rows.effective_keys.flatten() / run["keys"], **at),
            mean("entropy_share", rows.entropy_nats.flatten() / math.log(run["keys"]), **at),
            mean("peak_over_uniform", rows.peak.flatten() * run["keys"], **at),
        ]
    return Measured(figures, (_plot(Figures(figures), run),))


def _plot(figures: Figures, run: Run) -> Plot:
    keys = run["keys"]
    return Plot(
        "share",
        Text(
            f"Effective keys over all {keys} keys: 1 where the weights are uniform.",
            f"有效键数与全部 {keys} 个键之比：权重均匀时为 1。",
        ),
        "$d_k$",
        "effective keys / keys",
        (
            over(f"measured, scale {run['scale']}", figures.all("effective_key_share", component_std=1.0), "d_k"),
            *(
                curve(
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
    return Text(
        "For components of variance 1 the logits have a standard deviation of sqrt(d_k)/d_k = 1/sqrt(d_k), and the "
        "weights use exp(-1/d_k) of the keys, nearly. At d_k = 64 that is almost all of them "
        f"({share(64)}), and the largest weight is {peak} times the uniform one. At d_k = 4 the share is {share(4)}. "
        "And it is a statement about the start: with components that have grown to a standard deviation of "
        f"{number(GROWN)} the same rule at d_k = 64 leaves {share(64, GROWN)} of the keys. muP divides by d_k "
        "with trained layers in mind: there q and k are aligned, and their product grows like d_k, not like its root.",
        "当分量的方差为 1 时，logit 的标准差是 sqrt(d_k)/d_k = 1/sqrt(d_k)，权重大约使用了 exp(-1/d_k) 比例的键。在 "
        f"d_k = 64 时几乎是全部（{share(64)}），最大权重只是均匀权重的 {peak} 倍；在 d_k = 4 时该比例为 {share(4)}。"
        f"而且这只适用于初始状态：若分量的标准差增大到 {number(GROWN)}，同样的规则在 d_k = 64 时只用到 "
        f"{share(64, GROWN)} 的键。muP 除以 d_k，着眼于训练之后的层：那时 q 与 k 相互对齐，点积按 d_k 增长，"
        "而不是按其平方根。",
    )


CLAIM = Claim(
    id="scale-dk",
    group="factors",
    sources=("S3",),
    statement=Text(
        "Dividing by d_k in place of sqrt(d_k) makes the attention weights nearly uniform.",
        "若除以 d_k 而不是 sqrt(d_k)，注意力权重将近乎均匀。",
    ),
    formula=r"\mathrm{Var}\left[ \frac{q \cdot k}{d_k} \right] = \frac{1}{d_k}, \qquad "
    r"\frac{1}{n \sum_i p_i^2} \approx e^{-\sigma^2}, \quad "
    r"\sigma = \frac{\mathrm{std}[q] \, \mathrm{std}[k]}{\sqrt{d_k}}",
    method=Text(
        "Random rows, each with keys of its own, divided by d_k: effective keys, 1 over the sum of the squared "
        "weights, as a share of all keys. Nearly uniform means a share of at least 0.95.",
        "随机生成若干行（每行有自己的键），点积除以 d_k，计算有效键数（权重平方和的倒数）占全部键的比例。"
        "“近乎均匀”指比例不低于 0.95。",
    ),
    control=Text(
        "The products are divided by sqrt(d_k): nowhere nearly uniform.",
        "改为除以 sqrt(d_k)：任何情形下都不近乎均匀。",
    ),
    parameters={"dims": (4, 16, 64, 256), "keys": 64, "rows": 1000, "scale": "dk"},
    quick={"dims": (4, 64, 256), "rows": 200},
    flipped={"scale": "sqrt_dk"},
    measure=measure,
    parts=(
        Part(
            Text(
                "at d_k 64 and more, components of variance 1 (as at the start of training)",
                "d_k 不小于 64，分量方差为 1（如训练开始时）",
            ),
            tuple(Expect("effective_key_share", low=0.95, at={"d_k": d_k, "component_std": 1.0}) for d_k in LARGE),
        ),
        Part(
            Text("at d_k 4, components of variance 1", "d_k 为 4，分量方差为 1"),
            (Expect("effective_key_share", low=0.95, at={"d_k": 4}),),
        ),
        Part(
            Text(
                f"at d_k 64, components that have grown to a standard deviation of {number(GROWN)}",
                f"d_k 为 64，分量的标准差增大到 {number(GROWN)}",
            ),
            (Expect("effective_key_share", low=0.95, at={"component_std": GROWN}),),
        ),
    ),
    why=why,
)
