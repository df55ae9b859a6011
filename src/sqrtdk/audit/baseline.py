"""A model's ledger, kept in a file that is reviewed; a later run is compared with it.

The file has one line for each attention: its formula, ratio, verdict, and kinds of findings. The comparison fails if a
formula, ratio or verdict changes, if an attention is added or removed, or if a new finding reaches the bar. What the
file already holds never fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqrtdk._records import quote
from sqrtdk.audit.records import SEVERITIES, UNMEASURED, CheckReport, Finding, about_call, at_bar
from sqrtdk.audit.tolerance import is_close
from sqrtdk.errors import BaselineError

BASELINE_VERSION = 1
CHANGES = ("added", "removed", "changed", "new finding", "gone finding")
WRITE_ANEW = "Write it anew with --update --force, and review what changes."
_NUMBER_IN_FORMULA = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """What a baseline keeps of one attention, or of a module without a judged attention that has a finding."""

    site: str
    index: int | None  # of the call at its site; None if there is no call
    formula: str | None
    ratio: float | None  # effective scale times sqrt(head_dim)
    verdict: str | None  # one of VERDICTS; None without an attention
    mistake: str | None
    findings: tuple[str, ...]  # "fail scale_ledger", each kind once, worst first

    @property
    def key(self) -> tuple[str, int | None]:
        """The module path and the index of the call there (None without a call); unique in a ledger."""
        return self.site, self.index

    @property
    def judgement(self) -> str:
        """The verdict as text, followed by the name of the mistake if there is one: "unexplained: missing"."""
        return f"{self.verdict}: {self.mistake}" if self.mistake else str(self.verdict)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The lines of a model, in the order of their sites, and the values of its config.json, by dotted path."""

    model: str
    mode: str
    lines: tuple[LedgerLine, ...]
    config: Mapping[str, Any] = field(default_factory=dict)  # empty if it has no config, or of an older file


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """One difference between a run and its baseline; `fails` says whether it counts as a failure under `fail_on`."""

    kind: str  # one of CHANGES
    site: str
    index: int | None
    what: str  # "formula", "ratio", "verdict", "attention", "finding"
    before: str | None
    after: str | None
    fails: bool
    follows_from: str | None = None  # the config's field that makes it, seen by setting the value back


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A value of the config that is not what the baseline has; None: the config does not have it."""

    field: str  # dotted path
    before: Any
    after: Any
    at: str | None  # "models/a/config.json:7"; None where the field is gone
    fails: bool = False  # whether changes that fail follow from it


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """The result of comparing a run with a baseline: the changes, and how many attentions are as they were."""

    file: str
    model: str
    mode: str
    changes: tuple[LedgerChange, ...]  # the failing ones first
    unchanged: int  # attentions
    unjudged: int  # attentions of this run that could not be judged, known to the baseline or not
    fail_on: str
    config: tuple[ConfigChange, ...] = ()  # those with consequences first

    @property
    def exit_code(self) -> int:
        """The exit status of the command: 1 if a change fails at the comparison's `fail_on`, else 0."""
        return int(any(change.fails for change in self.changes))


def ledger_of(report: CheckReport) -> Ledger:
    """Return the ledger of a report: what a baseline file keeps of it.

    There is one line for each attention that was judged, with its formula, scale ratio (six digits), verdict and the
    kinds of its findings, and one for each other module path that has a finding. Lines are sorted by path.
    """
    lines: list[LedgerLine] = []
    rest = {id(finding): finding for finding in report.findings}
    for judged in report.calls:
        call, here = judged.call, about_call(judged.call, report.findings)
        ratio = None if call.scale.ratio is None else float(f"{call.scale.ratio:.6g}")
        lines.append(LedgerLine(*judged.key, call.formula, ratio, judged.verdict, judged.mistake, _kinds(here)))
        for finding in here:
            rest.pop(id(finding), None)
    # The rest are findings on an attention that was not read, or on a site without one.
    for site in dict.fromkeys(finding.site for finding in rest.values()):
        kinds = _kinds(finding for finding in rest.values() if finding.site == site)
        unread = any(kind.endswith(f" {UNMEASURED}") for kind in kinds)
        lines.append(LedgerLine(site, None, None, None, UNMEASURED if unread else None, None, kinds))
    return Ledger(report.model.id, report.mode, tuple(sorted(lines, key=_order)))


def _kinds(findings: Iterable[Finding]) -> tuple[str, ...]:
    kinds = {(-SEVERITIES.index(finding.severity), finding.rule) for finding in findings}
    return tuple(f"{SEVERITIES[-worst]} {rule}" for worst, rule in sorted(kinds))


