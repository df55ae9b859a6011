"""The causes that a comparison can name, with their explanations; docs/en/diff.md has the same list."""

from __future__ import annotations

from sqrtdk._language import Language
from sqrtdk.messages import Text
from sqrtdk.report.said import read, said

CATALOGUE = ("causes",)
CAUSES = {name: Text(*next(iter(table.items()))) for name, table in read(*CATALOGUE).items()}


def caused(text: str, language: Language) -> str:
    """Translate a cause's sentence, or the words for what one side does.

    Example:
        >>> caused("turns q and k with base 500000 instead of base 10000", "zh"), caused("the last 1 to 3", "zh")
        ('旋转 q 和 k 时用基数 500000，而不是基数 10000', '最后 1 到 3 个')
    """
    return said(text, language, CATALOGUE).strip()
