"""Every law in one literal table, and the function that asks them of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import nn

from sqrtdk._progress import report_progress
from sqrtdk.audit.guard import eval_mode, random_state
from sqrtdk.audit.model_run import ModelRun
from sqrtdk.audit.records import KEPT, LawAnswer
from sqrtdk.audit.rules.eager_vs_sdpa import LARGE_MODEL
from sqrtdk.errors import INTERRUPTS, InvalidValueError, kind_and_text
from sqrtdk.laws import (
    cache,
    causal,
    configured,
    declared_masks,
    documents,
    finite,
    gradient,
    heads,
    left_padding,
    modes,
    padding,
    parameters,
    place,
    ranks,
    samples,
    shift,
)
from sqrtdk.laws.answers import NO_VALUES, law_not_asked, law_refused
from sqrtdk.laws.first_tokens import first_tokens, stand_for_all
from sqrtdk.laws.pace import Pace
from sqrtdk.laws.steady import confirmed, outputs_move, steady
from sqrtdk.laws.subject import NotAsked, Subject, subject_of
from sqrtdk.messages import Message, joined
from sqrtdk.models.inputs import without_numbers
from sqrtdk.models.modules import is_spread
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.settings import process_unchanged
from sqrtdk.ranks.group import world

Law = Callable[[Subject], Iterator[LawAnswer]]


@dataclass(frozen=True, slots=True)
class LawRow:
    """A law, and all that is known of it before it is asked.

    Attributes:
        name: its name; its sentences are `laws.NAME...` and `laws.names.NAME`.
        ask: yields its answers about a subject, or raises `NotAsked`.
        runs: runs of a model that it takes at most where it is kept: a decoder with a mask, positions and a cache.
        compares: whether it compares two runs. If not, it is asked once, and of the whole inputs.
        of_one_run: whether the first run alone answers it: it is asked of random outputs too, and without a copy.
        of_large_models: whether "all" includes it for a large model: it takes at most one run more than the audit.
        needs_motion: whether outputs that never move keep it, so that some must move with the content of the inputs.
        without_values: asks it of a model without values, on the meta device; None if it can't be asked then.
        on_all_tokens: asks the whole inputs one question where their first tokens keep it; None if these stand for all.
        found_by: rules that find the same, at a site, for an answer without a finding.
        own_rule: whether its findings are of the rule `law_NAME`, which has a title and a help text (`help.toml`).
        unnamed: asks it in place of `ask` if the user named no laws, at a bounded cost; None for `ask` itself.
        by_name: whether it is asked only if it is named; "all" does not include it.
    """

    name: str
    ask: Law
    runs: int = 1
    compares: bool = True
    of_one_run: bool = False
    of_large_models: bool = False
    needs_motion: bool = False
    without_values: Law | None = None
    on_all_tokens: Callable[[Subject], bool] | None = None
    found_by: tuple[str, ...] = ()
    own_rule: bool = True
    unnamed: Law | None = None
    by_name: bool = False

    @property
    def rule(self) -> str:
        """The rule of its findings: "law_causal"."""
        return f"law_{self.name}"

    def asks(self, *, named: bool) -> Law:
        """Return what asks the law, depending on whether the user named laws."""
        return self.ask if named or self.unnamed is None else self.unnamed


_LAW_ROWS = (
    LawRow(
        finite.LAW, finite.ask, runs=0, compares=False, of_one_run=True, of_large_models=True, found_by=("nonfinite",),
        own_rule=False,
    ),
    LawRow(samples.LAW, samples.ask, runs=2),
    LawRow(causal.LAW, causal.ask, of_large_models=True, on_all_tokens=causal.earlier_stay),
    LawRow(padding.LAW, padding.ask, runs=5),
    LawRow(documents.LAW, documents.ask),
    LawRow(left_padding.LAW, left_padding.ask, runs=3, needs_motion=True),
    LawRow(cache.LAW, cache.ask, runs=11, needs_motion=True, on_all_tokens=cache.steps_stay),
    LawRow(shift.LAW, shift.ask, runs=3),
    LawRow(place.LAW, place.ask, runs=3),
    LawRow(heads.LAW, heads.ask),
    LawRow(
        declared_masks.LAW, configured.ask, runs=0, compares=False, without_values=configured.without_values,
        found_by=declared_masks.REPEATED,
    ),
    LawRow(parameters.LAW, parameters.ask, runs=2),
    LawRow(modes.LAW, modes.ask, needs_motion=True),
    LawRow(gradient.LAW, gradient.ask, runs=2, compares=False, of_one_run=True, unnamed=gradient.ask_within_bounds),
    LawRow(ranks.LAW, ranks.ask, runs=0, compares=False, of_one_run=True, by_name=True),
)  # fmt: skip
LAWS: dict[str, LawRow] = {row.name: row for row in _LAW_ROWS}
FINDINGS = tuple(row.rule for row in _LAW_ROWS)  # names of the rules of their findings
DEFAULT = "all"  # laws that `check` asks


def names_of(laws: str | Sequence[str]) -> tuple[str, ...]:
    """Return the laws that an option names: "all", "none", or names, in a sequence or joined by commas.

    "all" leaves out the laws that are asked by name alone.

    Raises:
        InvalidValueError: There is no such law.

    Example:
        >>> names_of("all")[:2], names_of("none"), names_of("causal, padding")
        (('finite', 'samples'), (), ('causal', 'padding'))
    """
    words = [word.strip() for word in laws.split(",")] if isinstance(laws, str) else list(laws)
    if words in (["all"], ["none"]):
        return tuple(name for name, row in LAWS.items() if not row.by_name) if words == ["all"] else ()
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
    if ranks.LAW in names and (group := world()) is not None:
        others = tuple(name for name in names if name != ranks.LAW)
        rest = answers_of(loaded, run, others, seed, named=named, seconds=seconds)
        return (*rest, *ranks.answers_of_ranks(group, loaded, seed, seconds=seconds))
    if run.ranks > 1:
        return tuple(law_not_asked(name, "", Message("laws.asking.ranks", count=run.ranks)) for name in names)
    if run.mode == "static" or without_numbers(loaded.module, loaded.inputs):
        subject = Subject(loaded.module, {}, (), run.calls, loaded.config, seed, run.findings)
        return tuple(answer for name in names for answer in _without_values(name, subject))
    module, large = loaded.module, is_large(loaded.module)
    with process_unchanged(), random_state(module), eval_mode(module):
        try:
            subject = subject_of(module, loaded.inputs, run.calls, loaded.config, seed=seed, large=large)
            subject.findings, subject.pace = run.findings, Pace(seconds, run.seconds)
            if large:
                subject.take(run.outputs)
            compares = not large and any(LAWS[name].compares for name in names)
            if compares and loaded.made and _all_read(run):
                subject.first = first_tokens(subject)
            if subject.first is not None:  # what stays on all tokens is compared with the audit's run
                (subject.itself or subject).take(run.outputs, run.returned)
            if not (subject.first or subject).base:
                raise NotAsked(Message("laws.asking.no_floating_output"))
            random = not large and not steady(subject.first or subject)
        except NotAsked as error:
            itself = subject_of(module, loaded.inputs, run.calls, loaded.config, seed=seed, large=True)  # no copy
            return tuple(one for name in names for one in _unless_read(name, itself, error.reason, named=named))
        answers: list[LawAnswer] = []
        for number, name in enumerate(names):
            _report(number, names, subject)
            if large and not LAWS[name].of_large_models and not named:
                answers.append(law_not_asked(name, "", Message("laws.asking.costly")))
            elif not random or LAWS[name].of_one_run:
                told = _confirmed(name, subject, large=large, named=named)
                random = random or told is None
                answers += told or ()
        if random:  # runs that differ by themselves tell nothing, neither of a law that looked broken nor of one kept
            reason = Message("laws.asking.random_outputs")
            answers = [answer for answer in answers if LAWS[answer.law].of_one_run]
            answers += [law_not_asked(name, "", reason) for name in names if not LAWS[name].of_one_run]
    return tuple(answers)


def _all_read(run: ModelRun) -> bool:
    """Return whether every attention that ran was read."""
    return all(entry.code in ("idle", "other_run") for entry in run.not_measured)


def _report(number: int, names: Sequence[str], subject: Subject) -> None:
    values = {"number": number + 1, "count": len(names)}
    left = subject.pace.left(sum(LAWS[name].runs for name in names[number:]))
    told = Message("progress.law", law=names[number], **values)
    report_progress(told if left is None else Message("progress.law_left", law=names[number], left=left, **values))


def is_large(module: nn.Module) -> bool:
    """Return whether a run is costly: weights spread over devices, or more than 2e9 parameters."""
    return is_spread(module) or sum(parameter.numel() for parameter in module.parameters()) > LARGE_MODEL


def _without_values(name: str, subject: Subject) -> list[LawAnswer]:
    if (ask := LAWS[name].without_values) is not None:
        return _answers_of_law(name, ask, subject)
    return [law_not_asked(name, "", Message(NO_VALUES))]


def _unless_read(name: str, subject: Subject, reason: str, *, named: bool) -> list[LawAnswer]:
    """Return the answers of a law that needs one run and no copy; of any other, that it was not asked."""
    row = LAWS[name]
    if not row.of_one_run:
        return [law_not_asked(name, "", reason)]
    if not named and not row.of_large_models and is_large(subject.module):
        return [law_not_asked(name, "", Message("laws.asking.costly"))]
    return _answers_of_law(name, row.asks(named=named), subject)


def _confirmed(name: str, subject: Subject, *, large: bool, named: bool) -> list[LawAnswer] | None:
    """Return a law's answers, of the first tokens if they stand for all; None if outputs differ from run to run."""
    row = LAWS[name]
    if not row.compares:
        return _answers_of_law(name, row.asks(named=named), subject)
    try:
        if (first := subject.first) is not None:
            answers = _where_outputs_move(row, _answers_of_law(name, row.ask, first), first)
            if name == samples.LAW:
                first.rows_apart = any(answer.state == KEPT and not answer.reason for answer in answers)
            if stand_for_all(answers) and _stay(row, answers, subject):
                return answers
            subject.leave_taken()
            if not steady(subject):
                return None
        told = confirmed(partial(_answers_of_law, name, row.ask, subject), subject, large=large)
        if told:
            told = _where_outputs_move(row, told, subject)
    except NotAsked:  # the unchanged inputs ran before
        told = None
    if told is None and subject.pace.is_up:  # a law that looked broken could not be asked again
        return [law_not_asked(name, "", subject.time_is_up, by_length=True)]
    return told


