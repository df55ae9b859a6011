"""Tracing: which attentions ran in a model, and the formula that reached each softmax.

The package is callable: `sqrtdk.trace(model)` is `sqrtdk.trace.trace(model)`.
"""

import sys
from collections.abc import Mapping
from types import ModuleType

from torch import nn

from sqrtdk.trace._trace import Trace as Trace
from sqrtdk.trace._trace import trace as trace
from sqrtdk.trace.records import AttentionCall as AttentionCall
from sqrtdk.trace.records import Factor as Factor
from sqrtdk.trace.records import Mask as Mask
from sqrtdk.trace.records import NotAttention as NotAttention
from sqrtdk.trace.records import NotMeasured as NotMeasured
from sqrtdk.trace.records import Scale as Scale
from sqrtdk.trace.records import Stage as Stage


class _Callable(ModuleType):
    """A package and a function share the name `sqrtdk.trace`; this makes either use of it right."""

    def __call__(
        self,
        model: nn.Module | None = None,
        *,
        stats: bool = True,
        numeric: bool = True,
        enlarge: Mapping[tuple[str, int], float] | None = None,
    ) -> Trace:
        return trace(model, stats=stats, numeric=numeric, enlarge=enlarge)


_Callable.__call__.__doc__ = trace.__doc__
sys.modules[__name__].__class__ = _Callable
