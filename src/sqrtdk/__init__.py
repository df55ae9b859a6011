"""sqrtdk: attention with the right scale, and an audit of every attention that runs in a PyTorch model.

The scale in question is the `1/sqrt(d_k)` of `softmax(q k^T / sqrt(d_k)) v`. `trace` records what ran, `check` audits
it, `diff` says why two implementations of one model differ, `record` writes what ran to a file. `qk_clip_`,
`fold_scale_` and `entropy_floor` put a model's attention right. All are imported on first use, so that `import sqrtdk`
and `sqrtdk --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqrtdk import answers as answers
    from sqrtdk import errors as errors
    from sqrtdk import extending as extending
    from sqrtdk import frontends as frontends
    from sqrtdk import laws as laws
    from sqrtdk import monitor as monitor
    from sqrtdk import nn as nn
    from sqrtdk import positions as positions
    from sqrtdk import recording as recording
    from sqrtdk import repair as repair
    from sqrtdk import scales as scales
    from sqrtdk import scores as scores
    from sqrtdk import stats as stats
    from sqrtdk import testing as testing
    from sqrtdk import theory as theory
    from sqrtdk import tracing as tracing
    from sqrtdk._attention import attention as attention
    from sqrtdk._check import check as check
    from sqrtdk._explain import explain as explain
    from sqrtdk._measure import measure as measure
    from sqrtdk._ring import merge as merge
    from sqrtdk._ring import ring_attention as ring_attention
    from sqrtdk.audit.records import CheckReport as CheckReport
    from sqrtdk.compare.diff import diff as diff
    from sqrtdk.compare.records import DiffReport as DiffReport
    from sqrtdk.errors import SqrtdkError as SqrtdkError
    from sqrtdk.monitor.watch import watch as watch
    from sqrtdk.recording.record import record as record
    from sqrtdk.repair.clip import qk_clip_ as qk_clip_
    from sqrtdk.repair.fold import fold_scale_ as fold_scale_
    from sqrtdk.repair.reparam import entropy_floor as entropy_floor
    from sqrtdk.stats.request import AuxRequest as AuxRequest
    from sqrtdk.tracing.trace import trace as trace

__version__ = "0.1.0"

_HOME = {
    "attention": "sqrtdk._attention",
    "AuxRequest": "sqrtdk.stats.request",
    "check": "sqrtdk._check",
    "CheckReport": "sqrtdk.audit.records",
    "diff": "sqrtdk.compare.diff",
    "DiffReport": "sqrtdk.compare.records",
    "entropy_floor": "sqrtdk.repair.reparam",
    "explain": "sqrtdk._explain",
    "fold_scale_": "sqrtdk.repair.fold",
    "measure": "sqrtdk._measure",
    "merge": "sqrtdk._ring",
    "qk_clip_": "sqrtdk.repair.clip",
    "record": "sqrtdk.recording.record",
    "ring_attention": "sqrtdk._ring",
    "SqrtdkError": "sqrtdk.errors",
    "trace": "sqrtdk.tracing.trace",
    "watch": "sqrtdk.monitor.watch",
}
__all__ = [*_HOME]
_ROOMS = (
    "answers", "errors", "extending", "frontends", "integrations", "kv", "laws", "monitor", "nn", "positions",
    "recording", "repair", "report", "scales", "scores", "stats", "testing", "theory", "tracing",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"sqrtdk.{name}")
    if name not in _HOME:
        import_module("sqrtdk._guesses").no_attribute(__name__, name, [*_HOME, *_ROOMS])
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, *_ROOMS, "__version__"])
