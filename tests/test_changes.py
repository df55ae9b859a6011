"""The tools that plant errors: what a pattern matches and leaves alone, and that one which no longer fits is told."""

from __future__ import annotations

import ast

import pytest

from tests.planting.changes import Change, plant
from tests.planting.tokens import changed_text
from tests.planting.trees import changed_tree

PYTHON = """
import math
import torch

NAMES = ("n", "max", "min")

def row(z, hidden, *, scale):
    z = z * scale  # once
    z = z.masked_fill(
        ~hidden, -math.inf,
    )
    total = z.exp() + 1.0
    return torch.cat([total], dim=-1, out=z + 1)

class Rows:
    def sum(self):
        def inner(a):
            return a - 1
        [].append(self)
        return inner(self.z) + True
"""
KERNEL = """
// last() { a * b; }
struct Row {
  float last(const float* z, int64_t n) const {
    return z[n - 1] * (z[0] + 1.0f);
  }
};
inline float dot(float a, float b) {
  return twice(a, at(b, 2), ')');
}
inline float dot(double a) {
  for (int64_t i = 0; i < a; ++i)
    a += 1e-3f * /* += 2 */ i, b(a);
  return dot(a, 2);
}
"""

CHANGES = {
    "an operator": ("row", [Change("A * B", "A / B")], "z = z / scale"),
    "any layout": (
        "row",
        [Change("A.masked_fill(~B, C)", "A.masked_fill(B, C)")],
        "z = z.masked_fill(hidden, -math.inf)",
    ),
    "a statement": ("row", [Change("A = A * B", "A = A * B; A = -A")], "z = -z"),
    "a call that stands alone": ("Rows.sum", [Change("A.append(B)", "pass")], "pass"),
    "one letter, one thing": ("row", [Change("A = A.F(*B)", "A = A.F()")], "z = z.masked_fill()"),
    "any arguments": (
        "row",
        [Change("F(*A, **B, out=C)", "F(*A, out=2 * C, **B)")],
        "return torch.cat([total], out=2 * (z + 1), dim=-1)",
    ),
    "one of several": ("row", [Change("A + B", "A - B", at=1)], "return torch.cat([total], dim=-1, out=z - 1)"),
    "1.0 is not 1": ("row", [Change("A + 1.0", "A")], "total = z.exp()"),
    "True is not 1": ("Rows.sum", [Change("A + True", "A")], "return inner(self.z)"),
    "letters of the change before": ("row", [Change("A * S"), Change("A.exp()", "S")], "total = scale + 1.0"),
    "a function of a method": ("Rows.sum.inner", [Change("A - B", "B - A")], "return 1 - a"),
    "a constant": ("NAMES", [Change('(*A, "max", *B)', '(*B, "max", *A)')], "NAMES = ('min', 'max', 'n')"),
}
KERNEL_CHANGES = {
    "an operator": ("last", Change("] * A;", "] + A;"), "return z[n - 1] + (z[0] + 1.0f);"),
    "brackets": ("dot", Change("(A, B, C)", "(B, A, C)"), "return twice(at(b, 2), a, ')');"),
    "any layout": ("dot", Change("+= A*B, F(C)", "+= B, F(A)"), "a += i, b(1e-3f);"),
    "one letter, one thing": ("dot", Change("for (int64_t A = 0; A < B; ++A)", "for (;;)"), "for (;;)"),
    "one of several": ("last", Change("[A]", "[A + 1]", at=1), "return z[n - 1] * (z[0 + 1] + 1.0f);"),
    "a class": ("Row", Change("[A - 1]", "[A]"), "return z[n] * (z[0] + 1.0f);"),
}
REFUSED = {
    "nothing is like it": ("row", Change("A // B", "A"), "a.py:row: nothing is like: A // B"),
    "several are": ("row", Change("A + B", "A - B"), r"2 pieces are like: A \+ B; say which with `at`"),
    "there are not so many": ("row", Change("A + B", "A - B", at=2), "there is no match 2 of 2"),
    "only one thing for a letter": ("row", Change("A + A", "A"), "nothing is like"),
    "a variable": ("row", Change("z * A", "A"), "z is a variable; a letter stands for it"),
    "a variable of another function": ("row", Change("A * B", "A * inner"), "inner is not known there"),
    "a letter without a meaning": ("row", Change("A * B", "A * C"), "C stands for nothing"),
    "no change": ("row", Change("A * B", "A*B"), r"it is already so: A\*B"),
    "only a look": ("row", Change("A * B"), "nothing is changed"),
    "no place": ("Rows.row", Change("A * B", "A"), "0 places have this name"),
}
KERNEL_REFUSED = {
    "nothing is like it": ("last", Change("= A;", "= 0;"), "a.h:last: nothing is like: = A;"),
    "several are": ("last", Change("[A]", "[A + 1]"), r"2 pieces are like: \[A\]; say which with `at`"),
    "there are not so many": ("last", Change("[A]", "[A + 1]", at=2), "there is no match 2 of 2"),
    "only one thing for a letter": ("dot", Change("(A, A, B)", "(A, B)"), "nothing is like"),
    "a comment": ("dot", Change("+= 2", "+= 3"), "nothing is like"),
    "two arguments for a letter": ("dot", Change("(A, ')')", "(A)"), "nothing is like"),
    "a statement for a letter": ("Row", Change("{A}", "{}"), "nothing is like"),
    "half a bracket": ("last", Change("(A;", "A;"), "nothing is like"),
    "a name of the kernel": ("last", Change("z[A]", "0"), "z is a name of the kernel; a letter stands for it"),
    "a letter at the beginning": ("last", Change("A + 1.0f", "1.0f"), "begins with no letter"),
    "a letter at the end": ("last", Change("1.0f + A", "1.0f"), "ends with no letter"),
    "a letter without a meaning": ("last", Change("[A - 1]", "[B]"), "B stands for nothing"),
    "no change": ("last", Change("[A - 1]", "[A  - 1]"), "it is already so"),
    "only a look": ("last", Change("[A - 1]"), "nothing is changed"),
    "no place": ("twice", Change("[A - 1]", "[A]"), "a.h:twice: there is no such place"),
}


def new_lines(before: str, after: str) -> list[str]:
    return [line.strip() for line in after.splitlines() if line not in before.splitlines()]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_tree(name: str) -> None:
    place, changes, line = CHANGES[name]
    tree = changed_tree(PYTHON, plant(f"a.py:{place}", *changes))
    compile(tree, "a.py", "exec")
    assert new_lines(ast.unparse(ast.parse(PYTHON)), ast.unparse(tree)) == [line]


@pytest.mark.parametrize("name", KERNEL_CHANGES)
def test_a_change_of_tokens(name: str) -> None:
    place, change, line = KERNEL_CHANGES[name]
    assert new_lines(KERNEL, changed_text(KERNEL, plant(f"a.h:{place}", change))) == [line]


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_of_a_tree_that_does_not_fit_is_told(name: str) -> None:
    place, change, reason = REFUSED[name]
    with pytest.raises(AssertionError, match=reason):
        changed_tree(PYTHON, plant(f"a.py:{place}", change))


@pytest.mark.parametrize("name", KERNEL_REFUSED)
def test_a_change_of_tokens_that_does_not_fit_is_told(name: str) -> None:
    place, change, reason = KERNEL_REFUSED[name]
    with pytest.raises(AssertionError, match=reason):
        changed_text(KERNEL, plant(f"a.h:{place}", change))
