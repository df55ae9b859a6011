"""scale-two-sqrt: what a divisor twice too large does to the logits, to the weights and to a trained layer."""

from __future__ import annotations

import sqrtdk
from sqrtdk.lab._own_keys import own_keys
from sqrtdk.lab._random_rows import factor
from sqrtdk.lab._run import Run
from sqrtdk.lab._teacher import TEACHER_STD, Fit, fit
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, curve
from sqrtdk.lab.text import Text
from sqrtdk.scales import SCALES

KEYS = 64
LEARNER_DIM = 32


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
    fits = {case: _fit(run, rule) for case, rule in (("this scale", run["scale"]), ("the usual scale", "sqrt_dk"))}
    figures += [mean("error_at_end", found.end, case=case) for case, found in fits.items()]
    figures.append(mean("extra_error_at_end", fits["this scale"].end - fits["the usual scale"].end))
    plot = Plot(
        "error",
        Text(
            "Error of layers that learn a teacher's outputs, as a share of the mean square of those, at the best "
            "learning rate of each scale.",
            "各层学习教师输出的误差（占教师输出均方的比例），每种缩放取各自最佳的学习率。",
        ),
        "step",
        "error",
        tuple(
            curve(label, range(run["steps"]), found.curve)
            for label, found in zip((run["scale"], "sqrt_dk, for comparison"), fits.values(), strict=True)
        ),
        y_axis="log",
    )
    return Measured(figures, (plot,))


def _fit(run: Run, rule: str) -> Fit:
    """The same start, teachers and rows for every scale."""
    return fit(
        run.generator("learners"),
        d_k=LEARNER_DIM,
        weight_std=LEARNER_DIM**-0.5,
        scale=factor(rule, LEARNER_DIM),
        learners=run["learners"],
        rates=run["rates"],
        steps=run["steps"],
        rows=32,
        keys=8,
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    variance, more = (figures.all(name)[-1] for name in ("logit_variance", "effective_key_share_more_than_usual"))
    ends = [figures("error_at_end", case=case) for case in ("this scale", "the usual scale")]
    return Text(
        f"Half the factor is a quarter of the variance: {variance} at d_k = {variance.at['d_k']}. The weights of a "
        f"fresh layer are flatter, by {more} in the share of keys in use. But flatter is not saturated: the Jacobian "
        "of softmax stays away from 0, and a factor of 2 is made up for by W_q or W_k twice as large, which is the "
        f"same function. Trained layers end with errors of {ends[0]} and, with the usual scale, {ends[1]}: no harm of "
        "note. A factor that is fixed from the start is learned around; only the best learning rate may differ.",
        f"因子减半，方差变为四分之一：在 d_k = {variance.at['d_k']} 时实测为 {variance}。新建层的权重更平缓，"
        f"所用键的比例增加 {more}。但平缓并不等于饱和：softmax 的雅可比矩阵并未趋于零，而且只要 W_q 或 W_k 增大一倍，"
        f"就得到同一个函数。训练之后，误差分别为 {ends[0]} 和 {ends[1]}（后者用通常的缩放）：没有明显的损害。"
        "从一开始就固定的倍数，会在学习中得到补偿；不同的可能只是最佳学习率。",
    )


CLAIM = Claim(
    id="scale-two-sqrt",
    group="factors",
    sources=("S3",),
    statement=Text(
        "Dividing by 2 sqrt(d_k) makes the variance of the logits 1/4, and that hurts too.",
        "若除以 2 sqrt(d_k),logit 的方差变为 1/4，这同样有害。",
    ),
    formula=r"\mathrm{Var}\left[ \frac{q \cdot k}{2 \sqrt{d_k}} \right] = \frac{1}{4}, \qquad "
    r"\frac{(2 W_q x)^\top W_k y}{2 \sqrt{d_k}} = \frac{(W_q x)^\top W_k y}{\sqrt{d_k}}",
    method=Text(
        "Random rows: variance of the logits, and effective keys as a share of all, against the usual scale. Then "
        "bilinear layers learn the outputs of a teacher whose logits have a standard deviation of "
        f"{TEACHER_STD:g}, with either scale from the same start, each at its best learning rate; harm means an error "
        "larger by at least 0.05 of the mean square of the teacher's output.",
        "对随机行，测量 logit 的方差，以及有效键数所占的比例，并与通常的缩放比较。"
        "然后让双线性层学习一个 logit 标准差为 "
        f"{TEACHER_STD:g} 的教师的输出，两种缩放的起点相同，各取最佳学习率。"
        "“有害”指误差增加了教师输出均方的 0.05 以上。",
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
        "rates": (3e-3, 1e-2, 3e-2, 1e-1),
        "steps": 400,
    },
    quick={"dims": (64,), "rows": 300, "learners": 4, "rates": (1e-2, 3e-2), "steps": 150},
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
                "a trained layer is worse: an error larger by at least 0.05",
                "训练后的层更差：误差至少增加 0.05",
            ),
            (Expect("extra_error_at_end", low=0.05),),
        ),
    ),
    why=why,
)
