"""How large the package is, how much of it is comments, and which names mean several things.

    python scripts/house.py            one table: files, lines, comments, docstrings, circles, names
    python scripts/house.py --names    every name with several meanings, and where it stands
    python scripts/house.py --check    ends with 1 if there are more such names than `MOST`

A reader who meets `Part` in two files takes it for one thing. So a class or function without a leading underscore has
one definition in the package, and a constant, with or without one, has one value. Functions of one folder with one
signature are variants of one kind (`claims/*.py: run(size)`) and count once.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "sqrtdk"
SHORT = 60  # lines: a file below is likely one jump of the reader for nothing
MOST = {"classes and functions": 216, "constants": 270}  # lower it with each name that goes; it never rises


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


def several() -> dict[str, dict[str, list[Definition]]]:
    """By kind, the names with several meanings and their definitions."""
    known: dict[str, dict[str, list[Definition]]] = {kind: defaultdict(list) for kind in MOST}
    for file in sorted(SOURCE.rglob("*.py")):
        for kind, name, definition in definitions(file):
            known[kind][name].append(definition)
    return {
        kind: {name: those for name, those in sorted(names.items()) if len({one.meaning for one in those}) > 1}
        for kind, names in known.items()
    }


def circles() -> int:
    """Sets of files that import one another, late and type-only imports included."""
    import grimp
    import networkx

    imports = grimp.build_graph("sqrtdk", cache_dir=None)
    graph = networkx.DiGraph()
    for module in imports.modules - {"sqrtdk"}:
        graph.add_edges_from((module, other) for other in imports.find_modules_directly_imported_by(module))
    return sum(len(circle) > 1 for circle in networkx.strongly_connected_components(graph))


def table() -> str:
    """The figures, one a line."""
    every = [sizes(file.read_text(encoding="utf-8")) for file in sorted(SOURCE.rglob("*.py"))]
    lines = [one.lines for one in every]
    total = sum(lines)
    figures = {
        "files": f"{len(every):,}",
        f"files under {SHORT} lines": f"{sum(count < SHORT for count in lines):,}",
        "lines": f"{total:,}",
        "lines of code": f"{sum(one.code for one in every):,}",
        "comments": f"{sum(one.comments for one in every) / total:.1%} of the lines",
        "docstrings": f"{sum(one.docstrings for one in every) / total:.1%} of the lines",
        "longest file": f"{max(lines):,}",
        "median file": f"{statistics.median(lines):g}",
        "circles of imports": f"{circles()}",
    }
    figures |= {f"{kind} with several meanings": f"{len(names)}" for kind, names in several().items()}
    width = max(map(len, figures))
    return "\n".join(f"{name:<{width}}  {figure}" for name, figure in figures.items())


def main(argument: str) -> int:
    """Print what is asked for; the exit code."""
    if argument not in ("--names", "--check"):
        print(table())
        return 0
    found = several()
    for kind, names in found.items():
        if argument == "--names" or len(names) > MOST[kind]:
            print(f"{len(names)} {kind} with several meanings, {MOST[kind]} allowed:")
            for name, those in names.items():
                print(f"  {name}: {', '.join(str(one.file.relative_to(SOURCE)) for one in those)}")
    return int(argument == "--check" and any(len(names) > MOST[kind] for kind, names in found.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
