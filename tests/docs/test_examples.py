"""Programs of a page, and what stands after `>>>`, run and give what the page says.

Of the Chinese pages those run whose code or output has Chinese words; the others have the code of the English ones.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
import torch

from page_programs import programs, without_blanks
from tests.docs.pages import ROOT, pages
from tests.support.lab_here import needs_lab

# Pages whose examples another test runs, together with the rest of what it holds of them.
ELSEWHERE = {
    "trace": "tests/trace/test_trace_page.py",
    "watch": "tests/report/test_watch_docs.py",
    "kv-cache": "tests/kv/test_kv_report.py",
    "trace-file": "tests/recording_files/test_printed_writer.py",
}
BLOCK = re.compile(r"^```(?:python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(path: Path) -> str:
    """All blocks of a page are one session, in order; the blank lines between keep the numbers of its lines."""
    text = path.read_text(encoding="utf-8")
    kept = [""] * len(text.splitlines())
    for block in BLOCK.finditer(text):
        if ">>>" in block[1]:
            start = text.count("\n", 0, block.start(1))
            lines = block[1].splitlines()
            kept[start : start + len(lines)] = lines
    return "\n".join(kept) + "\n"


def code(text: str) -> str:
    """The examples without their comments and the lines between them."""
    return re.sub(r"\n+", "\n", re.sub(r" +# .*", "", text))


ENGLISH, CHINESE = (
    {name: examples(path) for name, path in sorted(pages(language).items()) if name not in ELSEWHERE}
    for language in ("en", "zh")
)
RUNNABLE = ENGLISH | {f"zh/{name}": text for name, text in CHINESE.items() if code(text) != code(ENGLISH[name])}
NAMES = [
    pytest.param(name, marks=needs_lab) if re.search("sqrtdk_lab|matplotlib|scipy", text) else name
    for name, text in RUNNABLE.items()
    if ">>>" in text
]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write where they stand
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.delenv("WANDB_MODE", raising=False)  # told of on stdout where it is set
    example = doctest.DocTestParser().get_doctest(RUNNABLE[name], {}, f"{name}.md", f"{name}.md", 0)
    said: list[str] = []
    result = doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    torch._dynamo.reset()  # its hooks look into the names of the examples, as long as they are there
    assert not said, "".join(said)
    assert result.attempted


SOURCES = {f"{tree}/{name}": path for tree in ("en", "zh") for name, path in sorted(pages(tree).items())}
SOURCES |= {name: ROOT / name for name in ("README.md", "README.zh-CN.md")}
PROGRAMS = {
    f"{name}: {number}": program
    for name, path in SOURCES.items()
    for number, program in enumerate(programs(path.read_text(encoding="utf-8")), 1)
}


def steady(printed: str) -> str:
    """Without the last digits of a share, which differ from CPU to CPU."""
    return without_blanks(re.sub(r"\d+\.\d+%", "#%", printed))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_stands_behind_it(name: str) -> None:
    code, printed = PROGRAMS[name]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    assert steady(output.getvalue()) == steady(printed)


def test_readme_and_the_first_page_have_programs() -> None:
    counted = {name: sum(program.startswith(f"{name}: ") for program in PROGRAMS) for name in SOURCES}
    assert {name: count for name, count in counted.items() if count} == {
        "README.md": 4,
        "README.zh-CN.md": 4,
        "en/start": 2,
        "zh/start": 2,
    }


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_test_runs_the_rest(name: str) -> None:
    text = (ROOT / ELSEWHERE[name]).read_text(encoding="utf-8")
    assert f"{name}.md" in text
    assert "doctest" in text
