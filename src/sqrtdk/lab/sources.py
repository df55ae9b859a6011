"""The five widely read explanations that the claims come from: what each may be called, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.lab.text import Text


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of the scale.

    Attributes:
        name: what it is called.
        says: what it says.
    """

    name: Text
    says: Text


EXPLANATIONS: dict[str, Explanation] = {
    "S0": Explanation(
        Text("an example at 512 dimensions", "512 维的例子"),
        Text(
            "The standard deviation and the range at 512 dimensions, the code that prints them, and other score "
            "functions, which may need another scale or none",
            "512 维时的标准差与取值范围，打印它们的代码，以及可能需要其他缩放或不需要缩放的评分函数",
        ),
    ),
    "S1": Explanation(
        Text("from the footnote to training", "从脚注到训练"),
        Text(
            "The footnote of the paper; at d_k = 64 printed weights, entropies and derivatives; gradients, "
            "initialisation, normalisation, additive attention, training",
            "论文的脚注；d_k = 64 时给出的权重、熵与导数；梯度、初始化、规范化、加性注意力与训练",
        ),
    ),
    "S2": Explanation(
        Text("questions of practice", "实践问题"),
        Text(
            "Scaling the values instead, temperature, heads, images and text, mixed precision, cost",
            "改为缩放值、温度、多头、图像与文本、混合精度、开销",
        ),
    ),
    "S3": Explanation(
        Text("the variance in general", "一般情形的方差"),
        Text(
            "The variance for any means and variances, and what other divisors than `sqrt(d_k)` would do",
            "任意均值与方差下点积的方差，以及用 `sqrt(d_k)` 之外的除数会怎样",
        ),
    ),
    "S4": Explanation(
        Text("multi-head attention", "多头注意力"),
        Text("How many parameters it has, and what its heads attend to", "参数有多少，各个头关注什么"),
    ),
}


def spelled(source: str) -> Text:
    """A source with its name; a paper, which has none here, as it is.

    Args:
        source: "S0" to "S4", or another one.

    Example:
        >>> spelled("S2").en, spelled("S2").zh, spelled("arXiv:1706.03762").en
        ('S2 questions of practice', 'S2 实践问题', 'arXiv:1706.03762')
    """
    if source not in EXPLANATIONS:
        return Text(source, source)
    name = EXPLANATIONS[source].name
    return Text(f"{source} {name.en}", f"{source} {name.zh}")
