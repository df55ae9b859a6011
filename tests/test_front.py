"""README and the first pages, in both languages: what they show is real, and their tables are those of the code."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

import cliffs_figure
import cost_page
import install_lines
import rates_table
import readme_picture
import sqrtdk
from page_programs import without_blanks
from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN_MISTAKE
from sqrtdk.audit.records import SEVERITIES, VERDICTS
from sqrtdk.models.demo import VARIANTS, weights_name
from tests.support.program import called

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "src" / "sqrtdk" / "models" / "weights"
READMES = ("README.md", "README.zh-CN.md")
MOST_LINES = 225
SWITCH = "**English** | [简体中文](README.zh-CN.md)", "[English](README.md) | **简体中文**"
LANGUAGES = {"en": "en", "zh": "zh-CN"}  # as the folders of the documentation have them, and `--lang`
# pages with `text` blocks of `sqrtdk check`: their languages, and how many
WITH_SAMPLES = {
    "README.md": ("en", 1),
    "README.zh-CN.md": ("zh", 1),
    "docs/en/start.md": ("en", 2),
    "docs/zh/start.md": ("zh", 2),
}
COLUMNS = "80"


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str = r"\w+") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(name), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", READMES)
def test_a_readme_is_short_and_begins_with_the_switch(name: str) -> None:
    lines = text(name).splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[2] == SWITCH[READMES.index(name)]


def test_the_pages_say_what_is_true_of_the_package_index() -> None:
    """After PUBLISHED is set: python scripts/install_lines.py."""
    assert {path for path, page in install_lines.wanted().items() if page != path.read_text(encoding="utf-8")} == set()


@pytest.mark.parametrize("published", [False, True])
def test_one_line_changes_what_they_say(published: bool) -> None:
    found = re.compile(r"\$ pip install sqrtdk |`pip install sqrtdk` installs|用 `pip install sqrtdk` 安装")
    first = {path: text.split(install_lines.START)[1] for path, text in install_lines.wanted(published).items()}
    assert len(first) == 6
    for path, text in first.items():
        assert bool(re.search("not on the package index yet|尚未发布到 PyPI", text)) is not published, path
        assert bool(found.search(text)) is published, path
        assert ("$ make demo" in text) is (path.stem != "index")


@cache
def printed(*arguments: str) -> str:
    return called(*arguments, COLUMNS=COLUMNS).stdout


def steady(text: str) -> str:
    """Without decimals and shares, whose last digits differ from CPU to CPU."""
    return re.sub(r"\d+(?:\.\d+)?e-\d+|\d+\.\d+%?|\d+%", "#", text)


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_the_output_shown_is_real(name: str) -> None:
    """Line by line, in order; `...` stands for lines that are left out."""
    language, count = WITH_SAMPLES[name]
    samples = [block for block in blocks(name, "text") if re.search("attention calls: |次注意力调用：", block)]
    assert len(samples) == count
    for sample in samples:
        model = "demo:unscaled" if "missing" in sample else "demo"
        output = steady(printed("check", model, "--laws", "all", "--lang", LANGUAGES[language]))
        for part in steady(sample).split("...\n"):
            before, found, output = output.partition(part)
            assert found, f"not in what is printed:\n{part}"
            assert before == "" or before.endswith("\n")


@pytest.mark.full
def test_two_lines_watch_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's own program has the other names of the block."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 8, "n_embd": 16}
    mine = {
        "Trainer": transformers.Trainer,
        "model": transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_layer=1, n_head=2)),
        "arguments": transformers.TrainingArguments(
            max_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False
        ),
        "data": [{"input_ids": row, "labels": row} for row in torch.randint(16, (8, 8))],
    }
    (block,) = [block for block in blocks("README.md", "python") if "Trainer(" in block]
    exec(block, mine)
    mine["trainer"].train()
    (command,) = re.findall(r"`sqrtdk (watch show \S+)`", text("README.md"))
    assert "1 sample" in called(*command.split()).stdout


@pytest.mark.full
@pytest.mark.parametrize(("name", "language"), [*zip(READMES, LANGUAGES.values(), strict=True)])
def test_the_claim_shown_is_real(name: str, language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the seconds that it took."""
    monkeypatch.chdir(tmp_path)
    (sample,) = [block for block in blocks(name, "text") if block.startswith("saturation-by-dim")]
    command = re.findall(r"^\$ sqrtdk (lab run .*)$", text(name), re.MULTILINE)
    output = called(*command[0].split(), "--lang", language, COLUMNS=COLUMNS).stdout
    assert without_blanks(steady(output)).startswith(without_blanks(steady(sample)))


