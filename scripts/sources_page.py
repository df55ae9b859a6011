"""Writes docs/{en,zh}/sources.md from docs/sources.toml and docs/large-models.toml, and a table of the lesson.

    python scripts/sources_page.py            # writes the pages
    python scripts/sources_page.py --check    # exit code 1 where a page says something else than the two files

The name of each source is the anchor of its section. The table of large models goes into the lesson, between
`<!-- large-models -->` and `<!-- /large-models -->`; a lesson without these comments is left alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from claims_page import LANGUAGES, wrapped
from made import ROOT, settle_texts
from sqrtdk.messages import Text

SOURCES, MODELS = ROOT / "docs" / "sources.toml", ROOT / "docs" / "large-models.toml"
FRAME = re.compile(r"(<!-- large-models -->\n).*?(<!-- /large-models -->)", re.DOTALL)

WORDS = {
    "title": Text("Sources", "出处"),
    "lead": Text(
        "What [the lesson](why-sqrt-dk.md) takes from papers and from the code of others. For each source the page has "
        "the place and what it says there, in our words. Of the {count} sources {read} were read at that place, most "
        "of them in a public copy of the text. The other {unread} are marked, with how their content is known.",
        "[这一课](why-sqrt-dk.md)取自论文与他人代码的内容：每个出处都注明具体位置，并用我们自己的话转述那里说了什么。"
        "{count} 个出处中，有 {read} 个读过原处，多数读的是公开的抄本；"
        "其余 {unread} 个作了标记，并说明内容从何得知。",
    ),
    "growth": Text("How large logits became", "logit 曾有多大"),
    "growth_lead": Text(
        "The largest logit that is reported, after the scale and before the softmax. The numbers are of several kinds: "
        "some grew in a training that diverged, some in one that went well; some were forced from outside; some are "
        "bounds that the model keeps by design.",
        "文献中报告的最大 logit，在缩放之后、softmax 之前。这些数有好几类：有的出现在发散的训练中，"
        "有的出现在正常的训练中，有的是从外部强行设定的，有的是模型在设计上的上限。",
    ),
    "bars": Text("Three bars help to read them:", "读这些数时，有三条界线可作参考："),
    "logit": Text("Largest logit", "最大 logit"),
    "year": Text("Year", "年份"),
    "kind": Text("Kind", "类别"),
    "on": Text("Measured on", "测量对象"),
    "source": Text("Source", "出处"),
    "diverged": Text("training diverged", "训练发散"),
    "healthy": Text("training went well", "训练正常"),
    "grew": Text("outcome not reported", "结果未报告"),
    "forced": Text("forced", "强行设定"),
    "bound": Text("bound by design", "设计上限"),
    "papers": Text("Papers and reports", "论文与报告"),
    "code": Text("Code", "代码"),
    "where": Text("Where", "位置"),
    "says": Text("What it says", "内容"),
    "unread": Text("Not read at this place", "未读原处"),
    "model": Text("Model", "模型"),
    "does": Text("What it does to the logits", "对 logit 做什么"),
    "formula": Text("Formula", "公式"),
    "its_text": Text("text", "文献"),
    "its_code": Text("code", "代码"),
    "colon": Text(": ", "："),
    "by": Text(" ({known})", "（{known}）"),
    "comma": Text(", ", "，"),
    "legend": Text(
        "In the formulas $z$ is the usual logit $q \\cdot k / \\sqrt{d_k}$; a formula that is $z$ alone leaves it as "
        "it is. $\\hat q$ and $\\hat k$ have a root mean square of 1, times gains where there are any. $m$ is the "
        "position of the query, and $n = m + 1$ the number of keys that it sees; $\\lfloor\\ \\rfloor$ rounds down to "
        "a whole number. In Gemma 3, $d_0$ is a number of the configuration. $\\lVert W \\rVert$ is the largest "
        "$|x W| / |x|$. Where two sources are given, the formula is from the second.",
        "公式中 $z$ 是通常的 logit，即 $q \\cdot k / \\sqrt{d_k}$；只写 $z$ 的公式表示 logit 保持不变。"
        "$\\hat q$ 与 $\\hat k$ 的均方根为 1，有增益时再乘增益。$m$ 是查询的位置，"
        "$n = m + 1$ 是它看得到的键的个数；$\\lfloor\\ \\rfloor$ 表示向下取整。Gemma 3 中的 $d_0$ 是配置中的一个数。"
        "$\\lVert W \\rVert$ 是最大拉伸倍数，即 $|x W| / |x|$ 的最大值。"
        "有两个出处时，第二个是公式的出处。",
    ),
}


@cache
def sources() -> dict[str, dict[str, Any]]:
    """The sources by their names."""
    with SOURCES.open("rb") as file:
        return tomllib.load(file)


@cache
def large_models() -> dict[str, list[dict[str, Any]]]:
    """`model`: the rows of the table. `growth`: sizes of logits. `bar`: the sizes to compare them with."""
    with MODELS.open("rb") as file:
        return tomllib.load(file)


def word(key: str, language: str) -> str:
    """A word of the pages."""
    text: str = getattr(WORDS[key], language)
    return text


def link(source: str) -> str:
    """To the source's section."""
    return f"[{source}](#{source})"


