"""Records of an audit: findings, judged calls with their health, and the report that holds them."""

from __future__ import annotations

import importlib.metadata
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sqrtdk._shown import Drawn, Saved, Shown
from sqrtdk.audit.cache import CacheForecast
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall, NotAttention, NotMeasured

SCHEMA_VERSION = 1

SEVERITIES = ("note", "warn", "fail", "critical")  # ascending
UNMEASURED = "unmeasured"  # the rule and the verdict for what could not be judged
FAIL_ON = ("note", "warn", UNMEASURED, "fail", "critical", "never")
OK = "ok"
HEALTH = (OK, *SEVERITIES, UNMEASURED)
FAILING = ("fail", "critical")
OUTCOMES = ("failed", "findings", "incomplete", "warnings", "scales", "passed")
SOURCE_BASES = ("root", "packages", "elsewhere")
KEPT, BROKEN, NOT_ASKED = LAW_STATES = ("kept", "broken", "not asked")  # of a law
VERDICTS = ("exact", "declared", "unexplained", UNMEASURED)
# Rules that declare a scale: a family's alone; a norm's of q and k, without gains; that of recurrent states.
DeclaredAs = Literal["family", "norm", "recurrent"]
_ONE_OF_SEVERAL = "rules.joined.call"  # message that names one of several calls at a site


