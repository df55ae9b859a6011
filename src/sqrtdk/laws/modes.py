"""Law `modes`: the outputs do not depend on how the model is run.

Batch of one. Changed: a sample runs alone. Compared: its outputs with those in a batch; the law `samples` shares the
two runs. What breaks it: a capacity of experts, a longest length or a mean that is taken over the whole batch.
Train mode. Changed: every module is in train mode, with every dropout off (`sqrtdk.laws.training`). Compared: outputs
of the same name and shape with those of eval mode, within rounding. It catches `is_causal=self.training`, a scale, a
mask, a norm or a rotation in one branch of `if self.training`, and a dropout that scales by its rate once more. Users
report such faults as a good loss with a bad evaluation, or as a port that agrees in one mode only.
Modules with running statistics stay in eval mode, because a BatchNorm in train mode uses the whole batch. If the
outputs differ, eval mode runs again with dropouts off, because torch's fused encoder layers run only in eval mode and
put zeros at padding. If random numbers were drawn, rates of hand-written dropouts, LayerDrop, masked features and
jitter are set to 0, and other seeds are tried.
Not asked: if other seeds still move the outputs (a constant rate written by hand, gumbel, sampling); if train mode
returns other outputs; if outputs follow a buffer that train mode updates; if the forward raises. The rule
`eager_vs_sdpa` compares eager with fused attention, and the rule `dropout` reports dropout in eval mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from sqrtdk.audit.records import LawAnswer
from sqrtdk.audit.rules.eager_vs_sdpa import call_difference
from sqrtdk.laws.answers import law_broken, law_holds, law_refused
from sqrtdk.laws.first_place import first_of_modes
from sqrtdk.laws.moved import moved_entries
from sqrtdk.laws.samples import batches, mixed, others_differ, same_alone
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.laws.training import draws, rates_off, seed_all, without_dropout
from sqrtdk.messages import Message
from sqrtdk.models.unchanged import unchanged
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.trace import trace

LAW = "modes"
ONE, TRAIN = "laws.modes.about.batch_of_one", "laws.modes.about.train_mode"
MOST_SEEDS = 6  # a branch taken at random half the time escapes with probability 2^-5
# Bytes of tensors that are copied before a run: buffers, not weights. A copy of all weights costs more than the run.
MOST_RESTORED_BYTES = 2**25
_LOSS = re.compile(r"loss|(^|_)aux")


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield two answers: are outputs the same alone as in a batch, and in training mode as in evaluation mode?

    Dropout is off in training mode. A comparison that can't be made gives the answer "not asked" with the reason.
    """
    for about, answer in ((ONE, _of_one), (TRAIN, _of_train)):
        try:
            yield answer(subject)
        except NotAsked as error:
            yield law_refused(LAW, Message(about), error)


def _of_one(subject: Subject) -> LawAnswer:
    """Return the answer for a batch of one: a sample must have the same outputs alone as in a batch."""
    found = batches(subject)
    if found.mixed:  # as the law `samples` has found
        raise NotAsked(Message("laws.modes.samples_mix"))
    if others_differ(found):
        subject.moves = True
    if not same_alone(found):
        if mixed(found):
            raise NotAsked(Message("laws.modes.samples_mix"))
        message, fix = Message("laws.modes.alone"), Message("laws.modes.fix_alone")
        return law_broken(LAW, Message(ONE), "warn", None, message, fix, Message("laws.modes.source_alone"))
    return law_holds(LAW, Message(ONE))


# -- train mode --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Runs:
    """Runs in both modes with dropout off; whatever such a run changes is put back, large tensors excepted.

    Attributes:
        subject: The model.
        resting: Modules that stay in eval mode.
        drew: Whether the last run drew random numbers.
        updated: Paths of the buffers and parameters that the last run changed.
        lost: Those of them that were too large to be put back.
    """

    subject: Subject
    resting: set[nn.Module]
    drew: bool = False
    updated: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        module = self.subject.module
        trains = lambda part: training and part not in self.resting  # noqa: E731
        with unchanged(module, most_copied=MOST_RESTORED_BYTES) as before, without_dropout(module, trains):
            yield
            self.updated = before.moved()
        self.lost += before.moved() if self.updated else []

    def run(self, training: bool, seed: int | None = None) -> Outputs:
        seed = self.subject.seed if seed is None else seed
        seed_all(seed)
        before = draws()
        with self.mode(training):
            outputs = self.subject.run({}, seed=seed)
            self.drew = draws() != before
        return outputs


