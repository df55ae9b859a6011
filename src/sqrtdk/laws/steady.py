"""What every comparison of two runs takes for granted: the same inputs give the same outputs, and other inputs do not.

A forward may draw random numbers, or count its own calls: in a buffer, an attribute, a global, a cache that it fills.
Two equal runs in evaluation mode come before any law. They do not show what differs now and then (at every fifth call),
so a law that looks broken is asked again, with runs of the unchanged inputs in between, which must agree as well.

Derivation of the number of askings: let one asking take m runs. With one unchanged run before the second asking and two
before the third, the same run of the law lies m + 1 and then m + 2 runs later. These numbers have no common factor, so
what recurs at every k-th run (k > 1) can't fall on it three times. A large model is asked again once.

A law is kept only if something could have moved. A head whose weights are zero, as those of a fresh model, moves
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.audit.records import BROKEN, LawAnswer
from sqrtdk.laws.inputs import Content, contents, other_content
from sqrtdk.laws.moved import any_moved
from sqrtdk.laws.subject import Subject

AGAIN = (1, 2)  # runs of the unchanged inputs before each further asking of a law that looks broken
AGAIN_IF_LARGE = (1,)


def steady(subject: Subject) -> bool:
    """Return whether a second run in evaluation mode, with another seed, gives the same outputs up to rounding.

    The result is kept in `subject.steady`. A traced run with that seed saves the second run if its outputs agree; if
    they do not, a plain run decides, because a trace may use other kernels.
    """
    if subject.steady is None:
        seed, traced = subject.seed + 1, subject.traced
        subject.steady = traced is not None and traced.seed == seed and not any_moved(subject.base, traced.outputs)
        subject.steady = subject.steady or not any_moved(subject.base, subject.run({}, seed=seed))
    return subject.steady


def confirmed(ask: Callable[[], list[LawAnswer]], subject: Subject, *, large: bool = False) -> list[LawAnswer] | None:
    """Ask a law, and ask it again if it looks broken, to exclude outputs that differ from run to run.

    Args:
        ask: Asks the law and returns its answers.
        subject: The model; its kept runs are dropped before the law is asked again.
        large: Whether the model is large, so that fewer runs are repeated.

    Returns:
        The answers of the first time, or None if runs of the unchanged inputs differ or the violation does not recur.
    """
    shared = subject.shares_runs
    answers = ask()
    broken = _broken(answers)
    if not broken:
        return answers
    if shared:  # runs that an earlier law made stand at another distance, so the count begins with runs of its own
        subject.forget_runs()
        if not _broken(ask()) >= broken:
            return None
    for count in AGAIN_IF_LARGE if large else AGAIN:
        again = [subject.run({}) for _ in range(count)]
        if subject.taken and any_moved(subject.base, again[0]):
            # The base is the audit's: a trace may run other kernels, whose rounding differs.
            subject.take_plain(again[0])
            return confirmed(ask, subject, large=large)
        subject.forget_runs()
        if any(any_moved(subject.base, outputs) for outputs in again) or not _broken(ask()) >= broken:
            return None
    return answers


def outputs_move(subject: Subject) -> bool:
    """Return whether some output changes with the content of the inputs; the result is kept in `subject.moves`.

    Runs the model once with other content, unless a law has already seen it. If there is no content to change, an
    output with unequal numbers counts as one that does.
    """
    if subject.moves is None:
        changes = {one.name: other_content(subject, one, _everywhere(one)) for one in contents(subject)}
        if any(not torch.equal(changes[name], subject.tensors[name]) for name in changes):
            subject.moves = any_moved(subject.base, subject.run(changes))
        else:  # without content to change, outputs of more than one number are taken to follow something
            subject.moves = any(bool((x != x.flatten()[:1]).any()) for x in subject.base.values() if x.numel())
    return subject.moves


def _everywhere(content: Content) -> Tensor:
    return torch.ones(content.tensor.shape[: 1 if content.length is None else 2], dtype=torch.bool)


def _broken(answers: list[LawAnswer]) -> set[str]:
    """Return what the broken answers are about."""
    return {answer.about for answer in answers if answer.state == BROKEN}
