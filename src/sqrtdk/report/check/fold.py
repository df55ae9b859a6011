"""Folds equal layers: calls and findings that look alike and whose sites differ in one integer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from sqrtdk._sites import fold, site_name
from sqrtdk.audit.records import SEVERITIES, VERDICTS, Finding, JudgedCall, has_nonfinite, without_call
from sqrtdk.messages import Message, Text, joined, named, text_of_value
from sqrtdk.report.check.places import in_files, places_text
from sqrtdk.report.figures import format_number, format_ratio

# Findings of these rules expect one exact value; other rules have an upper or lower bound.
_EXACT_RULES = ("scale_ledger", "declared_vs_actual", "mask_audit", "sliding_window", "unused", "responsiveness")
_OF_LAWS = "law_"  # exact too: an output that a law fixes must not move at all
# Rules whose figures have a unit -> the message that says it of a figure in percent.
_UNITS = {"law_gradient": "rules.bound.of_largest"}
_CLOSE_TO_BOUND = 0.01  # a value this close to its bound, relative to the bound, is shown with more decimals
# A message with `some` of a call's `heads` -> the one that counts the heads of several calls.
_SUMS = {
    "rules.saturation.heads": "rules.saturation.heads_of_calls",
    "rules.entropy.heads": "rules.entropy.heads_of_calls",
    "rules.flat.heads": "rules.flat.heads_of_calls",
}
# The message beside it on the worst head of a call -> the one that also names the site.
_AT_SITE = {
    "rules.saturation.worst": "rules.saturation.worst_at",
    "rules.entropy.lowest": "rules.entropy.lowest_at",
    "rules.flat.flattest": "rules.flat.flattest_at",
}
# -0.5, 1e-06, 1,024: findings that differ in such numbers alone fold into one
_NUMBER_TO_FOLD = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Fold:
    """Calls of the same kind, as those of equal layers, that a report shows as one line.

    Attributes:
        site: Path of their modules, with a range for the number that differs: "model.layers.0-31.self_attn".
        calls: The calls, in the order in which they ran.
    """

    site: str  # the integers that differ are a range: "model.layers.0-31.self_attn"
    calls: tuple[JudgedCall, ...]

    @property
    def first(self) -> JudgedCall:
        """The call that ran first. The line that the report shows for it is true of all calls of the fold."""
        return self.calls[0]


@dataclass(frozen=True, slots=True)
class FoldedFinding:
    """Findings of one rule, as those of equal layers, that a report shows as one.

    Attributes:
        site: Path of their modules, with a range for the number that differs.
        findings: The findings, the worst first.
    """

    site: str
    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        """The finding with the worst severity; among equals, the one that was reported first."""
        return self.findings[0]

    @property
    def message(self) -> str:
        """The worst finding's message, made true of all findings.

        A count of heads becomes the sum over all findings, and the message says over how many calls.
        """
        first = self.first.message
        if len({finding.call for finding in self.findings}) > 1:
            first = without_call(first)
        return _summed(self.findings, first) if len(self.findings) > 1 else first

    @property
    def several(self) -> str | None:
        """Number of sites or calls that the findings are about, as "24 sites"; None for a single finding."""
        findings, sites = len(self.findings), len({finding.site for finding in self.findings})
        if findings == 1:
            return None
        if sites in (1, findings):
            return Message("words.sites" if sites > 1 else "words.calls", count=f"{findings:,}")
        return Message("words.calls_at_sites", count=f"{findings:,}", sites=f"{sites:,}")


def fold_calls(calls: Iterable[JudgedCall]) -> tuple[Fold, ...]:
    """Fold calls that agree in all that a line shows and whose sites differ in one integer, the number of the layer.

    A call with NaN or infinite numbers is never folded.

    Returns:
        Folds in the order of their first call. A call like no other is a fold of its own.
    """

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
            format_ratio(call.scale.ratio),
            judged.verdict,
            judged.health,
            judged.mistake,
            judged.declared_by,
            judged.reason,
            call.stats is None,
            # a graph's places, "<node>:12", are unlike in each layer and would prevent every fold
            places_text(call) if in_files(call) else None,
            # a call with non-finite numbers is kept apart by its own site
            call.site if has_nonfinite(call) else None,
        )

    groups = fold(calls, lambda judged: judged.call.site, shown)
    return tuple(Fold(site_name(site, group[0].call.index), tuple(group)) for site, group in groups)


def fold_findings(findings: Iterable[Finding]) -> tuple[FoldedFinding, ...]:
    """Fold findings of one rule whose sites differ in one integer and whose messages differ in numbers only.

    Args:
        findings: Findings of one report, in its order.

    Returns:
        Groups in the order of their first finding. A finding like no other is a group of its own.
    """

    def shown(finding: Finding) -> Hashable:
        message, fix = (_NUMBER_TO_FOLD.sub("#", text) for text in (finding.message, finding.fix))
        at = None if (finding.at or "").startswith("<") else finding.at  # a graph's node is another in each layer
        return finding.rule, finding.severity, str(finding.threshold), message, fix, at

    groups = fold(findings, lambda finding: finding.site, shown)
    return tuple(FoldedFinding(site, tuple(group)) for site, group in groups)


def _summed(findings: Sequence[Finding], message: str) -> str:
    """Return a message "2 of 4 heads ...; worst: head 1 ..." with the sums over all findings, and the worst's site."""
    if not isinstance(message, Message) or message.id != "joins.semicolon":
        return message
    heads, worst = message.values["first"], message.values["second"]
    counts = [one for finding in findings if (one := _count_of_heads(finding)) is not None]
    if len(counts) < len(findings) or not isinstance(heads, Message) or not isinstance(worst, Message):
        return message
    some, of = (sum(pair) for pair in zip(*counts, strict=True))
    total = Message(_SUMS[heads.id], calls=len(findings), some=some, heads=of)
    site = site_name(findings[0].site, findings[0].call or 0)
    return joined([total, Message(_AT_SITE[worst.id], **worst.values, site=site)])


