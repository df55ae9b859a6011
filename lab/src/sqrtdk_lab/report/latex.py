"""Turns LaTeX formulas into plain text for the terminal, as the claims' sentences write them: sqrt(d_k), q . k.

Spacing follows the author's commands. A side of a fraction gets brackets if it is a sum or a product. Only commands
that the register's formulas use are known; others stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LATEX_TOKEN = re.compile(r"\\left\s*(?P<opening>\S)\s*|\s*\\right(?P<closing>\S)|\\partial\s*|\\[A-Za-z]+|\\.|\s+|.")
_WIDE_BLANK = "\t"  # stands for a wide blank (\quad) until the whole text is put together
_UNICODE_BY_COMMAND = {
    **{rf"\{name}": name for name in ("cos", "epsilon", "eta", "log", "max", "min", "mu", "sigma", "tanh", "theta")},
    **{rf"\{name}": name for name in ("Delta", "Phi")},
    r"\partial": "d",
    r"\sum": "sum",
    r"\#": "#",
    r"\cdot": ".",
    r"\pm": "+-",
    r"\top": "T",
    r"\Vert": "||",
    r"\approx": "~=",
    r"\propto": "~",
    r"\sim": "~",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ll": "<<",
    r"\gg": ">>",
    r"\neq": "!=",
    r"\Rightarrow": "=>",
    r"\Leftrightarrow": "<=>",
    r"\,": " ",
    r"\;": " ",
    r"\quad": _WIDE_BLANK,
    r"\qquad": _WIDE_BLANK,
}
_TEXT_COMMANDS = (r"\mathrm", r"\text")
_CALLS = {r"\sqrt": "sqrt", r"\bar": "mean"}
_BARE_SCRIPT = re.compile(
    r"-?\d+|[A-Za-z]+|\*|\([^()]*\)"
)  # an index or exponent that needs no brackets: d_k, x^2, z_(1)
_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\|[^|]*\|")


def to_text(latex: str) -> str:
    r"""Return a formula as plain text.

    Args:
        latex: the formula in LaTeX, without dollar signs.

    Example:
        >>> to_text(r"\frac{\partial L}{\partial q} = s \, K^\top J, \quad s = \frac{1}{2 \sqrt{d_k}}")
        'dL/dq = s K^T J,  s = 1/(2 sqrt(d_k))'
        >>> to_text(r"p_{\max} \le e^{-(z_{(1)} - z_{(2)})}")
        'p_max <= e^(-(z_(1) - z_(2)))'
    """
    text = _group(_LATEX_TOKEN.finditer(latex))
    return re.sub(r"\s+", lambda blank: "  " if _WIDE_BLANK in blank[0] else " ", text).strip()


def _group(tokens: Iterator[re.Match[str]]) -> str:
    """Return the text up to the brace that closes this group, or up to the end."""
    pieces = []
    for token in tokens:
        if token[0] == "}":
            break
        pieces.append(_piece(token, tokens))
    return "".join(pieces)


def _piece(token: re.Match[str], tokens: Iterator[re.Match[str]]) -> str:
    """Return the text of a token and its arguments."""
    sign = token[0].strip() or " "
    if delimiter := token["opening"] or token["closing"]:  # \left( and \right): plain text needs the bracket alone
        return delimiter
    if sign == "{":
        return _group(tokens)
    if sign in "_^":
        script = _argument(tokens)
        return sign + (script if _BARE_SCRIPT.fullmatch(script) else f"({script})")
    if sign == r"\frac":
        return f"{_operand(_argument(tokens))}/{_operand(_argument(tokens))}"
    if sign in _CALLS:
        return f"{_CALLS[sign]}({_argument(tokens)})"
    return _argument(tokens) if sign in _TEXT_COMMANDS else _UNICODE_BY_COMMAND.get(sign, sign)


def _argument(tokens: Iterator[re.Match[str]]) -> str:
    """Return the text of the next argument: a group in braces or a single token."""
    for token in tokens:
        if token[0].strip():
            return _piece(token, tokens)
    return ""


def _operand(text: str) -> str:
    """Return a side of a fraction, in brackets if it has more than one factor."""
    inside, outside = "", text  # strip brackets from inside out: operators within them need no brackets of ours
    while inside != outside:
        inside, outside = outside, _BRACKETS.sub("", outside)
    return f"({text})" if re.search(r"[\s+/-]", outside) else text
