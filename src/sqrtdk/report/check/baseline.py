"""Writes a baseline file, and a comparison with a baseline as terminal text, JSON or a pull request comment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from sqrtdk import _json
from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME, fold
from sqrtdk.audit.baseline import BASELINE_VERSION, BaselineComparison, ConfigChange, Ledger, LedgerChange
from sqrtdk.messages import Message, joined, named
from sqrtdk.report.check.fold import verdict_counts, verdict_text
from sqrtdk.report.check.markdown import details, fitted, markdown_code, markdown_table, markdown_text
from sqrtdk.report.json_values import record_fields, tool
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.speaker import Speaker

_MOST_CHANGE_ROWS = 40  # rows of folded changes; the rest is counted
_MOST_VALUE_CHARACTERS = 80  # of a value of the config
_APPEARING = ("attention", "finding")  # what appears or goes as a whole, and has no value of its own


def to_file(*ledgers: Ledger) -> str:
    """Return the content of a baseline file: JSON, sorted by site, with one line for each attention.

    Args:
        ledgers: Of one model; or of several, which are listed under `models`.

    Example:
        >>> from sqrtdk.audit.baseline import LedgerLine
        >>> line = LedgerLine("h.0", 0, "softmax(q.k)", 8.0, "unexplained", "missing", ("fail scale_ledger",))
        >>> print(to_file(Ledger("m", "static", (line,))).split("\\n")[5][:60])
            {"site": "h.0", "index": 0, "formula": "softmax(q.k)", "
    """
    documents = list(map(_document, ledgers))
    only = documents[0] if len(documents) == 1 else {"models": documents}
    return _json.json_document({"schema_version": BASELINE_VERSION} | only)


def _document(ledger: Ledger) -> dict[str, Any]:
    lines = [record_fields(line) | {"findings": ", ".join(line.findings)} for line in ledger.lines]
    config = {"config": dict(ledger.config)} if ledger.config else {}
    return {"model": ledger.model, "mode": ledger.mode, **config, "attentions": lines}


def ledger_line(ledger: Ledger, language: Language = "en") -> str:
    """Return one line for the terminal that counts a ledger's attentions by verdict, and its findings.

    Args:
        ledger: The baseline that was just written.
        language: "en" or "zh".
    """
    speaker = Speaker(language)
    attentions = [line for line in ledger.lines if line.verdict is not None]
    each = verdict_counts("words.attentions_with", (line.verdict for line in attentions))
    counts = speaker.said(_attentions(len(attentions))) + speaker.mark("colon") + speaker.join(each)
    findings = Message("terminal.findings", count=f"{sum(len(line.findings) for line in ledger.lines):,}")
    return counts + speaker.mark("stop") + speaker.word("baseline.kept", findings=findings)


def to_json(comparison: BaselineComparison) -> str:
    """Return the comparison as one JSON document that ends with a newline.

    It has `schema_version`, `tool`, the fields of `BaselineComparison` and `exit_code`.
    """
    return _json.json_document(comparison_document(comparison))


def comparison_document(comparison: BaselineComparison) -> dict[str, Any]:
    """Return the document of `to_json` as a dict, before its values are converted to JSON types."""
    head = {"schema_version": BASELINE_VERSION, "tool": tool()}
    return head | record_fields(comparison) | {"exit_code": comparison.exit_code}


def baseline_summary_line(comparison: BaselineComparison, language: Language = "en") -> str:
    """Return one line that says how much changed since the baseline, what was not judged, and the exit code.

    Args:
        comparison: What changed since the baseline was written.
        language: "en" or "zh".
    """
    speaker = Speaker(language)
    exit = speaker.word("terminal.exit", code=comparison.exit_code, fail_on=comparison.fail_on)
    return speaker.said(changes_in_words(comparison)) + exit


def changes_in_words(comparison: BaselineComparison) -> str:
    """Return a sentence that says how much changed since the baseline, and what was not judged."""
    failing, others = (_counted(comparison, fails) for fails in (True, False))
    changed = Message("baseline.changes", count=f"{failing:,}")
    parts = [changed if failing else Message("baseline.nothing_changed")]
    if others and comparison.fail_on == "never":
        parts = [Message("baseline.changes", count=f"{others:,}")]
    elif others:
        parts.append(Message("baseline.more_not_counted", count=others))
    parts.append(Message("baseline.as_before", attentions=_attentions(comparison.unchanged)))
    if comparison.unjudged:
        parts.append(Message("baseline.not_judged", attentions=_attentions(comparison.unjudged)))
    return joined(parts, "comma")


def to_text(comparison: BaselineComparison, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Return a comparison with a baseline as text for the terminal.

    Args:
        comparison: What changed since the baseline was written.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
    """

    def draw(printer: Printer) -> None:
        whole = printer.console.width
        names = {"model": comparison.model, "file": comparison.file}
        printer.paragraph(
            Message("baseline.against", **names, mode=named("terminal.mode", comparison.mode)), most=whole
        )
        printer.blank()
        folds = fold_changes(comparison)
        for folded in folds[:_MOST_CHANGE_ROWS]:
            _print_change(printer, folded)
        printer.more(len(folds) - _MOST_CHANGE_ROWS, "terminal.more_json", 0)
        if folds:
            printer.blank()
        # a change may be meant: the report says how to accept it
        if any(change.fails for change in comparison.changes):
            printer.paragraph(Message("baseline.if_meant"))
            printer.blank()
        printer.paragraph(baseline_summary_line(comparison, language), most=whole)

    return printed(draw, width, color, language)


def _print_change(printer: Printer, fold: ChangeFold) -> None:
    counts, style = ("fails", "red") if fold.fails else ("not_counted", "dim")
    where = printer.join([_kind(fold.changes[0]), _where(printer, fold)], "colon") if fold.changes else ""
    what = where
    if fold.config:
        what = printer.join([*([fold.config.at] if fold.config.at else []), _config(fold.config)], "colon")
    line = Text(printer.word(f"baseline.{counts}"), style)
    printer.paragraph(line + Text(f"  {plain(what)}", style="default"))
    if fold.config:
        printer.paragraph(where or printer.word("baseline.no_attention_follows"), 7)
    for change in fold.changes:
        for sign, side in (("-", change.before), ("+", change.after)):
            if side is not None:
                printer.paragraph(f"{sign} {printer.said(_side(change, side))}", 7)


def _where(speaker: Speaker, fold: ChangeFold) -> str:
    many = speaker.bracketed(speaker.word("words.sites", count=f"{fold.sites:,}")) if fold.sites > 1 else ""
    return (plain(fold.site) or ROOT_NAME) + many


def _config(change: ConfigChange) -> str:
    """Return "query_pre_attn_scalar 256 -> 144"."""
    before, after = (_json_text(value) for value in (change.before, change.after))
    return Message("baseline.config_value", field=change.field, before=before, after=after)


def _json_text(value: Any) -> str:
    text = "-" if value is None else _json.json_document(value).strip()
    return text if len(text) <= _MOST_VALUE_CHARACTERS else f"{text[: _MOST_VALUE_CHARACTERS - 2]}.."


def baseline_markdown(comparison: BaselineComparison, language: Language = "en") -> str:
    """Return the comparison as a comment for a pull request, in GitHub's Markdown.

    Names from the model are escaped, and what exceeds GitHub's limit is cut; `sqrtdk.report.check.markdown` says how.
    """
    speaker = Speaker(language)
    return fitted(parts_of_comparison(comparison, speaker), speaker)


def parts_of_comparison(comparison: BaselineComparison, speaker: Speaker, heading: str = "###") -> Iterator[str]:
    """Yield the parts of the comment, the most important first; `fitted` drops those that exceed GitHub's limit.

    Args:
        comparison: What changed since the baseline was written.
        speaker: Speaks the sentences.
        heading: Mark of the heading's level.
    """
    outcome = Message("baseline.outcome.changed" if comparison.exit_code else "baseline.outcome.same")
    title = speaker.word("terminal.comment.title", model=markdown_code(comparison.model), outcome=outcome)
    yield f"{heading} {title}\n"
    file = speaker.word("baseline.file", file=comparison.file)
    yield markdown_text(f"{baseline_summary_line(comparison, speaker.language)} {file}", 1000) + "\n"
    folds = fold_changes(comparison)
    # changes that fail the run are shown; the others are folded away
    loud, quiet = ([fold for fold in folds if fold.fails is fails] for fails in (True, False))
    titles = [speaker.word("words.column.site")]
    titles += [speaker.word(f"baseline.{key}") for key in ("change", "before", "now")]
    if loud:
        yield markdown_table(titles, (_row(fold, speaker) for fold in loud[:_MOST_CHANGE_ROWS]))
        more = speaker.word("baseline.changes_not_shown", count=len(loud) - _MOST_CHANGE_ROWS)
        yield f"{speaker.word('baseline.write_anew')}\n" + (f"\n{more}\n" if len(loud) > _MOST_CHANGE_ROWS else "")
    if quiet:
        more = speaker.word("baseline.more_changes", count=f"{_counted(comparison, False):,}")
        yield details(more, [markdown_table(titles, (_row(fold, speaker) for fold in quiet[:_MOST_CHANGE_ROWS]))])


def _row(fold: ChangeFold, speaker: Speaker) -> list[str]:
    whats = [
        speaker.said(_kind(change) if change.what in _APPEARING else Message(f"baseline.changed.{change.what}"))
        for change in fold.changes
    ]
    sides = [
        "<br>".join(
            markdown_code(speaker.said(_value(change, side)), 240)
            for change in fold.changes
            if (side := getattr(change, name)) is not None
        )
        for name in ("before", "after")
    ]
    sites = [f"{markdown_code(fold.site or ROOT_NAME)}{speaker.bracketed(str(fold.sites)) if fold.sites > 1 else ''}"]
    if fold.config:
        whats = [markdown_code(speaker.said(_config(fold.config))), *whats]
        sites = [*([markdown_code(fold.config.at)] if fold.config.at else []), *(sites if fold.changes else [])]
    what = "<br>".join(whats)
    return ["<br>".join(sites), f"**{what}**" if fold.fails else what, *sides]


@dataclass(frozen=True, slots=True)
class ChangeFold:
    """Changes that a report shows as one: those of an attention, of equal layers, and of a value of the config.

    Attributes:
        site: "h.0-31.attn"; "" for a value of the config from which nothing follows.
        changes: Of the first site; none for a value of the config from which nothing follows.
        sites: How many sites have these changes.
        fails: Whether they fail.
        config: The value of the config from which they follow, or None.
    """

    site: str
    changes: tuple[LedgerChange, ...]
    sites: int
    fails: bool
    config: ConfigChange | None = None


def fold_changes(comparison: BaselineComparison) -> list[ChangeFold]:
    """Return the changes: those of the config, then those of attentions that follow from none; failing ones first."""
    by_field = {change.field: change for change in comparison.config}
    folds = list(_folded_changes(comparison.changes, by_field))
    shown = {fold.config.field for fold in folds if fold.config}
    folds += [
        ChangeFold("", (), 0, False, one) for one in comparison.config if one.field not in shown and not one.fails
    ]
    return sorted(folds, key=lambda fold: (not fold.fails, fold.config is None))


def _folded_changes(changes: Sequence[LedgerChange], by_field: Mapping[str, ConfigChange]) -> Iterator[ChangeFold]:
    together: dict[tuple[Any, ...], list[LedgerChange]] = {}
    for change in changes:  # formula, ratio and verdict of an attention change together
        own = () if change.kind == "changed" else (change.kind, change.before, change.after)
        together.setdefault((change.follows_from, change.fails, change.site, change.index, own), []).append(change)

    def shown(group: list[LedgerChange]) -> tuple[Any, ...]:
        return tuple(
            (one.fails, one.kind, one.what, one.before, one.after, one.index, one.follows_from) for one in group
        )

    for site, groups in fold(together.values(), lambda group: group[0].site, shown):
        first = groups[0][0]
        names = (first.follows_from or "").split(", ")
        cause = by_field.get(names[0])
        if cause and len(names) > 1:  # it takes all of them
            cause = replace(cause, field=" + ".join(names), before=None, after=None)
        # calls of one module differ in their index alone, and a change names one of them
        where = f"{site} #{first.index}" if first.index else site
        yield ChangeFold(where, tuple(groups[0]), len(groups), first.fails, cause)


def _counted(comparison: BaselineComparison, fails: bool) -> int:
    """Return how many changes there are: each value of the config is one, and each attention that follows from none."""
    values = {change.field for change in comparison.config if change.fails is fails}
    rest = {
        (change.site, change.index, change.kind, change.what == "finding" and (change.before, change.after))
        for change in comparison.changes
        if change.fails is fails and not change.follows_from
    }
    return len(values) + len(rest)


def page_words(fold: ChangeFold) -> list[str]:
    """Return what changed, as a page shows it: the value of the config, then each side of each change."""
    words = [_config(fold.config)] if fold.config else []
    for change in fold.changes:
        sides = [_side(change, side) for side in (change.before, change.after) if side is not None]
        words.append(
            joined(
                [
                    _kind(change),
                    Message("baseline.sides", before=sides[0], after=sides[-1]) if len(sides) > 1 else sides[0],
                ],
                "colon",
            )
        )
    return words


def _kind(change: LedgerChange) -> Message:
    return Message(f"baseline.kind.{change.kind.replace(' ', '_')}")


def _side(change: LedgerChange, side: str) -> str:
    if change.what in _APPEARING:
        return side
    return Message("baseline.value", what=Message(f"baseline.side.{change.what}"), value=_value(change, side))


def _value(change: LedgerChange, side: str) -> str:
    """Return the value of one side; a verdict, such as "unexplained: missing", in words."""
    if change.what != "verdict":
        return side
    verdict, _, mistake = side.partition(": ")  # other verdicts than "unexplained: missing" have no mistake
    return verdict_text(verdict, mistake)


def _attentions(number: int) -> Message:
    return Message("words.attentions", count=f"{number:,}")
