"""The language of what people read: asked for, or the one of the environment. JSON, names and errors stay English."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Language = Literal["en", "zh"]
Choice = Literal["auto", "en", "zh-CN"]


def chosen(choice: Choice, environment: Mapping[str, str]) -> Language:
    """The language that a choice means.

    Formula: of `LC_ALL`, `LC_MESSAGES` and `LANG` the first that is set and not empty, as gettext reads them.

    Args:
        choice: "auto" takes the environment's: Chinese where it begins with "zh", else English.
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
