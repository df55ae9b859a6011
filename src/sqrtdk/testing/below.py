"""Findings that did not fail their test: which option would have, and their list in the summary of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqrtdk._sites import fold_sites
from sqrtdk.audit.records import SEVERITIES, UNMEASURED, Finding, JudgedCall
from sqrtdk.messages import id_of
from sqrtdk.testing.standing import OUTSIDE, count_text, is_allowed, printable

MOST_LISTED = 10
_MOST_TESTS = 3  # named for each entry


def below_bar(
    findings: Iterable[Finding],
    calls: Sequence[JudgedCall],
    bad: Sequence[Finding],
    allow: Sequence[str],
    marker: str | None,
) -> list[list[str]]:
    """Return one entry for each rule with findings that were neither failed on nor allowed, in types that xdist sends.

    An attention that was not judged is left out, because the summary has a list of these.

    Args:
        findings: of one test.
        calls: of the test.
        bad: findings that the test fails on.
        allow: names that may stand.
        marker: name of the marker if it has its own `fail_on`, which the command line then does not change.

    Returns:
        Lists of severity, what would fail on it, rule and place, and message.
    """
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        if finding in bad or finding.rule == UNMEASURED or is_allowed(finding, calls, allow):
            continue
        alike.setdefault((finding.severity, finding.rule, id_of(finding.message) or finding.message), []).append(
            finding
        )
    return [
        [severity, failed_by(severity, marker), f"{rule}  {_place(group)}", _message(group)]
        for (severity, rule, _), group in alike.items()
    ]


def failed_by(bar: str, marker: str | None) -> str:
    """Return what sets the bar for a test; `marker` as in `below_bar`.

    Example:
        >>> failed_by("warn", None), failed_by("note", "laws")
        ('--sqrtdk-fail-on warn', '@pytest.mark.laws(fail_on="note")')
    """
    return f"--sqrtdk-fail-on {bar}" if marker is None else f'@pytest.mark.{marker}(fail_on="{bar}")'


def _place(group: Sequence[Finding]) -> str:
    sites = dict.fromkeys(finding.site or OUTSIDE for finding in group)
    lines = dict.fromkeys(finding.at for finding in group if finding.at is not None)
    many = f" ({count_text(len(sites), 'site')})" if len(sites) > 1 else ""
    return printable("  ".join([f"{', '.join(fold_sites(sites))}{many}", *lines]))


def _message(group: Sequence[Finding]) -> str:
    """Return the message of all, or of the first site if they differ in their numbers."""
    first = printable(group[0].message)
    return first if len({finding.message for finding in group}) == 1 else f"{first} (the first of them)"


def below_lines(entries: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the lines of the summary: what would fail on them, then the findings, each once with its tests.

    Args:
        entries: node id of a test and an entry of `below_bar`.
    """
    tests: dict[tuple[str, ...], list[str]] = {}
    for node, entry in entries:
        tests.setdefault(tuple(entry), []).append(node)
    listed = sorted(tests, key=lambda entry: (-SEVERITIES.index(entry[0]), entry[1]))
    lines: list[str] = []
    for entry in listed[:MOST_LISTED]:
        severity, option, place, message = entry
        title = f"below the bar, {severity}; fails with {option}:"
        lines += [title] if title not in lines else []
        nodes = tests[entry]
        more = f" and {len(nodes) - _MOST_TESTS} more" if len(nodes) > _MOST_TESTS else ""
        lines += [f"  {place}", f"    {message}", f"    in {', '.join(nodes[:_MOST_TESTS])}{more}"]
    return lines + ([f"below the bar: ... and {len(listed) - MOST_LISTED} more"] if len(listed) > MOST_LISTED else [])
