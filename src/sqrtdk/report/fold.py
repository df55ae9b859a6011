"""Equal layers folded: what differs only in one integer of the site, and in nothing that a reader is shown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.report.figures import number, ratio
from sqrtdk.report.places import places_text

T = TypeVar("T")

_INTEGER = re.compile(r"(\d+)")
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_MOST_RANGES = 3


@dataclass(frozen=True, slots=True)
class Fold:
    """Calls that are shown as one."""

    site: str  # with the integers that differ as ranges: "model.layers.0-31.self_attn"
    calls: tuple[JudgedCall, ...]

    @property
    def first(self) -> JudgedCall:
        """The call that ran first; what is shown of it holds for all."""
        return self.calls[0]


@dataclass(frozen=True, slots=True)
class FoldedFinding:
    """Findings that are shown as one, with the worst, which comes first in a report, as their speaker."""

    site: str
    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        """The finding whose message is shown."""
        return self.findings[0]


def fold_calls(calls: Iterable[JudgedCall]) -> tuple[Fold, ...]:
    """Fold the calls that differ in one integer of their site and agree in all that one line shows."""

    def shown(judged: JudgedCall) -> Hashable:
        call = judged.call
        return (
            call.index,
            call.module_class,
            call.kind,
            call.heads,
            call.kv_heads,
            call.head_dim,
            call.formula,
            ratio(call.scale.ratio),
            judged.verdict,
            judged.health,
            judged.mistake,
            judged.declared_by,
            judged.reason,
            call.stats is None,
            places_text(call),
        )

    groups = _fold(calls, lambda judged: judged.call.site, shown)
    return tuple(Fold(_with_index(site, group), tuple(group)) for site, group in groups)


def fold_findings(findings: Iterable[Finding]) -> tuple[FoldedFinding, ...]:
    """Fold the findings of one rule that differ in one integer of their site and in the numbers of their message."""

    def shown(finding: Finding) -> Hashable:
        message, fix = (_NUMBER.sub("#", text) for text in (finding.message, finding.fix))
        return finding.rule, finding.severity, str(finding.threshold), message, fix, finding.at

    groups = _fold(findings, lambda finding: finding.site, shown)
    return tuple(FoldedFinding(site, tuple(group)) for site, group in groups)


def fold_sites(sites: Iterable[str]) -> tuple[str, ...]:
    """Fold the sites that differ in one integer; each is named once.

    Example:
        >>> fold_sites(["h.0.attn", "h.1.attn", "pool", "h.1.attn"])
        ('h.0-1.attn', 'pool')
    """
    return tuple(site for site, _ in _fold(dict.fromkeys(sites), lambda site: site, lambda _: None))


def values(folded: FoldedFinding) -> str:
    """Show the values of folded findings: one number, or the range of several.

    Example:
        >>> finding = Finding("r", "warn", "h.0", 101.0, 100.0, "m", "f", "s")
        >>> values(FoldedFinding("h.0", (finding,)))
        '101'
    """
    all_values = [finding.value for finding in folded.findings]
    numbers = [value for value in all_values if isinstance(value, (int, float))]
    if len(numbers) < len(all_values):
        return " / ".join(dict.fromkeys(value if isinstance(value, str) else number(value) for value in all_values))
    low, high = number(min(numbers)), number(max(numbers))
    return low if low == high else f"{low} to {high}"


def ranges(integers: Sequence[int]) -> str:
    """Show integers as ranges.

    Example:
        >>> ranges([0, 1, 2, 3]), ranges([4]), ranges([0, 2, 4, 6]), ranges([0, 1, 3, 4])
        ('0-3', '4', '0,2,..,6', '0-1,3-4')
        >>> ranges([0, 1, 3, 4, 6, 7, 9])
        '0-1,3-4,..,9'
    """
    ordered = sorted(set(integers))
    steps = {after - before for before, after in itertools.pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]},{ordered[1]},..,{ordered[-1]}"
    runs: list[list[int]] = []
    for integer in ordered:
        if runs and integer == runs[-1][1] + 1:
            runs[-1][1] = integer
        else:
            runs.append([integer, integer])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    if len(shown) > _MOST_RANGES:
        shown = [*shown[: _MOST_RANGES - 1], "..", shown[-1]]
    return ",".join(shown)


def _fold(items: Iterable[T], site_of: Callable[[T], str], shown: Callable[[T], Hashable]) -> list[tuple[str, list[T]]]:
    """Group equal items; each group takes the integer of the site that gathers most of them. Order is kept."""
    remaining = list(items)
    buckets: dict[tuple[Hashable, Hashable], list[int]] = {}
    keys: list[list[tuple[Hashable, Hashable]]] = []
    for position, item in enumerate(remaining):
        parts = _INTEGER.split(site_of(item))
        same = shown(item)
        holes = [(*parts[:hole], None, *parts[hole + 1 :]) for hole in range(1, len(parts), 2)] or [tuple(parts)]
        keys.append([(same, hole) for hole in holes])
        for key in keys[-1]:
            buckets.setdefault(key, []).append(position)
    taken: set[int] = set()
    folded: list[tuple[str, list[T]]] = []
    for position in range(len(remaining)):
        if position in taken:
            continue
        group = max(([p for p in buckets[key] if p not in taken] for key in keys[position]), key=len)
        taken.update(group)
        folded.append((_label([site_of(remaining[p]) for p in group]), [remaining[p] for p in group]))
    return folded


def _label(sites: Sequence[str]) -> str:
    if len(set(sites)) == 1:
        return sites[0]
    columns = list(zip(*(_INTEGER.split(site) for site in sites), strict=True))
    return "".join(column[0] if len(set(column)) == 1 else ranges([int(part) for part in column]) for column in columns)


def _with_index(site: str, group: Sequence[JudgedCall]) -> str:
    """Name the root, and number the calls of a site that attends more than once."""
    index = group[0].call.index
    return f"{site or '(root)'}{f' #{index}' if index else ''}"
