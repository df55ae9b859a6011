"""The lesson: every number of its text is one of a record, its figures and notebooks are those of records and page."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import lesson_figures
import lesson_notebook
import lesson_words
from sqrtdk_lab._scale_grid import LOSS_TOLERANCE
from sqrtdk_lab.figures import Figures, Place
from sqrtdk_lab.record import Record, read_record
from tests.docs.pages import DOCS, ROOT

RECORDS = ROOT / "benchmarks" / "results" / "lesson"
LANGUAGES = ("en", "zh")
EXERCISES = {"en": "**Exercises.**", "zh": "**练习。**"}
CAPTION = re.compile(r"^\*\*(?:Figure |图 )(\d+)[.：]\*\*", re.MULTILINE)
BEFORE = {"en": "**Before you run it.**", "zh": "**运行之前。**"}


@cache
def record(claim: str) -> Record:
    return read_record(RECORDS / f"{claim}.json")


def value(claim: str, name: str, **at: Place) -> float:
    return Figures(list(record(claim).outcome.figures))(name, **at).value


def three(number: float) -> str:
    """Three digits, zeros at the end included."""
    return f"{number:#.3g}".rstrip(".")


def two(number: float) -> str:
    return f"{number:#.2g}"


STRINGS: dict[str, Place] = {"task": "strings"}
STEPS = 10


def measured() -> dict[int, list[str]]:
    """What the text of each step says was measured."""
    peaks = [value("saturation-by-dim", "peak", side="unscaled", d_k=d) for d in (16, 64, 4096)]
    peaks += [value("saturation-by-dim", "peak", side="scaled", d_k=d) for d in (16, 4096)]
    ratios = [value("grad-norm", f"{name}_gradient_ratio", d_k=512, keys=32) for name in ("median", "rms")]
    ratios += [
        value("grad-norm", "median_gradient_ratio", d_k=64, keys=1024),
        value("grad-norm", "rms_gradient_ratio", d_k=512, keys=1024),
    ]
    long = {"d_k": 512, "keys": 1024, "upstream": "unit"}
    norms = [
        value("grad-norm", f"{name}_gradient_norm", case=case, **long)
        for name in ("median", "rms")
        for case in ("unscaled", "scaled")
    ]
    figures = Figures(list(record("grad-norm").outcome.figures))
    median = figures("median_gradient_norm", case="unscaled", **long)
    norms += [median.low, median.high]
    slopes = [
        value("grad-norm", "slope_of_rms_gradient_norm", case="scaled", keys=32, upstream=upstream)
        for upstream in ("sum", "average")
    ]
    entropies = [value("entropy-table", "entropy_nats", side="scaled", d_k=64, length=10)]
    entropies += [value("entropy-table", "entropy_nats", side="unscaled", d_k=d, length=10) for d in (16, 64, 256)]
    best = {"unit": "nats"}
    missed = value("entropy-table", "largest_error_of_the_table_nats", length_of="best", **best)
    outlier = {"inputs": "outlier"}
    products = [value("fp16-overflow", "largest_product", scale=scale, **outlier) for scale in ("none", "sqrt_dk")]
    products.append(value("fp16-overflow", "largest_product_of_all_calls", inputs="N(0,1)", d_k=4096))
    growth = [value("layernorm-role", "std_ratio", grown=grown, times=8) for grown in ("inputs", "weights")]
    growth += [value("layernorm-role", "unscaled_logit_std", d_k=d_k) for d_k in (64, 256)]
    large = max(record("train-instability").outcome.parameters["dims"])
    pair = {"d_k": large, "start": "unit", **STRINGS}
    losses = [value("train-instability", "held_out_loss_nats", scale=scale, **pair) for scale in ("none", "sqrt_dk")]
    losses += [
        value("train-instability", "loss_gap_nats", **pair),
        value("train-instability", "loss_gap_nats", d_k=4, start="unit", **STRINGS),
        value("train-instability", "folded_gap_nats", **STRINGS),
    ]
    best_rates = [value("train-instability", "best_rate", scale=scale, **pair) for scale in ("none", "sqrt_dk")]
    figures = record("best-exponent").outcome.figures
    starts = [one.value for one in figures if one.name == "exponent" and one.at["when"] == "start"]
    steps_of_adam = [value("best-exponent", "exponent", when="step", keys=keys) for keys in (32, 4096)]
    least, most = (ends(record("best-exponent").outcome.parameters["dims"]) for ends in (min, max))
    sigmas = [value("optimal-interval", "sigma_of_largest_jacobian", keys=keys) for keys in (8, 32, 256)]
    sigmas += [value("optimal-interval", "sigma_after_training", d_k=d_k) for d_k in (least, most)]
    starts_of_training = [
        value("best-exponent", name, rate=rate, d_k=d_k)
        for name, rate in (("best_sigma", "own"), ("best_sigma", "0.003"), ("cost_of_sigma_1_nats", "own"))
        for d_k in (least, most)
    ]
    starts_of_training += [value("optimal-interval", "best_sigma_by_length", length=length) for length in (16, 256)]
    laws = [
        value("best-exponent", "cost_with_best_factor_nats", rate=rate, exponent=a)
        for rate in ("own", "0.003")
        for a in (0.0, 0.5, 1.0)
    ]
    return {
        1: [f"{value('var-linear', 'variance_over_d_k', d_k=1024):.3f}"],
        2: [f"{peak:.3f}" for peak in peaks],
        3: [*(f"{ratio:.2g}" for ratio in (*ratios, *norms)), *(f"{slope:.1f}".lstrip("-") for slope in slopes)],
        4: [str(large), *(three(loss) for loss in losses), *(f"{rate:.1g}" for rate in best_rates)],
        5: [
            *(three(entropy) for entropy in entropies),
            f"{math.log(10):.2f}",
            f"{value('entropy-table', 'length_that_fits_best', **best):.0f}",
            three(missed),
        ],
        6: [
            *(f"{exponent:.2f}" for exponent in (min(starts), max(starts), *steps_of_adam)),
            *(f"{sigma:.2f}" for sigma in sigmas),
            *(two(one) for one in starts_of_training),
            *(str(least), str(most), *(f"{cost:.2f}" for cost in laws)),
        ],
        7: [f"{product:.0f}" for product in products],
        8: [three(ratio) for ratio in growth],
        9: [
            f"{value('large-dk', 'families', size='large'):.0f}",
            f"{value('large-dk', 'median', size='large'):.0f}",
            f"{value('large-dk', 'share_of_64_to_256', size='large'):.0%}",
        ],
        10: [],
    }


def softcapped(logit: float) -> float:
    return 50 * math.tanh(logit / 50)


# Other numbers of the text with a fraction or more than four digits: what is arithmetic, and what was set.
SET = {
    1: [str(record("var-linear").outcome.parameters["pairs"])],
    2: [
        *(f"{math.e:.1f}", f"{math.exp(10):.0f}", "0.32", "1.0", "0.5", "0.25", "0.99", "0.01", f"{0.99 * 0.01:.4f}"),
        *(f"{1 / (1 + math.exp(10)):.6f}", "0.8292", "0.1", "0.83", "0.17", f"{0.1 * 0.8292 * 0.1708:.3f}"),
    ],
    3: [three(math.log(1024))],
    4: ["0.001", three(math.sqrt(128)), f"{math.log(16):.2f}"],
    5: [
        three(math.log(1000)),
        "0.5",
        three(math.log(1000) - 0.5),
        f"{math.log(2):.2f}",
        three(math.sqrt(2 * math.log(2))),
    ],
    6: ["0.003", "0.1", "0.2", f"{LOSS_TOLERANCE}", f"{1 / math.sqrt(3):.2f}"],
    7: [
        *("65504", f"{1 / (1 + math.exp(-8)):.4f}", f"{1 / (1 + math.exp(8)):.4f}"),
        *(str(64 * 40 * 40), "12800", str(128 * 20 * 20), str(128 * 30 * 30), f"{128 * 30 * 30 / math.sqrt(128):.0f}"),
    ],
    8: [
        *(f"{softcapped(logit):.1f}" for logit in (10, 100, 200)),
        *("0.2", f"{math.tanh(0.2):.3f}", f"{math.tanh(2):.3f}", f"{math.tanh(4):.4f}", f"{math.exp(2):.1f}"),
    ],
    9: ["50000", "10000", three(math.sqrt(128))],
    10: [
        *("0.125", three(math.sqrt(1 / 12)), three(math.sqrt(64 / 12))),
        three(math.sqrt(128 / 4096)),
    ],
}


def steps(language: str) -> dict[int, str]:
    """The text of each step without code and quoted claims."""
    text = (DOCS / language / "why-sqrt-dk.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- large-models -->.*?<!-- /large-models -->", "", text, flags=re.DOTALL)  # has a test of its own
    text = re.sub(r"^```.*?^```$|^>[^\n]*$|\$\$.*?\$\$", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"^## (?:Step (\d+)\.|第 (\d+) 步：)", text, flags=re.MULTILINE)
    numbered = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return {
        int(english or chinese): re.split(r"^## ", part, flags=re.MULTILINE)[0] for english, chinese, part in numbered
    }


def numbers(text: str) -> list[str]:
    """Those that someone must have computed or measured: with a fraction, or of five digits and more."""
    return [n for n in re.findall(r"\d+(?:\.\d+)?%?", text) if "." in n or len(n) >= 5]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_number_is_one_of_a_record(language: str) -> None:
    found = steps(language)
    assert list(found) == list(range(1, STEPS + 1))
    for step, text in found.items():
        missing = [n for n in measured()[step] if not re.search(rf"(?<![\d.]){re.escape(n)}(?![\d%]|\.\d)", text)]
        assert missing == [], f"step {step} does not say what was measured"
        assert set(numbers(text)) <= {*measured()[step], *SET[step]}, f"step {step} says what no record has"


def test_figures_of_few_digits_are_those_of_the_records() -> None:
    assert value("fp16-overflow", "step_of_a_stored_logit_nats", inputs="outlier") == 8
    assert value("train-instability", "seeds_that_diverged") == 0
    failed = [one for one in record("fp16-overflow").outcome.figures if one.name == "calls_not_finite"]
    assert [(one.at["place"], one.at["scale"]) for one in failed if one.value == 1] == [
        ("query", "none"),
        ("product", "none"),
        ("product", "sqrt_dk"),
    ]
    for claim, name, size in (
        ("saturation-by-dim", "rows", 2500),
        ("saturation-by-dim", "keys", 10),
        ("fp16-overflow", "calls", 200),
        ("train-instability", "seeds", 5),
    ):
        assert record(claim).outcome.parameters[name] == size


def test_the_records_say_what_the_full_run_of_the_lab_said() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "lab.json").read_text(encoding="utf-8"))["claims"]
    verdicts = {row["id"]: row["full"]["verdict"] for row in rows}
    found = {path.stem: record(path.stem).outcome.verdict.answer for path in RECORDS.glob("*.json")}
    assert len(found) == 11
    assert found.items() <= verdicts.items()
    assert not any(record(path.stem).quick for path in RECORDS.glob("*.json"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_command_at_the_end_makes_the_records(language: str) -> None:
    page = (DOCS / language / "why-sqrt-dk.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ sqrtdk lab run ((?:[^\\\n]|\\\n)+)$", page, re.MULTILINE)
    assert sorted(command.replace("\\", "").split()) == sorted(path.stem for path in RECORDS.glob("*.json"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_step_has_its_parts(language: str) -> None:
    page = (DOCS / language / "why-sqrt-dk.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (?=Step|第)", page, flags=re.MULTILINE)[1:]
    assert len(parts) == STEPS
    assert [int(number) for number in CAPTION.findall(page)] == list(range(1, page.count("](figures/") + 1))
    for step, part in enumerate(parts, 1):
        part = part.split("\n## ")[0]
        assert part.count("$$") == 2, f"step {step}: one formula"
        pictures = len(re.findall(r"^!\[[^\]]+\]\(figures/why-[\w-]+\.svg\)$", part, re.MULTILINE))
        assert 1 <= pictures <= 2, f"step {step}: one picture, or two that belong together"
        assert len(CAPTION.findall(part)) == pictures
        assert part.count(BEFORE[language]) == 1, f"step {step}: a question before the code"
        assert ">>> " in part.split(BEFORE[language])[1], f"step {step}: something to try after the question"
        assert len(re.findall(r"^> .*\(claims\.md#[\w-]+\)$", part, re.MULTILINE)) == 1, f"step {step}: a statement"
        exercises = part.split(EXERCISES[language])[1].split("<details>")
        assert [re.findall(r"^(\d)\. ", one, re.MULTILINE) for one in exercises] == [["1", "2", "3"]] * 2


def words(text: str, language: str) -> int:
    """Words or characters to read: without code, tables, formulas on lines of their own, and the targets of links."""
    text = re.sub(r"<!-- large-models -->.*?<!-- /large-models -->", "", text, flags=re.DOTALL)  # to look things up
    text = re.sub(r"^```.*?^```$|^\|.*?$|^<.*?>$|\$\$.*?\$\$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    if language == "en":
        return len(text.split())
    return len(re.findall(r"[\u3400-\u9fff]|\$[^$]*\$|`[^`]*`|[A-Za-z\d.]+", text))


# The steps with the most formulas and figures are read at three quarters of the speed.
DENSE = re.compile(r"Step [369]\.|第 [369] 步")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_times_of_reading_are_those_of_a_first_reader(language: str) -> None:
    """200 words or 300 Chinese characters a minute, less in dense steps, and two minutes for an exercise."""
    speed, ways_through = {"en": (200, "ways-through"), "zh": (300, "几条路线")}[language]
    page = (DOCS / language / "why-sqrt-dk.md").read_text(encoding="utf-8")
    first, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    sections = {lesson_notebook.slug(part.split("\n")[0]): part for part in parts}
    ways = sections[ways_through]
    for way in [ways.split("\n- ")[0], *ways.split("\n- ")[1:]]:
        linked = re.findall(r"\(#([\w-]+)\)", way) or list(sections)
        read = [first, ways, *(sections[name] for name in linked if name != ways_through)]
        reading = sum(words(part, language) / (0.75 * speed if DENSE.match(part) else speed) for part in read)
        exercises = 2 * 3 * sum(part.count(EXERCISES[language]) for part in read)
        stated = [int(minutes) for minutes in re.findall(r"(\d+) (?:minutes|分钟)", way)]
        if stated == [12]:  # the way without exercises
            assert reading < 12.5
            continue
        assert [5 * math.ceil(minutes / 5) for minutes in (reading, reading + exercises)] == stated, way


def test_the_figures_show_the_records() -> None:
    wanted = lesson_figures.figures()
    for path, panels in wanted.items():
        assert lesson_figures.digest(panels) in path.read_text(encoding="utf-8"), (
            f"{path}: run python scripts/lesson_figures.py"
        )
    for language in LANGUAGES:
        drawn = {path for path in wanted if path.parent.parent.name == language}
        page = (DOCS / language / "why-sqrt-dk.md").read_text(encoding="utf-8")
        assert {DOCS / language / name for name in re.findall(r"\]\((figures/why-[\w.-]+)\)", page)} == drawn
    (chinese,) = {path for path in wanted if path.parts[-3:] == ("zh", "figures", "why-entropy.svg")}
    assert "熵" in chinese.read_text(encoding="utf-8")


def test_another_number_or_word_makes_another_figure() -> None:
    shown = lesson_figures.figures()
    english, chinese = (shown[DOCS / language / "figures" / "why-norm.svg"] for language in LANGUAGES)
    assert lesson_figures.digest(english) != lesson_figures.digest(chinese)
    with pytest.raises(KeyError):
        lesson_figures.translated(english[0], {})


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_colour_means_one_thing(language: str) -> None:
    """Blue is with the scale and orange without, as in README's picture."""
    plots = lesson_figures.figures()
    shown = [plot for path, panels in plots.items() if path.parts[-3] == language for plot in panels]
    labels = [one.label for plot in shown for one in plot.series]
    blues = {lesson_words.BLUE, lesson_words.DARK_BLUE}
    blue = {label for label in labels if lesson_figures.COLOURS.get(label) in blues}
    bare = {label for label in labels if re.search("no scale|不缩放", label)}
    scaled = {label for label in labels if re.search("with the scale|divided|缩放|除以", label)} - bare
    assert blue == scaled
    oranges = {lesson_words.ORANGE, lesson_words.DARK_ORANGE, lesson_words.DARKEST_ORANGE}
    assert {label for label in labels if lesson_figures.COLOURS.get(label) in oranges} == bare
    (plot,) = plots[DOCS / language / "figures" / "why-saturation.svg"]
    for series in plot.series:
        drawn = lesson_figures.draw((replace(plot, series=(series,)),)).decode()
        assert [colour in drawn for colour in (lesson_words.BLUE, lesson_words.ORANGE)] == [
            series.label in blue,
            series.label in bare,
        ]


