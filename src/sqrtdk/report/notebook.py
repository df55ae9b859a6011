"""Draws records for a notebook: the tables of the page, limited in length, without scripts or network access.

The tables share the page's macros (templates/*_parts.html) and its escaping: see `sqrtdk.report.page`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqrtdk._language import Language, chosen
from sqrtdk.report import page
from sqrtdk.report.files import drawn

MOST_NOTEBOOK_ROWS = 40  # rows of a table; a notebook stores its outputs, so a long table would bloat the file
ROW_UNITS = dict.fromkeys(("lse", "max_logit", "min_logit", "mean"), "logits") | {
    "variance": "logits squared", "entropy_nats": "nats", "keys": "keys",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NotebookRow:
    """One statistic over all rows of a tensor, as a notebook shows it.

    Attributes:
        name: Name of the statistic.
        unit: Its unit; "" for none.
        shape: Shape of the tensor, as text.
        least: Least value; None, like the next three, for a tensor without values (device "meta").
        mean: Mean.
        largest: Largest value.
        lost: Number of rows whose value is not finite; the other figures leave them out.
    """

    name: str
    unit: str
    shape: str
    least: float | None = None
    mean: float | None = None
    largest: float | None = None
    lost: int | None = None  # rows with a non-finite value; the other figures leave them out


def to_html(record: object) -> str:
    """Return a check, a call, a comparison or statistics of rows as HTML for a notebook.

    Example:
        >>> from sqrtdk.audit.records import CheckReport, ModelInfo
        >>> shown = to_html(CheckReport(ModelInfo("<b>", "Decoder", 1), "static", (), (), (), ()))
        >>> "<script" in shown, "&lt;b&gt;" in shown
        (False, True)
    """
    return DRAW[type(record).__name__](record)


def table_fragment(name: str, context: Mapping[str, Any], home: str = page.HOME) -> str:
    """Render the template of a notebook's table, in the language of the environment.

    Args:
        name: Name of the template in `notebook/`, without ".html".
        context: Values that the template uses.
        home: Package that holds the template.
    """
    return page.fragment(name, {"most": MOST_NOTEBOOK_ROWS, **context}, environment_language(), home)


def environment_language() -> Language:
    """Return the language of the environment, "en" or "zh", in which notebooks show tables."""
    return chosen("auto", os.environ)


def _rows(aux: Any) -> str:
    there = ((name, rows) for name, rows in aux._asdict().items() if rows is not None)
    return table_fragment("rows", {"rows": [_summary(name, rows.detach()) for name, rows in there]})


def _summary(name: str, rows: Any) -> NotebookRow:
    from sqrtdk.impl.call import has_values

    labels = (name, ROW_UNITS.get(name, ""), " x ".join(map(str, rows.shape)))
    if not has_values(rows):
        return NotebookRow(*labels)
    finite = rows[rows.isfinite()].double()
    lost = rows.numel() - finite.numel()
    if not finite.numel():
        return NotebookRow(*labels, math.nan, math.nan, math.nan, lost)
    return NotebookRow(*labels, finite.min().item(), finite.mean().item(), finite.max().item(), lost)


DRAW: Mapping[str, Callable[[Any], str]] = {
    "CheckReport": drawn("report.check.html.check_table"),
    "JudgedCall": drawn("report.check.html.judged_table"),
    "AttentionCall": drawn("report.check.html.call_table"),
    "DiffReport": drawn("report.diff.html.diff_table"),
    "AnswersReport": drawn("report.answers.html.answers_table"),
    "AuxOutput": _rows,
}
