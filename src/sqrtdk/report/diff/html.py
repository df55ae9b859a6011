"""Draws a comparison as one self-contained HTML page in English and Simplified Chinese.

Names, formulas and reasons come from untrusted models and files, and are escaped: see `sqrtdk.report.page`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup, escape

from sqrtdk._language import Choice
from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.compare.records import UNKNOWN_CAUSE, Cause, DiffReport, PairDiff, StageDiff, kind_word, stage_word
from sqrtdk.compare.words import share_text, short, shown_causes, site_text
from sqrtdk.messages import Message, said
from sqrtdk.report import notebook, page
from sqrtdk.report.diff.fold import (
    CANCELS,
    OUTCOMES_IN_ORDER,
    STAGE_MARKS,
    cause_name,
    changes_in_b,
    fold_pairs,
    has_short_values,
    has_words,
    is_one,
    largest_left,
    mark,
    outcome,
    outcome_word,
    result_word,
    value_in_words,
    verdict,
)
from sqrtdk.report.diff.payload import diff_page_data, drawable
from sqrtdk.report.environment import shown_environment
from sqrtdk.report.plain import plain

_FORMULA_TOKEN = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?|\w+|\s+|.", re.DOTALL)
_MOST_TOKENS = 2000  # tokens of a formula; difflib takes quadratic time, so longer formulas get no marks
_LADDER = (1e-12, 1e2)  # smallest and largest difference on the ladder
_ARROW = 7  # percent of its width, below which two circles leave no room for an arrow on a telephone


def to_html(report: DiffReport, language: Choice = "auto") -> str:
    """Draw the comparison as one self-contained page that opens from disk.

    Args:
        report: what `sqrtdk.diff` returned.
        language: "en" or "zh-CN", the language that the page opens in; "auto" follows the reader's browser.

    Returns:
        A complete HTML document.

    Example:
        >>> from sqrtdk.compare.records import SideInfo
        >>> side = SideInfo("<b>", "model")
        >>> page = to_html(DiffReport(side, side, (), (), (), ()))
        >>> "<b>" in page, "&lt;b&gt;" in page
        (False, True)
    """
    folds = fold_pairs(report.pairs)
    outcomes = Counter(map(outcome, report.pairs))
    causes = Counter(cause.name for pair in report.pairs for cause in pair.causes)
    faults = () if report.backward is None else report.backward.faults
    result, tone = verdict(report)
    context = {
        "report": report,
        "payload": Markup(page.script_json(diff_page_data(folds))),
        "folds": folds,
        "changes": changes_in_b(report),
        "outcomes": [(name, outcomes[name]) for name in OUTCOMES_IN_ORDER],
        "causes": causes.most_common(),
        "named_causes": len(set(causes) - {UNKNOWN_CAUSE}) + len({fault.text for fault in faults}),
        "result": (result_word(result), tone),
        "chinese": [said(paragraph, "zh") for paragraph in report.paragraphs],
        "unjudged": [pair for pair in report.pairs if pair.same is None],
        "open": len(report.unpaired_a) + len(report.unpaired_b) + outcomes["not compared"],
        "sides": (("A", "a", report.a, report.unpaired_a), ("B", "b", report.b, report.unpaired_b)),
        "environment": [*shown_environment(report.environment)],
        "columns": STAGES,
        "unknown": UNKNOWN_CAUSE,
        "legend": STAGE_MARKS,
    }
    return page.render("diff", {**context, **DIFF_FUNCTIONS}, languages=True, opens=language)


def diff_table(report: DiffReport) -> str:
    """Return the result and the table of pairs as HTML for a notebook (no script)."""
    result, tone = verdict(report)
    context = {
        "report": report,
        "result": (result_word(result), tone),
        "folds": fold_pairs(report.pairs),
        "unknown": UNKNOWN_CAUSE,
        "alone": (("A", report.unpaired_a), ("B", report.unpaired_b)),
    }
    return notebook.table_fragment("diff", {**context, **DIFF_FUNCTIONS})


def outcome_class(name: str) -> str:
    """Return the CSS class of an outcome.

    Example:
        >>> outcome_class("not compared")
        'not-compared'
    """
    return name.replace(" ", "-")


def marked_formulas(pair: PairDiff) -> tuple[Markup | None, Markup | None]:
    """Return both formulas with their differences marked; an unknown formula is None.

    Example:
        >>> pair = PairDiff("h", "h", 0, 0, True, None, None, (), 0, 1, formula_a="2 * q.k", formula_b="3 * q.k")
        >>> [str(text) for text in marked_formulas(pair)]
        ['<mark>2</mark> * q.k', '<mark>3</mark> * q.k']
    """
    if pair.formula_a is None or pair.formula_b is None:
        a, b = (None if text is None else escape(plain(text)) for text in (pair.formula_a, pair.formula_b))
        return a, b
    left, right = _FORMULA_TOKEN.findall(plain(pair.formula_a)), _FORMULA_TOKEN.findall(plain(pair.formula_b))
    # the formula of an untrusted graph may have a million tokens
    if max(len(left), len(right)) > _MOST_TOKENS:
        return escape("".join(left)), escape("".join(right))
    # without the heuristic for junk, which drops the signs that occur often: "*", "(" and "."
    alike = difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return _marked(left, [(one.a, one.size) for one in alike]), _marked(right, [(one.b, one.size) for one in alike])


def _marked(tokens: Sequence[str], alike: Sequence[tuple[int, int]]) -> Markup:
    """Return the tokens with a mark on each run outside `alike`, which lists (start, length) of the equal runs."""
    text, done = Markup(), 0
    for start, size in alike:
        begin, end = done, start
        limit = start + size
        # "(softcap" before "(" reads better as "softcap(": slide the mark while the marked text stays equivalent
        while begin < end < limit and tokens[begin] == tokens[end]:
            begin, end = begin + 1, end + 1
        text += escape("".join(tokens[done:begin]))
        if begin < end:
            text += Markup("<mark>{}</mark>").format("".join(tokens[begin:end]))
        text += escape("".join(tokens[end:limit]))
        done = limit
    return text


def ladder(pair: PairDiff) -> Markup | None:
    """Draw a pair's difference before and after its causes, and the allowed one, as an SVG on a log scale.

    Returns:
        The drawing, or None if the remaining difference or the allowed one is unknown.
    """
    figures = {"before": pair.difference, "left": largest_left(pair), "allowed": pair.allowed}
    known = {name: size for name, size in figures.items() if size is not None and math.isfinite(size) and size >= 0}
    if "left" not in known or "allowed" not in known:
        return None
    # 0 has no place on a log scale: it is drawn at the lower end
    sizes = [min(max(size, _LADDER[0]), _LADDER[1]) for size in known.values() if size > 0] or [1e-9]  # all are 0
    low = math.floor(math.log10(min(sizes)))
    high = max(math.ceil(math.log10(max(sizes))), low + 3)

    def at(size: float) -> float:
        """Return the place of a size, in percent of the width: the drawing is as wide as its column."""
        power = math.log10(min(max(size, 10.0**low), 10.0**high))
        return round(5 + 90 * (power - low) / (high - low), 2)

    step = max(1, (high - low) // 7)  # decades between ticks, so that labels do not overlap
    ticks = Markup().join(
        Markup('<line class="axis" x1="{0}%" x2="{0}%" y1="26" y2="31"/><text x="{0}%" y="44">1e{1}</text>').format(
            at(10.0**power), power
        )
        for power in range(low, high + 1, step)
    )
    drawn = Markup('<rect class="within" x="5%" y="8" width="{}%" height="18" rx="3"/>').format(
        round(at(known["allowed"]) - 5, 2)
    )
    drawn += Markup('<line class="allowed" x1="{0}%" x2="{0}%" y1="4" y2="30"/>').format(at(known["allowed"]))
    drawn += Markup('<line class="axis" x1="5%" x2="95%" y1="26" y2="26"/>') + ticks
    if "before" in known and known["before"] != known["left"]:
        ends = (at(known["left"]), at(known["before"]))
        if ends[1] - ends[0] > _ARROW:
            drawn += Markup('<line class="went" x1="{1}%" x2="{0}%" y1="17" y2="17" marker-end="url(#went)"/>').format(
                *ends
            )
        drawn += Markup('<circle class="before" cx="{}%" cy="17" r="5"/>').format(at(known["before"]))
    tone = "good" if known["left"] <= known["allowed"] else "bad"
    drawn += Markup('<circle class="left {}" cx="{}%" cy="17" r="5.5"/>').format(tone, at(known["left"]))
    return Markup('<svg class="ladder" height="50" aria-hidden="true">{}</svg>').format(drawn)


def unbroken(sentence: str) -> Markup:
    """Return a sentence in which no line breaks inside a number such as 3e-6.

    Example:
        >>> print(unbroken("to 3e-6 & less"))
        to <span class="whole">3e-6</span> &amp; less
    """
    # browsers may break a line behind the minus of 3e-6
    return Markup(re.sub(r"\d[\d.]*e-\d+", r'<span class="whole">\g<0></span>', str(page.prose(sentence))))


def outcome_means(name: str) -> Message:
    """Return the sentence of the legend that says what an outcome of a pair or a stage means."""
    return Message(f"diff.means.{name.replace(' ', '_')}")


def stage_reason(pair: PairDiff, stage: StageDiff) -> str | None:
    """Return the sentence that says why a stage has its outcome; None if it has no reason.

    A difference that later stages cancel has the sentence of the legend, except at an output of which rows were left
    out: its own reason says so.
    """
    also_rows = stage.stage == "output" and pair.rows_left_out > 0
    return outcome_means(CANCELS) if stage.cancels and not also_rows else stage.reason


def meaning_of(cause: Cause) -> str:
    """Return what a cause means, in words of the catalogue.

    A cause that a user added has none there, and gives its own text.
    """
    return Message(f"causes.{cause.name}.meaning") if has_words(cause.name) else str(cause.text)


def marks_of(pair: PairDiff) -> list[tuple[str, str | None, StageDiff | None]]:
    """Return the cells of a pair's row in the table of stages.

    Returns:
        For each of `STAGES`: its name, its mark (one of `STAGE_MARKS`) and its record. The last two are None if the
        pair has no such stage.
    """
    by_name = {stage.stage: stage for stage in pair.stages}
    return [(name, mark(pair, by_name[name]) if name in by_name else None, by_name.get(name)) for name in STAGES]


DIFF_FUNCTIONS = {  # what the templates of a comparison call, beside the functions of every template
    function.__name__: function
    for function in (
        cause_name, outcome_class, drawable, fix_of, has_short_values, is_one, kind_word, ladder, largest_left, mark,
        marked_formulas, marks_of, meaning_of, outcome, outcome_means, outcome_word, share_text, short, shown_causes,
        site_text, stage_reason, stage_word, unbroken, value_in_words,
    )
}  # fmt: skip
