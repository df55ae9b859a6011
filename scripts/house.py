"""How large the package is, how much of it is comments, and which names mean several things.

    python scripts/house.py              one table: files, lines, comments, docstrings, circles, names, and what is
                                         done in several places
    python scripts/house.py OLD/src src  the same of two checkouts side by side
    python scripts/house.py --names      every name with several meanings, and where it stands
    python scripts/house.py --check      ends with 1 if there are more such names than `MOST`, or circles

A reader who meets `Part` in two files takes it for one thing. So a class or function without a leading underscore has
one definition in the package, and a constant, with or without one, has one value. Functions of one folder with one
signature are variants of one kind (`claims/*.py: run(size)`) and count once.
"""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SHORT = 60  # lines: a file below is likely one jump of the reader for nothing
MOST = {"classes and functions": 11, "constants": 18}  # lower it with each name that goes; it never rises


# What one file should do for all others.
PLACES = {
    "read JSON": re.compile(r"json\.loads?\("),
    "read TOML": re.compile(r"tomllib\.loads?\("),
    "put a file in place": re.compile(r"os\.(replace|link|rename)\("),
    "take a lock": re.compile(r"\b(flock|lockf|locking)\("),
    "hash": re.compile(r"hashlib\.\w+\("),
}
CHINESE = re.compile(r"[\u4e00-\u9fff]")


class Sizes(NamedTuple):
    """Lines of one file, by what stands on them."""

    lines: int
    code: int
    comments: int
    docstrings: int


def sizes(text: str) -> Sizes:
    """Count the lines of one file; a line with code and a comment counts as both."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    blank = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    return Sizes(len(text.splitlines()), len(code - documented), len(comments), len(documented))


class Definition(NamedTuple):
    """One definition at the top of a file."""

    file: Path
    meaning: str  # what has to be equal for two definitions to be one thing


def definitions(file: Path) -> Iterator[tuple[str, str, Definition]]:
    """Kind, name and definition of the classes, functions and constants at the top of a file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list):
                continue
            signature = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else file.name
            yield "classes and functions", node.name, Definition(file, f"{file.parent} {signature}")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    yield "constants", target.id.lstrip("_"), Definition(file, ast.unparse(node.value))


def several(source: Path) -> dict[str, dict[str, list[Definition]]]:
    """By kind, the names with several meanings and their definitions."""
    known: dict[str, dict[str, list[Definition]]] = {kind: defaultdict(list) for kind in MOST}
    for file in sorted(source.rglob("*.py")):
        for kind, name, definition in definitions(file):
            known[kind][name].append(definition)
    return {
        kind: {name: those for name, those in sorted(names.items()) if len({one.meaning for one in those}) > 1}
        for kind, names in known.items()
    }


def circles(source: Path) -> int:
    """Sets of files that import one another, late and type-only imports included."""
    import grimp
    import networkx

    sys.path.insert(0, str(source.parent))
    imports = grimp.build_graph("sqrtdk", cache_dir=None)
    graph = networkx.DiGraph()
    for module in imports.modules - {"sqrtdk"}:
        graph.add_edges_from((module, other) for other in imports.find_modules_directly_imported_by(module))
    return sum(len(circle) > 1 for circle in networkx.strongly_connected_components(graph))


def says_chinese(text: str) -> bool:
    """Whether code holds a Chinese sentence: a string that is no docstring."""
    tree = ast.parse(text)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(CHINESE.search(str(node.value)) for node in strings if id(node) not in alone)


def figures(source: Path) -> dict[str, str]:
    """The figures of one checkout, by what they are of."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(source.rglob("*.py"))]
    every = list(map(sizes, texts))
    lines = [one.lines for one in every]
    total = sum(lines)
    found = {
        "files": f"{len(every):,}",
        f"files under {SHORT} lines": f"{sum(count < SHORT for count in lines):,}",
        "lines": f"{total:,}",
        "lines of code": f"{sum(one.code for one in every):,}",
        "comments": f"{sum(one.comments for one in every) / total:.1%} of the lines",
        "docstrings": f"{sum(one.docstrings for one in every) / total:.1%} of the lines",
        "longest file": f"{max(lines):,}",
        "median file": f"{statistics.median(lines):g}",
        "circles of imports": f"{circles(source)}",
    }
    found |= {f"{kind} with several meanings": f"{len(names)}" for kind, names in several(source).items()}
    found["files that hold Chinese sentences"] = f"{sum(map(says_chinese, texts))}"
    return found | {
        f"files that {what}": f"{sum(bool(call.search(text)) for text in texts)}" for what, call in PLACES.items()
    }


def table(sources: list[Path]) -> str:
    """The figures, one a line, with a column for each checkout."""
    columns = []
    for source in sources:  # each in its own process, as one process imports one package of a name
        run = [sys.executable, __file__, "--json", str(source.parent)]
        columns.append(json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout))
    width = max(map(len, columns[0]))
    return "\n".join(f"{name:<{width}}" + "".join(f"  {one[name]:>18}" for one in columns) for name in columns[0])


def main(arguments: list[str]) -> int:
    """Print what is asked for; the exit code."""
    option = next((one for one in arguments if one.startswith("--")), "")
    sources = [Path(one).resolve() / "sqrtdk" for one in arguments if one != option] or [ROOT / "src" / "sqrtdk"]
    if option == "--json":
        print(json.dumps(figures(sources[0])))
        return 0
    if option not in ("--names", "--check"):
        print(table(sources))
        return 0
    found = several(sources[0])
    for kind, names in found.items():
        if option == "--names" or len(names) > MOST[kind]:
            print(f"{len(names)} {kind} with several meanings, {MOST[kind]} allowed:")
            for name, those in names.items():
                print(f"  {name}: {', '.join(str(one.file.relative_to(sources[0])) for one in those)}")
    round_trips = circles(sources[0]) if option == "--check" else 0
    if round_trips:
        print(f"{round_trips} circles of imports, late and type-only ones included")
    too_many = any(len(names) > MOST[kind] for kind, names in found.items())
    return int(option == "--check" and (too_many or round_trips > 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
