"""One report of all ranks: each attention once, each finding once, with the ranks that have it.

Every rank judges the attentions that it has a part of, each already as a whole. An attention of several ranks is in the
reports of all of them. Under one name, attentions of other layers (stages of a pipeline) are told apart by their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqrtdk.audit.model_run import Whole, WholeCalls
from sqrtdk.audit.records import (
    BROKEN,
    HEALTH,
    KEPT,
    SEVERITIES,
    UNMEASURED,
    VERDICTS,
    AttentionSplit,
    CheckReport,
    Finding,
    JudgedCall,
    LawAnswer,
    RanksOfReport,
)
from sqrtdk.messages import Message, joined
from sqrtdk.models.records import Inputs
from sqrtdk.ranks.attentions import whole_calls
from sqrtdk.ranks.group import RankGroup, RanksError
from sqrtdk.tracing import Trace

_Names = dict[str, str]  # a rank's module paths, and the names of those that other ranks have for other layers


@dataclass(slots=True)
class Together:
    """A check in which other ranks may take part.

    Attributes:
        ranks: The ranks; None: this process is alone.
        name: Name of the model, which must be that of all ranks; "" for a module, which may be one stage of a model.
        splits: How each attention of this rank is split, once that is known.
    """

    ranks: RankGroup | None
    name: str = ""
    splits: tuple[AttentionSplit, ...] = field(default=(), init=False)

    @property
    def whole(self) -> Whole | None:
        """Puts the attentions of a trace together with those of the other ranks; None if there are none."""
        return None if self.ranks is None else self._whole

    def _whole(self, trace: Trace, inputs: Inputs) -> WholeCalls | None:
        assert self.ranks is not None
        # Without a collective in the forward pass the other ranks may do something else now.
        if not self.ranks.together and trace.ranks == 1:
            return None
        found = whole_calls(trace, inputs, self.ranks)
        self.splits = self.splits or found.splits
        return found

    def report(self, own: CheckReport) -> CheckReport:
        """Return the report of all ranks, on every rank; that of this rank if it ran alone.

        Args:
            own: This rank's report.

        Raises:
            RanksError: A rank raised, did not arrive, or checked something else.
        """
        if self.ranks is None or not self.ranks.together:
            return own
        told = self.ranks.gather((own, self.splits, self.name))
        _refuse_unlike([{"model": name, "seed": one.seed, "fail_on": one.fail_on} for one, _, name in told])
        return one_report([report for report, _, _ in told], [splits for _, splits, _ in told])


def one_report(reports: Sequence[CheckReport], splits: Sequence[Sequence[AttentionSplit]]) -> CheckReport:
    """Return one report for those of all ranks.

    Args:
        reports: By rank.
        splits: How each attention of each rank is split, in the order of its calls.
    """
    names = _names(reports, splits)
    calls: dict[tuple[str, int], tuple[JudgedCall, AttentionSplit]] = {}
    for report, of_rank, renamed in zip(reports, splits, names, strict=True):
        for judged, split in zip(report.calls, of_rank, strict=False):
            judged = _at(judged, renamed)
            key = judged.key
            known = calls.get(key)
            calls[key] = (
                _worse(known[0], judged) if known else judged,
                replace(split, site=judged.call.site),
            )
    found: dict[tuple[Any, ...], tuple[Finding, list[int]]] = {}
    for rank, (report, renamed) in enumerate(zip(reports, names, strict=True)):
        for finding in report.findings:
            # A law's answer is that of all ranks; so is what every rank could not measure.
            if not finding.rule.startswith("law_") and not _is_of_all(finding, reports):
                finding = replace(finding, site=renamed.get(finding.site, finding.site))
            kind = _kind(finding)
            found.setdefault(kind, (finding, []))[1].append(rank)
    at_site: dict[str, set[int]] = {}
    for _, split in calls.values():
        at_site.setdefault(split.site, set()).update(split.ranks)
    in_rows = {split.site for _, split in calls.values() if "rows" in split.ways}
    asked = any(answer.law == "ranks" and answer.state in (KEPT, BROKEN) for answer in _laws(reports))
    found = {kind: (_over_ranks(finding, in_rows, asked), ranks) for kind, (finding, ranks) in found.items()}
    every = sorted(found.values(), key=lambda one: -SEVERITIES.index(one[0].severity))
    everyone = set(range(len(reports)))
    first = reports[0]
    notes = [note for report in reports for note in report.environment.get("notes") or ()]
    of_all = tuple(split for _, split in calls.values())
    environment = first.environment | {"notes": list(dict.fromkeys([*notes, *_notes(len(reports), of_all, asked)]))}
    return replace(
        first,
        calls=tuple(judged for judged, _ in calls.values()),
        findings=tuple(_said_of(*one, at_site.get(one[0].site, everyone)) for one in every),
        not_attention=tuple(_entries(reports, names, lambda report: report.not_attention)),
        not_measured=tuple(_entries(reports, names, lambda report: report.not_measured)),
        laws=_laws(reports),
        sources=tuple(dict.fromkeys(source for report in reports for source in report.sources)),
        environment=environment,
        ranks=RanksOfReport(len(reports), of_all, tuple(tuple(ranks) for _, ranks in every)),
    )


def _kind(finding: Finding) -> tuple[Any, ...]:
    return finding.rule, finding.site, finding.call, finding.severity, str(finding.message)


def _is_of_all(finding: Finding, reports: Sequence[CheckReport]) -> bool:
    return finding.rule == UNMEASURED and all(
        any(_kind(other) == _kind(finding) for other in report.findings) for report in reports
    )


def _over_ranks(finding: Finding, in_rows: set[str], asked: bool) -> Finding:
    """Return a finding with the fix that helps where rows lie on several ranks, or the law `ranks` was asked."""
    code = finding.fix.id if isinstance(finding.fix, Message) else ""
    if finding.site in in_rows and code == "rules.mask_audit.fix_leak":
        return replace(finding, fix=Message("laws.ranks.fix.local_rows"))
    if asked and code == "rules.unmeasured.fix_ranks":
        return replace(finding, fix=Message("rules.unmeasured.fix_ranks_asked"))
    return finding


def _refuse_unlike(asked: Sequence[dict[str, Any]]) -> None:
    """Raise where the ranks checked different models, or with different options."""
    for rank, of_rank in enumerate(asked):
        for name, first in asked[0].items():
            if of_rank[name] != first:
                other = str(of_rank[name])
                text = Message("errors.ranks.unlike", name=name, first=str(first), rank=rank, other=other)
                raise RanksError(text, hint=Message("errors.hint.ranks_late"))


def _names(reports: Sequence[CheckReport], splits: Sequence[Sequence[AttentionSplit]]) -> list[_Names]:
    """Return, for each rank, the names of the sites at which other ranks have other attentions."""
    holders: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for of_rank in splits:
        for split in of_rank:
            holders.setdefault((split.site, split.index), set()).add(split.ranks)
    several = {site for (site, _), ranks in holders.items() if len(ranks) > 1}
    return [
        {split.site: f"{split.site}@rank{min(split.ranks)}" for split in of_rank if split.site in several}
        for of_rank in splits
    ]


def _at(judged: JudgedCall, names: _Names) -> JudgedCall:
    site = names.get(judged.call.site)
    return judged if site is None else replace(judged, call=replace(judged.call, site=site))


def _worse(one: JudgedCall, other: JudgedCall) -> JudgedCall:
    """Return the judgement that counts where ranks differ: the one with the worse health, then verdict."""

    def badness(judged: JudgedCall) -> tuple[int, int]:
        return HEALTH.index(judged.health), VERDICTS.index(judged.verdict)

    return max(one, other, key=badness)


def _said_of(finding: Finding, ranks: Sequence[int], whose: set[int]) -> Finding:
    """Return a finding with its ranks in the message, unless all ranks have it that have the attention."""
    if set(ranks) >= whose:
        return finding
    listed = joined([str(rank) for rank in ranks], "comma")
    return replace(finding, message=Message("rules.joined.ranks", text=finding.message, ranks=listed))


def _entries(
    reports: Sequence[CheckReport], names: Sequence[_Names], of: Callable[[CheckReport], Sequence[Any]]
) -> dict[Any, None]:
    each = zip(reports, names, strict=True)
    return dict.fromkeys(
        replace(entry, site=renamed.get(entry.site, entry.site)) for report, renamed in each for entry in of(report)
    )


def _laws(reports: Sequence[CheckReport]) -> tuple[LawAnswer, ...]:
    """Return the answers of the first rank; where a law is broken on another, that answer."""
    answers: dict[tuple[str, str], LawAnswer] = {}
    for report in reports:
        for answer in report.laws:
            key = answer.law, answer.about
            if key not in answers or (answer.state == BROKEN and answers[key].state != BROKEN):
                answers[key] = answer
    return tuple(answers.values())


def _notes(count: int, splits: Sequence[AttentionSplit], asked: bool) -> list[str]:
    """Return a sentence for each way in which attentions are split, with their number, and what else can be asked."""
    kinds: dict[tuple[tuple[str, ...], str], int] = {}
    for split in splits:
        kinds[split.ways, split.order] = kinds.get((split.ways, split.order), 0) + 1
    said: list[str] = []
    for (ways, order), number in kinds.items():
        how = joined([Message(f"ranks.way.{way}") for way in ways or ("alone",)], "comma")
        sentence = Message("ranks.split", count=count, number=number, how=how)
        said.append(
            Message("ranks.in_order", text=sentence, order=Message(f"ranks.order.{order}")) if order else sentence
        )
    if not asked and count > 1:
        said.append(Message("ranks.can_be_asked"))
    return said
