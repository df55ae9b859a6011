"""Shows the register's claims on the page, and runs their experiments in the quick form."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from markupsafe import Markup

from sqrtdk.extending import Language
from sqrtdk.messages import Message, in_language, said, word
from sqrtdk_lab import CLAIMS
from sqrtdk_lab.app.figures import drawing
from sqrtdk_lab.app.settings import RefusedValueError
from sqrtdk_lab.app.tables import Cell, escaped, html_table, lead, notice, result_headline
from sqrtdk_lab.claim import Claim, spelled
from sqrtdk_lab.record import Record
from sqrtdk_lab.report import markup
from sqrtdk_lab.report.page import format_measured
from sqrtdk_lab.runner import run_claim

_STATEMENT = 76  # longest statement in the list, in Latin characters
ANSWER_TONES = {"holds": "good", "fails": "bad"}


def claim_choices(language: Language) -> list[tuple[str, str]]:
    """Return the claims by group as (label, id); the label has the id, the shortened statement and the group."""
    most = _STATEMENT // 2 if language == "zh" else _STATEMENT  # a Chinese character is as wide as two

    def label(claim: Claim) -> str:
        statement = _shortened(in_language(claim.statement, language), most)
        return f"{claim.id} · {statement} · {word(f'lab.group.{claim.group}', language)}"

    return [(label(claim), claim.id) for claim in CLAIMS.values()]


def claim_html(name: str, language: Language) -> Markup:
    """Return a claim before its run: its statement, and how it is measured.

    Raises:
        RefusedValueError: there is no such claim.
    """
    claim = _find(name)
    return Markup("").join(
        [
            Markup('<h3 class="result"><span>{}</span></h3>').format(escaped(claim.id)),
            lead(in_language(claim.statement, language)),
            _formula(claim.formula),
            _titled(word("app.claim.method", language), in_language(claim.method, language)),
            _titled(word("app.claim.control", language), in_language(claim.control, language)),
            _sources(claim.sources, language),
        ]
    )


@functools.lru_cache(maxsize=64)
def quick_record(name: str) -> Record:
    """Return the record of a claim's quick run, which is measured once in the life of the server.

    Raises:
        RefusedValueError: there is no such claim.
    """
    return run_claim(_find(name), quick=True)


def record_html(record: Record, language: Language) -> Markup:
    """Return a measured claim: verdict and condition, explanation, parts and plots."""
    verdict = record.outcome.verdict
    tone = ANSWER_TONES.get(verdict.answer, "doubtful")
    rows: list[tuple[Cell, ...]] = [
        (in_language(part.text, language), word(f"lab.part.{part.state}", language)) for part in verdict.findings
    ]
    head = [word(f"app.column.{name}", language) for name in ("part", "answer")]
    how = word("app.claim.run", language, seed=record.seed, seconds=format_measured(round(record.duration_s, 1)))
    doubt = Markup("") if record.sound else notice(word("app.claim.unsound", language))
    on = Markup("")
    if record.condition is not None:
        on = _titled(word("app.claim.condition", language), in_language(record.condition, language))
    return Markup("").join(
        [
            result_headline(word(f"lab.answer.{verdict.answer}", language), tone, record.id),
            on,
            doubt,
            lead(in_language(record.statement, language)),
            lead(in_language(record.why, language)),
            html_table(word("app.claim.parts", language), head, rows),
            Markup('<div class="plots">{}</div>').format(_plots(record, language)),
            _formula(record.formula),
            _titled(word("app.claim.method", language), in_language(record.method, language)),
            _titled(word("app.claim.control", language), in_language(record.control_method, language)),
            _sources(record.sources, language),
            lead(how),
        ]
    )


def _shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters. English is cut between words; Chinese has no blanks to cut at."""
    if len(text) <= most:
        return text
    cut = text[: most - 3]
    return f"{cut.rpartition(' ')[0] if text.isascii() else cut}..."


def _find(name: str) -> Claim:
    if name not in CLAIMS:
        raise RefusedValueError(Message("app.error.claim", got=repr(str(name)[:40])))
    return CLAIMS[name]


def _formula(latex: str) -> Markup:
    drawn = markup.math(latex)
    return Markup('<div class="formula wide" tabindex="0">{}</div>').format(escaped(latex) if drawn is None else drawn)


def _sources(sources: Iterable[str], language: Language) -> Markup:
    return _titled(
        word("app.claim.sources", language),
        word("words.mark.list", language).join(said(spelled(one), language) for one in sources),
    )


def _titled(title: str, text: str) -> Markup:
    return Markup("<p><b>{}</b> {}</p>").format(escaped(title), escaped(text))


def _plots(record: Record, language: Language) -> Markup:
    parts = []
    for index, plot in enumerate(record.plots):
        prefix = f"claim-{index}"
        parts.append(
            Markup('<figure class="plot">{}<figcaption id="{}-caption">{}</figcaption></figure>').format(
                drawing(plot, prefix, language), prefix, escaped(in_language(plot.caption, language))
            )
        )
    return Markup("").join(parts)
