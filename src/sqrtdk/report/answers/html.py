"""Draws a comparison with a side that answers as one self-contained HTML page in English and Simplified Chinese."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from sqrtdk._language import Choice
from sqrtdk.answers.records import AnswersReport, EditResidue
from sqrtdk.answers.sentences import nats
from sqrtdk.messages import said
from sqrtdk.report import notebook, page
from sqrtdk.report.answers.terminal import answering_word, edit_text, shown_edits, verdict_word
from sqrtdk.report.environment import shown_environment

MOST_BARS = 24
_LEFT_END = 1e-5  # nats at the left end of the scale of residues
_WIDE, _HIGH, _LEFT, _BASE = 720, 220, 56, 190  # pixels of the picture by position


def to_html(report: AnswersReport, language: Choice = "auto") -> str:
    """Draw the comparison as one self-contained page that opens from disk.

    Args:
        report: What `sqrtdk.answers.diff_answers` returned.
        language: "en" or "zh-CN", the language that the page opens in; "auto" follows the reader's browser.
    """
    edits = shown_edits(report, MOST_BARS)
    context = {
        "report": report,
        "result": verdict_word(report),
        "chinese": [said(paragraph, "zh") for paragraph in report.paragraphs],
        "edits": [(edit, bar_of(edit, edits)) for edit in edits],
        "course": course_of_positions(report),
        "environment": [*shown_environment(report.environment)],
        "edit_text": edit_text,
        "kind": answering_word(report.b),
        "nats": nats,
        "unbroken": page.prose,
    }
    return page.render("answers", context, languages=True, opens=language)


def answers_table(report: AnswersReport) -> str:
    """Return the result and the nearest changes as HTML for a notebook (no script)."""
    context = {
        "report": report,
        "result": verdict_word(report),
        "edits": shown_edits(report, MOST_BARS),
        "edit_text": edit_text,
        "nats": nats,
    }
    return notebook.table_fragment("answers", context)


def bar_of(edit: EditResidue, edits: Sequence[EditResidue]) -> Markup:
    """Draw a residue as a bar on a log scale, with a mark at its floor.

    Args:
        edit: The change.
        edits: All that are drawn, which set the end of the scale.
    """
    known = [each.residue for each in edits if math.isfinite(each.residue)]
    high = math.ceil(math.log10(max([*known, 1e-3])))
    low = math.log10(_LEFT_END)

    def at(value: float) -> float:
        power = math.log10(min(max(value, _LEFT_END), 10.0**high))
        return round(300 * (power - low) / (high - low), 1)

    tone = "near" if edit.floor is not None and edit.residue <= 1.5 * edit.floor else "far"
    long = at(edit.residue) if math.isfinite(edit.residue) else 300.0
    drawn = Markup('<rect class="{}" x="0" y="3" width="{}" height="10" rx="2"/>').format(tone, max(long, 1.5))
    if edit.floor is not None:
        drawn += Markup('<line class="floor" x1="{0}" x2="{0}" y1="0" y2="16"/>').format(at(edit.floor))
    return Markup('<svg class="residue" viewBox="0 0 300 16" aria-hidden="true">{}</svg>').format(drawn)


def course_of_positions(report: AnswersReport) -> Markup | None:
    """Draw the difference by position, before and after the causes, with the floor; None without a bin."""
    places = report.places
    values = [value for value in (*places.before, *places.after, report.floor) if math.isfinite(value)]
    if not places.ends or not values:
        return None
    top = max(*values, 1e-6) * 1.1
    last = max(places.ends[-1], 1)

    def x(position: float) -> float:
        return round(_LEFT + (_WIDE - _LEFT - 12) * position / last, 1)

    def y(value: float) -> float:
        return round(_BASE - (_BASE - 10) * min(value, top) / top, 1)

    starts = (0, *(end + 1 for end in places.ends[:-1]))
    middles = [(start + end) / 2 for start, end in zip(starts, places.ends, strict=True)]
    lines = Markup()
    for name, bins in (("before", places.before), ("after", places.after)):
        points = [f"{x(at)},{y(value)}" for at, value in zip(middles, bins, strict=True) if math.isfinite(value)]
        lines += Markup('<polyline class="{}" points="{}"/>').format(name, " ".join(points))
    floor = Markup('<line class="floor" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(x(0), x(last), y(report.floor))
    axis = Markup('<line class="axis" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(x(0), x(last), _BASE)
    marks = Markup()
    for position in sorted({0, last // 2, last}):
        marks += Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(x(position), _BASE + 16, position)
    for value in (0.0, top / 1.1):
        marks += Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(_LEFT - 6, y(value) + 4, nats(value))
    picture = Markup('<svg class="course" viewBox="0 0 {} {}" aria-hidden="true">{}{}{}{}</svg>')
    return picture.format(_WIDE, _HIGH, axis, floor, lines, marks)
