"""Every law in one literal table, and the function that asks them of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from sqrtdk._progress import report_progress
from sqrtdk.audit.guard import eval_mode, random_state
from sqrtdk.audit.model_run import ModelRun
from sqrtdk.audit.records import BROKEN, LawAnswer
from sqrtdk.audit.rules.eager_vs_sdpa import LARGE_MODEL
from sqrtdk.errors import INTERRUPTS, InvalidValueError, kind_and_text
from sqrtdk.laws import (
    cache,
    causal,
    configured,
    documents,
    finite,
    heads,
    left_padding,
    modes,
    padding,
    parameters,
    place,
    samples,
    shift,
)
from sqrtdk.laws.answers import NO_VALUES, law_not_asked
from sqrtdk.laws.moved import any_moved
from sqrtdk.laws.pace import Pace
from sqrtdk.laws.subject import NotAsked, Subject, subject_of, unchanged
from sqrtdk.messages import Message, joined
from sqrtdk.models.inputs import without_numbers
from sqrtdk.models.modules import is_spread
from sqrtdk.models.records import LoadedModel

Law = Callable[[Subject], Iterator[LawAnswer]]

LAWS: dict[str, Law] = {
    "finite": finite.ask,
    "samples": samples.ask,
    "causal": causal.ask,
    "padding": padding.ask,
    "documents": documents.ask,
    "left_padding": left_padding.ask,
    "cache": cache.ask,
    "shift": shift.ask,
    "place": place.ask,
    "heads": heads.ask,
    "configured": configured.ask,
    "parameters": parameters.ask,
    "modes": modes.ask,
}
FINDINGS = tuple(f"law_{name}" for name in LAWS)  # names of the rules of their findings
WITHOUT_VALUES: dict[str, Law] = {"configured": configured.without_values}  # laws that are asked on meta too
DEFAULT = "all"  # laws that `check` asks
CHEAP = ("finite", "causal")  # asked of a large model: one forward more than the audit


def names_of(laws: str | Sequence[str]) -> tuple[str, ...]:
    """Return the laws that an option names: "all", "none", or names, in a sequence or joined by commas.

    Raises:
        InvalidValueError: There is no such law.

    Example:
        >>> names_of("all")[:2], names_of("none"), names_of("causal, padding")
        (('finite', 'samples'), (), ('causal', 'padding'))
    """
    words = [word.strip() for word in laws.split(",")] if isinstance(laws, str) else list(laws)
    if words in (["all"], ["none"]):
        return tuple(LAWS) if words == ["all"] else ()
    if unknown := [word for word in words if word not in LAWS]:
        raise InvalidValueError(
            Message("errors.options.law", law=repr(unknown[0])),
            hint=Message("errors.hint.laws", names=joined([*LAWS], "comma")),
        )
    return tuple(name for name in LAWS if name in words)


def are_named(laws: str | Sequence[str] | None) -> bool:
    """Return whether an option names laws, which are then asked whatever they cost; "all" and None name none.

    Example:
        >>> are_named("all"), are_named("causal"), are_named([*LAWS])
        (False, True, True)
    """
    words = [laws] if isinstance(laws, str) else list(laws or ())
    return bool(words) and [word.strip() for word in words] != ["all"]


def check_seconds(seconds: float | None) -> None:
    """Refuse a bound on the time of laws that is no positive number.

    Raises:
        InvalidValueError: It is zero, negative, infinite or NaN.
    """
    if seconds is not None and not 0 < seconds < math.inf:
        raise InvalidValueError(
            Message("errors.options.laws_seconds", value=str(seconds)), hint=Message("errors.hint.laws_seconds")
        )


def answers_of(
    loaded: LoadedModel, run: ModelRun, names: Sequence[str], seed: int, *, named: bool = False,
    seconds: float | None = None,
) -> tuple[LawAnswer, ...]:  # fmt: skip
    """Ask laws of a model that has just been audited.

    Args:
        loaded: The model and its inputs.
        run: The audit's run.
        names: Names of the laws.
        seed: Seed of every run.
        named: Whether the user named the laws: a costly one is then asked as well.
        seconds: Seconds that all of them together may take; None: any number.

    Returns:
        The answers, in the order of `LAWS`. A law that can't be asked gives the reason; none raises.
    """
    if not names:
        return ()
    if run.ranks > 1:
        return tuple(law_not_asked(name, "", Message("laws.asking.ranks", count=run.ranks)) for name in names)
    if run.mode == "static" or without_numbers(loaded.module, loaded.inputs):
        subject = Subject(loaded.module, {}, (), run.calls, loaded.config, seed, run.findings)
        return tuple(answer for name in names for answer in _without_values(name, subject))
    module, large = loaded.module, is_large(loaded.module)
    with random_state(module), eval_mode(module), unchanged(module):
        try:
            subject = subject_of(module, loaded.inputs, run.calls, loaded.config, seed=seed, large=large)
            subject.findings, subject.pace = run.findings, Pace(seconds, run.seconds)
            if large:
                subject.take(run.outputs)
            if not subject.base:
                raise NotAsked(Message("laws.asking.no_floating_output"))
            # A steady run in train mode shows as well that the outputs are not random.
            random = not (large or (modes.LAW in names and modes.steady(subject))) and _random(subject)
        except NotAsked as error:
            return tuple(law_not_asked(name, "", error.reason) for name in names)
        answers: list[LawAnswer] = []
        for number, name in enumerate(names):
            _report(number, names, subject)
            if random and name != "finite":
                answers.append(law_not_asked(name, "", Message("laws.asking.random_outputs")))
            elif large and name not in CHEAP and not named:
                answers.append(law_not_asked(name, "", Message("laws.asking.costly")))
            else:
                told = _answers_of_law(name, subject)
                if subject.taken and any(answer.state == BROKEN for answer in told):
                    subject.take({})  # a trace may run other kernels, whose rounding differs
                    told = _answers_of_law(name, subject)
                answers += told
    return tuple(answers)


def _report(number: int, names: Sequence[str], subject: Subject) -> None:
    values = {"number": number + 1, "count": len(names)}
    left = subject.pace.left(names[number:])
    told = Message("progress.law", law=names[number], **values)
    report_progress(told if left is None else Message("progress.law_left", law=names[number], left=left, **values))


def is_large(module: nn.Module) -> bool:
    """Return whether a run is costly: weights spread over devices, or more than 2e9 parameters."""
    return is_spread(module) or sum(parameter.numel() for parameter in module.parameters()) > LARGE_MODEL


def _without_values(name: str, subject: Subject) -> list[LawAnswer]:
    if name in WITHOUT_VALUES:
        return _answers_of_law(name, subject, WITHOUT_VALUES)
    return [law_not_asked(name, "", Message(NO_VALUES))]


def _answers_of_law(name: str, subject: Subject, laws: Mapping[str, Law] = LAWS) -> list[LawAnswer]:
    try:
        return list(laws[name](subject))
    except NotAsked as error:
        return [law_not_asked(name, "", error.reason)]
    except INTERRUPTS:
        raise
    except Exception as error:  # outputs may be tensors of a kind that lacks an operation
        return [law_not_asked(name, "", Message("laws.asking.raised", error=kind_and_text(error, 120)))]


def _random(subject: Subject) -> bool:
    """Return whether another seed gives other outputs."""
    return any_moved(subject.base, subject.run({}, seed=subject.seed + 1))
