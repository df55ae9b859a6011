"""What a rule sees: the judged calls, the model, and a way to run the model once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk.audit.configs import config_at
from sqrtdk.audit.records import SEVERITIES, Finding, JudgedCall
from sqrtdk.audit.verdicts import module_at, template
from sqrtdk.trace.records import AttentionCall, NotMeasured


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
    forward ran, None when that was not watched. `compare` asks for eager against sdpa.
    """

    model: nn.Module
    calls: tuple[JudgedCall, ...]
    mode: str
    rerun: Callable[[bool, Mapping[tuple[str, int], float] | None], Rerun] | None = None
    ran: frozenset[str] | None = None
    compare: bool = True
    dtype: str = ""

    def module(self, site: str) -> nn.Module | None:
        """The module at a site."""
        return module_at(self.model, site)

    def config(self, site: str) -> Any:
        """The config that governs a site."""
        return config_at(self.model, site)


Rule = Callable[[Context], Iterable[Finding | NotMeasured]]


def worst(severities: Iterable[str]) -> str:
    """The gravest of some severities.

    >>> worst(["note", "fail", "warn"])
    'fail'
    """
    return max(severities, key=SEVERITIES.index)


def folded(pairs: Iterable[tuple[JudgedCall, Any]]) -> Iterator[tuple[JudgedCall, Any, str]]:
    """Merge what is equal in layers of the same kind: the first call, its payload, and how many more (as text)."""
    groups: dict[Any, list[tuple[JudgedCall, Any]]] = {}
    for judged, payload in pairs:
        groups.setdefault((template(judged.call.site), payload), []).append((judged, payload))
    for members in groups.values():
        sites = list(dict.fromkeys(judged.call.site for judged, _ in members))
        more = f" (and {len(sites) - 1} more sites like it, up to {sites[-1]})" if len(sites) > 1 else ""
        yield members[0][0], members[0][1], more
