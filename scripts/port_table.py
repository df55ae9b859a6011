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
from sqrtdk._language import Language
from sqrtdk.messages import Message, recorded, said
from sqrtdk.tracing.calls.scale import AGREEMENT

RECORD = ROOT / "benchmarks" / "results" / "families.json"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
NONE = "-"
LANGUAGES: tuple[Language, ...] = ("en", "zh")
JUDGED = {"exact", "declared"}
LONGEST_ERROR = 160
CLOSED = re.compile(r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])")  # a space that stood beside Latin letters
ENGLISH = re.compile(r"[A-Za-z][\x20-\x7e]* [\x20-\x7e]*[A-Za-z0-9)]")  # words of it

# Rule of the scale, by the config field that declares it; without a declaration it is the textbook's.
TEXTBOOK = "`1/sqrt(d)`"
RULES = {
    "query_pre_attn_scalar": "`1/sqrt(query_pre_attn_scalar)`",
    "attention_multiplier": "`attention_multiplier`",
    "rope_parameters": "`m^2/sqrt(d)`",
    "qk_scale_factor": "`qk_scale_factor/sqrt(d)`",
}

# What is said in words: English, Chinese.
WORDS = {
    "header": (
        "| model type | d | scale | r | softcap | q/k norm | position | fields |",
        "| 模型类型 | d | 缩放因子 | r | 软上限 | QK 规范化 | 位置 | 字段 |",
    ),
    "family": (", in the code", "，在代码中"),
    "rows": (" times a factor for each row", "，再乘逐行的因子"),
    "learned": ("learned", "可学习"),
    "learned by": ("learned, `{name}`", "可学习，`{name}`"),
    "comma": (", ", "，"),
    "rms": ("RMS", "RMS"),
    "layer": ("layer norm", "层规范化"),
    "l2": ("unit length", "单位长度"),
    "gain": (", gain", "，带增益"),
    "rotary": ("rotary", "旋转"),
    "inner": ("rotary, before the norm", "旋转，在规范化之前"),
    "alibi": ("ALiBi", "ALiBi"),
    "relative": ("relative", "相对"),
    "disentangled": ("relative", "相对"),  # products with positions, counted among the terms or added (SAM)
    "bias": ("learned bias", "可学习的偏置"),
    "nothing": ("none", "无"),
    "and": (", ", "、"),
    "or": (" or ", "；"),
    "joint": ("; ", "；"),
    "summary": (
        "The table has {families} families of transformers {transformers}, measured on {date} with torch {torch}\n"
        "([record](../../benchmarks/results/families.json)). In the runs of the small models the two readings of a\n"
        "scale, that of the code and the slope of the logits, differ by a share of at most {apart}; where each head\n"
        "has a gain of its own, they are compared head by head, to {agreement}. By default r is not 1 in these:\n"
        "{others}.\n"
        "It is learned in these: {learned}.",
        "表中有 transformers {transformers} 的 {families} 个模型族，于 {date} 以 torch {torch} 测量\n"
        "（[记录](../../benchmarks/results/families.json)）。在小模型的运行中，缩放因子的两种读数，\n"
        "即代码的读数和 logit 的斜率，相对差至多为 {apart}；每个头各有增益时，逐头比较，容差为 {agreement}。\n"
        "按默认配置，r 不为 1 的有：{others}。可学习的有：{learned}。",
    ),
    "left out": (
        "{count} more were tried and are not in the table: a scale could not be judged or not be read twice, or the\n"
        "model was not built or did not run.",
        "另有 {count} 个试过而未列入上表：某处缩放因子无法判定或无法读两次，或者模型未能构建或运行。",
    ),
    "left out header": ("| model type | why |", "| 模型类型 | 原因 |"),
    "failed": ("not built or not run: `{error}`", "未能构建或运行：`{error}`"),
}


