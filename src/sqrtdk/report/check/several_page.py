"""Draws the report on several models as one self-contained HTML page, failing ones first and open."""

from __future__ import annotations

from sqrtdk._language import Choice
from sqrtdk.audit.several import CheckedModel, SeveralReport
from sqrtdk.messages import Message, Text
from sqrtdk.report import page
from sqrtdk.report.check.baseline import ChangeFold, changes_in_words, fold_changes, page_words
from sqrtdk.report.check.consequences import consequences
from sqrtdk.report.check.fold import fold_calls
from sqrtdk.report.check.headline import headline
from sqrtdk.report.check.html import CHECK_FUNCTIONS
from sqrtdk.report.check.several import MODEL_TONES, one_line, summary
from sqrtdk.report.notebook import MOST_NOTEBOOK_ROWS


def to_html(several: SeveralReport, language: Choice = "auto") -> str:
    """Draw the models as one page, in English and Chinese, that opens from disk.

    Args:
        several: The models.
        language: "en" or "zh-CN", the language that the page opens in; "auto" follows the reader's browser.

    Returns:
        A complete HTML document.

    Example:
        >>> page = to_html(SeveralReport((CheckedModel("<mine>", error="no such file"),)))
        >>> "<mine>" in page, "&lt;mine&gt;" in page
        (False, True)
    """
    worst = next(iter(several.by_outcome), "passed")
    context = {
        "several": several,
        "models": several.worst_first,
        "summary": summary(several),
        "outcome": Message(f"several.outcome.{worst}"),
        "tone": MODEL_TONES[worst],
        "tones": MODEL_TONES,
        "most": MOST_NOTEBOOK_ROWS,
    }
    functions = {
        function.__name__: function for function in (consequences, fold_calls, one_line, said_of, change_folds)
    }
    everything = {**context, **CHECK_FUNCTIONS, **functions, "page_words": page_words}
    return page.render("several", everything, languages=True, opens=language, styles=("report",))


def said_of(model: CheckedModel) -> Text | str:
    """Return the headline of a model: what is wrong with it, what changed, or why it was not checked."""
    if model.report is None:
        return model.error
    return headline(model.report) if model.comparison is None else changes_in_words(model.comparison)


def change_folds(model: CheckedModel) -> list[ChangeFold]:
    """Return what changed in a model since its baseline; nothing without one."""
    return [] if model.comparison is None else fold_changes(model.comparison)