def _order(line: LedgerLine) -> tuple[Any, ...]:
    """Return a sort key that compares the numbers in a site as numbers: layer 9 before layer 10."""
    # At most 18 digits: int() refuses the thousands that an untrusted site may hold.
    parts = re.split(r"([0-9]{1,18})", line.site)
    return [
        (int(part), "") if odd % 2 else (-1, part) for odd, part in enumerate(parts)
    ], -1 if line.index is None else line.index


def compare_with_baseline(before: Ledger, report: CheckReport, file: str) -> BaselineComparison:
    """Compare a report with a baseline.

    Args:
        before: The ledger of the baseline.
        report: The report of this run; its `fail_on` decides which changes fail.
        file: Path of the baseline, for the messages.

    Returns:
        The changes, those that fail first, and the numbers of unchanged attentions and of attentions without a verdict.

    Raises:
        BaselineError: Only one of the two is static, or the run has two calls with the same site and index.
    """
    now = ledger_of(report)
    if before.mode != now.mode:
        raise BaselineError(
            f"{quote(file)} is of a {before.mode} check, and this one is {now.mode}",
            hint="Give --static to both or to neither.",
        )
    old, new = by_key(before.lines, quote(file)), by_key(now.lines, "this run")
    changes = [
        change
        for key in sorted({*old, *new}, key=lambda key: _order(new.get(key) or old[key]))
        for change in _changes(old.get(key), new.get(key), report.fail_on)
    ]
    loud = {(change.site, change.index) for change in changes if change.kind in CHANGES[:3]}  # added, removed, changed
    attentions = [key for key, line in new.items() if line.verdict is not None]
    unchanged = sum(key in old and key not in loud for key in attentions)
    unjudged = sum(new[key].verdict == UNMEASURED for key in attentions)
    ordered = tuple(sorted(changes, key=lambda change: not change.fails))
    return BaselineComparison(file, now.model, now.mode, ordered, unchanged, unjudged, report.fail_on)


def by_key(lines: Iterable[LedgerLine], whose: str) -> dict[tuple[str, int | None], LedgerLine]:
    """Return lines by site and index.

    Args:
        lines: Of one ledger.
        whose: What an error calls the ledger.

    Raises:
        BaselineError: Two lines have the same site and index.
    """
    ordered: dict[tuple[str, int | None], LedgerLine] = {}
    for line in lines:
        if line.key in ordered:
            place = f"{quote(line.site)}, index {line.index}"
            raise BaselineError(f"{whose} has two lines of {place}", hint=WRITE_ANEW)
        ordered[line.key] = line
    return ordered


def _changes(old: LedgerLine | None, new: LedgerLine | None, fail_on: str) -> Iterable[LedgerChange]:
    line = new or old
    assert line is not None
    loud = fail_on != "never"
    if (old is None or new is None) and line.verdict is not None:
        said = f"{line.formula or 'not read'}  {line.judgement}"
        kind, before, after = ("added", None, said) if old is None else ("removed", said, None)
        yield LedgerChange(kind, *line.key, "attention", before, after, loud)
    elif old is not None and new is not None:
        for what, before, after in (
            ("formula", old.formula, new.formula),
            ("ratio", _text(old.ratio), _text(new.ratio)),
            ("verdict", old.judgement, new.judgement),
        ):
            if not same_formula(before, after):
                yield LedgerChange("changed", *line.key, what, before, after, loud)
    known, now = (side.findings if side else () for side in (old, new))
    for kind in now:
        if kind not in known:
            severity, rule = kind.split(" ", 1)
            yield LedgerChange("new finding", *line.key, "finding", None, kind, at_bar(fail_on, severity, rule))
    # A removed line is reported as a whole, and not by its findings.
    for kind in known if new else ():
        if kind not in now:
            yield LedgerChange("gone finding", *line.key, "finding", kind, None, False)


def _text(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.6g}"


def same_formula(old: str | None, new: str | None) -> bool:
    """Return whether two formulas agree: the words exactly, the numbers within the 1% of a scale.

    Example:
        >>> same_formula("softmax(0.125 * q.k)", "softmax(0.1251 * q.k)")
        True
        >>> same_formula("softmax(0.125 * q.k)", "softmax(0.125 * q.k + causal)")
        False
    """
    if old is None or new is None:
        return old == new
    if _NUMBER_IN_FORMULA.split(old) != _NUMBER_IN_FORMULA.split(new):
        return False
    pairs = zip(_NUMBER_IN_FORMULA.findall(old), _NUMBER_IN_FORMULA.findall(new), strict=True)
    return all(one == other or is_close(float(other), float(one)) for one, other in pairs)