def test_the_notebooks_are_those_of_the_pages() -> None:
    for language in LANGUAGES:
        path = ROOT / "examples" / "lesson" / f"why-sqrt-dk.{language}.ipynb"
        text = path.read_text(encoding="utf-8")
        assert text == lesson_notebook.notebook(language), f"{path.name}: run python scripts/lesson_notebook.py"
        for target in re.findall(r"\]\((\.\.[^)#]+(?:svg|json))\)", text):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_notebook_runs_and_gives_what_it_shows(language: str) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    shown = nbformat.read(ROOT / "examples" / "lesson" / f"why-sqrt-dk.{language}.ipynb", as_version=4)
    run = nbformat.from_dict(shown)
    nbclient.NotebookClient(run, timeout=600, kernel_name="python3").execute()
    for before, after in zip(shown.cells, run.cells, strict=True):
        if before.cell_type == "code":
            assert said(after) == said(before), before.source


def said(cell: Any) -> str:
    """What a cell prints, which may come in several pieces, and what it shows in the end; no progress bar."""
    outputs = [one for one in cell.outputs if one.output_type != "display_data"]
    return "".join(one.text if one.output_type == "stream" else one.data["text/plain"] for one in outputs)


def test_check_finds_a_file_that_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that shows something else, and a notebook that is not there."""
    shown = lesson_figures.figures()
    norm = ROOT / "docs" / "en" / "figures" / "why-norm.svg"
    monkeypatch.setattr(lesson_figures, "figures", lambda: shown | {norm: (replace(shown[norm][0], x_label="times"),)})
    monkeypatch.setattr(lesson_notebook, "NOTEBOOKS", ROOT / "examples" / "none")
    for script, name in ((lesson_figures, "docs/en/figures/why-norm.svg"), (lesson_notebook, "examples/none/.*.ipynb")):
        monkeypatch.setattr(sys, "argv", [f"scripts/{script.__name__}.py", "--check"])
        with pytest.raises(SystemExit, match=rf"^{name}: run python scripts/{script.__name__}\.py$"):
            script.main()
