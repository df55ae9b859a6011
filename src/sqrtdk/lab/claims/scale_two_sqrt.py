"""scale-two-sqrt: what a divisor twice too large does to the logits, to the weights and to a trained layer."""

from __future__ import annotations

import sqrtdk
from sqrtdk.lab._random_rows import factor, own_keys
from sqrtdk.lab._run import Run
from sqrtdk.lab._teacher import TEACHER_STD, Fit, Start, fit
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import geometric_mean, mean
from sqrtdk.lab.plots import Plot, curve
from sqrtdk.lab.text import Text
from sqrtdk.scales import SCALES

KEYS = 64
LEARNER_DIM = 32
NOISE = 0.5  # standard deviation of what is added to the teacher's outputs
WORSE = 1.1  # times the error with the usual scale


def measure(run: Run) -> Measured:
    """Variance and effective keys of random rows, and the error of trained layers, against the usual scale."""
    figures = []
    for d_k in run["dims"]:
        query, key = own_keys(run.generator("rows", d_k), run["rows"], KEYS, d_k)
        rows, usual = (sqrtdk.measure(query, key, scale=SCALES[rule]()) for rule in (run["scale"], "sqrt_dk"))
        shares = [r.effective_keys.flatten() / KEYS for r in (rows, usual)]
        figures += [
            mean("logit_variance", rows.variance.flatten() * KEYS / (KEYS - 1), d_k=d_k),
            mean("effective_key_share", shares[0], d_k=d_k),
            mean("effective_key_share_more_than_usual", shares[0] - shares[1], d_k=d_k),
        ]
    fits = _fits(run)
    for case, found in fits.items():
        figures.append(geometric_mean("error_at_end", found.end, case=case))
        if case != "the usual scale":
            figures.append(geometric_mean("error_over_usual", found.end / fits["the usual scale"].end, case=case))
    plot = Plot(
        "error",
        Text(
            "Error of layers that learn a teacher's outputs, as a share of the mean square of those, at the best "
            "learning rate of each scale.",
            "各层学习教师输出的误差（占教师输出均方的比例），每种缩放取各自最佳的学习率。",
        ),
        "step",
        "error",
        tuple(curve(case, range(run["steps"]), found.curve) for case, found in fits.items()),
        y_axis="log",
    )
    return Measured(figures, (plot,))


def _fits(run: Run) -> dict[str, Fit]:
    """The same W, teachers and rows for every scale."""
    rules = {"this scale": run["scale"], "the usual scale": "sqrt_dk", "no scale": "none"}
    start = LEARNER_DIM**-0.5
    return fit(
        run.generator("learners"),
        d_k=LEARNER_DIM,
        starts={case: Start(start, factor(rule, LEARNER_DIM)) for case, rule in rules.items()},
        learners=run["learners"],
        rates=run["rates"],
        steps=run["steps"],
        rows=32,
        keys=8,
        noise=NOISE,
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    variance, more = (figures.all(name)[-1] for name in ("logit_variance", "effective_key_share_more_than_usual"))
    ends = [figures("error_at_end", case=case) for case in ("this scale", "the usual scale")]
    ratio, bare = (figures("error_over_usual", case=case) for case in ("this scale", "no scale"))
    return Text(
        f"Half the factor is a quarter of the variance: {variance} at d_k = {variance.at['d_k']}. The weights of a "
        f"fresh layer are flatter, by {more} in the share of keys in use. But flatter is not saturated: the Jacobian "
        "of softmax stays away from 0, and a factor of 2 is made up for by W_q or W_k twice as large, which is the "
        f"same function. Trained layers end with errors of {ends[0]} and, with the usual scale, {ends[1]}: a ratio of "
        f"{ratio}. The same comparison does see harm where there is some: without any scale the ratio is {bare}. A "
        "factor of 2 is learned around; what it moves is the best learning rate.",
        f"因子减半，方差变为四分之一：在 d_k = {variance.at['d_k']} 时实测为 {variance}。新建层的权重更平缓，"
        f"所用键的比例增加 {more}。但平缓并不等于饱和：softmax 的雅可比矩阵并未趋于零，而且只要 W_q 或 W_k 增大一倍，"
        f"就得到同一个函数。训练之后，误差分别为 {ends[0]} 和 {ends[1]}（后者用通常的缩放），二者之比为 {ratio}。"
        f"若确有损害，同样的比较是看得出来的：完全不缩放时，这个比值为 {bare}。两倍的因子会在学习中得到补偿，"
        "改变的只是最佳学习率。",
    )


CLAIM = Claim(
    id="scale-two-sqrt",
    group="factors",
    sources=("S3",),
    statement=Text(
        "Dividing by 2 sqrt(d_k) makes the variance of the logits 1/4, and that hurts too.",
        "若除以 2 sqrt(d_k)，logit 的方差变为 1/4，这同样有害。",
    ),
    formula=r"\mathrm{Var}\left[ \frac{q \cdot k}{2 \sqrt{d_k}} \right] = \frac{1}{4}, \qquad "
    r"\frac{(2 W_q x)^\top W_k y}{2 \sqrt{d_k}} = \frac{(W_q x)^\top W_k y}{\sqrt{d_k}}",
    method=Text(
        "Random rows: variance of the logits, and effective keys as a share of all, against the usual scale. Then "
        "bilinear layers learn the outputs of a teacher whose logits have a standard deviation of "
        f"{TEACHER_STD:g}, noise of standard deviation {NOISE:g} added, with either scale from the same W, each at its "
        "best learning rate, which falls to 0. The error is the distance from the teacher's outputs without the noise; "
        f"harm means at least {WORSE} times the error that the usual scale ends with.",
        "对随机行，测量 logit 的方差，以及有效键数所占的比例，并与通常的缩放比较。然后让双线性层学习一个 logit "
        f"标准差为 {TEACHER_STD:g} 的教师的输出（加上标准差为 {NOISE:g} 的噪声），两种缩放从同样的 W 出发，"
        f"各取最佳学习率，并逐渐降到零。误差指与无噪声的教师输出之间的距离；“有害”指最终误差至少是通常缩放的 {WORSE} "
        "倍。",
    ),
    control=Text(
        "The usual scale takes its place: variance 1, and no difference.",
        "换成通常的缩放：方差为 1，且没有差别。",
    ),
    parameters={
        "scale": "two_sqrt_dk",
        "dims": (16, 64, 256),
        "rows": 1000,
        "learners": 6,
        "rates": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
        "steps": 600,
    },
    quick={"dims": (64,), "rows": 300, "learners": 4, "rates": (1e-2, 2e-2, 4e-2, 8e-2), "steps": 150},
    flipped={"scale": "sqrt_dk"},
    measure=measure,
    parts=(
        Part(
            Text("the variance of the logits is 1/4 (within 10%)", "logit 的方差为 1/4（误差 10% 以内）"),
            (Expect("logit_variance", low=0.225, high=0.275),),
        ),
        Part(
            Text(
                "the weights of a fresh layer are flatter: at least 0.2 more of the keys in use",
                "新建层的权重更平缓：所用键的比例至少增加 0.2",
            ),
            (Expect("effective_key_share_more_than_usual", low=0.2),),
        ),
        Part(
            Text(
                f"a trained layer is worse: at least {WORSE} times the error",
                f"训练后的层更差：误差至少是 {WORSE} 倍",
            ),
            (Expect("error_over_usual", low=WORSE, at={"case": "this scale"}),),
        ),
    ),
    why=why,
)