def at_bar(fail_on: str, severity: str, rule: str) -> bool:
    """Return whether a finding counts as a failure under `fail_on`.

    Args:
        fail_on: A severity, "unmeasured" or "never". "unmeasured" counts failures ("fail", "critical") and every
            attention that could not be judged.
        severity: The severity of the finding.
        rule: The name of its rule.
    """
    if fail_on == "never":
        return False
    if fail_on == UNMEASURED:
        return rule == UNMEASURED or severity in FAILING
    return SEVERITIES.index(severity) >= SEVERITIES.index(fail_on)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that a rule found: the site, the value and its threshold, and the fix in one sentence."""

    rule: str  # a key of `rules.RULES`, e.g. "scale_ledger"
    severity: str  # one of SEVERITIES
    site: str
    value: float | str | None
    threshold: float | str | None
    message: str
    fix: str
    source: str  # where the threshold comes from
    at: str | None = None  # file and line of the fault, "myport.py:14"; several are joined by commas
    call: int | None = None  # 0-based index of the call at its site; None: all calls of the site
    consequence: bool = False  # it says what the fault of another finding reaches


@dataclass(frozen=True, slots=True)
class LawAnswer:
    """The answer of a law (`sqrtdk.laws`) about one model."""

    law: str
    about: str  # the input that was changed; "" if the law asks only once
    state: str  # one of STATES
    reason: str = ""  # why it was not asked, or what moved
    site: str = ""  # the first module at which the law is broken
    moved: tuple[bool, ...] = ()  # which positions of a sample moved
    finding: Finding | None = None
    by_length: bool = False  # whether the reason not to ask may lie in the number of tokens


@dataclass(frozen=True, slots=True)
class JudgedCall(Drawn, Shown):
    """An attention call with the verdict on its scale; `call` is what the trace recorded."""

    call: AttentionCall
    verdict: str  # one of VERDICTS
    mistake: str | None = None  # a key of `mistakes.MISTAKES` if unexplained
    declared_by: str | None = None  # e.g. "config.query_pre_attn_scalar = 256", "family t5: scale 1.0 (...)"
    expected: float | None = None  # the effective scale that was declared, or 1/sqrt(head_dim)
    reason: str | None = None  # why unmeasured, or how the mistake was distinguished from its look-alikes
    attribute: str | None = None  # reading of the module's attribute that holds the effective scale, "1/temperature"
    health: str = UNMEASURED  # one of HEALTH; unmeasured: no finding, and no statistics
    declared_as: DeclaredAs | None = None  # the kind of rule in `declared_by`, where a decision hangs on it
    declared_at: str | None = None  # file and line of the config's fields in `declared_by`, "models/x/config.json:12"

    @property
    def site(self) -> str:
        """Module path of the call."""
        return self.call.site

    @property
    def key(self) -> tuple[str, int]:
        """Site, and 0-based index of the call at that site."""
        return self.call.site, self.call.index

    @property
    def formula(self) -> str:
        """What enters the softmax, e.g. "softmax(0.125 * q.k + causal)"."""
        return self.call.formula

    @property
    def sound_but_failing(self) -> bool:
        """Whether the scale is right but something else at the call fails; its verdict is then not shown in green."""
        return self.verdict in ("exact", "declared") and self.health in FAILING

    def __repr__(self) -> str:
        verdict = self.verdict if self.mistake is None else f"{self.verdict}: {self.mistake}"
        return f"JudgedCall({self.call.in_short}, {verdict}, health {self.health})"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that was audited."""

    id: str
    cls: str
    parameters: int
    at: str | None = None  # file and line of what was named: the factory, the config's model type, or the class


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The place of a file whose lines the report names.

    `base` is one of `SOURCE_BASES`: for "root" `path` is relative to `CheckReport.root`, for "packages" to an entry of
    Python's import path, and for "elsewhere" it is absolute.
    """

    file: str  # as in `at`: "myport.py"
    path: str  # with "/"
    base: str


@dataclass(frozen=True, slots=True)
class AttentionSplit:
    """How one attention is split over ranks.

    Attributes:
        site: Module path.
        index: 0-based index among the attentions at this site.
        ranks: The ranks that have a part of it.
        ways: "rows", "heads", "batch", "same", "unlike", "lengths"; () if one rank has all of it.
        order: Order of the tokens: "given" by the inputs, "plain", "zigzag", "striped", "unknown"; "" if each rank has
            all tokens.
    """

    site: str
    index: int
    ranks: tuple[int, ...]
    ways: tuple[str, ...]
    order: str = ""


@dataclass(frozen=True, slots=True)
class RanksOfReport:
    """The ranks of a report, where several run one model.

    Attributes:
        count: Number of ranks.
        attentions: How each attention is split, in the order of `calls`.
        findings: The ranks that have each finding, in the order of `findings`.
    """

    count: int
    attentions: tuple[AttentionSplit, ...]
    findings: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CheckReport(Drawn, Saved, Shown):
    """A whole audit; `sqrtdk.report` draws it for `to_json`, `save` and a notebook."""

    model: ModelInfo
    mode: str  # "static" or "dynamic"
    calls: tuple[JudgedCall, ...]
    not_attention: tuple[NotAttention, ...]
    not_measured: tuple[NotMeasured, ...]
    findings: tuple[Finding, ...]  # worst first
    seed: int = 0
    command: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    fail_on: str = "fail"
    sources: tuple[SourceFile, ...] = ()  # files that the report names, as far as they are known
    root: str = ""  # the repository in which the check ran, else the working directory
    laws: tuple[LawAnswer, ...] = ()
    kv_bytes_per_token: int | None = None  # of the KV cache, in the dtype that ran; None: no row is kept for later ones
    kv_cache: CacheForecast | None = None  # forecast of a cache in fewer bits, if asked for
    kv_formats: tuple[CacheForecast, ...] = ()  # forecasts of all formats, to choose one
    ranks: RanksOfReport | None = None  # None: one process ran the model

    def __repr__(self) -> str:
        verdicts = Counter(judged.verdict for judged in self.calls)
        severities = Counter(finding.severity for finding in self.findings)
        calls = [f"{verdicts[name]} {name}" for name in VERDICTS if verdicts[name]]
        findings = [f"{severities[name]} {name}" for name in reversed(SEVERITIES) if severities[name]]
        counts = f"calls: {', '.join(calls) or 'none'}; findings: {', '.join(findings) or 'none'}"
        return f"CheckReport({self.model.id!r}, {self.outcome}; {counts})"

    @property
    def schema_version(self) -> int:
        """Version of the JSON document."""
        return SCHEMA_VERSION

    @property
    def tool(self) -> dict[str, str]:
        """Name and version of the program that wrote the report."""
        return {"name": "sqrtdk", "version": importlib.metadata.version("sqrtdk")}

    @property
    def unjudged(self) -> tuple[Finding, ...]:
        """The findings on attentions that could not be judged."""
        return tuple(finding for finding in self.findings if finding.rule == UNMEASURED)

    @property
    def worst(self) -> str | None:
        """Severity of the worst finding ("note", "warn", "fail" or "critical"), or None without findings."""
        return max((finding.severity for finding in self.findings), key=SEVERITIES.index, default=None)

    @property
    def outcome(self) -> str:
        """The result in one word, one of `OUTCOMES`; the first of these that applies.

        "failed": a finding fails under `fail_on`. "findings": one is a failure, but `fail_on` lets it pass.
        "incomplete": an attention could not be judged. "warnings": the worst finding is a warning. Else "passed" if
        statistics were computed for every attention, and "scales" if for some only the scale was judged.
        """
        if self.exit_code:
            return "failed"
        if self.worst in FAILING:
            return "findings"
        if self.unjudged:
            return "incomplete"
        if self.worst == "warn":
            return "warnings"
        return "passed" if all(judged.health != UNMEASURED for judged in self.calls) else "scales"

    @property
    def ok(self) -> bool:
        """Whether all was judged and nothing fails: the outcome is "passed", "scales" or "warnings"."""
        return self.outcome in ("passed", "scales", "warnings")

    def repeated(self, entry: NotAttention | NotMeasured) -> bool:
        """Return whether a finding at the same module already contains the reason of an entry.

        Args:
            entry: An item of `not_attention` or `not_measured`.
        """
        return any(entry.site == f.site and _says(f.message, entry.reason) for f in self.unjudged)

    def fails(self, finding: Finding) -> bool:
        """Return whether a finding is at `fail_on` or above.

        "unmeasured" means "fail", and also fails on each attention that could not be judged.
        """
        return at_bar(self.fail_on, finding.severity, finding.rule)

    @property
    def exit_code(self) -> int:
        """1 if a finding fails, else 0; always 0 if `fail_on` is "never"."""
        return int(any(map(self.fails, self.findings)))


def _says(message: object, reason: str) -> bool:
    """Return whether a message is a reason, or the reason with something behind it, such as the formula."""
    while message != reason and isinstance(message, Message):
        message = message.values.get("text", message.values.get("first"))
    return message == reason


def has_nonfinite(call: AttentionCall) -> bool:
    """Return whether a call's logits or output hold NaN or plus infinity, even if the cause is elsewhere."""
    rows = call.stats is not None and any(call.stats.nan_rows)
    return rows or (call.output_rms is not None and not math.isfinite(call.output_rms))


