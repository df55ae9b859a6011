"""Draws the records of `sqrtdk lab` as one self-contained HTML page in English and Simplified Chinese.

Text and figures come from the records. Records are untrusted: see
`sqrtdk.report.page` for texts and `sqrtdk_lab.report.markup` for formulas and plots.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from markupsafe import Markup, escape

from sqrtdk.extending import Choice
from sqrtdk.messages import Message, Text, named, word
from sqrtdk.messages import text_of_value as text_of
from sqrtdk.report import notebook, page
from sqrtdk.report.environment import entry_name, entry_value, shown_environment
from sqrtdk.report.plain import plain
from sqrtdk_lab import figures
from sqrtdk_lab.claim import EXPLANATION_IDS, GROUPS, spelled
from sqrtdk_lab.figures import Figure, Plot
from sqrtdk_lab.judge import Answer, Check, PartAnswer, PartState
from sqrtdk_lab.record import Record
from sqrtdk_lab.report import markup
from sqrtdk_lab.report.plots import plot_files, to_svg

ANSWERS = get_args(Answer)
PART_STATES = get_args(PartState)
MET = {True: "met", False: "missed", None: "undecided"}  # answer to a bar -> key of lab.part
# anchors of the page itself; claims must use others
_OWN_IDS = ("register", "sources", "run", "claims", "missing", "mixed", "search", "filter", "count", "none", "zh", "en")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A record with its anchor, formula and plots as the page shows them."""

    record: Record
    anchor: str
    formula: Markup | None
    plots: tuple[tuple[Markup, Text, str], ...]  # drawing, caption, id of the caption


def to_html(
    records: Sequence[Record],
    missing: Sequence[str] = (),
    language: Choice = "auto",
    drawn_in: Path | None = None,
    ran: Sequence[str] = (),
) -> str:
    """Draw records of claims as one self-contained page that opens from disk.

    Args:
        records: records of one or several runs. The page says so if their settings differ.
        missing: ids of claims that have no record, listed last as not run.
        language: "en" or "zh-CN", the language that the page opens in; "auto" follows the reader's browser.
        drawn_in: directory where `plots.write_plots` drew the plots; those that it lacks are drawn anew.
            None: draw all of them, which takes a fifth of a second each.
        ran: ids of the claims that a command has just run. They come first, in its order; other records follow.

    Returns:
        A complete HTML document.

    Raises:
        MissingExtraError: matplotlib or latex2mathml is not installed.

    Example:
        >>> from sqrtdk_lab.claims.var_linear import CLAIM
        >>> from sqrtdk_lab.runner import run_claim
        >>> page = to_html([run_claim(CLAIM, quick=True)])
        >>> page.startswith("<!doctype html>"), "<math" in page, "<svg" in page
        (True, True, True)
    """
    shown = _shown(records, drawn_in)
    answers = Counter(str(record.outcome.verdict.answer) for record in records)
    settings = _settings(records)
    context = {
        "groups": _groups(shown, ran),
        "total": len(records),
        "missing": missing,
        "answers": [(name, answers[name]) for name in ANSWERS],
        "unsound": [one for one in shown if not one.record.sound],
        "settings": settings,
        "mixed": [(label, values) for label, values, must_agree in settings if must_agree and len(values) > 1],
        "seconds": sum(record.duration_s for record in records if math.isfinite(record.duration_s)),
        "version": importlib.metadata.version("sqrtdk"),
        "percent": format_share,
        "levels": ", ".join(dict.fromkeys(format_share(record.level) for record in records)),
        "means": lambda name: both_with_indices(Message(f"lab.means.{name}")),
        "say": _say,
        "both": both_with_indices,
        "answer": lambda name: both_with_indices(named("lab.answer", name)),
        "tone": _tone,
        "met": lambda value: both_with_indices(Message(f"lab.part.{MET[value]}")),
        "part_sets": _part_sets,
        "changes": _changes,
        "parameters": _parameters,
        "number": format_measured,
        "limit": limit,
        "bar": bar_as_formula,
        "strip": strip,
        "name": _name,
        "place": _place,
        "source": _source,
        "said": page.both,
        "shown_environment": shown_environment,
        "explanations": list(map(spelled, EXPLANATION_IDS)),
    }
    return page.render("lab", context, languages=True, opens=language, home=__package__)


def to_table(record: Record) -> str:
    """Return a claim, its verdict and the figures behind it as English HTML for a notebook."""
    return notebook.table_fragment(
        "lab",
        {
            "record": record,
            "verdict": record.outcome.verdict,
            "both": lambda text: _prose(text.en),
            "say": lambda id, **values: word(id, "en", **values),
            "answer": lambda name: named("lab.answer", name),
            "tone": _tone,
            "met": lambda value: word(f"lab.part.{MET[value]}", "en"),
            "number": format_measured,
            "percent": format_share,
            "bar": bar_as_formula,
            "strip": lambda check: "",
            "name": _name,
            "place": _place,
        },
        home=__package__,
    )


def _tone(name: str) -> str:
    return f"a-{name}" if name in ANSWERS else ""


def _shown(records: Iterable[Record], drawn_in: Path | None) -> list[_Shown]:
    taken, shown = set(_OWN_IDS), []
    for record in records:
        stem = anchor = re.sub(r"[^A-Za-z0-9_-]+", "-", record.id) or "claim"
        while anchor in taken:  # ids such as "a b" and "a/b" give the same stem
            anchor = f"{stem}-{len(taken)}"
        taken.add(anchor)
        plots = []
        for index, plot in enumerate(record.plots):
            own = f"{anchor}.{index}"
            drawing = _drawing(record, plot, drawn_in, f"{own}.", f"{own}.caption")
            plots.append((drawing, plot.caption, f"{own}.caption"))
        shown.append(_Shown(record, anchor, markup.math(record.formula), tuple(plots)))
    return shown


def _drawing(record: Record, plot: Plot, drawn_in: Path | None, prefix: str, labelled_by: str) -> Markup:
    """Return a plot for the page: from its file if that can be read and is a drawing, else drawn anew."""
    if drawn_in is not None:
        # a file that somebody changed may hold anything, of which `plot_svg` takes what a drawing may have
        with contextlib.suppress(OSError, ValueError, KeyError, SyntaxError, RecursionError):
            svg, _ = plot_files(record, plot, drawn_in)
            return markup.plot_svg(svg.read_text(encoding="utf-8"), prefix, labelled_by)
    return markup.plot_svg(to_svg(plot), prefix, labelled_by)


def _groups(shown: Sequence[_Shown], ran: Sequence[str]) -> list[tuple[str, list[_Shown]]]:
    """Return the claims by group: those that just ran in the order of their command, then the others."""
    place = {id: number for number, id in enumerate(ran)}
    now = sorted((one for one in shown if one.record.id in place), key=lambda one: place[one.record.id])
    groups = [(named("lab.group", name), list(members)) for name, members in groupby(now, lambda one: one.record.group)]
    others = [one for one in shown if one.record.id not in place]
    # the register's groups in its order, then any others: a record may name a group that we do not have
    for name in dict.fromkeys((*GROUPS, *(one.record.group for one in others))):
        title = named("lab.group", name)
        if members := [one for one in others if one.record.group == name]:
            groups.append((Message("lab.earlier", group=title) if now else title, members))
    return groups


def _settings(records: Sequence[Record]) -> list[tuple[Markup, list[tuple[Any, int]], bool]]:
    """Return each setting: its name, its values with the number of records, and whether all should be equal."""

    def values(of: Callable[[Record], Any]) -> list[tuple[Any, int]]:
        return list(Counter(map(of, records)).items())

    def entry(key: str) -> Callable[[Record], Markup]:
        return lambda record: page.both(entry_value(record.environment.get(key, "?")))

    environment = dict.fromkeys(key for record in records for key in record.environment)
    days = sorted(record.started for record in records)  # the page shows the first and the last
    return [
        (_say("lab.kind"), values(lambda record: _say("lab.quick" if record.quick else "lab.full")), True),
        (_say("lab.seed"), values(lambda record: record.seed), True),
        (_say("lab.level"), values(lambda record: format_share(record.level)), True),
        (_say("lab.started"), [(day, 1) for day in dict.fromkeys((*days[:1], *days[-1:]))], False),
        *((page.both(entry_name(key)), values(entry(key)), True) for key in environment),
        (_say("lab.command"), values(lambda record: record.command or _say("lab.python_call")), False),
    ]


def _say(id: str, **values: str | int) -> Markup:
    return both_with_indices(Message(id, **values))


def both_with_indices(text: Text | str) -> Markup:
    """Return a text in both languages, of which the page shows one. An index such as in "d_k" is set as a subscript.

    Example:
        >>> print(both_with_indices(Text("d_k < 3", "d_k < 3")))
        d<sub>k</sub> &lt; 3
    """
    text = text_of(text)
    if text.en == text.zh:
        return _prose(text.en)
    return Markup('<span class="en" lang="en">{}</span><span class="zh" lang="zh-CN">{}</span>').format(
        _prose(text.en), _prose(text.zh)
    )


# pattern in escaped text -> HTML. Groups match letters and digits only, so that they cannot bring markup in.
_SIGN_PATTERNS = (
    (r"sqrt\((\w|[A-Za-z]_\w)\)", r"√\1"),
    (r"sqrt\(", r"√("),
    (r"(?<![\w.])([a-z]) \. ([a-z])(?![\w.])", "\\1\u00a0·\u00a0\\2"),
    (r"(?<=[A-Za-z0-9)])\^\((-?[0-9]+/[0-9]+)\)", r"<sup>\1</sup>"),
    (r"(?<=[A-Za-z0-9)])\^(-?[0-9]+(?:\.[0-9]+)?|[A-Za-z])(?![A-Za-z0-9_]|\.[A-Za-z0-9])", r"<sup>\1</sup>"),
    (r"(?<![A-Za-z0-9_])([A-Za-z])_([A-Za-z0-9])(?![A-Za-z0-9_])", r"\1<sub>\2</sub>"),
)


