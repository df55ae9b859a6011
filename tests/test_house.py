"""The house itself: what an import costs, how many names are public, how long files are."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import networkx
import pytest

import sqrtdk

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MOST_LINES = 400
MOST_NAMES = 15
HEAVY = ("torch", "numpy", "pyarrow", "transformers", "typer", "rich", "jinja2", "safetensors")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, env=wide
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


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    long = [f"{path.relative_to(ROOT)}: {count}" for path, count in lines.items() if count > MOST_LINES]
    assert len(SOURCES) > 100
    assert not long, f"over {MOST_LINES} lines: {long}"


def test_no_two_files_import_each_other() -> None:
    """Neither directly nor through others, late and type-only imports included.

    The package itself is left out: it names what is imported on first use, and the claims of the lab are written with
    these public names, as a user would write them.
    """
    imports = grimp.build_graph("sqrtdk", cache_dir=None)
    graph = networkx.DiGraph()
    for module in imports.modules - {"sqrtdk"}:
        graph.add_edges_from((module, other) for other in imports.find_modules_directly_imported_by(module))
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert graph.number_of_edges() > 1000
    assert not circles
