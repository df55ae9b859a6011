"""The formulas of the register as plain text: no macro is left over, and fractions and indices stay whole."""

from __future__ import annotations

import pytest

from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.report.latex import to_text

SHOWN = {
    "grad-norm": "dL/dq = s K^T J V dL/do,  J = diag(p) - p p^T,  s = 1, 1/sqrt(d_k)",
    "var-linear": "E[q . k] = 0,  Var[q . k] = sum_(i=1)^(d_k) Var[q_i k_i] = d_k",
    "range-512": "P(|q . k| > 100) ~= 2 Phi(-100/sqrt(512)) ~= 10^-5,  P(|z| <= 3) ~= 0.997",
    "init-scaling": "Var[q . k] = d v^2 = 1  <=>  v = 1/sqrt(d),  sqrt(v) = d^(-1/4)",
    "seed-code-shapes": "s = sqrt(1/17 sum_(i=1)^18 (z_i - mean(z))^2),  sum_j p_ij = 1",
    "onehot-64": "softmax(z)_i = e^(z_i)/(sum_j e^(z_j)),  1 - p_max ~= e^(-(z_(1) - z_(2)))",
    "printed-maxima": "max_(i,j) softmax(s Q K^T)_ij,  s = 1, 1/sqrt(d_k)",
    "few-positions": "n_eff = 1/(sum_j p_j^2),  P[arg max_j z_j = i] = 1/n for exchangeable keys",
    "jacobian-vanishes": "J = diag(p) - p p^T,  || J ||_F^2 = sum_i p_i^2 - 2 sum_i p_i^3 + (sum_i p_i^2)^2",
    "additive-bounded": "|v^T tanh(W_q q + W_k k)| <= || v ||_1,  Var ~ A Var[v]",
    "cosine-unscaled": "-g <= g (q . k)/(|q| |k|) <= g,  p_max <= e^(2g)/(e^(2g) + n - 1)",
    "free": "(L d_k)/(2 L S d_k) << 1,  softmax((s Q) K^T) = softmax(s (Q K^T))",
    "paper-table3": "Attention(Q, K, V) = softmax((Q K^T)/sqrt(d_k)) V",
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_formula_reads_as_the_sentences_do(name: str) -> None:
    assert to_text(CLAIMS[name].formula) == SHOWN[name]


def test_no_formula_has_a_macro_that_is_not_known() -> None:
    for name, claim in CLAIMS.items():
        text = to_text(claim.formula)
        assert text.isascii(), name
        assert text.isprintable(), name
        assert not set(text) & set("\\{}"), name
        for opening, closing in ("()", "[]"):
            assert text.count(opening) == text.count(closing), name


def test_what_is_not_known_stays_as_it_is() -> None:
    assert to_text(r"\nonsense{x} = \frac{\alpha}{2}") == r"\nonsensex = \alpha/2"
    assert [to_text(cut) for cut in (r"\frac{", "x_", r"\sqrt", "")] == ["/", "x_()", "sqrt()", ""]


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\frac{a b}{c}", "(a b)/c"),
        (r"\frac{a}{b + c}", "a/(b + c)"),
        (r"\frac{a}{-b}", "a/(-b)"),
        (r"\frac{\frac{a}{b}}{c}", "(a/b)/c"),
        (r"\frac{(a + (b - c))}{[d - 1]}", "(a + (b - c))/[d - 1]"),
        (r"\frac{|q| |k|}{|q \cdot k|}", "(|q| |k|)/|q . k|"),
        (r"\frac12", "1/2"),
        (r"x_{ij}^{10}", "x_ij^10"),
        (r"x_i^{-1} x^{a b}", "x_i^-1 x^(a b)"),
        (r"e^{x_i}", "e^(x_i)"),
    ],
)
def test_brackets_stand_where_a_line_would_be_read_otherwise(latex: str, text: str) -> None:
    assert to_text(latex) == text
