"""The machine that a measurement ran on."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path


def cpu_name() -> str:
    """The processor's name; Python has none on Linux."""
    with suppress(OSError, ValueError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or "unknown"
