"""Whether the lab is installed: what holds for records of both packages is tested with its own where it is."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TypeVar

import pytest

Case = TypeVar("Case")
LAB = find_spec("sqrtdk_lab") is not None
needs_lab = pytest.mark.skipif(not LAB, reason="the lab is not installed: pip install 'sqrtdk[lab]'")


def of_installed(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Cases by their command lines, without those of the lab's verbs where it is not installed."""
    return {line: case for line, case in cases.items() if LAB or line.split(" ")[0] not in ("lab", "app")}
