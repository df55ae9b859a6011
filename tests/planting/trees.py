"""Changes of a Python file's syntax tree, see `changes`."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from tests.planting.changes import LETTER, Change, Planted, the_one

Letters = dict[str, Any]  # what each stands for: a node, an identifier, or a list of nodes
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def changed_tree(text: str, planted: Planted) -> ast.Module:
    """The tree of the file's text with the error in it."""
    tree, letters = ast.parse(text), Letters()
    for change in planted.changes:
        scope = scope_of(tree, planted)
        _check_names(change, scope, text, planted.place)
        letters = _apply(change, tree, scope, letters, planted.place)
    assert any(change.new is not None for change in planted.changes), f"{planted.place}: nothing is changed"
    return tree


def scope_of(tree: ast.Module, planted: Planted) -> ast.AST:
    """The place: a function, a class or the assignment of a constant."""
    scope: Any = tree
    for name in planted.name.split("."):
        places = [
            node
            for node in scope.body
            if (isinstance(node, DEFINITIONS) and node.name == name)
            or (isinstance(node, ast.Assign) and ast.unparse(node.targets) == name)
        ]
        assert len(places) == 1, f"{planted.place}: {len(places)} places have this name"
        scope = places[0]
    return scope


def _check_names(change: Change, scope: ast.AST, text: str, place: str) -> None:
    """What a pattern names is no variable, which may be renamed, and is there for new code to use."""
    parts = [part for code in (change.old, change.new or "") for part in ast.walk(ast.parse(code))]
    names = {part.id for part in parts if isinstance(part, ast.Name) and not LETTER.fullmatch(part.id)}
    inner = {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}
    inner |= {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not names & inner, f"{place}: {', '.join(sorted(names & inner))} is a variable; a letter stands for it"
    symbols = symtable.symtable(text, place, "exec").get_symbols()
    known = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    known |= {*vars(builtins), *(symbol.get_name() for symbol in symbols if symbol.is_namespace())}
    assert names <= known, f"{place}: {', '.join(sorted(names - known))} is not known there"


def _apply(change: Change, tree: ast.Module, scope: ast.AST, letters: Letters, place: str) -> Letters:
    """Change one node of the tree; what all letters stand for from then on."""
    (pattern,), template = _parsed(change)
    searched = getattr(scope, "body", None) or [scope.value]  # type: ignore[attr-defined]
    nodes = sorted(
        (node for top in searched for node in ast.walk(top) if hasattr(node, "lineno")),
        key=lambda node: (node.lineno, node.col_offset),
    )
    matches = [(node, bound) for node in nodes for bound in list(_matches(pattern, node, letters))[:1]]
    node, letters = the_one(matches, change, place)
    if change.new is None:
        return letters
    new = [_Fill(letters, place).visit(part) for part in template]
    assert ast.unparse(new) != ast.unparse(node), f"{place}: it is already so: {change.new}"
    for part in (part for top in new for part in ast.walk(top)):
        ast.copy_location(part, node)
    swap = _Swap(node, new)
    swap.visit(tree)
    assert swap.count == 1
    return letters


def _parsed(change: Change) -> tuple[list[ast.AST], list[ast.AST]]:
    """Old and new: both an expression, or both statements."""
    both = [ast.parse(code).body for code in (change.old, change.new or change.old)]
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in both):
        both = [[body[0].value] for body in both]
    return both[0], both[1]


def _matches(pattern: Any, node: Any, letters: Letters) -> Iterator[Letters]:
    """What the letters stand for, in every way in which the node is like the pattern."""
    if isinstance(pattern, list) and isinstance(node, list):
        yield from _runs(pattern, node, letters)
    elif isinstance(pattern, ast.Name) and LETTER.fullmatch(pattern.id) and isinstance(node, ast.expr):
        yield from _bound(pattern.id, node, letters)
    elif isinstance(pattern, ast.Constant):  # 1, 1.0 and True are three
        yield from [letters] if isinstance(node, ast.Constant) and repr(pattern.value) == repr(node.value) else []
    elif isinstance(pattern, ast.Attribute) and LETTER.fullmatch(pattern.attr) and isinstance(node, ast.Attribute):
        for bound in _matches(pattern.value, node.value, letters):
            yield from _bound(pattern.attr, node.attr, bound)
    elif isinstance(pattern, ast.AST) and type(pattern) is type(node):
        names = [name for name in pattern._fields if name != "ctx"]
        yield from _runs([getattr(pattern, name) for name in names], [getattr(node, name) for name in names], letters)
    elif type(pattern) is type(node) and pattern == node:
        yield letters


def _runs(patterns: list[Any], nodes: list[Any], letters: Letters) -> Iterator[Letters]:
    """The same of a list, in which `*A` and `**A` stand for any number of arguments."""
    if not patterns:
        yield from [] if nodes else [letters]
        return
    letter = _run_letter(patterns[0])
    if letter is not None:
        for count in range(len(nodes) + 1):
            for bound in _bound(letter, nodes[:count], letters):
                yield from _runs(patterns[1:], nodes[count:], bound)
    elif nodes:
        for bound in _matches(patterns[0], nodes[0], letters):
            yield from _runs(patterns[1:], nodes[1:], bound)


def _run_letter(node: Any) -> str | None:
    run = isinstance(node, ast.Starred) or (isinstance(node, ast.keyword) and node.arg is None)
    return node.value.id if run and isinstance(node.value, ast.Name) and LETTER.fullmatch(node.value.id) else None


def _bound(letter: str, value: Any, letters: Letters) -> Iterator[Letters]:
    if letter not in letters or _text(letters[letter]) == _text(value):
        yield letters | {letter: value}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else ast.unparse(value)


class _Fill(ast.NodeTransformer):
    """Puts in a pattern what its letters stand for."""

    def __init__(self, letters: Letters, place: str) -> None:
        self.letters, self.place = letters, place

    def meaning(self, letter: str) -> Any:
        assert letter in self.letters, f"{self.place}: {letter} stands for nothing"
        return deepcopy(self.letters[letter])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not LETTER.fullmatch(node.id):
            return node
        meant = self.meaning(node.id)
        if hasattr(meant, "ctx"):
            meant.ctx = node.ctx
        return meant

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if LETTER.fullmatch(node.attr):
            node.attr = self.meaning(node.attr)
        return self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> Any:
        letter = _run_letter(node)
        return self.generic_visit(node) if letter is None else self.meaning(letter)

    def visit_keyword(self, node: ast.keyword) -> Any:
        letter = _run_letter(node)
        return self.generic_visit(node) if letter is None else self.meaning(letter)


class _Swap(ast.NodeTransformer):
    """Puts new nodes in the place of one."""

    def __init__(self, node: ast.AST, new: list[ast.AST]) -> None:
        self.node, self.new, self.count = node, new, 0

    def visit(self, node: ast.AST) -> Any:
        if node is not self.node:
            return self.generic_visit(node)
        self.count += 1
        return self.new if isinstance(node, ast.stmt) else self.new[0]
