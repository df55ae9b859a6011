"""The lab: every claim about sqrt(d_k) is an experiment with a control, an interval and a verdict.

`run` measures one claim, or several one after the other. `CLAIMS` has them by name, and `records` reads a directory
that a run left.

Example:
    >>> from sqrtdk import lab
    >>> lab.run("v-scaling", quick=True).record.outcome.verdict.answer
    'holds'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqrtdk.lab.register import CLAIMS as CLAIMS
    from sqrtdk.lab.runner import records as records
    from sqrtdk.lab.runner import run as run

_HOME = {"CLAIMS": "register", "records": "runner", "run": "runner"}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        import_module("sqrtdk._guesses").no_attribute(__name__, name, _HOME)
    return getattr(import_module(f"sqrtdk.lab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
