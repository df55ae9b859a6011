"""The lines of code that a report names: those that wrote the parts of an attention, and those of a finding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqrtdk.audit.records import CheckReport, Finding, JudgedCall, SourceFile, about_call
from sqrtdk.audit.sources import split_lines
from sqrtdk.messages import Message, joined
from sqrtdk.report.figures import format_number
from sqrtdk.tracing.records import AttentionCall


def source_lines(call: AttentionCall) -> dict[str, str]:
    """Return the source lines of a call's formula, and what is written on each.

    Returns:
        "file:line" -> its parts, as `{"attention.py:31": "q.k, 0.125", "attention.py:33": "softmax"}`. Parts whose
        place is unknown are left out.
    """
    parts: dict[str, list[str]] = {}
    for what, at in (("q.k", call.product_at), *_factors(call), ("softmax", call.softmax_at)):
        if at is not None:
            parts.setdefault(at, []).append(what)
    return {at: joined(list(dict.fromkeys(whats)), "comma") for at, whats in parts.items()}


def _factors(call: AttentionCall) -> Iterator[tuple[str, str | None]]:
    for factor in call.scale.factors:
        id = "terminal.by_kernel" if factor.where == "op" else "terminal.factor_on"
        yield Message(id, value=format_number(factor.value), where=factor.where), factor.at


def in_files(call: AttentionCall) -> bool:
    """Return whether the source places of a call are lines of files.

    They are not for an exported graph, whose places, such as `<node>:12`, differ from layer to layer.
    """
    return not any(at.startswith("<") for at in source_lines(call))


def at_text(at: str) -> str:
    """Return a finding's files and lines as a list.

    Example:
        >>> at_text("a.py:3, b.py:14"), at_text("a.py:3, b.py:14").said("zh")
        ('a.py:3, b.py:14', 'a.py:3、b.py:14')
    """
    # "a.py:3, b.py:14" -> "a.py", ":3", "b.py:14": a comma elsewhere belongs to the name of a file
    parts = re.split(r"(:\d+), ", at)
    return joined(["".join(parts[place : place + 2]) for place in range(0, len(parts), 2)], "comma")


def places_text(call: AttentionCall) -> str:
    """Return the result of `source_lines` as one line of text; "" if no place is known."""
    written = [Message("terminal.what_at", what=what, at=at) for at, what in source_lines(call).items()]
    return joined(written) if written else ""


# their findings also show the scale's declaration
_RULES_AT_THE_SCALE = ("scale_ledger", "declared_vs_actual", "unmeasured")


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of a source file that a report points to.

    Attributes:
        source: The file.
        line: Number of the line, from 1.
        what: A few words on what stands there.
    """

    source: SourceFile
    line: int  # 1-based
    what: str


def calls_of_finding(report: CheckReport, finding: Finding) -> tuple[JudgedCall, ...]:
    """Return the calls that a finding is about.

    These are the calls of the finding's own module. If that module has none, as a transformer block, they are the calls
    of the modules inside it.
    """
    # a finding on a block belongs to the attentions inside it, unless the block itself attends
    about = tuple(judged for judged in report.calls if about_call(judged.call, (finding,)))
    return tuple(judged for judged in about if judged.call.site == finding.site) or about


def spots(report: CheckReport, finding: Finding) -> tuple[Spot, ...]:
    """Return the source lines that a finding is about, those of the user's repository first.

    They are the lines that the finding names, or else those of the call at its site; lines that declare the scale
    follow. If none of them is in the repository, the line that was audited is added.
    """
    # the line that computes comes first: that is where an editor opens
    calls = calls_of_finding(report, finding)
    by_call = [at for judged in calls for at in (judged.call.product_at, judged.call.softmax_at)]
    code = [finding.at] if split_lines(finding.at) else by_call
    declared = [judged.declared_at for judged in calls] if finding.rule in _RULES_AT_THE_SCALE else []
    audited: tuple[list[str | None], str] = ([report.model.at], "audited here")
    groups: list[tuple[list[str | None], str]] = [(code, "written here"), (declared, "declared here")]
    known = at_lines(report, groups)
    # no line of the repository so far: add the one that was audited
    return known if known and known[0].source.base == "root" else at_lines(report, [*groups, audited])


def at_lines(report: CheckReport, groups: Iterable[tuple[Iterable[str | None], str]]) -> tuple[Spot, ...]:
    """Return the lines that texts such as "a.py:3, b.py:4" name, each once, those of the user's repository first.

    Args:
        report: The report, whose `sources` are the known files; lines of other files are left out.
        groups: Pairs of texts and a description of what stands at their lines.
    """
    known = {source.file: source for source in report.sources}
    by_line: dict[tuple[SourceFile, int], Spot] = {}
    for texts, what in groups:
        for text in texts:
            for file, line in split_lines(text):
                if file in known and line:
                    by_line.setdefault((known[file], line), Spot(known[file], line, what))
    return tuple(sorted(by_line.values(), key=lambda spot: spot.source.base != "root"))
