"""Writes docs/{en,zh}/claims.md from the register and its verdicts, and the statements that the lesson quotes.

    python scripts/claims_page.py            # writes the pages
    python scripts/claims_page.py --check    # exit code 1 where a page says something else than the register

The words are those of the register, the verdicts those of benchmarks/results/lab.json; why a verdict is what it is, and
which parts of the claim hold, follows from the figures in benchmarks/results/lab-figures.json. In the lesson each block
quote that ends in a link to a claim is replaced.
"""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from made import ROOT, settle_texts
from sqrtdk.messages import Text
from sqrtdk.messages import word as ours
from sqrtdk_lab.claim import EXPLANATION_IDS, GROUPS, Claim
from sqrtdk_lab.figures import CONFIDENCE, Figures
from sqrtdk_lab.judge import ClaimVerdict, PartAnswer, judge_claim
from sqrtdk_lab.record import figure_of
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.report.page import ANSWERS, PART_STATES

RESULTS = ROOT / "benchmarks" / "results"
VERDICTS, FIGURES = RESULTS / "lab.json", RESULTS / "lab-figures.json"
LANGUAGES = ("en", "zh")
WIDTH = 120

FORMULA = re.compile(
    r"([\w./]*\(\w+ sqrt\([^()]*\)\)|(?:\w+ / |2 |\|\w\|)?[\w./]*(?:sqrt|N|exp)\((?:[^()]|\([^()]*\))*\)"
    r"|p \(1 - p\)|\(B\)|\[[-+\de., /]+\])"
)
PLAIN = re.compile(r"([*<>|$]|(?<!\w)_|_(?!\w))")  # what Markdown would read as its own

WORDS = {
    "title": Text("Claims", "说法"),
    "lead": Text(
        "Popular explanations say a good deal about the scale of attention, $1/\\sqrt{{d_k}}$. This page lists {count} "
        "statements, each in our words, with a verdict. Each is tested by an experiment of [the lab](lab.md), with "
        "confidence intervals and a control: the same experiment with its premise reversed, which must come to another "
        "verdict. If you want to learn the subject from the start, read [Why sqrt(d_k)](why-sqrt-dk.md) first.",
        "关于注意力的缩放因子 $1/\\sqrt{{d_k}}$，常见的讲解有许多说法。本页列出其中 {count} 条，用我们自己的话转述，"
        "每条附有判定。每条说法都是[实验室](lab.md)中的一个实验，带有置信区间与一个对照：把前提反过来的同一个实验，"
        "它必须得出不同的判定。如果想从头学起，请先读[为什么是 sqrt(d_k)](why-sqrt-dk.md)。",
    ),
    "made": Text(
        "The verdicts are those of the full run in [lab.json](../../benchmarks/results/lab.json): torch {torch} on a "
        "CPU ({cpu}, {threads} threads), {minutes} minutes for all. The quick run takes {quick} minutes and comes to "
        "the same verdicts.",
        "判定取自 [lab.json](../../benchmarks/results/lab.json) 中的完整运行：torch {torch}，"
        "CPU（{cpu}，{threads} 个线程），全部用时 {minutes} 分钟。快速运行用时 {quick} 分钟，判定相同。",
    ),
    "verdicts": Text("What the verdicts mean", "判定的含义"),
    "verdict": Text("Verdict", "判定"),
    "meaning": Text("Meaning", "含义"),
    "claims": Text("Claims", "说法"),
    "kinds": Text("Five kinds of statement", "五类说法"),
    "kinds_lead": Text(
        "The statements come from five widely read explanations, each with its own subject. Some statements are in "
        "several of them. A few come from a paper.",
        "这些说法来自五篇流传甚广的讲解，每篇各有侧重；有的说法见于多篇，少数出自论文。",
    ),
    "kind": Text("Kind", "类别"),
    "says": Text("What it says", "内容"),
    "from": Text("From", "出处"),
    "condition": Text("Condition", "条件"),
    "run": Text("Run it", "运行"),
    "seeds": Text(
        "The verdicts do not hang on the seed: the quick runs of all claims come to the same with each of the seeds "
        "{first} to {last}.",
        "判定与随机种子无关：种子取 {first} 到 {last} 中的任何一个，所有说法的快速运行都得出相同的判定。",
    ),
    "figures": Text(
        "After each claim come the parts of it that hold, the parts that do not, and the reason with its figures, "
        "most of them with a {level} confidence interval in brackets. The figures are those of the full run "
        "([lab-figures.json](../../benchmarks/results/lab-figures.json)). Sentences of the explanations that are wrong "
        "or imprecise stand in [Errata](errata.md), each with the right one.",
        "每条说法之后列出其中成立与不成立的部分，以及附有数值的原因；数值后面的方括号中大多是 {level} 置信区间。"
        "这些数值取自完整运行（[lab-figures.json](../../benchmarks/results/lab-figures.json)）。"
        "各篇讲解中错误或不准确的句子见[勘误](errata.md)，每句都附有更正。",
    ),
    "comma": Text(", ", "、"),
    "colon": Text(": ", "："),
    "semicolon": Text("; ", "；"),
    "end": Text(".", "。"),
}


