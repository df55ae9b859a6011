"""The recorded columns that are drawn: name, unit and meaning in two languages, and which values are worse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sqrtdk.messages import Text

Array = np.ndarray[Any, np.dtype[Any]]

_PLAIN = Text("", "")
_LOGITS = Text("natural-log units", "自然对数单位")
_NATS = Text("nats", "nat")
_KEYS = Text("keys", "键")
_ROWS = Text("rows", "行")
_PRODUCTS = Text("products", "点积")
_PER_Q = Text("loss per unit of q", "损失 / q 的单位")
_PER_K = Text("loss per unit of k", "损失 / k 的单位")
_NUMBERS = Text("numbers", "个")
_PERCENT = Text("%", "%")


@dataclass(frozen=True, slots=True)
class Statistic:
    """How a column of the records is shown.

    Attributes:
        name: the title that readers see.
        of: the unit; empty for a plain number, "%" for a share.
        worst: which value is the worst: the "largest", the "least", or the "farthest" from 1 as a factor.
        meaning: one sentence.
        newest: whether the table of the newest sample shows it.
        always: whether every attention should have it. A fused kernel, for one, stores no product.
    """

    name: Text
    of: Text
    worst: str
    meaning: Text
    newest: bool = False
    always: bool = True

    @property
    def unit(self) -> str:
        """ "%" for a share, else "".

        Example:
            >>> STATISTICS["saturated"].unit, STATISTICS["max_logit"].unit
            ('%', '')
        """
        return self.of.en if self.of == _PERCENT else ""


STATISTICS: Mapping[str, Statistic] = {
    "max_logit": Statistic(
        Text("Max logit", "最大 logit"),
        _LOGITS,
        "largest",
        Text(
            "largest logit of a head: signed, scaled, after bias, visible keys only; 50 is a note, 100 a warning, 1e3 "
            "a failure, 1e4 critical",
            "一个头的最大 logit：带符号，缩放及加偏置之后，仅可见键；50 为提示，100 为警告，1e3 为失败，1e4 为严重",
        ),
        newest=True,
    ),
    "max_logit_p50": Statistic(
        Text("Max logit, median row", "最大 logit，中位行"),
        _LOGITS,
        "largest",
        Text("median over rows of the row's largest logit", "每行最大 logit 的各行中位数"),
    ),
    "max_logit_p95": Statistic(
        Text("Max logit, 95th percentile", "最大 logit，第 95 百分位"),
        _LOGITS,
        "largest",
        Text("95th percentile over rows of the row's largest logit", "每行最大 logit 的各行第 95 百分位"),
    ),
    "min_logit": Statistic(
        Text("Min logit", "最小 logit"),
        _LOGITS,
        "least",
        Text("least logit of a visible key", "可见键的最小 logit"),
    ),
    "max_abs_logit": Statistic(
        Text("Max |logit|", "最大 |logit|"),
        _LOGITS,
        "largest",
        Text("largest absolute logit", "logit 绝对值的最大值"),
    ),
    "mean_logit": Statistic(
        Text("Mean logit", "logit 均值"),
        _LOGITS,
        "largest",
        Text("mean logit of the visible keys", "可见键的 logit 均值"),
    ),
    "std_logit": Statistic(
        Text("Std of the logits", "logit 标准差"),
        _LOGITS,
        "largest",
        Text("root of the mean variance of the logits within a row", "一行之内 logit 方差均值的平方根"),
        newest=True,
    ),
    "row_offset": Statistic(
        Text("Row offset", "行偏移"),
        _LOGITS,
        "largest",
        Text(
            "largest absolute mean of the logits of a row; beyond 50 logits that are stored in bfloat16 lose digits",
            "一行 logit 均值的绝对值的最大值；超过 50 时以 bfloat16 存储的 logit 会损失精度",
        ),
    ),
    "max_product": Statistic(
        Text("Max |q·k|", "最大 |q·k|"),
        _PRODUCTS,
        "largest",
        Text("largest |q·k| of a visible key before any scale", "任何缩放之前可见键 |q·k| 的最大值"),
    ),
    "stored_product": Statistic(
        Text("Max |q·k| as stored", "存储的最大 |q·k|"),
        _PRODUCTS,
        "largest",
        Text(
            "largest |q·k| of any key as the code stored it, factors of q and k in it; float16 ends at 65504",
            "代码所存储的任意键 |q·k| 的最大值，含 q 与 k 上的因子；float16 的上限为 65504",
        ),
        always=False,
    ),
    "scale_ratio": Statistic(
        Text("Scale ratio", "缩放比"),
        _PLAIN,
        "farthest",
        Text(
            "effective scale times sqrt(head dimension): 1 is the textbook value",
            "实际缩放乘以 sqrt(头维度)：1 为教科书值",
        ),
        newest=True,
    ),
    "entropy_fraction": Statistic(
        Text("Entropy / log n", "熵 / log n"),
        _PERCENT,
        "least",
        Text(
            "mean over rows of the entropy over log(visible keys): 100% is uniform, 0% one-hot",
            "各行的熵除以 log(可见键数) 的均值：100% 为均匀，0% 为单点",
        ),
        newest=True,
    ),
    "entropy_nats": Statistic(
        Text("Entropy", "熵"), _NATS, "least", Text("mean over rows of the entropy of the weights", "各行权重熵的均值")
    ),
    "entropy_p05": Statistic(
        Text("Entropy, 5th percentile", "熵，第 5 百分位"),
        _NATS,
        "least",
        Text("5th percentile over rows of the entropy", "各行熵的第 5 百分位"),
    ),
    "entropy_p50": Statistic(
        Text("Entropy, median row", "熵，中位行"),
        _NATS,
        "least",
        Text("median over rows of the entropy", "各行熵的中位数"),
    ),
    "entropy_p95": Statistic(
        Text("Entropy, 95th percentile", "熵，第 95 百分位"),
        _NATS,
        "least",
        Text("95th percentile over rows of the entropy", "各行熵的第 95 百分位"),
    ),
    "effective_keys": Statistic(
        Text("Effective keys", "有效键数"),
        _KEYS,
        "least",
        Text("mean over rows of 1 / sum p²", "各行 1 / sum p² 的均值"),
    ),
    "saturated": Statistic(
        Text("Saturated rows", "饱和行"),
        _PERCENT,
        "largest",
        Text("share of rows whose largest weight is above .99", "最大权重超过 .99 的行的比例"),
        newest=True,
    ),
    "peak": Statistic(
        Text("Peak", "峰值"),
        _PLAIN,
        "largest",
        Text("mean over rows of the largest weight", "各行最大权重的均值"),
        newest=True,
    ),
    "peak_max": Statistic(
        Text("Peak, largest row", "峰值，最大行"),
        _PLAIN,
        "largest",
        Text("largest weight of any row; a row of one key has 1", "所有行中最大的权重；只有一个键的行为 1"),
    ),
    "jacobian_norm": Statistic(
        Text("Softmax Jacobian", "softmax 雅可比矩阵"),
        _PLAIN,
        "least",
        Text("mean over rows of the Frobenius norm of diag(p) - p pᵀ", "各行 diag(p) - p pᵀ 的 Frobenius 范数的均值"),
    ),
    "query_grad_p50": Statistic(
        Text("Gradient of q, median row", "q 的梯度，中位行"),
        _PER_Q,
        "largest",
        Text("median over rows of the root mean square of dL/dq over channels", "dL/dq 沿通道的均方根，各行的中位数"),
        newest=True,
    ),
    "query_grad_p95": Statistic(
        Text("Gradient of q, 95th percentile", "q 的梯度，第 95 百分位"),
        _PER_Q,
        "largest",
        Text(
            "95th percentile over rows of the root mean square of dL/dq over channels",
            "dL/dq 沿通道的均方根，各行的第 95 百分位",
        ),
    ),
    "query_grad_max": Statistic(
        Text("Gradient of q, largest row", "q 的梯度，最大行"),
        _PER_Q,
        "largest",
        Text("largest over rows of the root mean square of dL/dq over channels", "dL/dq 沿通道的均方根，各行的最大值"),
        newest=True,
    ),
    "key_grad_p50": Statistic(
        Text("Gradient of k, median key", "k 的梯度，中位键"),
        _PER_K,
        "largest",
        Text("median over keys of the root mean square of dL/dk over channels", "dL/dk 沿通道的均方根，各键的中位数"),
        newest=True,
    ),
    "key_grad_p95": Statistic(
        Text("Gradient of k, 95th percentile", "k 的梯度，第 95 百分位"),
        _PER_K,
        "largest",
        Text(
            "95th percentile over keys of the root mean square of dL/dk over channels",
            "dL/dk 沿通道的均方根，各键的第 95 百分位",
        ),
    ),
    "key_grad_max": Statistic(
        Text("Gradient of k, largest key", "k 的梯度，最大键"),
        _PER_K,
        "largest",
        Text("largest over keys of the root mean square of dL/dk over channels", "dL/dk 沿通道的均方根，各键的最大值"),
        newest=True,
    ),
    "query_grad_nonfinite": Statistic(
        Text("Gradient of q, non-finite rows", "q 的梯度，非有限的行"),
        _ROWS,
        "largest",
        Text("rows whose dL/dq holds NaN or infinity", "dL/dq 含 NaN 或无穷的行"),
    ),
    "key_grad_nonfinite": Statistic(
        Text("Gradient of k, non-finite keys", "k 的梯度，非有限的键"),
        _KEYS,
        "largest",
        Text("keys whose dL/dk holds NaN or infinity", "dL/dk 含 NaN 或无穷的键"),
    ),
    "query_nonfinite": Statistic(
        Text("Non-finite numbers of q", "q 的非有限数"),
        _NUMBERS,
        "largest",
        Text("numbers of q, of all heads together, that are NaN or infinite", "所有头的 q 中 NaN 或无穷的个数"),
    ),
    "key_nonfinite": Statistic(
        Text("Non-finite numbers of k", "k 的非有限数"),
        _NUMBERS,
        "largest",
        Text("numbers of k, of all heads together, that are NaN or infinite", "所有头的 k 中 NaN 或无穷的个数"),
    ),
    "nan_rows": Statistic(
        Text("Rows with NaN", "含 NaN 的行"),
        _ROWS,
        "largest",
        Text(
            "rows with a NaN or plus infinite logit; they are in no other statistic",
            "logit 含 NaN 或正无穷的行；不计入其他统计量",
        ),
    ),
}
NEWEST = tuple(name for name, statistic in STATISTICS.items() if statistic.newest)


def badness(values: Array, column: str) -> Array:
    """Return a key that is largest at the worst head: the value, its negative, or |log|value||. NaN gives -inf.

    Example:
        >>> badness(np.array([0.5, 1.0, math.nan]), "scale_ratio").round(2).tolist()
        [0.69, 0.0, -inf]
    """
    kind = STATISTICS[column].worst
    if kind == "farthest":
        with np.errstate(divide="ignore"):
            values = np.where(np.isnan(values), values, np.abs(np.log(np.abs(values))))
    return np.where(np.isnan(values), -math.inf, -values if kind == "least" else values)
