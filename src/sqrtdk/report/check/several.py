"""Writes the report on several models as text, JSON or a comment: failing models first and whole, healthy ones a line.

A comment has a limit of characters. Each failing model gets at least a line before any gets more, and healthy models
get what is left, so that no failing one is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from sqrtdk._json import json_document
from sqrtdk._language import Language
from sqrtdk.audit.records import SCHEMA_VERSION, CheckReport
from sqrtdk.audit.several import HEALTHY, CheckedModel, SeveralReport
from sqrtdk.audit.sources import config_fields
from sqrtdk.messages import Message, joined
from sqrtdk.messages import Text as TextOfBoth
from sqrtdk.report.check import baseline, json, markdown, terminal
from sqrtdk.report.check.fold import fold_findings, severity_counts, verdict_counts
from sqrtdk.report.check.headline import headline
from sqrtdk.report.check.markdown import details, markdown_code, markdown_text
from sqrtdk.report.check.places import at_text
from sqrtdk.report.console import TONE_STYLES
from sqrtdk.report.figures import format_ratio
from sqrtdk.report.json_values import tool
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.speaker import Speaker

MODEL_TONES = {
    "not_checked": "bad", "failed": "bad", "changed": "bad", "findings": "bad", "incomplete": "doubtful",
    "warnings": "doubtful", "scales": "good", "passed": "good",
}  # fmt: skip
_MOST_CORE_FINDINGS = 3  # failing findings of a model whose whole report has no room
_MOST_LINE_CHARACTERS = 240
_LOG_WIDTH = 160  # a log's; there a healthy model's line stays one, to be searched
_UNWRAPPED = 100_000


def summary(several: SeveralReport) -> str:
    """Return one sentence that counts the models by outcome, and names those that are not healthy.

    Example:
        >>> summary(SeveralReport((CheckedModel("a", error="no such file"),)))
        '1 model: 1 not checked (a)'
    """
    counts: list[str] = []
    for outcome, names in several.by_outcome.items():
        count = Message("several.counted", count=len(names), what=Message(f"several.outcome.{outcome}"))
        named = outcome not in HEALTHY
        counts.append(Message("joins.brackets", first=count, second=_listed(names)) if named else count)
    models = Message("several.models", count=len(several.models))
    sentence = joined([models, joined(counts, "comma")], "colon") if counts else models
    of_names = {"repeated": several.repeated, "not_in_run": several.not_in_run}
    others = [
        Message(f"several.{id}", count=len(names), names=_listed(names)) for id, names in of_names.items() if names
    ]
    return joined([sentence, *others])


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = joined(list(map(plain, names[:most])), "comma")
    return Message("several.and_more", names=shown, count=len(names) - most) if len(names) > most else shown


def summary_of_several(several: SeveralReport, language: Language = "en") -> str:
    """Return the sentence of `summary` with the exit code, as one line.

    Args:
        several: The models.
        language: "en" or "zh".
    """
    speaker = Speaker(language)
    exit = speaker.word("terminal.exit", code=several.exit_code, fail_on=several.fail_on)
    return plain(speaker.said(summary(several))) + exit


def one_line(model: CheckedModel) -> TextOfBoth | str:
    """Return what one line says of a model: why it was not checked, what is wrong with it, or its verdicts."""
    if model.report is None:
        return model.error
    if model.comparison is not None:
        return baseline.changes_in_words(model.comparison)
    if not model.healthy:
        return headline(model.report)
    calls = Message("terminal.calls", count=f"{len(model.report.calls):,}")
    verdicts = verdict_counts("words.calls_with", (judged.verdict for judged in model.report.calls))
    counts = joined([calls, *verdicts, *severity_counts(model.report.findings).values()], "comma")
    return joined([counts, *_declared_by_config(model.report)])


def _declared_by_config(report: CheckReport) -> list[str]:
    """Return a sentence for each declaration of a config by which a scale is not that of the rule.

    A model passes with such a scale, and in a line of counts a mistake that was declared would show in nothing.
    """
    ratios: dict[tuple[str, str | None], list[float]] = {}
    for judged in report.calls:
        by, ratio = judged.declared_by, judged.call.scale.ratio
        if judged.verdict == "declared" and by and ratio is not None and config_fields(by):
            ratios.setdefault((by, judged.declared_at), []).append(ratio)
    sentences: list[str] = []
    for (by, at), each in ratios.items():
        ends = [format_ratio(ratio) for ratio in (min(each), max(each))]
        told = ends[0] if ends[0] == ends[1] else Message("several.from_to", least=ends[0], most=ends[1])
        source = Message("several.by_at", by=by, at=at_text(at)) if at else by
        sentences.append(Message("several.declared", ratio=told, by=source))
    return sentences


def to_text(
    several: SeveralReport, *, width: int = 80, color: bool = False, language: Language = "en", reasons: bool = False
) -> str:
    """Return the models as text for the terminal: the whole report of each that is not healthy, a line of the others.

    Args:
        several: The models.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
        reasons: Whether it says why each law that was not asked was not.
    """
    settings: dict[str, Any] = {"width": width, "color": color, "language": language}
    parts = [_whole_text(model, settings, reasons) for model in several.worst_first if not model.healthy]

    def lines(printer: Printer) -> None:
        for model in several.worst_first:
            if model.healthy:
                _print_line(printer, model, "green")

    def draw(printer: Printer) -> None:
        style = TONE_STYLES[MODEL_TONES[next(iter(several.by_outcome), "passed")]]
        printer.paragraph(Text(summary_of_several(several, language), style), most=printer.console.width)

    healthy = printed(lines, _UNWRAPPED if width >= _LOG_WIDTH else width, color, language)
    return "\n".join((*parts, *([healthy] if healthy else []), printed(draw, width, color, language)))


def _print_line(printer: Printer, model: CheckedModel, style: str) -> None:
    line = Text(printer.word(f"several.outcome.{model.outcome}"), style)
    said = plain(model.name) + printer.mark("colon") + plain(printer.said(one_line(model)))
    printer.paragraph(line + Text(f"  {said}", style="default"), most=printer.console.width)


def _whole_text(model: CheckedModel, settings: Mapping[str, Any], reasons: bool) -> str:
    if model.report is None:  # its hint was written to stderr, where errors go
        return printed(lambda printer: _print_line(printer, model, "bold red"), **settings)
    if model.comparison is not None:
        return baseline.to_text(model.comparison, **settings)
    return terminal.to_text(model.report, reasons=reasons, **settings)


def to_json(several: SeveralReport) -> str:
    """Return the models as one JSON document: `models` has the document of each that was checked, in their order.

    Returns:
        A document with `schema_version`, `tool`, `command`, `fail_on`, `models`, `not_checked` (name, error and hint of
        each model without a report), `not_in_run`, `repeated` and `exit_code`.

    Example:
        >>> import json
        >>> json.loads(to_json(SeveralReport((CheckedModel("a", error="no such file"),))))["not_checked"]
        [{'model': 'a', 'error': 'no such file', 'hint': ''}]
    """
    documents = [
        json.to_document(model.report) if model.comparison is None else baseline.comparison_document(model.comparison)
        for model in several.models
        if model.report is not None
    ]
    return json_document(
        {
            "schema_version": SCHEMA_VERSION,
            "tool": tool(),
            "command": several.command,
            "fail_on": several.fail_on,
            "models": documents,
            "not_checked": [
                {"model": model.name, "error": str(model.error), "hint": str(model.hint)}
                for model in several.not_checked
            ],
            "not_in_run": list(several.not_in_run),
            "repeated": list(several.repeated),
            "exit_code": several.exit_code,
        }
    )


def several_markdown(several: SeveralReport, language: Language = "en") -> str:
    """Return the models as a comment for a pull request, at most `markdown.MOST_CHARACTERS` long.

    Args:
        several: The models.
        language: "en" or "zh"; names and formulas stay English.
    """
    speaker = Speaker(language)
    ordered = several.worst_first
    worst = ordered[0].outcome if ordered else "passed"
    outcome = Message(f"several.outcome.{worst}")
    count = speaker.word("several.models", count=len(several.models))
    head = f"### {speaker.word('terminal.comment.title', model=count, outcome=outcome)}\n\n"
    head += f"{markdown_text(summary_of_several(several, language), 2000)}\n"
    ending = speaker.word("several.more_healthy", count=len(ordered))
    room = markdown.MOST_CHARACTERS - len(head) - len(ending) - 4
    levels = [_levels(model, speaker) for model in ordered if not model.healthy]
    healthy = [model for model in ordered if model.healthy]
    parts, room = _fitted([""] * len(levels), [each[:2] for each in levels], room)
    lines: list[str] = []
    for model in healthy:
        line = _line(model, speaker)
        room -= len(line) + 1
        if room < 0:
            lines.append(f"- {speaker.word('several.more_healthy', count=len(healthy) - len(lines))}")
            break
        lines.append(line)
    parts, _ = _fitted(parts, [each[2:] for each in levels], room)
    return "\n".join([head, *filter(None, parts), *([""] if parts and lines else []), *lines]).rstrip("\n") + "\n"


def _fitted(chosen: Sequence[str], levels: Sequence[Sequence[str]], room: int) -> tuple[list[str], int]:
    """Return a longer text for each model, as long as there is room: the first level for all, then the next.

    Args:
        chosen: The text of each model so far.
        levels: Longer texts of each model, the shortest first.
        room: Characters.

    Returns:
        The texts, in order, and the room that is left.
    """
    texts = list(chosen)
    for level in range(max(map(len, levels), default=0)):
        for place, longer in enumerate(levels):
            more = len(longer[level]) - len(texts[place]) + (not texts[place]) if level < len(longer) else 0
            if level < len(longer) and more <= room:
                texts[place], room = longer[level], room - more
    return texts, room


def _levels(model: CheckedModel, speaker: Speaker) -> list[str]:
    """Return what a comment may say of a model that is not healthy, the shortest first: name, line, core, whole."""
    name = f"- **{speaker.word(f'several.outcome.{model.outcome}')}** {markdown_code(model.name, 80)}"
    line = _line(model, speaker)
    if model.report is None:
        hint = markdown_text(speaker.said(model.hint))
        return [name, line, f"{line}{speaker.mark('stop')}{hint}" if hint else line]
    if model.comparison is not None:
        parts = list(baseline.parts_of_comparison(model.comparison, speaker, "####"))
    else:
        parts = list(markdown.parts_of_report(model.report, speaker, "####"))
    if not model.exit_code:  # it does not fail: a line, with the rest folded away
        title = f"{speaker.word(f'several.outcome.{model.outcome}')}{speaker.mark('colon')}{markdown_code(model.name)}"
        return [name, line, "\n" + details(title, parts[1:])]
    core = "\n".join(["", *parts[:2], *(parts[2:3] if model.comparison is not None else _core(model, speaker))])
    return [name, line, core, "\n".join(["", *parts])]


def _core(model: CheckedModel, speaker: Speaker) -> Iterator[str]:
    """Yield the first failing findings of a model."""
    assert model.report is not None
    failing = (one for one in fold_findings(model.report.findings) if any(map(model.report.fails, one.findings)))
    for _, finding in zip(range(_MOST_CORE_FINDINGS), failing, strict=False):
        yield markdown.finding_line(finding, speaker)


def _line(model: CheckedModel, speaker: Speaker) -> str:
    """Return the line of a model: its outcome, unless it is healthy, its name, and what is to say of it."""
    text = markdown_text(speaker.said(one_line(model)), _MOST_LINE_CHARACTERS)
    said = f"{markdown_code(model.name)}{speaker.mark('colon')}{text}"
    return f"- {said}" if model.healthy else f"- **{speaker.word(f'several.outcome.{model.outcome}')}** {said}"
