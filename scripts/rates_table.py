"""Write the table of learning rates in docs/en/watch.md and docs/zh/watch.md from its record in benchmarks/results.

What stands between `<!-- rates -->` and `<!-- end of rates -->` is written here. `--check` writes nothing, and exits 1
where a page says something else than the record.

    python scripts/rates_table.py [--check]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_page import LANGUAGES, caption, record, table, when
from made import ROOT, settle_texts, with_part

HEADS = (
    ("optimizer, rate", "优化器与学习率"),
    ("weights", "权重"),
    ("besides", "其他"),
    ("loss", "损失"),
    ("largest logit", "最大 logit"),
    ("a step moves q and k by", "每步使 q、k 的权重变化"),
    ("alarm", "警报"),
)
BESIDES = {
    "warm_up": ("warm-up of 50 steps", "预热 50 步"),
    "clip": ("clipped gradients", "梯度裁剪"),
    "decay": ("weight decay {}", "权重衰减 {}"),
    "unscaled": ("one attention without its scale", "一个注意力缺少缩放因子"),
    "seed": ("another seed", "另一个随机种子"),
    "before": ("after {} steps at 1e-3", "以 1e-3 训练 {} 步之后"),
}
COPYING = ("copying", "复制任务")
STEP = ("step {}", "第 {} 步")
NONE = "-"


def rates(language: str, found: Mapping[str, Any]) -> str:
    """The rows of the record."""
    at = LANGUAGES.index(language)
    comma = (", ", "、")[at]
    rows = []
    for row in found["rows"]:
        besides = [words[at].format(row[name]) for name, words in BESIDES.items() if row[name]]
        besides += [COPYING[at]] if row["task"] == "copying" else []
        alarms = [STEP[at].format(row["named_at"])] if row["named_at"] else []
        alarms += ["`scale_ledger`"] if row["scale_named"] else []
        rows.append(
            (
                f"{row['optimizer']}{(', ', '，')[at]}{rate_text(row['rate'])}",
                "`1/sqrt(width)`" if row["deviation"] is None else f"{row['deviation']:g}",
                comma.join(besides),
                f"{row['loss']:.2f}",
                f"{row['largest_logit']:.0f}",
                comma.join(f"{100 * moved:.2g}%" for moved in row["moved"]),
                comma.join(alarms) or NONE,
            )
        )
    return table(language, HEADS, rows) + "\n" + caption(language, "learning_rates", *when(found))


def rate_text(rate: float) -> str:
    """A rate as people write it.

    Example:
        >>> rate_text(0.0003), rate_text(0.1)
        ('3e-4', '0.1')
    """
    return f"{rate:g}" if rate >= 0.1 else f"{rate:.0e}".replace("e-0", "e-")


def page(language: str) -> Path:
    """The page with the table."""
    return ROOT / "docs" / language / "watch.md"


def written(language: str, found: Mapping[str, Any]) -> str:
    """The page with the table as the record has it."""
    path = page(language)
    return with_part(path, path.read_text(encoding="utf-8"), "rates", rates(language, found))


def main() -> None:
    """The command."""
    found = record("learning_rates")
    settle_texts(__doc__, {page(language): written(language, found) for language in LANGUAGES})


if __name__ == "__main__":
    main()
