"""Whether the lab is installed: what holds for records of both packages is tested with its own where it is."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

LAB = find_spec("sqrtdk_lab") is not None
needs_lab = pytest.mark.skipif(not LAB, reason="the lab is not installed: pip install 'sqrtdk[lab]'")