def _runs(subject: Subject) -> _Runs:
    """Return the runs, with modules that keep running statistics in eval mode."""
    resting = {part for part in subject.module.modules() if getattr(part, "running_mean", None) is not None}
    return _Runs(subject, resting)


def _of_train(subject: Subject) -> LawAnswer:
    """Return the answer for train mode: without dropout, it must give the outputs of eval mode."""
    module = subject.module
    runs = _runs(subject)
    trained = _trained(runs)
    if not _differ(subject.base, trained):
        return law_holds(LAW, Message(TRAIN))
    if runs.lost:  # what runs from here on follows it as well
        raise NotAsked(Message("laws.modes.updates_buffer", buffer=runs.lost[0]))
    drew, updated = runs.drew, runs.updated
    plain = runs.run(False)
    if not _differ(plain, trained):
        return law_holds(LAW, Message(TRAIN))
    if updated:
        runs.resting |= {module.get_submodule(path.rpartition(".")[0]) for path in updated}
        trained = _trained(runs)
        if not _differ(plain, trained):
            raise NotAsked(Message("laws.modes.updates_buffer", buffer=updated[0]))
        drew = runs.drew
    with ExitStack() as stack:
        if drew:
            stack.enter_context(rates_off(module))
            plain, trained = runs.run(False), _trained(runs)
            if not _differ(plain, trained):
                return law_holds(LAW, Message(TRAIN))
        # A generator that the model owns advances without `draws` seeing it, so one more run is needed.
        others = (runs.run(True, subject.seed + turn) for turn in range(1, MOST_SEEDS if runs.drew else 2))
        if any(_differ(trained, other) for other in others):
            raise NotAsked(Message("laws.modes.random"))
        return _broken(runs)


def _trained(runs: _Runs) -> Outputs:
    try:
        return runs.run(True)
    except NotAsked as error:
        raise NotAsked(Message("laws.modes.not_run", error=error.reason), by_length=True) from error


def _differ(one: Outputs, other: Outputs) -> bool:
    """Return whether any output that both runs have moved.

    Losses are left out, because a router's loss is computed only in train mode.

    Raises:
        NotAsked: No output has the same name and shape, or the outputs are tuples of different lengths, whose numbers
            do not correspond.
    """
    places = [{name for name in outputs if name.partition(".")[0].isdigit()} for outputs in (one, other)]
    both = (name for name in one if name in other and one[name].shape == other[name].shape)
    names = [name for name in both if one[name].dim() and not _LOSS.search(name)]
    if not names or places[0] != places[1]:
        raise NotAsked(Message("laws.modes.other_outputs"))
    return any(bool(moved_entries(one[name], other[name]).any()) for name in names)


def _broken(runs: _Runs) -> LawAnswer:
    subject = runs.subject
    site = first_of_modes(subject, [partial(runs.mode, training) for training in (False, True)])
    evaluated, trained = (_calls(runs, training) for training in (False, True))
    twins = {(call.site, call.index): call for call in trained}
    pairs = [(call, twins[call.site, call.index]) for call in evaluated if (call.site, call.index) in twins]
    found = next(((one.site, what) for one, two in pairs if (what := _difference_of_calls(one, two)) is not None), None)
    message = Message("laws.modes.train")
    at_attention = any(site == call.site or (site or "").startswith(f"{call.site}.") for call in evaluated if call.site)
    if found is not None:
        message = Message("laws.modes.train_at", what=found[1])
        site = found[0] if site is None else site
    severity = "fail" if found is not None or at_attention else "warn"
    fix, source = Message("laws.modes.fix_train"), Message("laws.modes.source_train")
    return law_broken(LAW, Message(TRAIN), severity, site, message, fix, source)


def _calls(runs: _Runs, training: bool) -> tuple[AttentionCall, ...]:
    with trace(runs.subject.module, stats=False) as seen, runs.mode(training):
        runs.subject.run({})
    return seen.calls


def _difference_of_calls(one: AttentionCall, other: AttentionCall) -> str | None:
    """Return what differs between two readings of an attention, or None if nothing that was read does."""
    found = call_difference(one, other, outputs=False)
    if found is not None:
        return found[0]
    if one.mask is None or other.mask is None or one.mask.kind == other.mask.kind:
        return None
    return Message("rules.eager_vs_sdpa.mask", eager=one.mask.kind, other=other.mask.kind)
