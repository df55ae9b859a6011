"""The house itself: what an import costs, how many names are public, how long files are, what the README says."""

from __future__ import annotations

import doctest
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sqrtdk
from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN
from sqrtdk.audit.records import SEVERITIES, VERDICTS

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 400
MOST_NAMES = 15
HEAVY = ("torch", "numpy", "pyarrow", "transformers", "typer", "rich", "jinja2", "safetensors")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=False, env=wide
    )


def test_the_import_loads_nothing_heavy() -> None:
    code = f"import sys, sqrtdk; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert _run("-c", code).stdout.strip() == "[]"


EACH_ALONE = """
import os, sys, torch, sqrtdk
for name in sqrtdk.__all__:
    if os.fork():
        assert os.wait()[1] == 0, name
        continue
    thing = getattr(sqrtdk, name)
    assert callable(thing) and thing.__doc__
    print(name, [other for other in UNWANTED if other in sys.modules], flush=True)
    os._exit(0)
"""


def test_every_public_name_resolves_and_needs_no_command_line() -> None:
    """Each in a process that has imported torch, and nothing else of ours."""
    unwanted = ("typer", "rich", "jinja2", "transformers", "jaxtyping", "sqrtdk._shapes")
    done = _run("-c", f"UNWANTED = {unwanted!r}\n{EACH_ALONE}")
    assert done.stdout.splitlines() == [f"{name} []" for name in sqrtdk.__all__], done.stderr


def test_public_names_are_few() -> None:
    assert 0 < len(sqrtdk.__all__) <= MOST_NAMES
    assert set(sqrtdk.__all__) <= set(dir(sqrtdk))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sqrtdk.no_such_name


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == sqrtdk.__version__ == importlib.metadata.version("sqrtdk")


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT / "src")) for path in SOURCES])
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{lines} lines; {MOST_LINES} are the limit"


def test_the_two_commands_come_first() -> None:
    first = _blocks("console")[0]
    assert README.index(first) < 100
    assert re.findall(r"^\$ (.*?)\s+#", first, re.MULTILINE) == ["make demo", "make test"]


def test_the_python_of_the_readme_runs() -> None:
    """All blocks are one session, in order."""
    blocks = _blocks("python")
    assert len(blocks) >= 2
    example = doctest.DocTestParser().get_doctest("".join(blocks), {}, "README.md", "README.md", 0)
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    said: list[str] = []
    runner.run(example, out=said.append)
    assert runner.summarize(verbose=False).attempted > 10
    assert not said, "".join(said)


@pytest.mark.parametrize("model", ["demo", "demo:unscaled"])
def test_the_output_in_the_readme_is_real(model: str) -> None:
    """Line by line; of the ledger's lines up to the verdict, as the figures may differ in their last digit."""
    output = _run("-m", "sqrtdk", "check", model).stdout
    shown = next(block for block in _blocks("text") if ("missing" in block) is (model == "demo:unscaled"))
    for line in shown.splitlines():
        if line != "...":
            known = re.match(r"blocks.*?(exact|: missing)", line)
            assert (known.group() if known else line) in output


def test_the_readme_lists_every_option() -> None:
    text = _run("-m", "sqrtdk", "check", "--help").stdout
    options = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)) - {"--help"}
    assert len(options) > 15
    table = README[README.index("| option |") : README.index("Exit codes:")]
    assert set(re.findall(r"--[a-z][a-z-]*", table)) == options


def test_the_table_of_mistakes_in_the_readme_is_that_of_the_code() -> None:
    table = README[README.index("| name | effective scale |") : README.index("\nWhat fits none of them")]
    rows = [f"| `{m.name}` | {m.scale} | {m.ratio} | {m.summary} |" for m in MISTAKES.values() if m.known]
    assert table.splitlines()[2:] == rows
    assert len(rows) == 9


def test_the_readme_names_every_verdict_and_severity() -> None:
    for name in (*VERDICTS, *SEVERITIES, UNKNOWN):
        assert f"`{name}" in README


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []
