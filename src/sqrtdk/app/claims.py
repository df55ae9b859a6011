"""Shows the register's claims on the page, and runs their experiments in the quick form."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from markupsafe import Markup

from sqrtdk.app.catalogue import Words
from sqrtdk.app.figures import drawing
from sqrtdk.app.settings import RefusedValueError
from sqrtdk.app.tables import Cell, headline, lead, notice, shown, table
from sqrtdk.lab import CLAIMS
from sqrtdk.lab.claim import GROUPS, Claim, spelled
from sqrtdk.lab.record import Record
from sqrtdk.lab.runner import run_claim
from sqrtdk.report import markup
from sqrtdk.report.lab_page import number
from sqrtdk.report.lab_words import ANSWERS, MET
from sqrtdk.report.terminal_words import word

_STATEMENT = 76  # longest statement in the list, in Latin characters
TONES = {"holds": "good", "fails": "bad"}


def options(words: Words) -> list[tuple[str, str]]:
    """Return the claims by group as (label, id); the label has the id, the shortened statement and the group."""
    most = _STATEMENT // 2 if words.language == "zh" else _STATEMENT  # a Chinese character is as wide as two
    return [
        (f"{claim.id} · {_shortened(words.of(claim.statement), most)} · {words.of(GROUPS[claim.group])}", claim.id)
        for claim in CLAIMS.values()
    ]


def claim_html(name: str, words: Words) -> Markup:
    """Return a claim before its run: its statement, and how it is measured.

    Raises:
        RefusedValueError: there is no such claim.
    """
    claim = _find(name)
    return Markup("").join(
        [
            Markup('<h3 class="result"><span>{}</span></h3>').format(shown(claim.id)),
            lead(words.of(claim.statement)),
            _formula(claim.formula),
            _titled(words("claim.method"), words.of(claim.method)),
            _titled(words("claim.control"), words.of(claim.control)),
            _sources(claim.sources, words),
        ]
    )


@functools.lru_cache(maxsize=64)
def measured(name: str) -> Record:
    """Return the record of a claim's quick run, which is measured once in the life of the server.

    Raises:
        RefusedValueError: there is no such claim.
    """
    return run_claim(_find(name), quick=True)


def record_html(record: Record, words: Words) -> Markup:
    """Return a measured claim: verdict and condition, explanation, parts and plots."""
    verdict = record.outcome.verdict
    tone = TONES.get(verdict.answer, "doubtful")
    rows: list[tuple[Cell, ...]] = [(words.of(part.text), words.of(MET[part.met])) for part in verdict.findings]
    how = words("claim.run", seed=record.seed, seconds=number(round(record.duration_s, 1)))
    doubt = Markup("") if record.sound else notice(words("claim.unsound"))
    on = Markup("") if record.condition is None else _titled(words("claim.condition"), words.of(record.condition))
    return Markup("").join(
        [
            headline(words.of(ANSWERS[verdict.answer]), tone, record.id),
            on,
            doubt,
            lead(words.of(record.statement)),
            lead(words.of(record.why)),
            table(words("claim.parts"), (words("column.part"), words("column.answer")), rows),
            Markup('<div class="plots">{}</div>').format(_plots(record, words)),
            _formula(record.formula),
            _titled(words("claim.method"), words.of(record.method)),
            _titled(words("claim.control"), words.of(record.control_method)),
            _sources(record.sources, words),
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
        raise RefusedValueError("error.claim", got=str(name)[:40])
    return CLAIMS[name]


def _formula(latex: str) -> Markup:
    drawn = markup.math(latex)
    return Markup('<div class="formula wide" tabindex="0">{}</div>').format(shown(latex) if drawn is None else drawn)


def _sources(sources: Iterable[str], words: Words) -> Markup:
    return _titled(
        words("claim.sources"), word("list comma", words.language).join(words.of(spelled(one)) for one in sources)
    )


def _titled(title: str, text: str) -> Markup:
    return Markup("<p><b>{}</b> {}</p>").format(shown(title), shown(text))


def _plots(record: Record, words: Words) -> Markup:
    parts = []
    for index, plot in enumerate(record.plots):
        prefix = f"claim-{index}"
        parts.append(
            Markup('<figure class="plot">{}<figcaption id="{}-caption">{}</figcaption></figure>').format(
                drawing(plot, prefix, words), prefix, shown(words.of(plot.caption))
            )
        )
    return Markup("").join(parts)
