"""All rows at once: every L x S matrix is held. The reference, and what small calls run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqrtdk.impl.call import Call
from sqrtdk.impl.rows import attend
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from sqrtdk._shapes import Output


def dense(call: Call) -> tuple[Output, AuxOutput]:
    """Output (..., Hq, L, Ev) and statistics (..., Hq, L)."""
    return attend(call, 0, call.length)