def is_code(source: Mapping[str, Any]) -> bool:
    """Whether it is a file of code: a place like `host/project: file`."""
    return re.match(r"(github\.com|huggingface\.co|transformers )", source["where"]) is not None


def place(where: str) -> str:
    """Where the source is to be found, with a link if it has an address."""
    if number := re.fullmatch(r"arXiv:(\d+\.\d+)", where):
        return f"[{where}](https://arxiv.org/abs/{number[1]})"
    if where.startswith("https://"):
        return f"<{where}>"
    project, _, file = where.partition(": ")
    known = f"[{project}](https://{project})" if "/" in project else project
    return f"{known}, `{file}`"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    head, *body = (f"| {' | '.join(map(str, line))} |" for line in (heads, *rows))
    return "\n".join([head, "|" + "---|" * len(heads), *body])


def models_table(language: str) -> str:
    """What large models do to the logits, as the lesson shows it; a formula may have a source of its own."""
    rows = []
    for model in large_models()["model"]:
        does, formula = model["does"], model["formula"]
        found = dict.fromkeys((does["source"], formula["source"]))
        kinds = {name: word("its_code" if is_code(sources()[name]) else "its_text", language) for name in found}
        links = word("comma", language).join(f"[{kind}](sources.md#{name})" for name, kind in kinds.items())
        means = f"**{model['means'][language]}**{word('colon', language)}{does[language]}"
        rows.append((model["name"], model["year"], means, f"${formula['tex']}$", links))
    heads = [word(key, language) for key in ("model", "year", "does", "formula", "source")]
    return f"{table(heads, rows)}\n\n{wrapped(word('legend', language))}"


def growth_table(language: str) -> str:
    """How large logits became."""
    rows = [
        (
            row["year"],
            f"{row['sign']}\u00a0{row['value']}".strip(),
            word(row["kind"], language),
            row[language],
            link(row["source"]),
        )
        for row in large_models()["growth"]
    ]
    return table([word(key, language) for key in ("year", "logit", "kind", "on", "source")], rows)


def section(name: str, language: str) -> str:
    """One source."""
    source = sources()[name]
    entries = [f"{word('where', language)}{word('colon', language)}{source['section'][language]}"]
    if not source["read"]:
        entries.append(f"**{word('unread', language)}**{word('colon', language)}{source['unread'][language]}")
    entries.append(f"{word('says', language)}{word('colon', language)}{source['says'][language]}")
    listed = "\n".join(wrapped(f"- {entry}", rest="  ") for entry in entries)
    work = f"*{source['title']}*. {source['authors']}, {source['year']}. {place(source['where'])}"
    return f"### {name}\n\n{wrapped(work)}\n\n{listed}\n"


def page(language: str) -> str:
    """The page of sources."""
    found = sources()
    read = sum(source["read"] for source in found.values())
    counts = {"count": len(found), "read": read, "unread": len(found) - read}
    lines = [f"# {word('title', language)}", "", wrapped(word("lead", language).format(**counts)), ""]
    lines += [f"## {word('growth', language)}", "", wrapped(word("growth_lead", language)), ""]
    lines += [growth_table(language), "", word("bars", language), ""]
    for bar in large_models()["bar"]:
        known = word("by", language).format(known=word("comma", language).join(map(link, bar["sources"])))
        lines.append(wrapped(f"- **{bar['value']}**{word('colon', language)}{bar[language]}{known}", rest="  "))
    for kind, codes in (("papers", False), ("code", True)):
        names = [name for name, source in found.items() if is_code(source) is codes]
        lines += ["", f"## {word(kind, language)}", "", "\n".join(section(name, language) for name in names).rstrip()]
    return "\n".join(lines) + "\n"


def lesson(text: str, language: str) -> str:
    """The lesson with its table as the file has it."""
    return FRAME.sub(lambda part: f"{part[1]}\n{models_table(language)}\n\n{part[2]}", text)


def pages() -> dict[Path, str]:
    """What each page should be."""
    found = {}
    for language in LANGUAGES:
        folder = ROOT / "docs" / language
        found[folder / "sources.md"] = page(language)
        path = folder / "why-sqrt-dk.md"
        found[path] = lesson(path.read_text(encoding="utf-8"), language)
    return found


def main() -> None:
    """The command."""
    settle_texts(__doc__, pages())


if __name__ == "__main__":
    main()
