"""docs/en/watch.md: its examples run, its output is real, in Chinese too, its tables are those of the columns."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

from sqrtdk.cli.options import Severity
from sqrtdk.monitor import sums
from sqrtdk.monitor.columns import COLUMNS_BY_TABLE, Column
from tests.support.program import called

PAGE, CHINESE_PAGE = (Path(__file__).parents[2] / "docs" / language / "watch.md" for language in ("en", "zh"))
TEXT = PAGE.read_text(encoding="utf-8")
QUANTILES = ("_p05", "_p50", "_p95")


def joined(name: str) -> str:
    """How a column of heads is joined over batches and ranks, by what `monitor.sums` does."""
    if name.endswith(QUANTILES) or name.endswith("_grad_max"):
        return "all rows together"
    if name in sums.MAXIMUM_COLUMNS:
        return "largest"
    if f"-{name}" in sums.MAXIMUM_COLUMNS:
        return "least"
    if name.endswith(("rows", "nonfinite")):
        return "sum"
    if name in sums.SUM_COLUMNS:
        return "sum / count"
    return {"std_logit": "root of sum / count", "scale_ratio": "of the formula"}.get(name, "-")


def row(column: Column) -> str:
    meaning = column.meaning.replace("|", r"\|")
    return f"| {' | '.join([f'`{column.name}`', column.type, column.unit or '-', meaning])} |"


def test_the_page_of_numbers_says_how_a_column_is_joined() -> None:
    page = (PAGE.parent / "numbers.md").read_text(encoding="utf-8")
    section = page[page.index("## One number for each head") : page.index("## From which value on")]
    rows = re.findall(r"^\| (`.*?) \| .* \| ([^|]*) \|$", section, re.MULTILINE)
    said = {name: how for names, how in rows for name in re.findall(r"`(\w+)`", names)}
    columns = {column.name for column in COLUMNS_BY_TABLE["heads"]} & said.keys()
    assert len(columns) > 25
    assert {name: said[name] for name in columns} == {name: joined(name) for name in columns}


@pytest.mark.parametrize("table", [table for table in COLUMNS_BY_TABLE if table != "heads"])
def test_the_tables_are_those_of_the_columns(table: str) -> None:
    section = TEXT.split(f"\n`{table}` has a row for each")[1].split("has a row for each")[0]
    assert re.findall(r"^\| `.*$", section, re.MULTILINE) == [row(column) for column in COLUMNS_BY_TABLE[table]]


@pytest.mark.full
def test_the_examples_run_and_the_output_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word by word, but for numbers of rounding, small bars, and alarms, which follow from them."""
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(TEXT, {}, "watch.md", str(PAGE), 0)
    result = doctest.DocTestRunner().run(example, clear_globs=False)
    torch._dynamo.reset()  # its hooks look into the names of the examples, as long as they are there
    assert result.failed == 0
    assert result.attempted > 20

    def words(text: str) -> list[str]:
        text = text[text.index("runs/exp1  Decoder") :]  # the headline follows from the alarms
        text = re.sub(r"\n(?:alarms|警报) .*?(?=\nnot measured|\n未测量|\Z)", "", text, flags=re.DOTALL)
        text = re.sub(r"[▁-█·]+|\d[\d.,]*(e-?\d+)?%?|, logarithmic|，对数刻度", "#", text)
        return text.replace("##", "#").split()

    for page, language in ((PAGE, "en"), (CHINESE_PAGE, "zh-CN")):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (shown,) = (block for block in blocks if "\nruns/exp1  Decoder" in block)
        printed = called("watch", "show", "runs/exp1", "--lang", language, COLUMNS="110").stdout
        assert words(shown) == words(printed)
        for text, causes in ((shown, {"5.657", "0.02"}), (printed, {"5.657"})):  # the rate's alarm has a bar to pass
            assert causes <= set(re.findall(r"\d+\.\d+", text.partition("\n\n")[0])), "the causes are first"


def test_the_bars_are_those_of_the_verb() -> None:
    sentence = TEXT[TEXT.index("at `--fail-on` or above (") :].split(";")[0]
    assert tuple(re.findall(r"`(\w+)`", sentence)) == Severity.__args__  # type: ignore[attr-defined]