@pytest.mark.full
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_comparison_shown_is_real(language: str) -> None:
    """But for blanks and line breaks: how many there are, the width of the numbers decides."""
    (sample,) = [block for block in blocks(f"docs/{language}/start.md", "text") if block.startswith("A  demo")]
    assert max(map(cell_len, sample.splitlines())) <= int(COLUMNS)
    output = printed("diff", "demo", "demo:unscaled", "--lang", LANGUAGES[language])
    assert without_blanks(steady(sample)) == without_blanks(steady(output))


def test_the_page_lists_every_option_of_check() -> None:
    shown = printed("check", "--help")
    options = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"}
    assert len(options) > 15
    page = text("docs/en/check.md")
    table = page[page.index("| option |") : page.index("| exit code |")]
    assert set(re.findall(r"--[a-z][a-z-]*", table)) == options


def test_the_table_of_mistakes_is_that_of_the_code() -> None:
    page = text("docs/en/check.md")
    table = page[page.index("| name | effective scale |") : page.index("\nWhat fits none of them")]
    rows = [" | ".join((f"| `{m.name}`", *m.table)) + " |" for m in MISTAKES.values() if m.table is not None]
    assert table.splitlines()[2:] == rows
    assert len(rows) == 10


def test_the_page_names_every_verdict_and_severity() -> None:
    for name in (*VERDICTS, *SEVERITIES, UNKNOWN_MISTAKE):
        assert f"`{name}" in text("docs/en/check.md")


@pytest.mark.parametrize("name", READMES)
def test_links_of_the_readme_lead_somewhere(name: str) -> None:
    links = set(re.findall(r"(?:\]\(|src=\")([^)#\"]+)[)\"]", text(name)))
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize("language", readme_picture.WORDS)
def test_the_picture_was_drawn_from_the_record(language: str) -> None:
    """Draw it again after the record changed: python scripts/readme_picture.py."""
    assert readme_picture.origin() in readme_picture.file_of(language).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", READMES)
def test_the_readme_says_where_and_when_the_picture_was_measured(name: str) -> None:
    record = json.loads(readme_picture.RECORD.read_text(encoding="utf-8"))
    assert record["started"][:10] in text(name)
    assert record["environment"]["cpu"] in text(name)


@pytest.mark.parametrize("name", ["docs/en/start.md", "docs/zh/start.md"])
def test_the_losses_on_the_first_page_are_those_of_the_records(name: str) -> None:
    for model in VARIANTS:
        record = json.loads((WEIGHTS / f"{weights_name(model)}.json").read_text(encoding="utf-8"))
        assert f"{record['held_out_loss_nats_per_byte']:.3f}" in text(name)


@pytest.mark.parametrize("model", readme_picture.MODELS)
def test_the_record_of_the_picture_is_what_a_run_gives(model: str) -> None:
    record = json.loads(readme_picture.RECORD.read_text(encoding="utf-8"))
    torch.testing.assert_close(readme_picture.weights(model), record["weights"][model], rtol=0, atol=2e-3)
    peaks = [list(judged.call.stats.peak) for judged in sqrtdk.check(model).calls]
    torch.testing.assert_close(peaks, record["peak"][model], rtol=0, atol=2e-3)


@pytest.mark.parametrize("language", cost_page.LANGUAGES)
def test_the_page_of_figures_is_what_the_records_say(language: str) -> None:
    """Write it again after a record changed: python scripts/cost_page.py."""
    assert cost_page.written(language) == cost_page.page(language).read_text(encoding="utf-8")


@pytest.mark.parametrize("language", rates_table.LANGUAGES)
def test_the_table_of_rates_is_what_the_record_says(language: str) -> None:
    """Write it again after a record changed: python scripts/rates_table.py."""
    found = rates_table.record("learning_rates")
    assert all((row["named_at"] is not None) == row["alarm"] for row in found["rows"])
    assert rates_table.written(language, found) == rates_table.page(language).read_text(encoding="utf-8")


def test_the_picture_of_every_kind_of_call_shows_the_record() -> None:
    """Draw it again after the record changed: python scripts/cliffs_figure.py."""
    stale = [path for path, shown in cliffs_figure.figures().items() if not cliffs_figure.is_current(path, shown)]
    assert stale == []
