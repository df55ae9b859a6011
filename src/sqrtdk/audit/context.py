"""What a rule sees: the judged calls, the model, and a way to run the model once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sqrtdk.audit.configs import module_at
from sqrtdk.audit.governing import config_at
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tokens import Tokens
from sqrtdk.tracing.records import AttentionCall, NotMeasured
from sqrtdk.tracing.watch.nonfinite import Origin


@dataclass(frozen=True, slots=True)
class Rerun:
    """One more run of the same model on the same inputs.

    Its calls, the floating-point tensors of its output, and how many attentions could not be read.
    """

    calls: tuple[AttentionCall, ...]
    outputs: tuple[Any, ...]
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """The input of every rule.

    `rerun(stats, enlarge)` runs the model again under a trace; None in static mode. `ran` holds the module paths whose
    forward ran, None when that was not watched. `compare` says when to run eager against sdpa: "auto" unless it is
    costly, "always", or "never". `lost` are attentions that ran and could not be read, `idle_or_doubtful` those that
    did not run, and softmaxes of which it is not known whether they are attentions. `unread` are parameters that
    nothing read, `tokens` the inputs' positions that are no padding. `spoiled` are the model's outputs that hold NaN or
    infinity, `infinite` those of them that hold no NaN, and `origin()` searches one more run for the first number that
    is not finite; it raises a `SqrtdkError` where that run fails.
    """

    model: nn.Module
    calls: tuple[JudgedCall, ...]
    mode: str
    rerun: Callable[[bool, Mapping[tuple[str, int], float] | None], Rerun] | None = None
    ran: frozenset[str] | None = None
    compare: str = "auto"
    dtype: str = ""
    lost: tuple[NotMeasured, ...] = ()
    idle_or_doubtful: tuple[NotMeasured, ...] = ()
    unread: frozenset[str] = frozenset()
    tokens: Tokens = field(default_factory=Tokens)
    spoiled: tuple[str, ...] = ()
    infinite: tuple[str, ...] = ()
    origin: Callable[[], Origin | None] | None = None

    def which(self, judged: JudgedCall) -> str:
        """Which of several calls at its site it is, in brackets: layers of one module, as ALBERT's; else nothing."""
        site, index = judged.call.site, judged.call.index
        calls = sum(other.call.site == site for other in self.calls)
        return f" (call {index + 1} of {calls} here)" if calls > 1 else ""

    def module(self, site: str) -> nn.Module | None:
        """The module at a site."""
        return module_at(self.model, site)

    def config(self, site: str) -> Any:
        """The config that governs a site."""
        return config_at(self.model, site)


Rule = Callable[[Context], Iterable[Finding | NotMeasured]]
