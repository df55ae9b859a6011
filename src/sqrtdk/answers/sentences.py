"""The result of a comparison with a side that answers, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from sqrtdk.answers.judge import CONSISTENT, NO_FAULT, PROVEN
from sqrtdk.answers.records import AnsweredCause, AnswersReport
from sqrtdk.messages import Message, joined

MOST_SAID = 6
EXACT_ROUNDING = "float32"


def sentences(report: AnswersReport, watched: int) -> tuple[str, ...]:
    """Return the sentences of a report, most important first.

    Args:
        report: The report, without sentences.
        watched: How many attentions of A could be changed.
    """
    return tuple(_sentences(report, watched))


def _sentences(report: AnswersReport, watched: int) -> Iterator[str]:
    figures = {"difference": nats(report.difference), "residue": nats(report.residue), "floor": nats(report.floor)}
    causes = joined([_named(cause) for cause in report.causes], "side_by_side") if report.causes else ""
    if report.verdict == PROVEN:
        id = "answers.say.proven_both" if len(report.causes) > 1 else "answers.say.proven"
        yield Message(id, causes=causes, explained=share(report.explained), **figures)
    elif report.verdict == CONSISTENT:
        floors = f"{report.residue / report.floor:.1f}"
        yield Message(
            "answers.say.consistent", causes=causes, floors=floors, explained=share(report.explained), **figures
        )
    elif report.verdict == NO_FAULT:
        yield Message("answers.say.no_fault", least=nats(report.least), **figures)
    elif report.same is None:
        yield Message("answers.say.not_sure", **figures)
    else:
        yield Message("answers.say.unknown", difference=nats(report.difference))
    for cause in report.causes:
        if cause.others:
            yield Message("answers.say.alike", others=joined(cause.others[:MOST_SAID]))
        if cause.low is not None and cause.high is not None and cause.low < cause.high:
            yield Message("answers.say.range", low=f"{cause.low:.6g}", high=f"{cause.high:.6g}")
    if report.ties and report.verdict not in (PROVEN, CONSISTENT, NO_FAULT):
        yield Message("answers.say.ties", ties=joined(report.ties[:MOST_SAID]))
    if report.same is not True:
        yield from _course(report)
    if report.rounding != EXACT_ROUNDING:
        kinds = joined([f"`{kind}`" for kind in report.roundings], "or")
        yield Message("answers.say.rounding", kinds=kinds, rounding=f"`{report.rounding}`")
    if report.bos:
        yield Message("answers.say.bos", count=report.bos)
    if report.shift:
        yield Message("answers.say.shift", count=report.shift)
    if not watched:
        yield Message("answers.say.no_attention")
    if report.hidden:
        yield Message("answers.say.hidden", hidden=joined(report.hidden[:MOST_SAID]))


def _named(cause: AnsweredCause) -> Message:
    return Message("answers.edit.named", name=cause.name, text=cause.text)


def _course(report: AnswersReport) -> Iterator[str]:
    """Say where the difference begins, and whether it grows."""
    places = report.places
    if places.begins is None:
        return
    grows = "grows" if places.grows else "stays"
    if places.begins > places.ends[0]:
        yield Message(f"answers.say.begins_{grows}", position=places.begins)
    elif places.grows:
        yield Message("answers.say.grows")


def nats(value: float) -> str:
    """Return a residue as a report shows it.

    Example:
        >>> nats(0.01234), nats(1e-4)
        ('0.0123', '0.0001')
    """
    return f"{value:.3g}"


def share(value: float) -> str:
    """Return a share in percent, cut so that only all is 100%.

    Example:
        >>> share(0.99999), share(0.4)
        ('99.9%', '40%')
    """
    return f"{int(value * 1000) / 10:g}%"
