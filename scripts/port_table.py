"""The table of docs/en/port.md and docs/zh/port.md, from benchmarks/results/families.json.

    python scripts/port_table.py            # writes both pages
    python scripts/port_table.py --check    # exit code 1 where a page is not what the record says

The record is of `python benchmarks/families.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from made import ROOT, settle_texts

RECORD = ROOT / "benchmarks" / "results" / "families.json"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
NONE = "-"

# Rule of the scale, by the config field that declares it; without a declaration it is the textbook's.
TEXTBOOK = "`1/sqrt(d)`"
RULES = {
    "query_pre_attn_scalar": "`1/sqrt(query_pre_attn_scalar)`",
    "attention_multiplier": "`attention_multiplier`",
    "rope_parameters": "`m^2/sqrt(d)`",
}

# What is said in words: English, Chinese.
WORDS = {
    "header": (
        "| model type | d | scale | r | softcap | q/k norm | position | fields |",
        "| 模型类型 | d | 缩放因子 | r | 软上限 | QK 规范化 | 位置 | 字段 |",
    ),
    "family": (", in the code", "，在代码中"),
    "comma": (", ", "，"),
    "rms": ("RMS", "RMS"),
    "layer": ("layer norm", "层规范化"),
    "l2": ("unit length", "单位长度"),
    "gain": (", gain", "，带增益"),
    "rotary": ("rotary", "旋转"),
    "hidden": ("rotary, before the norm", "旋转，在规范化之前"),
    "alibi": ("ALiBi", "ALiBi"),
    "relative": ("relative", "相对"),
    "bias": ("learned bias", "可学习的偏置"),
    "nothing": ("none", "无"),
    "and": (", ", "、"),
    "or": (" or ", "；"),
    "summary": (
        "The table has {families} families of transformers {transformers}, measured on {date} with torch {torch}\n"
        "([record](../../benchmarks/results/families.json)). In the runs of the small models the two readings of a\n"
        "scale, that of the code and the slope of the logits, differ by a share of at most {apart}. By default r is\n"
        "not 1 in these: {others}.",
        "表中有 transformers {transformers} 的 {families} 个模型族，于 {date} 以 torch {torch} 测量\n"
        "（[记录](../../benchmarks/results/families.json)）。在小模型的运行中，缩放因子的两种读数，\n"
        "即代码的读数和 logit 的斜率，相对差至多为 {apart}。按默认配置，r 不为 1 的有：{others}。",
    ),
}


def shown(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The families whose run was judged in every call, by name."""
    judged = [
        entry
        for entry in record["families"]
        if set(entry["run"]["verdicts"]) <= {"exact", "declared"} and entry["run"]["read_twice"]
    ]
    return sorted(judged, key=lambda entry: str(entry["model_type"]))


def _distinct(cells: Iterable[str], joiner: str = ", ") -> str:
    return joiner.join(dict.fromkeys(cells))


def _rule(call: dict[str, Any], word: Callable[[str], str]) -> str:
    """The rule, which names the field that declares it, or else what does."""
    by = call["declared_by"]
    if by is None:
        return TEXTBOOK
    if by.startswith("family "):
        rule = re.fullmatch(r"family \S+: (.*?) \(.*", by)
        assert rule is not None, by
        text = rule[1].removeprefix("scale ").removesuffix(".0").replace("head_dim", "d")
        return f"`{text}`{word('family')}"
    field = _field(by)
    rule_text = RULES[field]
    return rule_text if field in rule_text else f"{rule_text}{word('comma')}`{field}`"


def _field(by: str) -> str:
    field = re.match(r"config\.([\w.]+)", by)
    assert field is not None, by
    return field[1]


def _others(entry: dict[str, Any], word: Callable[[str], str]) -> str:
    """The fields that no rule of the row has named."""
    declared = {_field(by) for call in entry["calls"] if (by := call["declared_by"]) and by.startswith("config.")}
    return word("and").join(f"`{field}`" for field in entry["fields"] if field not in declared) or NONE


def _norm(call: dict[str, Any], word: Callable[[str], str]) -> str:
    return NONE if call["norm"] is None else word(call["norm"]) + (word("gain") if call["norm_gain"] else "")


def _position(call: dict[str, Any], rotary: bool, word: Callable[[str], str]) -> str:
    kinds = [word(kind) for kind in ("rotary" if call["rope"] else None, call["bias"]) if kind is not None]
    if kinds:
        return ", ".join(kinds)
    return word("hidden") if rotary and call["norm"] is not None else word("nothing")


def _row(entry: dict[str, Any], word: Callable[[str], str]) -> str:
    calls = entry["calls"]
    ratios = [call["ratio"] for call in calls if call["ratio"] is not None]
    rotary = entry["rotary_config"] and not any(call["rope"] for call in calls)
    cells = (
        f"`{entry['model_type']}`",
        _distinct(str(call["head_dim"]) for call in calls),
        _distinct((_rule(call, word) for call in calls), word("or")),
        _distinct(f"{ratio:.4g}" for ratio in ratios) or "1",
        _distinct(NONE if call["softcap"] is None else f"{call['softcap']:g}" for call in calls),
        _distinct((_norm(call, word) for call in calls), word("or")),
        _distinct((_position(call, rotary, word) for call in calls), word("or")),
        _others(entry, word),
    )
    return f"| {' | '.join(cells)} |"


def _textbook(entry: dict[str, Any]) -> bool:
    return all(call["ratio"] is None or abs(call["ratio"] - 1.0) < 1e-3 for call in entry["calls"])


def table(record: dict[str, Any], language: int) -> str:
    """What stands between the markers; the language is 0, English, or 1, Chinese."""

    def word(name: str) -> str:
        return WORDS[name][language]

    entries = shown(record)
    apart = max(entry["run"]["apart"] for entry in entries)
    summary = word("summary").format(
        families=len(entries),
        date=record["date"],
        transformers=record["versions"]["transformers"],
        torch=record["versions"]["torch"],
        others=word("and").join(f"`{entry['model_type']}`" for entry in entries if not _textbook(entry)),
        apart=f"{10.0 ** math.ceil(math.log10(apart)):.0e}".replace("e-0", "e-"),
    )
    rows = [_row(entry, word) for entry in entries]
    return "\n".join([summary, "", word("header"), "|" + "---|" * word("header").count(" | ") + "---|", *rows])


def filled(page: str, text: str) -> str:
    """The page with the text between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    """The command."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    pages = [ROOT / "docs" / tree / "port.md" for tree in ("en", "zh")]
    tables = [table(record, language) for language in range(len(pages))]
    settle_texts(
        __doc__,
        {page: filled(page.read_text(encoding="utf-8"), made) for page, made in zip(pages, tables, strict=True)},
    )


if __name__ == "__main__":
    main()