def _stay(row: LawRow, answers: list[LawAnswer], subject: Subject) -> bool:
    """Return whether one question on the whole inputs agrees with what the first tokens keep; if not, these go."""
    if row.on_all_tokens is not None and any(answer.state == KEPT for answer in answers):
        with suppress(NotAsked):
            if row.on_all_tokens(subject):
                return True
        subject.first = None
    return subject.first is not None


def _where_outputs_move(row: LawRow, answers: list[LawAnswer], subject: Subject) -> list[LawAnswer]:
    """Return the answers, without those that are kept because no output moves with the content of the inputs."""
    if not row.needs_motion or all(one.state != KEPT for one in answers) or outputs_move(subject):
        return answers
    nothing = Message("laws.asking.nothing_moves")
    return [
        law_not_asked(row.name, one.about, nothing, by_length=True) if one.state == KEPT else one for one in answers
    ]


def _answers_of_law(name: str, ask: Law, subject: Subject) -> list[LawAnswer]:
    try:
        return list(ask(subject))
    except NotAsked as error:
        return [law_refused(name, "", error)]
    except INTERRUPTS:
        raise
    except Exception as error:  # outputs may be tensors of a kind that lacks an operation
        reason = Message("laws.asking.raised", error=kind_and_text(error, 120))
        return [law_not_asked(name, "", reason, by_length=True)]
