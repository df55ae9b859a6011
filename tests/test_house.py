"""The house itself: what an import costs, how many names are public, how long files are."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx
import pytest

import sqrtdk

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MOST_LINES = 400
MOST_NAMES = 17
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


MODULES_ALONE = """
import gc, importlib, os, sys
names = sys.argv[1:]
read, write = os.pipe()
if not os.fork():
    for name in names:
        importlib.import_module(name)
    os.write(write, " ".join(name for name in sys.modules if name.partition(".")[0] != "sqrtdk").encode())
    os._exit(0)
os.close(write)
for name in os.fdopen(read).read().split():  # libraries are imported once, before: only our own order is tested
    try:
        importlib.import_module(name)
    except Exception:
        pass
os.wait()
gc.disable()  # each child would walk all that the libraries hold
assert len(sys.modules) > 1000 and not any(name.partition(".")[0] == "sqrtdk" for name in sys.modules)
for name in names:
    if not os.fork():
        importlib.import_module(name)
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


@pytest.mark.full
def test_every_module_can_be_imported_first() -> None:
    """In a process that has imported nothing else of ours: a circle of imports shows only from some of its files."""
    modules = [".".join(file.relative_to(ROOT / "src").with_suffix("").parts) for file in SOURCES]
    names = [module.removesuffix(".__init__") for module in modules if not module.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", MODULES_ALONE, *names], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr


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


_BROUGHT = {"torch", "numpy", "safetensors", "typer", "rich", "jinja2", "markupsafe", "msgspec", "tomli", "sqrtdk"}
_LATER = {"triton": "impl/gpu", "pytest": "testing"}  # folders that are imported where the package is there


def test_what_the_library_alone_imports_it_brings() -> None:
    """No file needs a package of an extra, or of the tests, just to be imported."""

    def imported(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield str(node.module)
            elif isinstance(node, ast.If):
                yield from imported(node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node.body)

    strange = []
    for path in SOURCES:
        for name in imported(ast.parse(path.read_text(encoding="utf-8")).body):
            package = name.partition(".")[0]
            later = package in _LATER and _LATER[package] in path.as_posix()
            if not (later or package in _BROUGHT or package in sys.stdlib_module_names) and path.name != "_shapes.py":
                strange.append(f"{path}: {name}")
    assert not strange
