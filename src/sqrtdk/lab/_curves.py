"""Plots of arms over their steps, and figures as the paragraphs name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqrtdk.lab._arms import Arm
from sqrtdk.lab.figures import Figure
from sqrtdk.lab.plots import Axis, Plot, Series, Style, curve
from sqrtdk.lab.text import Text

SMALLEST = 1e-10  # on a logarithmic axis; quantiles of gradients may be 0
TASK_TEXTS = {"text": Text("text", "文本"), "strings": Text("strings", "字符串")}
Entries = Mapping[str, tuple[str, Style]]  # curves of a run: what the legend adds, and how it is drawn
GRADIENTS: Entries = {
    "gradient_p10": ("quantile .1", "dashed"),
    "gradient_p50": ("median", "curve"),
    "gradient_p90": ("quantile .9", "dashed"),
}


def averaged(curves: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Mean over runs, as far as the shortest goes.

    Example:
        >>> averaged([[1.0, 2.0], [3.0]])
        (2.0,)
    """
    return tuple(sum(values) / len(values) for values in zip(*curves, strict=False))


def listed(figures: Sequence[Figure]) -> Text:
    """Figures with their tasks.

    Example:
        >>> listed([Figure("gap", 0.5, 0.4, 0.6, "t", 9, {"task": "text"})])
        Text(en='0.5 [0.4, 0.6] (text)', zh='0.5 [0.4, 0.6]（文本）')
    """
    pairs = [(figure, TASK_TEXTS[str(figure.at["task"])]) for figure in figures]
    english = ", ".join(f"{figure} ({task.en})" for figure, task in pairs)
    return Text(english, "、".join(f"{figure}（{task.zh}）" for figure, task in pairs))


def curve_plots(arms: Mapping[str, Arm], task: str, d_k: int) -> tuple[Plot, ...]:
    """Loss, largest logit, entropy and gradients over the steps, each arm at its best rate.

    Args:
        arms: by their label in the legend.
        task: "text" or "strings".
        d_k: of all arms.
    """

    def plot(name: str, what: Text, label: str, entries: Entries, axis: Axis = "linear") -> Plot:
        caption = Text(
            f"{what.en}: mean over the seeds, each arm at its best learning rate ({TASK_TEXTS[task].en}, d_k = {d_k}).",
            f"{what.zh}：各种子的平均，各自取最佳学习率（{TASK_TEXTS[task].zh}任务，d_k = {d_k}）。",
        )
        series = tuple(
            _over_steps(arm, entry, f"{legend}, {of}" if of else legend, style, axis)
            for legend, arm in arms.items()
            for entry, (of, style) in entries.items()
        )
        return Plot(name, caption, "step", label, series, y_axis=axis)

    return (
        plot("loss", Text("Training loss", "训练损失"), "loss, nats a symbol", {"loss": ("", "curve")}),
        plot("max-logit", Text("Largest logit", "最大的 logit"), "largest logit", {"max_logit": ("", "curve")}, "log"),
        plot(
            "entropy",
            Text("Entropy of the weights over log n", "注意力权重的熵与 log n 之比"),
            r"entropy / $\log n$",
            {"entropy_share": ("", "curve")},
        ),
        plot(
            "gradient",
            Text("Quantiles of the gradient over the entries of W_q", "W_q 各元素梯度绝对值的分位数"),
            r"$|\partial L / \partial W_q|$",
            GRADIENTS,
            "log",
        ),
    )


def _over_steps(arm: Arm, entry: str, legend: str, style: Style, axis: Axis) -> Series:
    values = averaged(arm.at_best(entry))
    # max keeps the first of two that do not compare: a NaN is left out of the drawing, not drawn as the smallest
    shown = [max(value, SMALLEST) for value in values] if axis == "log" else values
    return curve(legend, averaged(arm.at_best("step")), shown, style=style)
