"""The verdict on a scale that only an attribute of the module may explain, which is a weak declaration."""

from __future__ import annotations

from collections.abc import Callable

from sqrtdk.audit.attributes import ScaleAttribute, holders, names_the_scale
from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN, name_mistake, root_factors
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.tracing.records import AttentionCall

Follows = Callable[[ScaleAttribute], bool | None]  # whether the call's scale changes with it; None: not known


def attribute_verdict(
    call: AttentionCall,
    effective: tuple[float, ...],
    attributes: tuple[ScaleAttribute, ...],
    layered: str | None,
    follows: Follows,
) -> JudgedCall:
    """What an attribute declares, which is little: nothing where the run does not follow it, and no mistake's value.

    Args:
        call: the record.
        effective: its scale, one value or one a head.
        attributes: of its module.
        layered: how the scale follows the number of the layer, where the layers show that.
        follows: whether the run's scale changes with an attribute, where that was tried.
    """
    textbook = inverse_root(call.head_dim)
    if min(effective) <= 0:
        reason = "a negative scale gives the weight to the keys least alike"
        if max(effective) <= 0 <= min(effective):
            reason = "at scale 0 the weights know nothing of q and k"
        return JudgedCall(call, "unexplained", UNKNOWN, None, textbook, reason)
    holding = list(holders(attributes, effective, call.head_dim))
    held, text = next((pair for pair in holding if follows(pair[0]) is not False), (None, None))
    idle = None if held or not holding else f"attribute {holding[0][1]} holds that value, but the scale does not follow"
    if not heads_agree(effective):
        if held is not None:
            return JudgedCall(call, "declared", declared_by=f"attribute {text} (per head)", attribute=text)
        low, high = min(effective), max(effective)
        reason = f"heads differ, from {low:.6g} to {high:.6g}, and nothing declares it"
        return JudgedCall(call, "unexplained", UNKNOWN, None, textbook, reason)
    mistake, how = name_mistake(call, effective[0], layered=layered)
    if held is not None and _excused(call, mistake, held, follows):
        by = f"attribute {text}" if held.flag else f"attribute {text} = {effective[0]:.6g}"
        by += " (learned)" if held.learned else ""
        return JudgedCall(call, "declared", None, by, effective[0], how if mistake == "twice" else None, text)
    if held is not None and MISTAKES[mistake].excuse == "nothing":
        idle = f"attribute {text} holds the value of {mistake}"
    told = "; ".join(part for part in (idle, how) if part) or None
    return JudgedCall(call, "unexplained", mistake, None, textbook, told, text)


def _excused(call: AttentionCall, mistake: str, held: ScaleAttribute, follows: Follows) -> bool:
    """Whether the attribute that holds the value of a mistake declares it."""
    excuse = MISTAKES[mistake].excuse
    if excuse == "one factor":
        return root_factors(call) < 2
    if excuse == "its name":  # T5's way; alpha and temperature are 1 by default, False is written
        return held.flag or (follows(held) is True and names_the_scale(held))
    return excuse == "any attribute"


def heads_agree(effective: tuple[float, ...]) -> bool:
    """Whether all heads have one scale."""
    return all(close(value, effective[0]) for value in effective)