def said(text: Text, language: str) -> str:
    """The text in one language as Markdown: its formulas are code, and all else is as it stands."""
    pieces = FORMULA.split(getattr(text, language))  # text and formula take turns
    return "".join(f"`{piece}`" if turn % 2 else PLAIN.sub(r"\\\1", piece) for turn, piece in enumerate(pieces))


@cache
def verdicts() -> dict[str, Any]:
    """The record of the lab's runs, its claims by id."""
    record = json.loads(VERDICTS.read_text(encoding="utf-8"))
    return {**record, "claims": {row["id"]: row["full"]["verdict"] for row in record["claims"]}}


@cache
def figures() -> dict[str, Any]:
    """The record of the figures, its claims by id."""
    record = json.loads(FIGURES.read_text(encoding="utf-8"))
    return {**record, "claims": {row["id"]: row for row in record["claims"]}}


def judged(claim: Claim) -> tuple[ClaimVerdict, Text]:
    """What the figures of a claim say of it and of its parts, and why.

    Raises:
        AssertionError: the figures give another verdict than the one that the page shows.
    """
    measured = Figures([figure_of(one) for one in figures()["claims"][claim.id]["figures"]])
    verdict = judge_claim(measured, claim.parts)
    assert verdict.answer == verdicts()["claims"][claim.id], f"{claim.id}: its figures say {verdict.answer}"
    return verdict, claim.why(measured)


def seeds_told() -> dict[str, str]:
    """The first and the last of the seeds whose quick runs the record has for every claim; empty if it has none."""
    runs = [row["seeds"] for row in json.loads(VERDICTS.read_text(encoding="utf-8"))["claims"] if "seeds" in row]
    if not runs:
        return {}
    seeds = sorted(map(int, set.intersection(*(set(run["quick"]) for run in runs))))
    assert seeds == list(range(seeds[0], seeds[-1] + 1))
    return {"first": str(seeds[0]), "last": str(seeds[-1])}


def wrapped(text: str, *, first: str = "", rest: str = "") -> str:
    """A paragraph in lines of at most WIDTH columns; a Chinese one breaks after its punctuation."""
    if not re.search(r"[\u3400-\u9fff]", text):
        indents = {"initial_indent": first, "subsequent_indent": rest}
        return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False, **indents)
    lines, line = [], first
    for piece in re.split(r"(?<=[，。；：])(?=[\u3400-\u9fff])", text):
        if columns(line + piece) > WIDTH and line not in (first, rest):
            lines.append(line)
            line = rest
        line += piece
    return "\n".join([*lines, line])


def columns(text: str) -> int:
    """Columns of a terminal."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def link(claim: str, page: str = "") -> str:
    """To the claim's section."""
    return f"[`{claim}`]({page}#{claim})"


def origins(claim: Claim, language: str) -> str:
    """The explanations and papers that make the claim."""
    found = []
    for source in claim.sources:
        number = source.removeprefix("arXiv:")
        paper = f"[arXiv:{number}](https://arxiv.org/abs/{number})"
        found.append(named(source, language) if source in EXPLANATION_IDS else paper)
    return getattr(WORDS["comma"], language).join(found)


def named(source: str, language: str) -> str:
    """An explanation by its name, and the short one that `sqrtdk lab list` prints."""
    name = ours(f"lab.explanation.{source}.name", language)
    return f"{name} (`{source}`)" if language == "en" else f"{name}（`{source}`）"


def _part(part: PartAnswer, language: str) -> str:
    """A part in words, with the reason where it is not measurable."""
    text = said(part.text, language).rstrip(".。")
    if part.reason is None:
        return text
    reason = said(part.reason, language).rstrip(".。")
    return f"{text} ({reason})" if language == "en" else f"{text}（{reason}）"


