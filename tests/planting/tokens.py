"""Changes of a C++ file's tokens, see `changes`.

Of C++ there is no syntax tree at hand. Tokens whose brackets are matched tell pieces apart as well, and leave the
kernel alone: hooks that a compiler's flag turns into errors would stand in the middle of its formulas, more than thirty
of them, and in every library that is built.

A letter stands for tokens whose brackets match, as few as fit, without a comma or a semicolon outside of brackets; a
pattern neither begins nor ends with one. What a pattern names are the language's words and the processor's
instructions, or a library's; no variable, function or constant of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.planting.changes import LETTER, Planted, the_one

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | [A-Za-z_]\w*
      | \.?\d(?:[eEpP][+-]|[\w.])*
      | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'
      | -> | :: | \+\+ | -- | && | \|\| | << | [-+*/%&|^=!<>]= | .""",
    re.VERBOSE | re.DOTALL,
)
CLOSING = {"(": ")", "[": "]", "{": "}"}
# What a pattern may name.
WORDS = re.compile(r"_mm\w+|std|static_cast|for|if|return|float|double|int64_t")
Letters = dict[str, tuple["Token", ...]]


class Token(NamedTuple):
    text: str
    start: int  # in the file
    end: int


def tokens_of(text: str) -> list[Token]:
    """All but spaces and comments."""
    return [Token(m[0], m.start(), m.end()) for m in TOKEN.finditer(text) if m["space"] is None]


def changed_text(text: str, planted: Planted) -> str:
    """The file's text with the error in it."""
    (change,) = planted.changes
    assert change.new is not None, f"{planted.place}: nothing is changed"
    tokens, pattern = tokens_of(text), _texts(tokens_of(change.old))
    assert not LETTER.fullmatch(pattern[0]), f"a pattern begins with no letter: {change.old}"
    assert not LETTER.fullmatch(pattern[-1]), f"a pattern ends with no letter: {change.old}"
    names = {name for name in re.findall(r"\b[A-Za-z_]\w*", f"{change.old} {change.new}") if not LETTER.fullmatch(name)}
    foreign = sorted(name for name in names if not WORDS.fullmatch(name))
    assert not foreign, f"{planted.place}: {', '.join(foreign)} is a name of the kernel; a letter stands for it"
    matches = [
        (body[start:stop], letters)
        for body in _bodies(tokens, planted)
        for start in range(len(body))
        for stop, letters in list(_matches(body, start, pattern, {}))[:1]
    ]
    piece, letters = the_one(matches, change, planted.place)

    def meaning(letter: re.Match[str]) -> str:
        assert letter[0] in letters, f"{planted.place}: {letter[0]} stands for nothing"
        return text[letters[letter[0]][0].start : letters[letter[0]][-1].end]

    new = LETTER.sub(meaning, change.new)
    assert _texts(tokens_of(new)) != _texts(piece), f"{planted.place}: it is already so: {change.new}"
    return text[: piece[0].start] + new + text[piece[-1].end :]


def _texts(tokens: Iterable[Token]) -> list[str]:
    return [token.text for token in tokens]


def _bodies(tokens: list[Token], planted: Planted) -> list[list[Token]]:
    """What is between the braces of the class, or of the functions, of that name."""
    bodies = []
    for at, token in enumerate(tokens[:-1]):
        if token.text == planted.name:
            brace = _behind(tokens, at + 1) if tokens[at + 1].text == "(" else at + 1
            brace += tokens[brace].text == "const"
            if tokens[brace].text == "{":
                bodies.append(tokens[brace + 1 : _behind(tokens, brace) - 1])
    assert bodies, f"{planted.place}: there is no such place"
    return bodies


def _behind(tokens: list[Token], opening: int) -> int:
    """The token behind the bracket that closes this one."""
    at, end = opening + 1, CLOSING[tokens[opening].text]
    while tokens[at].text != end:
        at = _behind(tokens, at) if tokens[at].text in CLOSING else at + 1
    return at + 1


def _matches(tokens: list[Token], at: int, pattern: list[str], letters: Letters) -> Iterator[tuple[int, Letters]]:
    """The token behind what is like the pattern from here on, and what the letters stand for."""
    if not pattern:
        yield at, letters
    elif LETTER.fullmatch(pattern[0]):
        for stop in _pieces(tokens, at):
            piece = tuple(tokens[at:stop])
            if _texts(letters.get(pattern[0], piece)) == _texts(piece):
                yield from _matches(tokens, stop, pattern[1:], letters | {pattern[0]: piece})
    elif at < len(tokens) and tokens[at].text == pattern[0]:
        yield from _matches(tokens, at + 1, pattern[1:], letters)


def _pieces(tokens: list[Token], at: int) -> Iterator[int]:
    """Where a letter that begins here may end, the next first."""
    while at < len(tokens) and tokens[at].text not in {",", ";", *CLOSING.values()}:
        at = _behind(tokens, at) if tokens[at].text in CLOSING else at + 1
        yield at
