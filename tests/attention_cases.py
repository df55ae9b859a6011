"""Every style of attention as a case, by name, and its trace, run once for all tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

import sqrtdk
from attention_eager import EAGER
from attention_fused import FUSED
from attention_modules import MODULES
from attention_positions import POSITIONS
from attention_rare import RARE
from attention_styles import Case, case
from sqrtdk.tracing import Trace

STYLES = {**EAGER, **POSITIONS, **FUSED, **RARE}
CASES: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(case, style) for name, style in STYLES.items()},
    **MODULES,
}


@functools.cache
def traced(name: str) -> tuple[Case, Trace]:
    """The case and its trace; records are frozen, so tests may share them."""
    made = CASES[name]()
    with sqrtdk.trace(made.model) as run:
        made.run()
    return made, run
