"""The sentence of a fault."""

from __future__ import annotations

from sqrtdk.laws.backward.case import OF_LEARNED, Fault
from sqrtdk.laws.backward.faults import numbers_text
from sqrtdk.messages import Message, joined


def fault_text(fault: Fault, dtype: str = "") -> Message:
    """Return the sentence of a fault: of which operands, what is wrong, and where.

    Args:
        fault: The fault.
        dtype: Name of the half-precision dtype in which alone it shows, or "".

    Example:
        >>> fault_text(Fault(("k",), "scale_missing", {"factor": "8"}, heads=(0, 2)))
        "the gradient of k is 8 times the formula's: the scale is missing (heads 0, 2)"
    """
    values = {**fault.values}
    if fault.code == "unknown" or fault.code.startswith("rounded_"):
        values |= {"off": f"{fault.off:.2g}", "allowed": f"{fault.allowed:.2g}"}
    text = Message(f"laws.gradient.what.{fault.code}", operands=operands_text(fault), **values)
    parts = [
        Message(f"laws.gradient.where.{name}", numbers=numbers_text(numbers))
        for name, numbers in (("samples", fault.samples), ("heads", fault.heads), ("rows", fault.rows))
        if numbers
    ]
    parts += [Message("laws.gradient.where.dtype", dtype=dtype)] if dtype else []
    return Message("laws.gradient.at", what=text, where=joined(parts, "comma")) if parts else text


def operands_text(fault: Fault) -> str:
    """Return the operands of a fault as a list: "q, k"."""
    return joined(list(dict.fromkeys(_operand(name) for name in fault.operands)), "comma")


def _operand(name: str) -> str:
    if name.startswith("bias"):
        return Message("laws.gradient.bias")
    if name == "sinks":
        return Message("laws.gradient.sinks")
    return name.removeprefix("factor ").removeprefix(OF_LEARNED)
