"""Builds pieces of the page, and the tables of numbers beside the figures.

All text is escaped unless it is `Markup`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from sqrtdk.extending import Language
from sqrtdk.messages import word
from sqrtdk.report.figures import format_number as digits
from sqrtdk.report.figures import format_percent, format_ratio
from sqrtdk.report.plain import plain
from sqrtdk_lab.app import sample
from sqrtdk_lab.app.figures import HALVES, of_range
from sqrtdk_lab.app.settings import ExplorerSettings

Cell = str | Markup


def escaped(text: object) -> Markup:
    """Return a text escaped, with every hidden character made visible; `Markup` is unchanged."""
    return escape(text) if isinstance(text, Markup) else escape(plain(str(text)))


def html_table(caption: Cell, head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> Markup:
    """Return a table whose first column names the rows. On a narrow screen, labelled cells stand below the name.

    ARIA roles are explicit, because CSS that changes a row's layout makes browsers drop its table role.
    """
    titles = [escaped(cell) for cell in head]
    top = Markup("").join(Markup('<th scope="col" role="columnheader">{}</th>').format(title) for title in titles)
    body = Markup("").join(
        Markup('<tr role="row"><th scope="row" role="rowheader">{}</th>{}</tr>').format(
            escaped(row[0]),
            Markup("").join(
                Markup('<td role="cell" data-label="{}">{}</td>').format(title.striptags(), escaped(cell))
                for title, cell in zip(titles[1:], row[1:], strict=True)
            ),
        )
        for row in rows
    )
    return Markup(
        '<div class="wide" tabindex="0"><table role="table"><caption>{}</caption>'
        '<thead role="rowgroup"><tr role="row">{}</tr></thead><tbody role="rowgroup">{}</tbody></table></div>'
    ).format(escaped(caption), top, body)


def notice(text: Cell, tone: str = "bad") -> Markup:
    """Return a message that screen readers announce at once."""
    return Markup('<p class="notice {}" role="alert">{}</p>').format(tone, escaped(text))


def result_headline(result: str, tone: str, of: str) -> Markup:
    """Return a headline: the result, and what it is about."""
    return Markup('<h3 class="result {}"><b>{}</b> <span>{}</span></h3>').format(tone, escaped(result), escaped(of))


def lead(text: Cell) -> Markup:
    """Return a paragraph."""
    return Markup("<p>{}</p>").format(escaped(text))


def at_a_glance(settings: ExplorerSettings, language: Language) -> Markup:
    """Return the numbers at the chosen d_k: measured, expected for these settings, expected for the textbook scale."""
    (settings, *_) = settings.sides()  # the figures drew it already
    logit, heads, textbook = sample.distribution(settings), sample.logit_statistics(settings), sample.textbook(settings)
    one = sample.at_dim(settings, settings.d_k)
    capped = settings.softcap is not None  # the theory covers no softcap
    here = ("-",) * 4 if capped else _theory(logit.std, one.expected)
    there = _theory(textbook.std, sample.gaussian_expectations(settings.keys, textbook.std))
    entropy = f"{number_cell(one.entropy.mean[0])} ({format_percent(heads.entropy_fraction[0])})"
    rows: list[tuple[Cell, ...]] = [
        (
            word("app.row.scale", language),
            number_cell(logit.scale),
            number_cell(logit.scale),
            number_cell(textbook.scale),
        ),
        (word("app.row.ratio", language), *[format_ratio(logit.scale / textbook.scale)] * 2, format_ratio(1.0)),
        (word("app.row.std", language), number_cell(heads.std_logit[0]), here[0], there[0]),
        (word("app.row.max", language), number_cell(heads.max_logit[0]), "-", "-"),
        (word("app.row.entropy", language), entropy, here[1], there[1]),
        (word("app.row.effective", language), number_cell(one.heads.effective_keys[0]), "-", "-"),
        (word("app.row.peak", language), number_cell(one.peak.mean[0]), here[2], there[2]),
        (word("app.row.saturated", language), format_percent(one.heads.saturated[0]), "-", "-"),
        (word("app.row.jacobian", language), number_cell(one.jacobian.mean[0] ** 0.5), here[3], there[3]),
        (word("app.row.gradient", language), number_cell(one.gradient.quantiles[0.5][0]), "-", "-"),
        (word("app.row.rounding", language, dtype=settings.dtype), _rounding(settings), "-", "-"),
    ]
    head = (
        "",
        word("app.column.measured", language),
        word("app.column.expected", language),
        word("app.column.textbook", language),
    )
    stored = settings.dtype if settings.dtype in HALVES else HALVES[0]
    kept = lead(
        word("app.glance.kept", language, kept="float64" if settings.dtype == "float64" else "float32", stored=stored)
    )
    return html_table(word("app.glance.caption", language, d_k=settings.d_k, keys=settings.keys), head, rows) + kept


def number_cell(value: float) -> str:
    """Format a number as the reports do, without a negative zero.

    Example:
        >>> number_cell(-0.0), number_cell(0.125), number_cell(math.inf)
        ('0', '0.125', '∞')
    """
    return "∞" if value == math.inf else digits(value + 0.0)


def _rounding(settings: ExplorerSettings) -> str:
    """Return the error of the chosen dtype; "-" for float64, which is the reference."""
    return "-" if settings.dtype == "float64" else number_cell(sample.rounding(settings))


def _theory(std: float, expected: tuple[float, float, float]) -> tuple[str, str, str, str]:
    """Format standard deviation, entropy, largest weight and norm of the Jacobian."""
    entropy, peak, jacobian = map(number_cell, expected)
    return number_cell(std), entropy, peak, jacobian


def range_forecast_table(settings: ExplorerSettings, language: Language) -> Markup:
    """Return the range forecasts of fp16, bf16 and the chosen dtype, for products scaled after and before storing."""
    asked = of_range(settings)
    rows: list[tuple[Cell, ...]] = []
    for dtype in dict.fromkeys((*HALVES, settings.dtype)):
        for before in (False, True):
            found = sample.forecast(asked, settings.d_k, dtype, before)
            rows.append(
                (
                    dtype,
                    word("app.place.before" if before else "app.place.after", language),
                    number_cell(found.expected_max),
                    number_cell(found.largest_finite),
                    number_cell(found.margin),
                    format_percent(found.overflow_probability),
                    number_cell(found.spacing_at_max),
                )
            )
    names = ("dtype", "place", "largest", "limit", "margin", "overflow", "step")
    return html_table(
        word("app.range.caption", language, pairs=f"{settings.keys**2:,}"),
        [word(f"app.column.{name}", language) for name in names],
        rows,
    )