def _count_of_heads(finding: Finding) -> tuple[int, int] | None:
    """Return how many heads a finding is about, and of how many; None if its message does not count heads."""
    message = without_call(finding.message)
    heads = message.values.get("first") if isinstance(message, Message) else None
    if not isinstance(heads, Message) or heads.id not in _SUMS:
        return None
    return int(str(heads.values["some"])), int(str(heads.values["heads"]))


def values(folded: FoldedFinding) -> Text:
    """Return the values of folded findings as a text: one number, or a range.

    Example:
        >>> finding = Finding("r", "warn", "h.0", 101.0, 100.0, "m", "f", "s")
        >>> values(FoldedFinding("h.0", (finding,))).en
        '101'
    """
    all_values = [finding.value for finding in folded.findings]
    numbers = [value for value in all_values if isinstance(value, (int, float))]
    if len(numbers) < len(all_values):
        shown = " / ".join(
            dict.fromkeys(value if isinstance(value, str) else format_number(value) for value in all_values)
        )
        return text_of_value(shown)
    # the values of folded findings are unlike: a range says how far they lie apart
    low, high = (_figure(folded, value) for value in (min(numbers), max(numbers)))
    shown = low if low == high else Message("rules.bound.range", low=low, high=high)
    unit = _UNITS.get(folded.first.rule)
    return text_of_value(shown if unit is None else Message(unit, value=shown))


def expected_text(folded: FoldedFinding) -> Text:
    """Return what the values should have been: a number, a bound, or an empty text if there is no threshold.

    Example:
        >>> flat = FoldedFinding("h.0", (Finding("flat", "note", "h.0", 0.99971, 0.999, "m", "f", "s"),))
        >>> values(flat).en, expected_text(flat).en
        ('0.99971', 'at most 0.99900')
        >>> expected_text(FoldedFinding("h.0", (Finding("scale_ledger", "fail", "h.0", 8.0, 1.0, "m", "f", "s"),))).en
        '1'
    """
    finding = folded.first
    value, threshold = finding.value, finding.threshold
    if threshold is None or isinstance(threshold, str):
        return text_of_value(threshold or "")
    shown = _figure(folded, threshold)
    exact = finding.rule in _EXACT_RULES or finding.rule.startswith(_OF_LAWS)
    if exact or not isinstance(value, (int, float)) or math.isnan(value) or value == threshold:
        return text_of_value(shown)
    if value > threshold:  # the finding breaks its bound, so the side tells which kind of bound it is
        return Message("rules.bound.at_most", value=shown).text
    return Message("rules.bound.at_least", value=shown).text


def _figure(folded: FoldedFinding, figure: float) -> str:
    """Return a value or a bound as text. If they lie within 1%, their decimals show two digits of the gap."""
    bound = folded.first.threshold
    if folded.first.rule in _UNITS:
        return f"{100 * figure:.3g}%" if figure else "0"
    if folded.first.rule in _EXACT_RULES or not isinstance(bound, (int, float)):
        return format_number(figure)
    between = (abs(one.value - bound) for one in folded.findings if isinstance(one.value, (int, float)))
    gap = min((gap for gap in between if gap > 0), default=math.inf)  # the smallest one: its digits must show
    if not gap < _CLOSE_TO_BOUND * abs(bound):
        return format_number(figure)
    # 0.99971 against 0.999: the gap of 0.00071 needs five decimals
    return f"{figure:.{max(0, 1 - math.floor(round(math.log10(gap), 9)))}f}"


def verdict_counts(id: str, verdicts: Iterable[str | None]) -> list[str]:
    """Return one sentence for each verdict that occurs, with its count, in the order of `VERDICTS`.

    Args:
        id: Id of the sentence in the catalogue; it has the parts `count` and `what`.
        verdicts: Verdicts of the calls; None (not judged) is not counted.

    Example:
        >>> verdict_counts("words.attentions_with", ["exact", "unexplained", "exact"])
        ['2 exact', '1 unexplained']
    """
    # a zero says nothing: verdicts that do not occur are left out
    counts = Counter(verdicts)
    return [Message(id, count=counts[name], what=Message(f"words.verdict.{name}")) for name in VERDICTS if counts[name]]


def severity_counts(findings: Iterable[Finding]) -> dict[str, Message]:
    """Return a sentence with the number of findings for each severity that occurs, worst first.

    Returns:
        The sentences by severity, as `{"fail": "2 fail", "note": "1 note"}`.
    """
    counts = Counter(finding.severity for finding in findings)
    return {
        name: Message("words.findings_with", count=counts[name], what=Message(f"words.severity.{name}"))
        for name in reversed(SEVERITIES)
        if counts[name]
    }


def verdict_text(verdict: str, mistake: str | None) -> str:
    """Return a verdict, followed by what went wrong with the scale.

    Example:
        >>> verdict_text("unexplained", "missing"), verdict_text("unexplained", "missing").said("zh")
        ('unexplained: missing', '未声明：缺少缩放')
        >>> verdict_text("exact", None)
        'exact'
    """
    words = (("verdict", verdict), ("mistake", mistake))
    return joined([named(f"words.{table}", name) for table, name in words if name], "colon")
