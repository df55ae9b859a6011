"""Whether the compiled kernel can be built here: its tests run there, and are skipped with the reason elsewhere."""

from __future__ import annotations

import pytest

from sqrtdk.impl.kernel import compiler, libraries


def unable() -> str | None:
    """Why the kernel can't be built here; None where a system and a compiler are there that may do."""
    return libraries.unsupported() or compiler.why_no_compiler()


def takes(target: str) -> bool:
    """Whether this CPU runs a kernel that was compiled for one of `TARGETS`."""
    return target in libraries.targets_here() and libraries._features().issuperset(libraries.TARGETS[target].features)


needs_kernel = pytest.mark.skipif(unable() is not None, reason=f"no compiled kernel: {unable()}")
