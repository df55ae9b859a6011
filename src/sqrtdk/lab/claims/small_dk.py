"""small-dk: unscaled dot products train as well as additive scores where d_k is small, and worse where it is large."""

from __future__ import annotations

from typing import Any

from sqrtdk.lab._arms import FULL, QUICK, gap, train_arms
from sqrtdk.lab._curves import curve_plots
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figure, Figures
from sqrtdk.lab.intervals import geometric_mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.lab.training.train import CHANCE

# nats a letter behind additive attention: less is "as well", more is "worse"
BEHIND = round(CHANCE["encoder_decoder"] / 5, 2)
LEGEND = {
    "dot": "dot product",
    "additive": "additive",
    "cosine": "cosine, learned gain",
    "scaled": r"dot product, $1/\sqrt{d_k}$",
}


def measure(run: Run) -> Measured:
    """Held-out losses of the scores on the string task, each at its own best learning rate."""
    dims = run["dims"]
    kinds = {
        "dot": {"score": "dot", "scale": run["dot_scale"]},
        "additive": {"score": "additive", "scale": "none"},
        "cosine": {"score": "cosine", "scale": "none"},
        "scaled": {"score": "dot", "scale": "sqrt_dk"},
    }
    scores = ("dot", "additive", *run["others"])
    names = [(score, d_k) for score in scores for d_k in dims]
    arms = train_arms(
        run,
        {(score, d_k): {"task": "strings", "head_dim": d_k, **kinds[score]} for score, d_k in names},
        {name: run["additive_rates" if name[0] == "additive" else "rates"] for name in names},
    )
    figures = []
    for (score, d_k), arm in arms.items():
        figures.append(geometric_mean("held_out_loss_nats", arm.best, score=score, d_k=d_k))
        figures.append(geometric_mean("best_rate", arm.chosen, score=score, d_k=d_k))
    sizes = {run["least"]: "least", run["small"]: "small", max(dims): "large"}
    figures += [
        gap("excess_over_additive_nats", arms["dot", d], arms["additive", d], d_k=d, size=sizes.get(d, "between"))
        for d in dims
    ]
    pair = {LEGEND[score]: arms[score, max(dims)] for score in ("dot", "additive")}
    return Measured(figures, (_plot(Figures(figures), scores), curve_plots(pair, "strings", max(dims))[0]))


