"""Law `finite`: every number of the outputs is finite.

Nothing is changed. Minus infinity rules a class or a token out, and is let pass. Where it is broken the rule
`nonfinite` says in which operation of which module it begins, and why.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqrtdk.audit.records import BROKEN, LawAnswer
from sqrtdk.laws.answers import kept
from sqrtdk.laws.subject import Subject

LAW = "finite"


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """One answer; its finding is that of the rule `nonfinite`."""
    bad = [name for name, x in subject.base.items() if bool((x.isnan() | x.isposinf()).any())]
    if bad:
        yield LawAnswer(LAW, "", BROKEN, f"NaN or infinity in the outputs: {', '.join(bad[:3])}")
    else:
        yield kept(LAW)
