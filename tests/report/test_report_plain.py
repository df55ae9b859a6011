import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqrtdk.report.plain import plain


@settings(max_examples=50)
@given(st.text(st.characters()))  # lone surrogates included
def test_nothing_invisible_is_left(text: str) -> None:
    shown = plain(text)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode()
    assert plain(shown) == shown


@settings(max_examples=50)
@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_visible_text_is_left_alone(text: str) -> None:
    assert plain(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("[red]x[/]", "[red]x[/]"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert plain(text) == shown
