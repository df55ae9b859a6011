"""Every style of attention as a case, by name, and its trace, run once for all tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

import sqrtdk
from sqrtdk.tracing import Trace
from tests.attentions.eager import EAGER
from tests.attentions.fused import FUSED
from tests.attentions.modules import MODULES
from tests.attentions.positions import POSITIONS
from tests.attentions.rare import RARE
from tests.attentions.styles import Case, case

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
