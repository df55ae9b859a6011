"""The health of a call: the worst that any rule, those on the scale included, found where it ran."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from sqrtdk.audit.records import FAILING, OK, SEVERITIES, UNMEASURED, Finding, JudgedCall
from sqrtdk.tracing.records import AttentionCall

_WHICH = re.compile(r"\(call (\d{1,9}) of \d+ here\)$")


def broken(call: AttentionCall) -> bool:
    """Whether a call's logits or output hold NaN or plus infinity, whatever holds the cause."""
    rows = call.stats is not None and any(call.stats.nan_rows)
    return rows or (call.output_rms is not None and not math.isfinite(call.output_rms))


def at_site(site: str, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that count for a call: those at its site or inside it."""
    return tuple(
        finding for finding in findings if finding.site == site or (site and finding.site.startswith(f"{site}."))
    )


def _is_of(call: AttentionCall, finding: Finding) -> bool:
    """Whether a finding at a call's site is not that of another call there, as `Context.which` says."""
    named = _WHICH.search(finding.message)
    return named is None or int(named[1]) == call.index + 1


def health(judged: JudgedCall, findings: Iterable[Finding]) -> str:
    """One of `HEALTH`: severity of the worst finding at the call's site or inside it, else "ok".

    "critical" where its numbers are not finite; the finding stands where that begins. "unmeasured" where nothing
    failed, and the scale could not be judged or no statistics were taken.
    """
    if broken(judged.call):
        return "critical"
    here = (finding for finding in at_site(judged.call.site, findings) if _is_of(judged.call, finding))
    worst = max((entry.severity for entry in here), key=SEVERITIES.index, default=OK)
    known = judged.call.stats is not None and judged.verdict != UNMEASURED
    return worst if known or worst in FAILING else UNMEASURED


def with_health(calls: Iterable[JudgedCall], findings: Iterable[Finding]) -> tuple[JudgedCall, ...]:
    """The calls, each with its health by these findings."""
    every = tuple(findings)
    return tuple(replace(judged, health=health(judged, every)) for judged in calls)
