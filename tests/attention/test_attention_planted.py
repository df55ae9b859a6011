"""The planted errors themselves, those of the compiled kernel too where it can't run: each fits, whatever the names."""

from __future__ import annotations

import ast

import pytest

from tests.attention import kernel_mutants, mutants
from tests.attention.planted_copy import HOME, changed_code
from tests.planting.changes import Planted
from tests.planting.tokens import WORDS, tokens_of
from tests.planting.trees import DEFINITIONS, scope_of
from tests.trace import mutants as trace_mutants

TABLES = {
    **mutants.MUTANTS,
    **{f"kernel: {name}": planted for name, planted in kernel_mutants.MUTANTS.items()},
    **{f"trace: {name}": planted for name, planted in trace_mutants.MUTANTS.items()},
}


class Renamed(ast.NodeTransformer):
    """Gives the variables of a function other names."""

    def __init__(self, scope: ast.AST) -> None:
        nodes = list(ast.walk(scope))
        self.names = {node.arg for node in nodes if isinstance(node, ast.arg)}
        self.names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = f"other_{node.id}" if node.id in self.names else node.id
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = f"other_{node.arg}"
        return self.generic_visit(node)


def renamed(text: str, planted: Planted) -> str:
    """The code with other names for the variables of the place; in C++ for all but the place and the language's."""
    if planted.file.endswith(".py"):
        tree = ast.parse(text)
        scope = scope_of(tree, planted)
        if isinstance(scope, DEFINITIONS):
            Renamed(scope).visit(scope)
        return ast.unparse(tree)
    own = {word for word in words(text) if word.isidentifier() and not WORDS.fullmatch(word)} - {planted.name, "const"}
    return " ".join(f"other_{word}" if word in own else word for word in words(text))


def words(text: str) -> list[str]:
    return [token.text for token in tokens_of(text)]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", TABLES)
def test_other_names_leave_a_planted_error_what_it_is(name: str) -> None:
    planted = TABLES[name]
    text = (HOME / planted.file).read_text()
    other = renamed(text, planted)
    assert other != text
    assert words(changed_code(other, planted)) == words(renamed(changed_code(text, planted), planted)) != words(other)
