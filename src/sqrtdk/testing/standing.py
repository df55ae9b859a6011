"""Which findings fail a test: those at the bar or above it that are not allowed to stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.records import FAIL_ON, SEVERITIES, UNMEASURED, Finding, JudgedCall
from sqrtdk.audit.rules import RULES
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.laws.table import FINDINGS

KINDS = frozenset({*RULES, *FINDINGS, *MISTAKES, "unexplained"})  # what `allow` may name besides sites
_OF_SCALE = ("scale_ledger", "declared_vs_actual", "blocks", "responsiveness")


def as_allowed(allow: Any) -> tuple[str, ...]:
    """`allow` as a tuple of names; one name may stand alone.

    Raises:
        InvalidTypeError: it is neither a name nor several.

    Example:
        >>> as_allowed("missing"), as_allowed(["decoder.*", "twice"])
        (('missing',), ('decoder.*', 'twice'))
    """
    names = (allow,) if isinstance(allow, str) else allow
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidTypeError(
            f"allow is {allow!r}", hint="Give sites, or kinds of verdicts, as strings: allow=('layers.0.attn', 'twice')"
        )
    return tuple(names)


def check_fail_on(fail_on: Any, choices: Sequence[str] = FAIL_ON) -> None:
    """Refuse a bar that there is not.

    Raises:
        InvalidValueError: it is none of `choices`.
    """
    if fail_on not in choices:
        raise InvalidValueError(f"fail_on is {fail_on!r}", hint=f"Use one of: {', '.join(choices)}.")


def check_names(allow: Iterable[str], sites: Collection[str], kinds: Collection[str] = KINDS) -> None:
    """Refuse a name that can allow nothing: a site that has gone, or a slip of the pen.

    Raises:
        InvalidValueError: a name is neither a kind nor matches a site.
    """
    for name in allow:
        if name not in kinds and not any(matches(site, name) for site in sites):
            raise InvalidValueError(
                f"allow names {name!r}, which is no site of this run and no kind of verdict",
                hint=f"Sites: {', '.join(sorted(sites)) or 'none'}. Kinds: {', '.join(sorted(kinds))}.",
            )


def matches(site: str, name: str) -> bool:
    """Whether `name` is the site, or a pattern that it fits, as "layers.*.attn"."""
    return site == name or fnmatchcase(site, name)


def is_allowed(finding: Finding, calls: Sequence[JudgedCall], allow: Sequence[str]) -> bool:
    """Whether a finding may stand: its site, its rule, or every mistake of a scale at its site is allowed."""
    if finding.rule in allow or any(matches(finding.site, name) for name in allow):
        return True
    wrong = [one for one in calls if one.call.site == finding.site and one.verdict == "unexplained"]
    if finding.rule not in _OF_SCALE or not wrong:
        return False
    return all(one.verdict in allow or one.mistake in allow for one in wrong)


def failing(
    findings: Iterable[Finding], calls: Sequence[JudgedCall], fail_on: str, allow: Sequence[str]
) -> tuple[Finding, ...]:
    """The findings at `fail_on` or above that may not stand; "unmeasured" is "fail", and what could not be judged."""
    if fail_on == "never":
        return ()
    bar = SEVERITIES.index("fail" if fail_on == UNMEASURED else fail_on)
    return tuple(
        finding
        for finding in findings
        if (SEVERITIES.index(finding.severity) >= bar or (fail_on == UNMEASURED and finding.rule == UNMEASURED))
        and not is_allowed(finding, calls, allow)
    )
