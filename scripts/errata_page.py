"""Writes docs/{en,zh}/errata.md: sentences and code examples of the five explanations, each with what is right.

    python scripts/errata_page.py            # writes the pages
    python scripts/errata_page.py --check    # exit code 1 where a page says something else

The sentences stand in docs/errata.toml, in our own words. Their numbers are figures of the claim's full run, which
benchmarks/results/lab-figures.json has, or are computed here from `sqrtdk.theory`. The code examples are small programs
of our own in source_examples.py, which this script runs. A sentence whose claim the register does not have is left out.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from claims_page import LANGUAGES, WORDS, figures, link, said, wrapped
from made import ROOT, settle_texts
from source_examples import EXAMPLES, SEEDS, SHARES, SourceExample, ranges, run_once
from sqrtdk import theory
from sqrtdk.messages import Text
from sqrtdk.messages import word as ours
from sqrtdk_lab.claim import EXPLANATION_IDS
from sqrtdk_lab.figures import Figures
from sqrtdk_lab.record import figure_of
from sqrtdk_lab.register import CLAIMS

SENTENCES = ROOT / "docs" / "errata.toml"
FIVE = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0], dtype=torch.float64).softmax(-1)  # softmax-example

PAGE_WORDS = {
    "title": Text("Errata", "勘误"),
    "lead": Text(
        "Five widely read explanations of $1/\\sqrt{{d_k}}$ are right in the main and wrong in places. This page lists "
        "{count} of their sentences that are wrong or imprecise, in our own words, each with what is right. Each is "
        "judged by a claim of [the lab](lab.md), which the last column links; numbers with an interval in brackets are "
        "measured there. It is no list of what the explanations say: most of that is true. [Claims](claims.md) has all "
        "of it, and [Why sqrt(d_k)](why-sqrt-dk.md) explains the subject from the start.",
        "五篇流传甚广的讲解对 $1/\\sqrt{{d_k}}$ 的说明大体正确，但有些地方有误。本页列出其中 {count} "
        "句错误或不准确的话，用我们自己的话转述，每句都附有更正。"
        "每句都由[实验室](lab.md)中的一条说法来判定，最后一列是它的链接；带方括号区间的数值就是在那里测得的。"
        "本页不是这些讲解的全部内容：其中大部分是对的。全部说法见[说法](claims.md)，"
        "想从头学起请读[为什么是 sqrt(d_k)](why-sqrt-dk.md)。",
    ),
    "sentences": Text("Sentences", "句子"),
    "says": Text("It says", "原文的意思"),
    "right": Text("What is right", "更正"),
    "claim": Text("Claim", "说法"),
    "examples": Text("Code examples", "代码示例"),
    "examples_lead": Text(
        "The explanations print numbers of small programs. Their code is not part of this project: programs of our own "
        "(`scripts/source_examples.py`) compute the same from the same shapes. The third column is what the source "
        "says that its example prints, the fourth what ours prints with seed 0, and the fifth the range from {low} to "
        "{high} of {seeds} seeds. One run in 50 prints a number outside its range.",
        "这些讲解给出了一些小程序打印的数值。其代码不属于本项目：我们自己的程序（`scripts/source_examples.py`）以同样的形状作同样的计算。"
        "第三列是原文所说的打印结果，第四列是我们的程序在种子为 0 时的打印结果，"
        "第五列是 {seeds} 个种子中从 {low} 到 {high} 的范围。每 50 次运行中只有一次的数值落在范围之外。",
    ),
    "source": Text("From", "出处"),
    "computes": Text("What it computes", "计算内容"),
    "prints": Text("What the source says", "原文所说"),
    "here": Text("Seed 0", "种子 0"),
    "over": Text("Over the seeds", "多个种子"),
    "exact": Text("nothing is random", "没有随机性"),
    "range": Text("{low} to {high}", "{low} 至 {high}"),
    "list": Text(", ", "、"),
}


def _within(dim: int, deviations: float) -> float:
    return theory.logit_distribution(dim).probability_within(-deviations, deviations)


def _median_of(claim: str, number: int) -> float:
    (example,) = (one for one in EXAMPLES if one.claim == claim)
    return measured(example)[number][1]


def _most_sensitive(keys: int) -> float:
    """The standard deviation of normal logits at which the norm of the softmax Jacobian is largest, to a tenth."""
    grid = [step / 10 for step in range(1, 100)]
    return max(grid, key=lambda sigma: theory.expected_jacobian_norm(keys, sigma))


_variance = theory.dot_product_moments
# Placeholders of the sentences that no run of the lab gives.
NUMBERS: Mapping[str, Callable[[], float | str]] = {
    "sigma_right": lambda: _variance(512, query_variance=0.25, key_variance=0.25).variance,
    "sigma_said": lambda: 512 * 0.25,
    "sigmas_of_100": lambda: 100 / _variance(512).std,
    "beyond_100": lambda: 1024 * (1 - _within(512, 100 / _variance(512).std)),
    "within_24": lambda: f"{_within(64, 3):.1%}",
    "beyond_24": lambda: f"{1024 * (1 - _within(64, 3)):.0f}",
    "kurtosis_4": lambda: _variance(4).excess_kurtosis,
    "kurtosis_64": lambda: _variance(64).excess_kurtosis,
    "tail_64": lambda: (1 - _within(64, 4)) / math.erfc(4 / math.sqrt(2)),
    "init_wrong": lambda: _variance(512, query_variance=1 / 512, key_variance=1 / 512).variance,
    "cosine_64": lambda: 64**-0.5,
    "softmax_example": lambda: ", ".join(f"{weight:.4f}" for weight in FIVE.tolist()),
    "least_derivative": lambda: float((FIVE * (1 - FIVE)).min()),
    "maximum_unscaled_16": partial(_median_of, "printed-maxima", 0),
    "maximum_scaled_16": partial(_median_of, "printed-maxima", 3),
    **{f"entropy_{d_k}": partial(theory.expected_entropy_nats, 10, d_k**0.5) for d_k in (16, 64, 256)},
    "entropy_scaled": partial(theory.expected_entropy_nats, 10, 1.0),
    **{f"best_sigma_{keys}": partial(_most_sensitive, keys) for keys in (8, 32, 1024)},
    "xavier_head": lambda: 2 * 768 / (768 + 64),  # d_model Var(W), with Var(W) = 2 / (inputs + outputs)
    "cosine_most": lambda: math.exp(2) / (math.exp(2) + 1023),  # the match at cosine 1, all others at -1
    "largest_4096": lambda: theory.range_forecast(4096, 2**20, "float16").expected_max,
    "exp_fp16": lambda: math.log(theory.largest_finite("float16")),
    "exp_fp32": lambda: math.log(theory.largest_finite("float32")),
    "one_matrix": lambda: f"{512 * 64}",
    "three_matrices": lambda: f"{3 * 512 * 64}",
    "module_variance": lambda: 1 / 9,
}


@cache
def sentences() -> list[dict[str, Any]]:
    """The sentences whose claim the register has."""
    every = tomllib.loads(SENTENCES.read_text(encoding="utf-8"))["sentence"]
    return [sentence for sentence in every if sentence["claim"] in CLAIMS]


@cache
def measured(example: SourceExample) -> list[tuple[float, float, float]]:
    """The ranges of an example, computed once."""
    return ranges(example)


def number(value: float | str) -> str:
    """A number to three digits; a text as it is."""
    return value if isinstance(value, str) else f"{value:.3g}"


def right(sentence: Mapping[str, Any], language: str) -> str:
    """What is right, with its numbers.

    Raises:
        AssertionError: the claim has no such figure.
        KeyError: a placeholder is neither a figure nor a number of this script.
    """
    text: str = sentence["right"][language]
    found = {}
    for name in re.findall(r"\{(\w+)\}", text):
        place = sentence.get("figures", {}).get(name)
        if place is None:
            found[name] = number(NUMBERS[name]())
            continue
        record = figures()["claims"][sentence["claim"]]["figures"]
        found[name] = str(Figures([figure_of(one) for one in record])(place["name"], **place["at"]))
    return text.format(**found)


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def cell(text: str, language: str) -> str:
    """A text as a cell: `code` stays code, the rest is written as on the page of claims."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else said(Text(piece, piece), language) for piece in pieces)


