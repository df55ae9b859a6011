"""How a law answers: kept, broken with a finding, or not asked with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, Finding, LawAnswer
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.tracing.records import AttentionCall

NO_VALUES = "laws.asking.no_values"


def law_holds(law: str, about: str = "", reason: str = "") -> LawAnswer:
    """Return the answer that a law holds.

    Args:
        law: Name of the law, a key of `LAWS`.
        about: Name of the input that was changed; "" if the law changes only one thing.
        reason: What restricts the answer; usually "".
    """
    return LawAnswer(law, about, KEPT, reason)


def law_not_asked(law: str, about: str, reason: str, *, by_length: bool = False) -> LawAnswer:
    """Return the answer that a law does not apply or could not be asked.

    Args:
        law: Name of the law.
        about: Name of the input that would have been changed, or "".
        reason: Why the law was not asked.
        by_length: Whether the reason may lie in the number of tokens, so that longer inputs may get an answer.
    """
    return LawAnswer(law, about, NOT_ASKED, reason, by_length=by_length)


def law_refused(law: str, about: str, error: NotAsked) -> LawAnswer:
    """Return the answer that a law was not asked, with the reason and `by_length` of a `NotAsked` error."""
    return law_not_asked(law, about, error.reason, by_length=error.by_length)


def law_broken(
    law: str, about: str, severity: str, site: str | None, message: str, fix: str, source: str,
    *, value: float | None = None, expected: float = 0.0, positions: Tensor | None = None,
) -> LawAnswer:  # fmt: skip
    """Return the answer that the law is broken, with its finding.

    Args:
        law: Its name.
        about: The input that was changed.
        severity: Severity of the finding.
        site: The first module at which it is broken, or None if no module shows it.
        message: What moved, or did not move.
        fix: One sentence.
        source: Why the law must hold.
        value: Number of positions or samples that moved but must not; or what was counted.
        expected: The number that is right.
        positions: Which positions moved, (n,), in the sample that shows it best.
    """
    finding = Finding(
        f"law_{law}", severity, site or "", value, None if value is None else expected, message, fix, source
    )
    picture = () if positions is None else tuple(bool(position) for position in positions.tolist())
    return LawAnswer(law, about, BROKEN, message, site or "", picture, finding)


def calls_inside(subject: Subject, site: str | None) -> Iterator[AttentionCall]:
    """Yield the attention calls of a module and of its submodules.

    Args:
        subject: The model with the attentions of its ordinary run.
        site: Path of the module. None or "" stands for the whole model.
    """
    for judged in subject.calls:
        inside = site is None or site == "" or judged.call.site == site or judged.call.site.startswith(f"{site}.")
        if inside:
            yield judged.call


def has_attention(subject: Subject, site: str | None) -> bool:
    """Return whether an attention runs in a module or in a submodule of it; None or "" stands for the whole model.

    It decides whether a mask can be the proposed fix: masks don't help a convolution or a recurrent state.
    """
    return next(calls_inside(subject, site), None) is not None


def state_of(answers: Iterable[LawAnswer]) -> str:
    """Return the state of a law that has several answers.

    It is "broken" if any answer is, else "kept" if any is, else "not asked" (also without answers).
    """
    states = {answer.state for answer in answers}
    return next((state for state in (BROKEN, KEPT) if state in states), NOT_ASKED)
