"""The lab: every claim about sqrt(d_k) is an experiment with a control, an interval and a verdict.

`run` measures one claim, or several one after the other. `CLAIMS` has them by name, and `records` reads a directory
that a run left.

Example:
    >>> import sqrtdk_lab as lab
    >>> lab.run("v-scaling", quick=True).record.outcome.verdict.answer
    'holds'
"""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sqrtdk.extending import no_attribute
from sqrtdk.messages import add_words

if TYPE_CHECKING:
    from sqrtdk_lab.register import CLAIMS as CLAIMS
    from sqrtdk_lab.runner import records as records
    from sqrtdk_lab.runner import run as run

add_words(files(__name__).joinpath("catalogue"))
_HOME = {"CLAIMS": "register", "records": "runner", "run": "runner"}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        no_attribute(__name__, name, _HOME)
    return getattr(import_module(f"sqrtdk_lab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
