"""What the tests of front ends share holds no tests: without JAX, it can't be imported."""

from __future__ import annotations

collect_ignore = ["libraries.py", "llama.py", "programs.py", "table.py"]
