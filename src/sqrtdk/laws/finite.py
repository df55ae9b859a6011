"""Law `finite`: every number of the outputs is finite.

Nothing is changed. A model in half precision is asked itself, because a value beyond float16 (a mask of float32's least
number) is finite in float32. Minus infinity is allowed, because it rules out a class or a token. If the law is broken,
the rule `nonfinite` says in which operation of which module that begins, and why.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqrtdk.audit.records import BROKEN, LawAnswer
from sqrtdk.laws.answers import law_holds
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.messages import Message

LAW = "finite"


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer: whether the outputs for the unchanged inputs are free of NaN and plus infinity.

    The finding that locates the fault is made by the rule `nonfinite`.

    Raises:
        NotAsked: The model returns no floating-point tensor.
    """
    outputs = (subject.itself or subject).base
    if not outputs:
        raise NotAsked(Message("laws.asking.no_floating_output"))
    bad = [name for name, x in outputs.items() if bool((x.isnan() | x.isposinf()).any())]
    if bad:
        yield LawAnswer(LAW, "", BROKEN, Message("laws.finite.outputs", names=", ".join(bad[:3])))
    else:
        yield law_holds(LAW)
