"""Sorts the findings of a check into causes and consequences: NaN causes NaN, a large scale causes large logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqrtdk.audit.records import FAILING, SEVERITIES, UNMEASURED, Finding
from sqrtdk.audit.rules.numbers import is_consequence
from sqrtdk.audit.tolerance import is_close
from sqrtdk.report.check.fold import FoldedFinding, fold_findings

RULES_ON_SCALES = ("scale_ledger", "declared_vs_actual", "blocks")
# consequences of a scale that is too large, and of one that is too small
RULES_ON_LARGE_LOGITS, TOO_SMALL = ("max_logit", "entropy", "saturation", "range_forecast"), ("flat",)
NOT_FINITE = "nonfinite"
# rule that reads the mask -> law that the outputs break by it
_LAWS_OF_MASKS = {"mask_audit": "law_causal", "padding": "law_padding"}


@dataclass(frozen=True, slots=True)
class Caused:
    """A finding together with the findings that follow from it.

    Attributes:
        cause: The finding, folded over equal layers.
        consequences: Findings that follow from it; () if none do.
    """

    cause: FoldedFinding
    consequences: tuple[FoldedFinding, ...] = ()


def consequences(findings: Iterable[Finding]) -> tuple[Caused, ...]:
    """Fold the findings and put consequences under their cause.

    At its own sites, a scale that is too large causes large logits, low entropy, saturated rows and logits that half
    precision cannot hold. One that is too small causes flat rows. A softmax over the wrong axis explains why no scale
    was judged, and a wrong mask explains a broken law. NaN causes NaN at every later site. Other findings stand alone.

    Args:
        findings: findings of a report, worst first.

    Returns:
        Causes and findings without a cause, ordered by the worst finding in each. Every finding occurs once.

    Example:
        >>> scale = Finding("scale_ledger", "fail", "h.0", 8.0, 1.0, "missing", "scale it", "paper")
        >>> logit = Finding("max_logit", "critical", "h.0", 2e4, 1e4, "head 1 has a logit of 2e+04", "clip", "paper")
        >>> [(one.cause.first.rule, len(one.consequences)) for one in consequences([logit, scale])]
        [('scale_ledger', 1)]
    """
    findings = tuple(findings)
    # folded first: a mistake in all layers is one cause
    causes = [cause for cause in fold_findings(findings) if _leads_to(cause.first)]
    sites = [{finding.site for finding in cause.findings} for cause in causes]
    cause_of: dict[int, int] = {}
    for place, finding in enumerate(findings):
        for index, cause in enumerate(causes):
            here = finding.site in sites[index] or finding.rule == NOT_FINITE
            if here and finding.rule in _leads_to(cause.first) and not _leads_to(finding):
                cause_of.setdefault(place, index)  # the first cause is the worst one
    # folded anew under each cause, as consequences of unlike causes must not share a line
    below = [fold_findings(f for p, f in enumerate(findings) if cause_of.get(p) == i) for i in range(len(causes))]
    caused = [Caused(cause, under) for cause, under in zip(causes, below, strict=True)]
    alone = fold_findings(f for p, f in enumerate(findings) if p not in cause_of and not _leads_to(f))
    caused += [Caused(folded) for folded in alone]
    order = {id(finding): place for place, finding in enumerate(findings)}
    return tuple(sorted(caused, key=lambda one: min(order[id(finding)] for finding in _all(one))))


def _all(one: Caused) -> list[Finding]:
    return [finding for folded in (one.cause, *one.consequences) for finding in folded.findings]


def _leads_to(finding: Finding) -> tuple[str, ...]:
    """Return the rules whose findings are consequences of this finding."""
    if finding.rule == NOT_FINITE:
        # NaN that arrives from another site is itself a consequence
        return () if is_consequence(finding) else (NOT_FINITE,)
    if finding.rule == "softmax_axis":
        return (UNMEASURED,)
    if finding.rule in _LAWS_OF_MASKS and finding.severity in FAILING:
        return (_LAWS_OF_MASKS[finding.rule],)
    # blocks with unlike scales have no one scale that could be too large or too small
    if finding.rule not in RULES_ON_SCALES[:2] or SEVERITIES.index(finding.severity) < SEVERITIES.index("warn"):
        return ()
    if not isinstance(finding.value, (int, float)) or not isinstance(finding.threshold, (int, float)):
        return ()
    large = abs(finding.value) > abs(finding.threshold) and not is_close(finding.value, finding.threshold)
    return RULES_ON_LARGE_LOGITS if large else TOO_SMALL
