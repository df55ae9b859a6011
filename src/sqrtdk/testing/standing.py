"""Decides which findings fail a test (at the bar or above, and not allowed), and writes the text of the failure.

The text reads like a diff: the site, the formula that ran, the expected formula, and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sqrtdk._sites import ROOT_NAME, fold_sites
from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.records import FAIL_ON, SEVERITIES, UNMEASURED, Finding, JudgedCall
from sqrtdk.audit.rules import RULES
from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.outside.outputs import percent_of_size
from sqrtdk.compare.records import Cause, DiffReport, OutputDiff, PairDiff
from sqrtdk.errors import InvalidTypeError, InvalidValueError, did_you_mean
from sqrtdk.laws.table import FINDINGS

ALLOWED_KINDS = frozenset({*RULES, *FINDINGS, *MISTAKES, "unexplained"})  # names that `allow` accepts beside sites
_LIKE_A_SITE = re.compile(r"[.*?\[A-Z]")  # Decoder.layers.0.attn, layers.*, Attention
# rules on scales: a mistake or "unexplained" in `allow` covers their findings
_RULES_ON_SCALES = ("scale_ledger", "declared_vs_actual", "blocks", "responsiveness")


def as_allowed(allow: Any) -> tuple[str, ...]:
    """Return `allow` as a tuple of names; a single string is one name.

    Raises:
        InvalidTypeError: `allow` is neither a string nor a collection of strings.

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
    """Check that `fail_on` is known.

    Raises:
        InvalidValueError: it is not one of `choices`.
    """
    if fail_on not in choices:
        raise InvalidValueError(f"fail_on is {fail_on!r}", hint=f"Use one of: {', '.join(choices)}.")


def check_allowed(allow: Iterable[str], sites: Collection[str], kinds: Collection[str] = ALLOWED_KINDS) -> None:
    """Check that each name that a test allows stands for something.

    Args:
        allow: Names of sites, patterns of sites, and kinds.
        sites: Module paths of the test's attentions.
        kinds: Rules, mistakes and verdicts that exist.

    Raises:
        InvalidValueError: A name is not a kind and matches no site: it is misspelt, or the site no longer exists.
    """
    names = sorted(kinds)
    for name in allow:
        if name not in kinds and not any(site_matches(site, name) for site in sites):
            raise InvalidValueError(
                f"allow names {name!r}, which is no site of this run and no kind of verdict{did_you_mean(name, names)}",
                hint=f"Sites: {', '.join(sorted(sites)) or 'none'}. Kinds: {', '.join(names)}.",
            )


def check_kinds(allow: Iterable[str]) -> None:
    """Refuse a misspelt kind of verdict where the sites of the run are not known yet.

    Raises:
        InvalidValueError: A name is nearly a kind. A site is known by its dot, a pattern or its class's capital letter.

    Example:
        >>> check_kinds(["missing", "Decoder.layers.0.attn", "block"])
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: allow names 'block', which is no kind of verdict; did you mean 'blocks'?
        Hint: A site of this name is allowed as 'block*'.
    """
    for name in allow:
        near = did_you_mean(name, sorted(ALLOWED_KINDS))
        if name not in ALLOWED_KINDS and near and not _LIKE_A_SITE.search(name):
            raise InvalidValueError(
                f"allow names {name!r}, which is no kind of verdict{near}",
                hint=f"A site of this name is allowed as {f'{name}*'!r}.",
            )


def site_matches(site: str, name: str) -> bool:
    """Return whether a module path is `name`, or matches it as a pattern with `*` and `?`.

    Example:
        >>> site_matches("layers.3.attn", "layers.*.attn"), site_matches("layers.3", "layers")
        (True, False)
    """
    return site == name or fnmatchcase(site, name)


def is_allowed(finding: Finding, calls: Sequence[JudgedCall], allow: Sequence[str]) -> bool:
    """Return whether the test allows a finding.

    Args:
        finding: The finding.
        calls: The judged calls of the test.
        allow: Sites, patterns of sites, rules, and mistakes or verdicts of a scale. A finding on the scale is allowed
            by the last two if all wrong scales at its site are.
    """
    if finding.rule in allow or any(site_matches(finding.site, name) for name in allow):
        return True
    wrong = [one for one in calls if one.call.site == finding.site and one.verdict == "unexplained"]
    if finding.rule not in _RULES_ON_SCALES or not wrong:
        return False
    return all(one.verdict in allow or one.mistake in allow for one in wrong)


