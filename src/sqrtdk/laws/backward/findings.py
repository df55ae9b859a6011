"""What the law of gradients says of a fault: where it is, what to do about it, and how grave it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import law_broken
from sqrtdk.laws.backward.case import OF_LEARNED, Fault
from sqrtdk.laws.backward.lines import BackwardLines
from sqrtdk.laws.backward.words import fault_text, operands_text
from sqrtdk.messages import Message

_OF_PARAMETERS = (OF_LEARNED, "factor ")  # names of what the run does not compute
# What a fault asks for, if it is not the formula of dz.
_FIX_OF_FAULT = {
    **dict.fromkeys(("scale_missing", "scale_twice", "scale_again", "part_missing", "part_twice"), "scale"),
    **dict.fromkeys(("group", "mean", "group_twice"), "group"),
    **dict.fromkeys(("rate_missing", "rate_twice", "no_dropout", "dropout_drawn"), "dropout"),
    "flat_softcap": "cap",
    "none": "none",
    "sign": "sign",
    "swapped": "swapped",
}


@dataclass(frozen=True, slots=True)
class GradientFinding:
    """A fault at an attention; the custom function whose backward pass has it, and the lines there, if known."""

    site: str
    fault: Fault
    dtype: str
    by: str
    lines: BackwardLines


def answers_to(law: str, findings: Sequence[GradientFinding]) -> Iterator[LawAnswer]:
    """Yield an answer of a law for each fault at each attention."""
    said: set[tuple[str, str]] = set()
    for one in findings:
        fault = one.fault
        message = fault_text(fault, one.dtype)
        if (one.site, str(message)) in said:  # of two calls at one module
            continue
        said.add((one.site, str(message)))
        severity, fix = "warn" if fault.code.startswith("rounded_") else "fail", _fix(one)
        if _is_of_parameter(fault):
            severity, fix = "note", Message("laws.gradient.fix_parameter")  # which may be meant
        off = fault.off if math.isfinite(fault.off) and fault.code != "none" else None
        source = Message("laws.gradient.source")
        answer = law_broken(law, "", severity, one.site, message, fix, source, value=off)
        assert answer.finding is not None
        yield replace(answer, finding=replace(answer.finding, at=one.lines.at or None))


def _is_of_parameter(fault: Fault) -> bool:
    return fault.code == "none" and all(name.startswith(_OF_PARAMETERS) for name in fault.operands)


def _fix(one: GradientFinding) -> Message:
    """Return what to do about a fault, and where."""
    kind = _FIX_OF_FAULT.get(one.fault.code, "formula")
    if kind == "none" and not one.by:
        kind = "cut"
    fix = Message(f"laws.gradient.fix.{kind}", operands=operands_text(one.fault))
    name = one.by.partition(" (")[0]
    if one.lines.code:
        return Message("laws.gradient.fix_line", by=name, code=one.lines.code, fix=fix)
    by = f"{name} ({one.lines.at})" if one.lines.at else one.by
    return Message("laws.gradient.fix_in", by=by, fix=fix) if by else fix
