"""What q/k normalisation declares: after it the size of q and k is known, and other scales than 1/sqrt(d) are rules.

Both q and k must be normalised: with one of them as it comes from its projection, the product still grows with d.
"""

from __future__ import annotations

import math

from sqrtdk.audit.attributes import INVERSE, PLAIN, SCALE_ATTRIBUTES, ScaleAttribute
from sqrtdk.audit.mistakes import MISTAKES, name_mistake, root_factors
from sqrtdk.audit.tolerance import close, heads_agree, inverse_root, matches
from sqrtdk.tracing.records import AttentionCall


def normalised(call: AttentionCall) -> str | None:
    """The normalisation of q and k ("rms", "layer", "l2", ...), or None if q and k are not both normalised."""
    sides = {stage.where for stage in call.stages if stage.name == "norm"} & {"q", "k"}
    return None if len(sides) == 1 else call.norm


def norm_sigma(ratio: float | None, size: int) -> float:
    """Standard deviation that a scale ratio gives to logits of normalised q and k; 0 where nothing sets it.

    Args:
        ratio: effective scale times sqrt(head_dim).
        size: `norm_size` of the call.
    """
    return abs(ratio) / size if ratio is not None and size else 0.0


def norm_size(call: AttentionCall) -> int:
    """By what a scale ratio is divided in `norm_sigma`.

    The head dimension where q and k are of length 1, 1 where each of their channels is; 0 where they are not
    normalised.
    """
    norm = normalised(call)
    return 0 if norm is None else call.head_dim if norm == "l2" else 1


def _dropped(call: AttentionCall, attributes: tuple[ScaleAttribute, ...]) -> bool:
    """Whether the module holds the textbook scale in an attribute, and no factor of the run is it."""
    if root_factors(call):
        return False
    textbook = {PLAIN: (inverse_root(call.head_dim),), INVERSE: (math.sqrt(call.head_dim),)}
    for attribute in attributes:
        if attribute.flag:
            continue
        expected = textbook.get(SCALE_ATTRIBUTES[attribute.name][0])
        if expected and attribute.values and not attribute.learned and matches(attribute.values, expected):
            return True
    return False


def _signature(call: AttentionCall, effective: tuple[float, ...]) -> bool:
    """Whether the scale is one that nobody intends."""
    return heads_agree(effective) and MISTAKES[name_mistake(call, effective[0])[0]].excuse in ("nothing", "one factor")


def _gains(call: AttentionCall, effective: tuple[float, ...]) -> str | None:
    """Gains of the norms themselves, written out beside a scale of 1 or 1/sqrt(d)."""
    gains = [f for f in call.scale.factors if f.where in ("q", "k") and f.source.startswith(("tensor", "parameter"))]
    if not gains or any(factor.value is None for factor in call.scale.factors):
        return None
    sides = tuple(dict.fromkeys(factor.where for factor in gains))
    rest = math.prod(factor.value or 0.0 for factor in call.scale.factors if factor not in gains)
    if not close(rest, 1.0) and not close(rest, inverse_root(call.head_dim)):
        return None
    if len(sides) == 1 and _signature(call, effective):  # a scale that was written on q, and no gain of a norm
        return None
    return " and ".join(sides)  # RMS norm with a gain of d^-1/2 on both sides is the l2 norm


def norm_rule(call: AttentionCall, effective: tuple[float, ...], attributes: tuple[ScaleAttribute, ...]) -> str | None:
    """The rule that admits a scale after q/k normalisation, or None."""
    norm = normalised(call)
    if norm is None:
        return None
    if sides := _gains(call, effective):
        return f"q/k norm ({norm}) with gains on {sides}"
    if matches(effective, (1.0,)) and not _dropped(call, attributes):
        return f"q/k norm ({norm}): scale 1.0"
    if norm == "l2" and matches(effective, (math.sqrt(call.head_dim),)):
        return "q/k norm (l2): sqrt(head_dim) gives logits of variance 1 (Loshchilov et al. 2024, nGPT)"
    return None


def divided_cosine(call: AttentionCall) -> bool:
    """Whether the product is a cosine: q and k have unit length, and no channel a gain of its own."""
    return normalised(call) == "l2" and not call.norm_gain


def cosine_gain(call: AttentionCall, effective: tuple[float, ...]) -> str | None:
    """The rule that admits a fixed gain on the cosine of q and k, or None.

    A cosine is at most 1, so the gain is what lets the softmax choose; one below 1 would only flatten it.
    """
    low, high = min(effective), max(effective)
    if normalised(call) != "l2" or low < 1.0:
        return None
    gain = f"{low:.6g}" if close(high, low) else f"{low:.6g} to {high:.6g}"
    return f"q/k norm (l2): cosine with fixed gain {gain} (learned in Henry et al. 2020, QKNorm)"