def _prose(text: str) -> Markup:
    shown = str(page.prose(text))
    for written, drawn in _SIGN_PATTERNS:
        shown = re.sub(written, drawn, shown)
    return Markup(shown)


def format_measured(value: float) -> str:
    """Format a measured number as the records' texts do. A whole number keeps all its digits.

    Example:
        >>> format_measured(0.123456), format_measured(2363904.0), format_measured(math.nan), format_measured(-math.inf)
        ('0.1235', '2363904', 'NaN', '-∞')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e12 else figures.format_figure(value)


def format_share(share: float) -> str:
    """Format a share in percent.

    Example:
        >>> format_share(0.99), format_share(0.999)
        ('99%', '99.9%')
    """
    return f"{100 * share:.6g}%"


def limit(value: float) -> str:
    """Format one end of a bar with all its digits.

    Example:
        >>> limit(0.99999), limit(65504.0)
        ('0.99999', '65504')
    """
    return f"{value:.12g}" if math.isfinite(value) else format_measured(value)


def bar_as_formula(check: Check) -> str:
    """Format a bar as a formula.

    Example:
        >>> one = Figure("peak", 0.5, 0.4, 0.6, "t", 9)
        >>> bars = ((0.3, math.inf), (-math.inf, 0.7), (0.3, 0.7), (0.5, 0.5))
        >>> [bar_as_formula(Check(one, *ends, True)) for ends in bars]
        ['≥ 0.3', '≤ 0.7', '[0.3, 0.7]', '= 0.5']
    """
    if check.low == check.high:
        return f"= {limit(check.low)}"
    if check.high == math.inf:
        return f"≥ {limit(check.low)}"
    if check.low == -math.inf:
        return f"≤ {limit(check.high)}"
    return f"[{limit(check.low)}, {limit(check.high)}]"


def strip(check: Check) -> Markup:
    """Draw a bar as a field with the measured value and its interval on it. Empty if a number is not finite."""
    figure = check.figure
    ends = [value for value in (check.low, check.high) if math.isfinite(value)]
    inside = [figure.low, figure.value, figure.high]
    if not all(map(math.isfinite, inside)) or not ends:
        return Markup()
    low, high = min(*ends, *inside), max(*ends, *inside)
    if not math.isfinite(2 * (high - low)):  # finite ends may be too far apart for a finite difference
        return Markup()
    room = 0.15 * (high - low) or 1.0  # a bar and an interval of one point still need a width
    low, high = low - room, high + room

    def at(value: float) -> float:
        return round(120 * ((min(max(value, low), high) - low) / (high - low)), 1)

    start, end = at(check.low), at(check.high)
    return Markup(
        '<svg class="strip" viewBox="0 0 120 14" aria-hidden="true">'
        '<rect class="field" x="{}" y="1" width="{}" height="12" rx="2"/>'
        '<line x1="{}" x2="{}" y1="7" y2="7"/><circle cx="{}" cy="7" r="3"/></svg>'
    ).format(start, max(round(end - start, 1), 1), at(figure.low), at(figure.high), at(figure.value))


def _part_sets(findings: Sequence[PartAnswer]) -> list[tuple[Markup, str, list[PartAnswer]]]:
    """Return the parts by their state, without empty sets: title, tone, parts."""
    tones = {"met": "good", "missed": "bad"}
    sets = [
        (state, tones.get(state, "open"), [part for part in findings if part.state == state]) for state in PART_STATES
    ]
    return [(both_with_indices(Message(f"lab.parts.{state}")), tone, parts) for state, tone, parts in sets if parts]


def _parameters(record: Record) -> list[tuple[str, str, str, bool]]:
    """Return each parameter's value in the experiment and in the control, and whether they differ."""
    ours, turned = record.outcome.parameters, record.control.parameters
    names = dict.fromkeys((*ours, *turned))
    return [(name, *(pair := (_value(ours, name), _value(turned, name))), pair[0] != pair[1]) for name in names]


def _changes(record: Record) -> list[tuple[str, str, str]]:
    return [(name, ours, turned) for name, ours, turned, differ in _parameters(record) if differ]


def _value(parameters: Mapping[str, Any], name: str) -> str:
    value = parameters.get(name, "")
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _name(name: str) -> Markup:
    """Return a figure's name, which may wrap after underscores."""
    return Markup(str(escape(plain(name))).replace("_", "_<wbr>"))


def _place(figure: Figure) -> Markup:
    return _prose(", ".join(f"{key} = {value}" for key, value in figure.at.items()))


def _source(source: str) -> Markup:
    """Return a source. An arXiv id becomes a link to the abstract."""
    paper = re.fullmatch(r"arXiv:(\d{4}\.\d{4,5})(v\d+)?", source)
    if paper:
        return Markup('<a href="https://arxiv.org/abs/{}" rel="noreferrer">{}</a>').format(paper[1], source)
    return escape(plain(source))