def with_calls_named(findings: Iterable[Finding], sites: Iterable[str]) -> tuple[Finding, ...]:
    """Return the findings, with the number of the call in the messages where a module was called several times.

    A finding on one call of such a module ends in "(call 2 of 12 here)"; ALBERT calls one layer twelve times.

    Args:
        findings: The findings of a run.
        sites: The module path of every call, repeated as often as the module was called.
    """
    calls = Counter(sites)

    def named(finding: Finding) -> Finding:
        if finding.call is None or calls[finding.site] < 2:
            return finding
        which = {"number": finding.call + 1, "total": calls[finding.site]}
        return replace(finding, message=Message(_ONE_OF_SEVERAL, text=finding.message, **which))

    return tuple(map(named, findings))


def without_call(message: str) -> str:
    """Return a message without the words that `with_calls_named` added ("call 2 of 12 here"); others are unchanged."""
    inside = message.values["text"] if isinstance(message, Message) and message.id == _ONE_OF_SEVERAL else None
    return inside if isinstance(inside, str) else message


def about_call(call: AttentionCall, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that count for the health of a call.

    These are findings at the module of the call that concern this call or all calls there, and findings at its
    submodules.
    """

    def counts(finding: Finding) -> bool:
        if finding.site == call.site:
            return finding.call in (None, call.index)
        return bool(call.site) and finding.site.startswith(f"{call.site}.")

    return tuple(filter(counts, findings))


def health(judged: JudgedCall, findings: Iterable[Finding]) -> str:
    """Return one of `HEALTH`: the severity of the worst finding about a call, or "ok" without findings.

    It is "critical" if the call's numbers are not finite, even if the finding names the module where they begin. It is
    "unmeasured" if nothing failed, but the scale could not be judged or no statistics were computed.

    Args:
        judged: The call.
        findings: The findings of the whole run; `about_call` selects those that count.
    """
    if has_nonfinite(judged.call):
        return "critical"
    severities = (finding.severity for finding in about_call(judged.call, findings))
    worst = max(severities, key=SEVERITIES.index, default=OK)
    known = judged.call.stats is not None and judged.verdict != UNMEASURED
    return worst if known or worst in FAILING else UNMEASURED


def with_health(calls: Iterable[JudgedCall], findings: Iterable[Finding]) -> tuple[JudgedCall, ...]:
    """Return copies of the calls, in the same order, with `health` decided from the findings of the whole run."""
    every = tuple(findings)
    return tuple(replace(judged, health=health(judged, every)) for judged in calls)
