"""train-instability: without the scale, training is slow or unstable where d_k is large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqrtdk.lab._arms import FULL, QUICK, Arm, differences, gap, train_arms
from sqrtdk.lab._curves import curve_plots, listed
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figure, Figures, Place
from sqrtdk.lab.intervals import geometric_mean, mean, proportion
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text

Name = tuple[str, int, str, str]  # task, d_k, scale, start of the weights of q and k
Arms = Mapping[Name, Arm]
SLOWER = 0.02  # nats a symbol; two arms that are the same differ by exactly 0


def measure(run: Run) -> Measured:
    """Held-out losses with and without the scale, each at its own best learning rate."""
    bare, dims = run["bare"], run["dims"]
    names: list[Name] = []
    for task in run["tasks"]:
        names += [(task, d_k, scale, "unit") for d_k in dims for scale in (bare, "sqrt_dk")]
        names += [(task, max(dims), scale, "unit") for scale in run["others"]]
        names += [_name(task, max(dims), scale, start) for start in run["starts"] for scale in (bare, "sqrt_dk")]
    arms = train_arms(
        run,
        {name: dict(zip(("task", "head_dim", "scale", "init"), name, strict=True)) for name in dict.fromkeys(names)},
    )
    figures: list[Figure] = []
    for name, arm in arms.items():
        place: dict[str, Place] = dict(zip(("task", "d_k", "scale", "start"), name, strict=True))
        figures.append(geometric_mean("held_out_loss_nats", arm.best, **place))
        figures.append(geometric_mean("best_rate", arm.chosen, **place))
    for task in run["tasks"]:
        figures += _gaps(arms, task, run) + _states(arms, task, bare, max(dims))
    figures.append(_diverged([arm for (_, _, scale, _), arm in arms.items() if scale == bare]))
    first = run["tasks"][0]
    pair = {
        label: arms[first, max(dims), scale, "unit"]
        for label, scale in (("no scale", bare), (r"$1/\sqrt{d_k}$", "sqrt_dk"))
    }
    return Measured(figures, (*_plots(Figures(figures), run), *curve_plots(pair, first, max(dims))))


def _name(task: str, d_k: int, scale: str, start: str) -> Name:
    """An arm; the factor is either in the weights or in the scale, never in both."""
    return task, d_k, scale, "unit" if start == "folded" and scale != "none" else start


def _gaps(arms: Arms, task: str, run: Run) -> list[Figure]:
    found, large = [], max(run["dims"])
    for d_k in run["dims"]:
        for start in ("unit", *run["starts"]) if d_k == large else ("unit",):
            pair = (arms[_name(task, d_k, scale, start)] for scale in (run["bare"], "sqrt_dk"))
            size = "large" if d_k == large else "smaller"
            name = "folded_gap_nats" if start == "folded" else "loss_gap_nats"
            found.append(gap(name, *pair, task=task, d_k=d_k, start=start, size=size))
    sides = (run["bare"], "sqrt_dk")
    least, most = (differences(*(arms[task, d, side, "unit"] for side in sides)) for d in (min(run["dims"]), large))
    return [*found, mean("gap_growth_nats", [b - a for a, b in zip(least, most, strict=True)], task=task)]


def _diverged(arms: Sequence[Arm]) -> Figure:
    """Seeds of which any run without the scale diverged; the runs of a seed are not independent."""
    runs = [(seed, one) for arm in arms for results in arm.results.values() for seed, one in enumerate(results)]
    lost = {seed for seed, one in runs if one["diverged_at"] is not None}
    return proportion("seeds_that_diverged", len(lost), len(arms[0].chosen))


def _states(arms: Arms, task: str, bare: str, d_k: int) -> list[Figure]:
    """Largest logit of a run, entropy of its weights, gradient at the start, without the scale and with it."""
    found: list[Figure] = []
    first = [[curve[0] for curve in arms[task, d_k, s, "unit"].at_best("gradient_p50")] for s in (bare, "sqrt_dk")]
    ratios = [a / b for a, b in zip(*first, strict=True)]
    found.append(geometric_mean("median_gradient_ratio", ratios, task=task, d_k=d_k))
    for label, scale in (("none", bare), ("sqrt_dk", "sqrt_dk")):
        arm = arms[task, d_k, scale, "unit"]
        at: dict[str, Place] = {"task": task, "d_k": d_k, "arm": label}
        logits, shares = arm.at_best("max_logit"), arm.at_best("entropy_share")
        found.append(geometric_mean("largest_logit", [max(curve) for curve in logits], **at))
        for when, step in (("start", 0), ("end", -1)):
            found.append(mean("entropy_share", [curve[step] for curve in shares], when=when, **at))
    return found


def _plots(figures: Figures, run: Run) -> tuple[Plot, ...]:
    large, losses = max(run["dims"]), "held_out_loss_nats"
    return (
        Plot(
            "gap",
            Text(
                "Held-out loss without the scale minus the loss with it, each at its best learning rate.",
                "不缩放与缩放的留出损失之差，各自取最佳学习率。",
            ),
            "$d_k$",
            "loss gap, nats a symbol",
            tuple(over(task, figures.all("loss_gap_nats", task=task, start="unit"), "d_k") for task in run["tasks"]),
            x_axis="log",
        ),
        Plot(
            "scales",
            Text(
                f"Held-out loss of each scale at d_k = {large}, each at its best learning rate.",
                f"d_k = {large} 时各种缩放的留出损失，各自取最佳学习率。",
            ),
            "scale",
            "held-out loss, nats a symbol",
            tuple(
                over(task, figures.all(losses, task=task, start="unit", d_k=large), "scale", style="bars")
                for task in run["tasks"]
            ),
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    gaps = figures.all("loss_gap_nats", size="large", start="unit")
    one = gaps[0]
    places = {"task": one.at["task"], "d_k": one.at["d_k"]}
    bare, scaled = (figures("largest_logit", arm=arm, **places) for arm in ("none", "sqrt_dk"))
    sharp, soft = (figures("entropy_share", arm=arm, when="start", **places) for arm in ("none", "sqrt_dk"))
    gaps_en, gaps_zh = listed(gaps)
    least = figures.all("loss_gap_nats", start="unit")[0].at["d_k"]
    small_en, small_zh = listed(figures.all("loss_gap_nats", d_k=least, start="unit"))
    gradients_en, gradients_zh = listed(figures.all("median_gradient_ratio"))
    lost = figures("seeds_that_diverged")
    text = Text(
        f"At d_k = {one.at['d_k']} the loss without the scale is higher by {gaps_en} nats a symbol, although each side "
        f"has its own best learning rate; at d_k = {least} by {small_en}. Before the first step the weights have "
        f"{sharp} of their possible entropy without the scale and {soft} with it, and later the largest logit reaches "
        f"{bare}, against {scaled}. The gradient does not vanish: at the first step the median entry of dL/dW_q is "
        f"{gradients_en} times that with the scale. But dL/dz_j = p_j (g_j - sum p g), so that a row whose weights are "
        "almost one-hot learns only from the keys that it happened to pick. The share of seeds of which any run "
        f"without the scale ended in a loss that is not finite is {lost}; gradients are clipped.",
        f"在 d_k = {one.at['d_k']} 时，尽管双方各取最佳学习率，不缩放的损失仍高出 {gaps_zh}（单位：nat/符号）；"
        f"在 d_k = {least} 时高出 {small_zh}。训练开始前，不缩放时权重的熵只有最大值的 {sharp}，缩放时为 {soft}；"
        f"此后最大的 logit 达到 {bare}，缩放时为 {scaled}。梯度并没有消失：第一步时 dL/dW_q 各元素绝对值的中位数"
        f"是缩放时的 {gradients_zh}倍。但 dL/dz_j = p_j (g_j - sum p g)，因此权重几乎是 one-hot 的一行，"
        f"只能从它碰巧选中的键学习。不缩放的任一运行出现非有限损失的种子所占比例为 {lost}；梯度均经过裁剪。",
    )
    folded = figures.all("folded_gap_nats")
    if not folded:
        return text
    folded_en, folded_zh = listed(folded)
    return Text(
        f"{text.en} If W_q starts with 1/sqrt(d_k) in place of the scale, both models are the same function before "
        f"the first step; the gap is then {folded_en}. Adam moves every weight by about the learning rate, however "
        "small the weight is, so that without the scale the same step moves the logits sqrt(d_k) times as far.",
        f"{text.zh}若用 W_q 初始值中的 1/sqrt(d_k) 代替缩放，两个模型在第一步之前是同一个函数，此时差距为 {folded_zh}。"
        "无论权重多小，Adam 每步都让它移动大约一个学习率，因此不缩放时，同样的一步会使 logits 移动 sqrt(d_k) 倍之远。",
    )


CLAIM = Claim(
    id="train-instability",
    group="gradients",
    sources=("S1", "S2"),
    statement=Text(
        "Where d_k is large, leaving out the scale makes training slow or unstable.",
        "当 d_k 较大时，省略缩放会使训练变慢或不稳定。",
    ),
    formula=r"\Delta L = \min_{\eta} L(\beta = 1, \eta) - \min_{\eta} L(\beta = d_k^{-1/2}, \eta) > 0",
    method=Text(
        "Train small models, a byte decoder on Python's standard library and an encoder-decoder that reverses strings, "
        "with AdamW at several learning rates and from several seeds. Each scale is judged at its own best rate, which "
        "is chosen for each seed by the other seeds; the full run adds rates where the best is the least or the "
        "largest. The bar, 0.02 nats, is put to the paired difference of held-out losses at the largest d_k, for two "
        "starts of the weights of q and k: 'unit' gives entries of q and k of variance 1, '0.02' is that standard "
        "deviation (full run); and to its growth from the smallest d_k to the largest. A third start, 'folded', is not "
        "judged: W_q starts with 1/sqrt(d_k).",
        "训练两个小模型：以 Python 标准库为文本的字节级解码器，以及把字符串倒序的编码器—解码器。使用 AdamW、"
        "多个学习率与多个种子。每种缩放都以自己的最佳学习率参评，且每个种子所用的学习率由其余种子选出；"
        "若最佳值是所试学习率中最小或最大的一个，完整运行会再向外增加。判据为 0.02 nat，用于最大 d_k 处留出损失的配对"
        "差，q、k 的权重有两种初始化：unit 使 q、k 的分量方差为 1，0.02 表示以此为标准差（仅完整运行）；"
        "也用于这个差从最小 d_k 到最大 d_k 的增量。第三种初始化 folded 不参与判定：W_q 的初始值中已含 1/sqrt(d_k)。",
    ),
    control=Text(
        "The runs without the scale are given it: the two sides are then the same, and the gap is 0.",
        "给不缩放的运行也加上缩放：两边完全相同，差为 0。",
    ),
    parameters={
        **FULL,
        "bare": "none",
        "others": ("dk", "learned"),
        "tasks": ("text", "strings"),
        "dims": (4, 64, 512),
        "starts": ("folded", "0.02"),
    },
    quick={**QUICK, "others": (), "tasks": ("strings",), "dims": (4, 64), "starts": ()},
    flipped={"bare": "sqrt_dk"},
    measure=measure,
    parts=(
        Part(
            Text(
                "training is slower at the largest d_k, for each usual start of the weights",
                "在最大的 d_k 处，对每种常用的初始化，训练都更慢",
            ),
            (Expect("loss_gap_nats", low=SLOWER, at={"size": "large"}),),
        ),
        Part(
            Text(
                "what the missing scale costs grows from the smallest d_k to the largest",
                "从最小的 d_k 到最大的 d_k，省略缩放的代价增大",
            ),
            (Expect("gap_growth_nats", low=SLOWER),),
        ),
    ),
    why=why,
)
