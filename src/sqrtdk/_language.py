"""The language of texts for people: as requested, or as the environment says. JSON and names stay English."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Language = Literal["en", "zh"]
Choice = Literal["auto", "en", "zh-CN"]


def chosen(choice: Choice, environment: Mapping[str, str]) -> Language:
    """Return the language of a choice.

    Formula: the first of `LC_ALL`, `LC_MESSAGES` and `LANG` that is not empty, in gettext's order.

    Args:
        choice: "auto" takes the environment's: Chinese if it begins with "zh", else English.
        environment: `os.environ`.

    Returns:
        "en" or "zh".

    Example:
        >>> chosen("auto", {"LANG": "zh_CN.UTF-8"}), chosen("auto", {"LC_ALL": "C", "LANG": "zh_CN.UTF-8"})
        ('zh', 'en')
        >>> chosen("zh-CN", {}), chosen("en", {"LANG": "zh_CN.UTF-8"})
        ('zh', 'en')
    """
    if choice != "auto":
        return "zh" if choice == "zh-CN" else "en"
    set_ones = (environment.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return "zh" if next(filter(None, set_ones), "").lower().startswith("zh") else "en"
