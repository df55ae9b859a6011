"""Makes names and texts of the audited model safe to show.

A module name is whatever the author of a checkpoint wrote. Terminal escape sequences, line breaks and controls that
reverse the direction of text must be shown, never executed. HTML's own characters are escaped by the template.
"""

from __future__ import annotations

import unicodedata

# control, format (bidi, zero width), lone surrogate, unassigned, line and paragraph separator
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"})
_SHORT_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def plain(text: str) -> str:
    r"""Return `text` with every character that has no glyph of its own written as an escape.

    Args:
        text: any string, lone surrogates included.

    Returns:
        A string without control characters, bidirectional or zero-width controls, or line breaks.

    Example:
        >>> print(plain("layer\u202e.0\x1b[31m\n"))
        layer\u202e.0\x1b[31m\n
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(char) if unicodedata.category(char) in _HIDDEN_CATEGORIES else char for char in text)


def plain_lines(text: str) -> str:
    r"""Return `text` with each line made plain and the line breaks kept.

    Example:
        >>> print(plain_lines("one\x07\ntwo"))
        one\x07
        two
    """
    return "\n".join(map(plain, text.split("\n")))


def _visible(char: str) -> str:
    code = ord(char)
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
