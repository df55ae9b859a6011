"""Where the parts of an attention are written, for a reader."""

from __future__ import annotations

from sqrtdk._language import Language
from sqrtdk.report.figures import number
from sqrtdk.tracing.records import AttentionCall


def places(call: AttentionCall) -> dict[str, str]:
    """File and line -> what is written there: the product, the factors of the scale, the softmax."""
    factors = [(f"{number(factor.value)} on {factor.where}", factor.at) for factor in call.scale.factors]
    parts: dict[str, list[str]] = {}
    for what, at in (("q.k", call.product_at), *factors, ("softmax", call.softmax_at)):
        if at is not None:
            parts.setdefault(at, []).append(what.replace(" on op", " by the kernel"))
    return {at: ", ".join(dict.fromkeys(whats)) for at, whats in parts.items()}


def places_text(call: AttentionCall, language: Language = "en") -> str:
    """The same in one line; empty where nothing is known."""
    written = places(call).items()
    if language == "zh":
        chinese = {at: what.replace(" on ", " 乘在 ").replace(" by the kernel", " 由核应用") for at, what in written}
        return "；".join(f"{what} 位于 {at}" for at, what in chinese.items())
    return "; ".join(f"{what} at {at}" for at, what in written)