def _plot(figures: Figures, scores: tuple[str, ...]) -> Plot:
    return Plot(
        "score",
        Text(
            "Held-out loss of each score on the string task, over d_k, each at its best learning rate.",
            "各打分函数在字符串任务上的留出损失随 d_k 的变化，各自取最佳学习率。",
        ),
        "$d_k$",
        "held-out loss, nats a letter",
        tuple(over(LEGEND[score], figures.all("held_out_loss_nats", score=score), "d_k") for score in scores),
        x_axis="log",
        lines=((r"guess, $\log 16$", CHANCE["encoder_decoder"]),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    sizes = [figures("excess_over_additive_nats", size=size) for size in ("least", "small", "large")]
    english = ", ".join(f"{one} at d_k = {one.at['d_k']} ({_stand(one).en})" for one in sizes)
    chinese = "，".join(f"d_k = {one.at['d_k']} 时为 {one}（{_stand(one).zh}）" for one in sizes)
    spread = float(sizes[1].at["d_k"]) ** 0.5
    return Text(
        f"The loss of the unscaled dot product minus that of additive attention, in nats a letter: {english}. With "
        "entries of q and k of variance 1 the logits start with a standard deviation of sqrt(d_k); that of the "
        "additive score, with entries of v of variance 1/d_k, stays below 1 at any width. What counts as small is the "
        f"question: at d_k = {sizes[1].at['d_k']}, less than the head dimensions in use, unscaled logits already start "
        f"with a standard deviation of {spread:.0f}.",
        f"不缩放的点积的损失减去加性注意力的损失，单位为 nat/字母：{chinese}。当 q、k 的分量方差为 1 时，"
        "logits 的初始标准差是 sqrt(d_k)；而 v 的分量方差为 1/d_k 时，加性打分 v · tanh(q + k) 的标准差在任何宽度下"
        f"都小于 1。问题在于多小才算“小”：d_k = {sizes[1].at['d_k']} 已小于实际使用的头维度，"
        f"而不缩放的 logits 的初始标准差已达 {spread:.0f}。",
    )


def _stand(excess: Figure) -> Text:
    """Where the whole interval lies."""
    if excess.high <= BEHIND:
        return Text("as well", "一样好")
    return Text("worse", "更差") if excess.low >= BEHIND else Text("undecided", "未定")


def _part(size: str, en: str, zh: str) -> Part:
    def expect(at: str, **bar: Any) -> Expect:
        return Expect("excess_over_additive_nats", at={"size": at}, **bar)

    return Part(Text(en, zh), (expect(size, high=BEHIND), expect("large", low=BEHIND)))


CLAIM = Claim(
    id="small-dk",
    group="gradients",
    sources=("S1", "arXiv:1706.03762", "arXiv:1703.03906"),
    statement=Text(
        "For small d_k attention with unscaled dot products trains as well as additive attention; for large d_k it "
        "trains worse.",
        "当 d_k 较小时，不缩放的点积注意力与加性注意力训练得一样好；当 d_k 较大时则更差。",
    ),
    formula=r"\mathrm{sd}(q \cdot k) = \sqrt{d_k}, \qquad \mathrm{Var}(v_i) = 1 / d_k \Rightarrow "
    r"\mathrm{sd}(v \cdot \tanh(q + k)) < 1",
    method=Text(
        "Train encoder-decoders that reverse strings with noise symbols, all their attentions with one score, at "
        "several learning rates and from several seeds; each score is judged at its own best rate, and additive "
        "attention, which asks for larger rates, has a range of its own. The full run adds rates where the best is the "
        "least or the largest. A held-out loss behind that of additive attention by a fifth of the log 16 nats a "
        "letter of a guess is the bar: less is 'as well', more is 'worse'. Two meanings of 'small' are asked: d_k = 4 "
        "and d_k = 16.",
        "训练把带噪声符号的字符串倒序的编码器—解码器，其全部注意力都用同一种打分函数，并试验多个学习率与多个种子；"
        "每种打分函数以自己的最佳学习率参评；加性注意力需要更大的学习率，因此有自己的取值范围。"
        "若最佳值是所试学习率中最小或最大的一个，完整运行会再向外增加。随机猜测的损失为每个字母 log 16 nat："
        "留出损失比加性注意力高出其五分之一为界，不足为“一样好”，超过为“更差”。"
        "“小”按两种含义检验：d_k = 4 与 d_k = 16。",
    ),
    control=Text(
        "The dot products are scaled by 1/sqrt(d_k): they do not fall behind at large d_k either.",
        "点积乘以 1/sqrt(d_k)：即使 d_k 较大也不再落后。",
    ),
    parameters={
        **FULL,
        "seeds": 6,
        "dot_scale": "none",
        "others": ("cosine", "scaled"),
        "additive_rates": (1e-3, 3e-3, 1e-2, 3e-2),
        "dims": (4, 16, 64, 512),
        "least": 4,
        "small": 16,
    },
    quick={**QUICK, "additive_rates": (4e-3, 1.2e-2), "others": (), "dims": (4, 16, 64)},
    flipped={"dot_scale": "sqrt_dk"},
    measure=measure,
    parts=(
        _part("least", "as well at d_k = 4, worse at the largest d_k", "d_k = 4 时一样好，最大的 d_k 时更差"),
        _part("small", "as well at d_k = 16, worse at the largest d_k", "d_k = 16 时一样好，最大的 d_k 时更差"),
    ),
    why=why,
)