def failing(
    findings: Iterable[Finding], calls: Sequence[JudgedCall], fail_on: str, allow: Sequence[str]
) -> tuple[Finding, ...]:
    """Return the findings at `fail_on` or above that are not allowed.

    The bar "unmeasured" is "fail" and adds the findings on attentions that could not be judged.
    """
    if fail_on == "never":
        return ()
    bar = SEVERITIES.index("fail" if fail_on == UNMEASURED else fail_on)
    return tuple(
        finding
        for finding in findings
        if (SEVERITIES.index(finding.severity) >= bar or (fail_on == UNMEASURED and finding.rule == UNMEASURED))
        and not is_allowed(finding, calls, allow)
    )


OUTSIDE = "(no module)"  # site of an attention that a test runs outside any module


def printable(text: str) -> str:
    r"""Return `text` with unprintable characters as escapes, because a model may give its modules any name.

    Example:
        >>> print(printable("layer\x1b[31m.0"))
        layer\x1b[31m.0
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def count_text(number: int, noun: str) -> str:
    """Return a count with its noun.

    Example:
        >>> count_text(1, "finding"), count_text(1200, "test")
        ('1 finding', '1,200 tests')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def findings_lines(findings: Iterable[Finding], calls: Sequence[JudgedCall], root: str = ROOT_NAME) -> list[str]:
    """Return the lines that show findings; equal findings are shown once, with all their sites.

    Args:
        findings: The findings.
        calls: The judged calls, whose formulas are shown.
        root: Name to show for the site "", the model itself.
    """
    sites: dict[tuple[str, ...], list[str]] = {}
    for finding in findings:
        sites.setdefault(_lines(finding, _call_of(finding, calls)), []).append(finding.site or root)
    lines: list[str] = []
    for (head, *body), where in sites.items():
        many = f" ({count_text(len(where), 'site')})" if len(where) > 1 else ""
        lines += [f"{printable(', '.join(fold_sites(where)))}{many}  {head}", *(f"  {line}" for line in body)]
    return lines


def _call_of(finding: Finding, calls: Sequence[JudgedCall]) -> JudgedCall | None:
    """Return the call that a finding is about: the one at its site with the finding's ratio, else the first there."""
    here = [judged for judged in calls if judged.call.site == finding.site]
    exact = [judged for judged in here if finding.value is not None and judged.call.scale.ratio == finding.value]
    return next(iter(exact or here), None)


def _lines(finding: Finding, judged: JudgedCall | None) -> tuple[str, ...]:
    at = "" if finding.at is None else f"  {printable(finding.at)}"
    lines = [f"{finding.severity}, {finding.rule}{at}"]
    if judged is not None and finding.rule != UNMEASURED:
        verdict = f"{judged.verdict}: {judged.mistake}" if judged.mistake else judged.verdict
        wanted = expected_formula(judged) if judged.verdict == "unexplained" else None
        lines.append(f"{'- found:   ' if wanted else '  found:   '} {printable(judged.call.formula)}  ({verdict})")
        if wanted:
            lines.append(f"+ expected: {printable(wanted)}")
    lines += [f"  {printable(finding.message)}", f"  fix: {printable(finding.fix)}"]
    return tuple(lines)


def expected_formula(judged: JudgedCall) -> str | None:
    """Return the formula with the expected scale, or words if the scale does not occur in it exactly once.

    Returns None if no scale was expected, or if the run applied the expected one.
    """
    effective, wanted, formula = judged.call.scale.effective, judged.expected, judged.call.formula
    if wanted is None or (effective is not None and f"{effective:.4g}" == f"{wanted:.4g}"):
        return None
    factor = "" if wanted == 1 else f"{wanted:.4g} * "
    if effective is not None and judged.call.scale.per_head is None:
        found = f"{effective:.4g} * "
        # softmax(8 * q.k) -> softmax(0.125 * q.k)
        if formula.count(found) == 1 and formula.startswith(f"softmax({found}"):
            return formula.replace(found, factor)
        # softmax(q.k) -> softmax(0.125 * q.k)
        if effective == 1 and formula.startswith(("softmax(q", "softmax(rope(")):
            return formula.replace("softmax(", f"softmax({factor}", 1)
    return f"the same with the scale {wanted:.4g}"