def section(claim: Claim, language: str) -> str:
    """One claim."""

    def word(key: str) -> str:
        return getattr(WORDS[key], language)

    verdict, why = judged(claim)
    answer = ours(f"lab.answer.{verdict.answer}", language)
    entries = [f"{word('verdict')}{word('colon')}**{answer}**"]
    if verdict.answer == "depends":
        assert claim.condition is not None, claim.id
        entries.append(f"{word('condition')}{word('colon')}{said(claim.condition, language)}")
    for state in PART_STATES:
        if parts := [_part(part, language) for part in verdict.findings if part.state == state]:
            entries.append(f"{ours(f'lab.parts.{state}', language)}{word('colon')}{word('semicolon').join(parts)}")
    entries.append(f"{ours('lab.why', language)}{word('colon')}{said(why, language)}")
    entries.append(f"{word('from')}{word('colon')}{origins(claim, language)}")
    entries.append(f"{word('run')}{word('colon')}`sqrtdk lab run {claim.id}`")
    whole = [entry if re.search(r"[.。][)）]?$", entry) else f"{entry}{word('end')}" for entry in entries]
    listed = "\n".join(wrapped(f"- {entry}", rest="  ") for entry in whole)
    return f"### {claim.id}\n\n{wrapped(said(claim.statement, language))}\n\n{listed}\n"


def page(language: str) -> str:
    """The page of claims."""

    def word(key: str, **values: object) -> str:
        text: str = getattr(WORDS[key], language)
        return text.format(**values) if values else text

    record = verdicts()
    counts = Counter(record["claims"].values())
    environment, minutes = record["environment"], record["minutes"]
    made = {
        "torch": environment["torch"].split("+")[0],
        "cpu": environment["cpu"],
        "threads": environment["threads"],
        "minutes": f"{minutes['full']:.0f}",
        "quick": f"{minutes['quick']:.0f}",
    }
    lines = [f"# {word('title')}", "", wrapped(word("lead", count=len(CLAIMS))), "", wrapped(word("made", **made)), ""]
    if seeds := seeds_told():
        lines[-2] += f"\n{wrapped(word('seeds', **seeds))}"
    lines += [wrapped(word("figures", level=f"{CONFIDENCE:.0%}")), ""]
    lines += [
        f"## {word('verdicts')}",
        "",
        f"| {word('verdict')} | {word('meaning')} | {word('claims')} |",
        "|---|---|---|",
    ]
    for answer in ANSWERS:
        means = (ours(f"lab.{section}.{answer}", language) for section in ("answer", "means"))
        lines.append(f"| {' | '.join(means)} | {counts[answer]} |")
    lines += ["", f"## {word('kinds')}", "", wrapped(word("kinds_lead")), ""]
    lines += [f"| {word('kind')} | {word('says')} | {word('claims')} |", "|---|---|---|"]
    for source in EXPLANATION_IDS:
        own = word("comma").join(link(claim.id) for claim in CLAIMS.values() if source in claim.sources)
        lines.append(f"| {named(source, language)} | {ours(f'lab.explanation.{source}.says', language)} | {own} |")
    for group in GROUPS:
        lines += ["", f"## {ours(f'lab.group.{group}', language)}", ""]
        lines.append("\n".join(section(claim, language) for claim in CLAIMS.values() if claim.group == group).rstrip())
    return "\n".join(lines) + "\n"


def quote(claim: str, language: str) -> str:
    """A claim as the lesson quotes it."""
    answer = verdicts()["claims"][claim]
    end, colon = (getattr(WORDS[key], language) for key in ("end", "colon"))
    in_words = ours(f"lab.answer.{answer}", language)
    verdict = f"{getattr(WORDS['verdict'], language)}{colon}**{in_words}**{end}"
    condition = CLAIMS[claim].condition
    space = " " if language == "en" else ""
    because = said(condition, language) + space if answer == "depends" and condition else ""
    lines = wrapped(said(CLAIMS[claim].statement, language), first="> ", rest="> ")
    judged = wrapped(f"{verdict}{space}{because}{link(claim, 'claims.md')}", first="> ", rest="> ")
    return f"{lines}\n>\n{judged}\n"


def lesson(text: str, language: str) -> str:
    """The lesson with its quoted claims as the register has them."""

    def anew(match: re.Match[str]) -> str:
        (claim,) = re.findall(r"\(claims\.md#([a-z0-9-]+)\)", match[0])
        return quote(claim, language)

    return re.sub(r"(?:^>(?: .*)?\n)+", anew, text, flags=re.MULTILINE)


def pages() -> dict[Path, str]:
    """What each page should be."""
    found = {}
    for language in LANGUAGES:
        folder = ROOT / "docs" / language
        found[folder / "claims.md"] = page(language)
        path = folder / "why-sqrt-dk.md"
        found[path] = lesson(path.read_text(encoding="utf-8"), language)
    return found


def main() -> None:
    """The command."""
    settle_texts(__doc__, pages())


if __name__ == "__main__":
    main()
