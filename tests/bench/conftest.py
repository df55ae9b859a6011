"""The scripts of benchmarks/ import one another as a script does: by their names alone."""

from __future__ import annotations

import sys
from pathlib import Path

# Before scripts/, which has a gpu.py of its own.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