def page(language: str) -> str:
    """The page of errata."""

    def word(key: str, **values: object) -> str:
        text: str = getattr(PAGE_WORDS[key], language)
        return text.format(**values) if values else text

    head = ("says", "right", "claim")
    lines = [f"# {word('title')}", "", wrapped(word("lead", count=len(sentences()))), "", f"## {word('sentences')}"]
    for source in EXPLANATION_IDS:
        lines += [
            "",
            f"### `{source}` {ours(f'lab.explanation.{source}.name', language)}",
            "",
            row(*map(word, head)),
            "|---|---|---|",
        ]
        for sentence in sentences():
            if source in sentence["sources"]:
                texts = (sentence["says"][language], right(sentence, language))
                lines.append(row(*(cell(text, language) for text in texts), link(sentence["claim"], "claims.md")))
    low, high = (f"{share:.0%}" for share in SHARES)
    lines += ["", f"## {word('examples')}", "", wrapped(word("examples_lead", low=low, high=high, seeds=SEEDS)), ""]
    lines += [row(*map(word, ("source", "computes", "prints", "here", "over", "claim"))), "|---|---|---|---|---|---|"]
    for example in (one for one in EXAMPLES if one.claim in CLAIMS):
        once = word("list").join(map(number, run_once(example)))
        over = word("exact")
        if example.random:
            ends = [
                number(low) if number(low) == number(high) else word("range", low=number(low), high=number(high))
                for low, _, high in measured(example)
            ]
            over = getattr(WORDS["semicolon"], language).join(ends)
        texts = (getattr(example.computes, language), getattr(example.said, language))
        cells = (cell(text, language) for text in texts)
        lines.append(row(f"`{example.source}`", *cells, once, over, link(example.claim, "claims.md")))
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """What each page should be."""
    return {ROOT / "docs" / language / "errata.md": page(language) for language in LANGUAGES}


if __name__ == "__main__":
    settle_texts(__doc__, pages())