def pairs_lines(pairs: Iterable[PairDiff]) -> list[str]:
    """Return the lines that show pairs of attentions that differ; equal ones are shown once, with all their sites."""
    alike: dict[tuple[str, ...], list[PairDiff]] = {}
    for pair in pairs:
        alike.setdefault(_pair(pair), []).append(pair)
    lines: list[str] = []
    for (head, *body), members in alike.items():
        many = f" ({count_text(len(members), 'site')})" if len(members) > 1 else ""
        where = ", ".join(fold_sites(map(pair_site, members)))
        lines += [f"{printable(where)}{many}  {head}", *(f"  {line}" for line in body)]
        worst = max(members, key=lambda pair: pair.difference or 0.0)
        if worst.difference is not None and worst.allowed is not None:
            lines.append(f"    outputs differ by {worst.difference:.3g}, rounding allows {worst.allowed:.2g}")
    return lines


def pair_site(pair: PairDiff) -> str:
    """Return the path of a pair in model A, followed by "#index" unless it is the module's first attention."""
    return f"{pair.site_a or ROOT_NAME}{f'#{pair.index_a}' if pair.index_a else ''}"


def _pair(pair: PairDiff) -> tuple[str, ...]:
    if pair.same is None:
        return "not compared", f"  {printable(pair.reason or 'no reason given')}"
    lines = [f"differs at: {pair.first_stage or 'output'}"]
    if pair.formula_a != pair.formula_b:
        lines.append(f"- B, found:    {printable(pair.formula_b or 'not known')}")
        lines.append(f"+ A, expected: {printable(pair.formula_a or 'not known')}")
    else:
        lines.append(f"  both: {printable(pair.formula_a or 'formula not known')}")
    lines += [f"  {printable(line)}" for cause in pair.causes for line in _cause(cause)]
    if not pair.causes:
        lines.append("  no cause was proven")
    return tuple(lines)


def _cause(cause: Cause) -> list[str]:
    text = f"{cause.name}: B {cause.text}" if cause.text else cause.name
    if cause.name == "input":
        return [text, "fix: mend what comes before it"]
    fix = fix_of(cause)
    return [text] if fix is None else [text, f"fix: in B, {fix}"]


def outputs_lines(report: DiffReport, outputs: Sequence[OutputDiff]) -> list[str]:
    """Return the lines that show outputs that differ, by how much, and in which module the difference begins."""
    lines = []
    for one in outputs:
        if one.same is None:
            lines.append(f"output {printable(one.name)}  {printable(one.reason or 'NaN on both sides')}")
        elif one.reason:
            lines.append(f"output {printable(one.name)}  has another shape: {printable(one.reason)}")
        else:
            by = "" if one.difference is None else f"by {percent_of_size(one.difference)}, "
            allowed = "-" if one.allowed is None else percent_of_size(one.allowed)
            lines.append(f"output {printable(one.name)}  differs {by}rounding allows {allowed}")
    return [*lines, f"  {printable(report.outputs_from)}"] if outputs and report.outputs_from else lines


def alone_lines(report: DiffReport, allow: Sequence[str] = ()) -> list[str]:
    """Return the lines that show calls of one model without a partner in the other.

    Args:
        report: The comparison.
        allow: Sites, or patterns of sites, whose calls are left out.
    """
    sides = (("A", report.unpaired_a), ("B", report.unpaired_b))
    return [
        f"{printable(call.site or ROOT_NAME)}  only in {letter}: {printable(call.reason)}"
        + (f", {printable(call.formula)}" if call.formula else "")
        for letter, calls in sides
        for call in calls
        if not any(site_matches(call.site, name) for name in allow)
    ]
