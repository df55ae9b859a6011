"""How a law answers: kept, broken with a finding, or not asked with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, Finding, LawAnswer
from sqrtdk.laws.subject import Subject
from sqrtdk.tracing.records import AttentionCall

NO_VALUES = "without values nothing can be changed"


def kept(law: str, about: str = "", reason: str = "") -> LawAnswer:
    """It holds."""
    return LawAnswer(law, about, KEPT, reason)


def not_asked(law: str, about: str, reason: object) -> LawAnswer:
    """It does not apply, or could not be asked."""
    return LawAnswer(law, about, NOT_ASKED, str(reason))


def broken(
    law: str, about: str, severity: str, site: str | None, message: str, fix: str, source: str,
    *, value: float | None = None, positions: Tensor | None = None,
) -> LawAnswer:  # fmt: skip
    """It is broken.

    Args:
        law: its name.
        about: the input that was changed.
        severity: of the finding.
        site: the first module where it shows; None where none does.
        message: what moved, or did not.
        fix: in one sentence.
        source: why it must hold.
        value: how many positions or samples moved that must not.
        positions: which positions moved, of the sample that shows it best: (n,).
    """
    finding = Finding(f"law_{law}", severity, site or "", value, None if value is None else 0.0, message, fix, source)
    picture = () if positions is None else tuple(bool(position) for position in positions.tolist())
    return LawAnswer(law, about, BROKEN, message, site or "", picture, finding)


def calls_at(subject: Subject, site: str | None) -> Iterator[AttentionCall]:
    """The attentions at a place, or inside it; all of them where it is not known."""
    for judged in subject.calls:
        inside = site is None or site == "" or judged.call.site == site or judged.call.site.startswith(f"{site}.")
        if inside:
            yield judged.call


def plural(count: int, noun: str) -> str:
    """A number with its noun: "1 position", "3 positions"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def state_of(answers: Iterable[LawAnswer]) -> str:
    """The state of a law that answered several times: broken if any is, kept if any is, else not asked."""
    states = {answer.state for answer in answers}
    return next((state for state in (BROKEN, KEPT) if state in states), NOT_ASKED)
