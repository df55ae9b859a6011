"""Writes the report as SARIF 2.1.0 for code scanning: a result for each finding and each check that was not made.

A result's location is the line of code that made the call. Further lines, such as the config's line that declares the
scale, are related locations. URIs of files in the repository are relative to its root.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from sqrtdk._json import json_document
from sqrtdk._sites import ROOT_NAME, site_name
from sqrtdk.audit.records import CheckReport, Finding, SourceFile
from sqrtdk.laws.table import LAWS
from sqrtdk.messages import Message
from sqrtdk.report.check.places import Spot, calls_of_finding, spots
from sqrtdk.report.plain import plain
from sqrtdk.tracing.records import NotMeasured

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
SARIF_LEVELS = {"note": "note", "warn": "warning", "fail": "error", "critical": "error"}
FINGERPRINT = "sqrtdkFinding/v1"
NOT_MEASURED_RULE = "not_measured"  # pseudo-rule for sites that no rule could look at and that have no finding
RULES_WITH_HELP = (  # rules with a title and a help text
    "nonfinite", "scale_ledger", "blocks", "declared_vs_actual", "unmeasured", "softmax_axis", "mask_audit",
    "sliding_window", "padding", "unused", "dropout", "max_logit", "range_forecast", "saturation", "entropy", "flat",
    "responsiveness", "eager_vs_sdpa", "kv_cache", *(row.rule for row in LAWS.values() if row.own_rule),
    NOT_MEASURED_RULE,
)  # fmt: skip
_ROOT, _PACKAGES = "SRCROOT", "PYTHONPATH"  # names of the directories that URIs are relative to
_MOST_RELATED = 9
_NUMBER_IN_TEXT = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


def to_sarif(*reports: CheckReport, not_checked: Mapping[str, str] | None = None) -> str:
    """Draw reports as a SARIF 2.1.0 log with one run for each.

    Severity note becomes level note, warn becomes warning, fail and critical become error. A site that could not be
    looked at and has no finding gets a result of kind "open". Fingerprints contain neither line numbers nor measured
    values, so that they stay the same while code moves.

    Args:
        reports: what `sqrtdk.check` returned, for one model or several.
        not_checked: names of models without a report -> why. They share a run of their own, without results: a run of
            a model that was not checked would close its alerts in code scanning.

    Returns:
        A JSON document that ends with a newline.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> log = json.loads(to_sarif(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ())))
        >>> log["version"], log["runs"][0]["results"]
        ('2.1.0', [])
    """
    runs = list(map(_run, reports))
    ids: Counter[str] = Counter()
    for run in runs:  # "a/b" and "a-b" have the same id, and code scanning takes one run of an id
        id = run["automationDetails"]["id"]
        ids[id] += 1
        if ids[id] > 1:
            run["automationDetails"]["id"] = f"{id.rstrip('/')}-{ids[id]}/"
    if not_checked:
        runs.append(_run_of_the_others(not_checked))
    return json_document({"$schema": SCHEMA, "version": "2.1.0", "runs": runs})


def _run_of_the_others(not_checked: Mapping[str, str]) -> dict[str, Any]:
    """Return the run that says which models were not checked, and why."""
    notifications = [
        {"level": "error", "message": {"text": _message(f"{name}: {why}")}} for name, why in not_checked.items()
    ]
    return {
        "tool": {"driver": _driver([])},
        "automationDetails": {"id": "sqrtdk/not-checked/"},
        "invocations": [
            {"executionSuccessful": False, "exitCode": 2, "toolExecutionNotifications": notifications},
        ],
        "columnKind": "unicodeCodePoints",
        "results": [],
    }


def _driver(ids: Iterable[str]) -> dict[str, Any]:
    version = importlib.metadata.version("sqrtdk")
    return {"name": "sqrtdk", "semanticVersion": version, "rules": [_rule(name) for name in ids]}


def _run(report: CheckReport) -> dict[str, Any]:
    """Return the object `run` of SARIF: the tool with its rules, and the results."""
    missed = [entry for entry in report.not_measured if not report.repeated(entry)]
    # rules of users come behind ours, so that a rule's index stays the same between runs
    ids = list(dict.fromkeys((*RULES_WITH_HELP, *(plain(finding.rule) for finding in report.findings))))
    results = [
        *(_result(report, finding, ids) for finding in report.findings),
        *(_open(report, entry, ids) for entry in missed),
    ]
    _number_fingerprints(results)
    return {
        "tool": {"driver": _driver(ids)},
        # code scanning replaces earlier results of the same id, so each model has its own
        "automationDetails": {"id": f"sqrtdk/{re.sub(r'[^A-Za-z0-9._-]+', '-', report.model.id)[:120]}/"},
        "invocations": [{"executionSuccessful": True, "exitCode": report.exit_code}],
        "originalUriBaseIds": _bases(report),
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {
            "model": plain(report.model.id),
            "class": plain(report.model.cls),
            "mode": report.mode,
            "seed": report.seed,
            "failOn": report.fail_on,
            "attentionCalls": len(report.calls),
            "outcome": report.outcome,
            "laws": {
                plain(f"{answer.law} ({answer.about})" if answer.about else answer.law): answer.state
                for answer in report.laws
            },
            "notes": [plain(str(note)) for note in report.environment.get("notes") or ()],
        },
    }


def _bases(report: CheckReport) -> dict[str, Any]:
    root: dict[str, Any] = {"description": {"text": "The root of the repository that the check ran in."}}
    # outside of a repository the root is not known, and a viewer asks for it
    if report.root:
        root["uri"] = _file_uri(report.root).rstrip("/") + "/"
    packages = {"description": {"text": "A directory of Python's import path, such as site-packages."}}
    return {_ROOT: root, _PACKAGES: packages}


def _rule(name: str) -> dict[str, Any]:
    known = name in RULES_WITH_HELP
    title, text = (str(Message(f"help.{name}.{part}")) if known else name for part in ("title", "text"))
    return {
        "id": name,
        "shortDescription": {"text": f"{title}."},
        "fullDescription": {"text": text},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": "note" if name == NOT_MEASURED_RULE else "warning"},
        "properties": {"tags": ["attention"]},
    }


def _result(report: CheckReport, finding: Finding, ids: list[str]) -> dict[str, Any]:
    """Return the object `result` of SARIF for a finding."""
    site = site_name(finding.site)
    calls = calls_of_finding(report, finding)
    more = {
        "severity": finding.severity,
        "value": _plain_value(finding.value),
        "threshold": _plain_value(finding.threshold),
        "source": plain(finding.source),
        "formulas": [plain(text) for text in dict.fromkeys(judged.call.formula for judged in calls)],
    }
    # viewers show the message alone, so that the fix has to stand in it
    text = f"{site}: {finding.message}. Fix: {finding.fix}"
    rule = plain(finding.rule)
    kind: dict[str, Any] = {"level": SARIF_LEVELS[finding.severity]}
    identity = (finding.rule, finding.site, finding.message)
    return _entry(rule, ids, kind, text, finding.site, spots(report, finding), identity, more)


def _open(report: CheckReport, entry: NotMeasured, ids: list[str]) -> dict[str, Any]:
    """Return a result of kind "open" for a site that was not measured: it is neither right nor wrong."""
    so_far = f"; seen up to there: {entry.formula}" if entry.formula else ""
    text = f"{site_name(entry.site)}: not measured: {entry.reason}{so_far}"
    finding = Finding(NOT_MEASURED_RULE, "note", entry.site, None, None, entry.reason, "", "", entry.at)
    kind = {"kind": "open", "level": "none"}
    identity = (NOT_MEASURED_RULE, entry.site, entry.reason)
    return _entry(NOT_MEASURED_RULE, ids, kind, text, entry.site, spots(report, finding), identity, {})


def _entry(
    rule: str,
    ids: list[str],
    kind: dict[str, Any],
    text: str,
    site: str,
    where: tuple[Spot, ...],
    identity: tuple[str, ...],
    more: dict[str, Any],
) -> dict[str, Any]:
    """Return an object `result` of SARIF.

    Args:
        rule: Name of the rule.
        ids: Names of all rules, in the order of `tool.driver.rules`.
        kind: Its level, or that it is open.
        text: The message.
        site: Module path, which is the logical location.
        where: Source lines; the first is the location, the others are related.
        identity: What makes it the same result in a later run.
        more: Further properties.
    """
    logical = {"fullyQualifiedName": plain(site) or ROOT_NAME, "kind": "module"}
    first: dict[str, Any] = {"physicalLocation": _physical(where[0])} if where else {}
    related = [
        {"id": number, "physicalLocation": _physical(spot), "message": {"text": spot.what}}
        for number, spot in enumerate(where[1 : _MOST_RELATED + 1], 1)
    ]
    result = {
        "ruleId": rule,
        "ruleIndex": ids.index(rule),
        **kind,
        "message": {"text": _message(text)},
        "locations": [first | {"logicalLocations": [logical]}],
        "partialFingerprints": {FINGERPRINT: _fingerprint(identity)},
        "properties": more,
    }
    return result | ({"relatedLocations": related} if related else {})


def _message(text: str) -> str:
    """Return a message with brackets escaped: SARIF reads "[text](target)" as a link, and a name may look like one."""
    return plain(text).replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]") if "](" in text else plain(text)


def _physical(spot: Spot) -> dict[str, Any]:
    return {"artifactLocation": _artifact(spot.source), "region": {"startLine": spot.line}}


def _artifact(source: SourceFile) -> dict[str, Any]:
    if source.base == "elsewhere":
        return {"uri": _file_uri(source.path)}
    return {"uri": _quoted(source.path), "uriBaseId": _ROOT if source.base == "root" else _PACKAGES}


def _file_uri(path: str) -> str:
    return "file://" + _quoted(path if path.startswith("/") else f"/{path}")


def _quoted(path: str) -> str:
    return quote(path.replace("\\", "/"), safe="/~!$&'()*+,;=@", errors="replace")


def _plain_value(value: float | str | None) -> float | str | None:
    return plain(value) if isinstance(value, str) else value


def _fingerprint(identity: Iterable[str]) -> str:
    """Hash rule, site and message without its numbers, so that moved code and drifting values change nothing."""
    rule, site, message = identity
    # JSON, because a separator could stand in a site's name: ("a b", "c") is not ("a", "b c")
    text = json.dumps((rule, site, _NUMBER_IN_TEXT.sub("#", message)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _number_fingerprints(results: Iterable[dict[str, Any]]) -> None:
    """Append ":1", ":2" to equal fingerprints, which equal messages at one site have."""
    # code scanning takes results with equal fingerprints for one
    counts: Counter[str] = Counter()
    for result in results:
        prints = result["partialFingerprints"]
        counts[prints[FINGERPRINT]] += 1
        prints[FINGERPRINT] += f":{counts[prints[FINGERPRINT]]}"