def shown(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The families that were judged in every call, in full width and in the run, by name."""
    return sorted(filter(_is_shown, record["families"]), key=lambda entry: str(entry["model_type"]))


def _is_shown(entry: dict[str, Any]) -> bool:
    verdicts = {*entry["run"]["verdicts"], *(call["verdict"] for call in entry["calls"])}
    return verdicts <= JUDGED and bool(entry["run"]["read_twice"])


def left_out(record: dict[str, Any], language: int) -> dict[str, str]:
    """Why a type that was tried is not shown, by name."""
    failed, joint = WORDS["failed"][language], WORDS["joint"][language]
    why = {name: failed.format(error=_shortened(error)) for name, error in record["failed"].items()}
    for entry in record["families"]:
        if not _is_shown(entry):
            why[entry["model_type"]] = _distinct((_said(reason, language) for reason in _reasons(entry)), joint)
    return dict(sorted(why.items()))


def _reasons(entry: dict[str, Any]) -> list[str]:
    """Of the run; where it was judged, what was seen in full width."""
    reasons = [recorded(one["reason"], one["message_id"], one["values"]) for one in entry["run"]["reasons"]]
    return reasons or [call["formula"] for call in entry["calls"] if call["verdict"] not in JUDGED]


def _said(reason: str, language: int) -> str:
    """A reason; what is left of its English in Chinese, the names of operations, as code."""
    if reason.startswith("softmax("):
        return f"`{reason}`"
    text = CLOSED.sub("", said(reason, LANGUAGES[language]))
    return text if LANGUAGES[language] == "en" else ENGLISH.sub(r"`\g<0>`", text)


def _shortened(error: str) -> str:
    text = error.replace("`", "'").replace("|", "/")
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR].rsplit(' ', 1)[0]} ..."


def _distinct(cells: Iterable[str], joiner: str = ", ") -> str:
    return joiner.join(dict.fromkeys(cells))


def _rule(call: dict[str, Any], language: int) -> str:
    """The rule, which names the field that declares it, or else what does."""
    by = call["declared_by"]
    if by is None:
        return TEXTBOOK
    if by.startswith("a factor for each row"):
        return TEXTBOOK + WORDS["rows"][language]
    if by.startswith("parameter "):
        return WORDS["learned by"][language].format(name=by.split(" ")[1].rpartition(".")[2])
    if by.startswith("family "):
        return _family_rule(recorded(by, call.get("message_id"), call.get("values")), language)
    field = _field(by)
    rule_text = RULES[field]
    return rule_text if field in rule_text else f"{rule_text}{WORDS['comma'][language]}`{field}`"


def _family_rule(by: str, language: int) -> str:
    if isinstance(by, Message) and _is_learned(by):
        return said(by.values["rule"], LANGUAGES[language])
    rule = re.fullmatch(r"family \S+: (.*?) \(.*", by)
    assert rule is not None, by
    text = rule[1].removeprefix("scale ").removesuffix(".0").replace("head_dim", "d")
    return f"`{text}`{WORDS['family'][language]}"


def _is_learned(by: str | None) -> bool:
    return by is not None and re.search(r"\(learned\)|: learned ", by) is not None


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


def _position(call: dict[str, Any], word: Callable[[str], str]) -> str:
    rotary = word("inner" if re.search(r"(rms|l2|layer)\(rope\(", call["formula"]) else "rotary")
    kinds = [kind for kind in (rotary if call["rope"] else None, call["bias"] and word(call["bias"])) if kind]
    return word("and").join(kinds) or word("nothing")


def _ratio(call: dict[str, Any], word: Callable[[str], str]) -> str:
    if _is_learned(call["declared_by"]):
        return word("learned")
    return NONE if call["ratio"] is None else f"{call['ratio']:.4g}"


def _row(entry: dict[str, Any], language: int) -> str:
    word = _words(language)
    calls = entry["calls"]
    cells = (
        f"`{entry['model_type']}`",
        _distinct(str(call["head_dim"]) for call in calls),
        _distinct((_rule(call, language) for call in calls), word("or")),
        _distinct(_ratio(call, word) for call in calls),
        _distinct(NONE if call["softcap"] is None else f"{call['softcap']:g}" for call in calls),
        _distinct((_norm(call, word) for call in calls), word("or")),
        _distinct((_position(call, word) for call in calls), word("or")),
        _others(entry, word),
    )
    return f"| {' | '.join(cells)} |"


def _textbook(call: dict[str, Any]) -> bool:
    return _is_learned(call["declared_by"]) or call["ratio"] is None or abs(call["ratio"] - 1.0) < 1e-3


def _words(language: int) -> Callable[[str], str]:
    return lambda name: WORDS[name][language]


def _grid(header: str, rows: Iterable[str]) -> list[str]:
    return [header, "|" + "---|" * header.count(" | ") + "---|", *rows]


def table(record: dict[str, Any], language: int) -> str:
    """What stands between the markers; the language is 0, English, or 1, Chinese."""
    word = _words(language)
    entries = shown(record)
    without = left_out(record, language)
    return "\n".join([
        _summary(record, entries, word),
        "",
        *_grid(word("header"), (_row(entry, language) for entry in entries)),
        "",
        word("left out").format(count=len(without)),
        "",
        *_grid(word("left out header"), (f"| `{name}` | {why} |" for name, why in without.items())),
    ])  # fmt: skip


def _summary(record: dict[str, Any], entries: list[dict[str, Any]], word: Callable[[str], str]) -> str:
    def named(chosen: Callable[[dict[str, Any]], bool]) -> str:
        return word("and").join(f"`{entry['model_type']}`" for entry in entries if any(map(chosen, entry["calls"])))

    apart = max(entry["run"]["apart"] or 0.0 for entry in entries)
    return word("summary").format(
        families=len(entries),
        date=record["date"],
        transformers=record["versions"]["transformers"],
        torch=record["versions"]["torch"],
        apart=f"{10.0 ** math.ceil(math.log10(apart)):.0e}".replace("e-0", "e-"),
        agreement=f"{AGREEMENT:.0%}",
        others=named(lambda call: not _textbook(call)),
        learned=named(lambda call: _is_learned(call["declared_by"])),
    )


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
