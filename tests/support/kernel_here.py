"""Whether the compiled kernel can be built here: its tests run there, and are skipped with the reason elsewhere."""

from __future__ import annotations

import pytest

from sqrtdk.impl.kernel import compiler, libraries


def unable() -> str | None:
    """Why the kernel can't be built here; None where a system and a compiler are there that may do."""
    return libraries.unsupported() or compiler.why_no_compiler()


needs_kernel = pytest.mark.skipif(unable() is not None, reason=f"no compiled kernel: {unable()}")
