"""The public names of a namespace, and the directive `public` that writes each of them out from its docstring.

The names that are used most have a docstring in Chinese too, in the folder api_zh: that stands in the Chinese tree.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

TOP = "sqrtdk"
CHINESE = Path(__file__).parent / "api_zh"


@cache
def names(namespace: str) -> list[str]:
    """What a namespace offers: what its `__init__` exports under its own name, its tables, functions and classes."""
    module = import_module(namespace)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    listed: dict[str, None] = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom):
            listed |= dict.fromkeys(alias.name for alias in statement.names if alias.asname == alias.name)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            listed[statement.name] = None
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            listed[statement.target.id] = None
    things = {name: getattr(module, name) for name in listed if not name.startswith("_")}
    return [name for name, thing in things.items() if not inspect.ismodule(thing)]


def _entry(namespace: str, name: str) -> list[str]:
    """The reStructuredText of one name, which autodoc fills; a table is listed by its keys."""
    thing = getattr(import_module(namespace), name)
    whole = f"{namespace}.{name}"
    if namespace != TOP and name in names(TOP):
        return [f".. rubric:: ``{name}``", "", f"See :py:obj:`{TOP}.{name}`.", ""]
    if inspect.isclass(thing):
        kind = "autoexception" if issubclass(thing, Exception) else "autoclass"
        return [f".. {kind}:: {whole}", "   :members:", ""]
    if not callable(thing):
        shown = ", ".join(f"``{key}``" for key in thing) if isinstance(thing, Mapping) else f"``{thing!r}``"
        return [f".. py:data:: {whole}", "", f"   {shown}", ""]
    analyzer = ModuleAnalyzer.for_module(thing.__module__)
    analyzer.analyze()
    analyzer.overloads.clear()  # one signature, which has them all
    return [f".. autofunction:: {whole}", ""]


class Public(SphinxDirective):
    """`{public} sqrtdk.scales`: every public name of the namespace, with its signature and docstring."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Leave the writing to autodoc."""
        namespace = self.arguments[0]
        lines = [line for name in names(namespace) for line in _entry(namespace, name)]
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *lines, "```"]), allow_section_headings=True)


def _in_chinese(app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """The docstring in Chinese, where there is one; the signature is the code's."""
    file = CHINESE / f"{name}.txt"
    if app.srcdir.name == "zh" and file.is_file():
        lines[:] = [*file.read_text(encoding="utf-8").splitlines(), ""]


def _as_rst(app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with code between backticks: what else reStructuredText reads in them is quoted."""
    for number, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...", ":", "..")):
            continue
        parts = re.split(r"(`+[^`]+`+)", line)
        parts[::2] = [re.sub(r"(?<!\\)([*|](?! )|_(?=\W|$))", r"\\\g<0>", part) for part in parts[::2]]
        lines[number] = "".join(parts)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", _in_chinese, priority=300)
    app.connect("autodoc-process-docstring", _as_rst, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
