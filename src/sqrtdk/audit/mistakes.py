"""The dictionary of mistakes: what happened, its values, its fix, and how look-alikes are told apart.

d = head_dim, h = heads, r = effective scale * sqrt(d). One effective scale can have several causes; evidence decides
before value: zero padding that the product saw, a declared length factor, a pattern over the layers, and the factors
along the lineage (a scale applied twice is two factors of d^-1/2, muP's 1/d is one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.tracing.records import AttentionCall

PAD_MULTIPLES = (8, 16, 32, 64, 128)  # head sizes that kernels pad to


@dataclass(frozen=True, slots=True)
class Mistake:
    """What happened in half a sentence, the `values` the scale can take for a call, and the fix in one sentence."""

    name: str
    happened: str
    values: Callable[[AttentionCall], tuple[float, ...]]
    fix: str


def _padded_sizes(call: AttentionCall) -> tuple[int, ...]:
    d = call.head_dim
    sizes = {-(-d // multiple) * multiple for multiple in PAD_MULTIPLES} | {1 << max(d - 1, 0).bit_length()}
    return tuple(sorted(size for size in sizes if size > d))


def _model_dims(call: AttentionCall) -> tuple[int, ...]:
    dims = [call.heads * call.head_dim] + ([call.model_dim] if call.model_dim else [])
    return tuple(dict.fromkeys(dim for dim in dims if dim != call.head_dim))


MISTAKES: dict[str, Mistake] = {
    mistake.name: mistake
    for mistake in (
        Mistake(
            "missing",
            "no 1/sqrt(head_dim) was applied",
            lambda call: (1.0,),
            "multiply the logits by 1/sqrt(head_dim), or declare 1.0 in the config if it is meant",
        ),
        Mistake(
            "inverted",
            "multiplied by sqrt(head_dim) instead of divided",
            lambda call: (math.sqrt(call.head_dim),),
            "divide by sqrt(head_dim) instead of multiplying by it",
        ),
        Mistake(
            "twice",
            "it is 1/head_dim, 1/sqrt(head_dim) applied twice",
            lambda call: (inverse_root(call.head_dim) ** 2,),
            "apply 1/sqrt(head_dim) once: scale q or pass scale=, not both (SDPA scales by default)",
        ),
        Mistake(
            "model_dim",
            "the root of the model dimension was taken",
            lambda call: tuple(map(inverse_root, _model_dims(call))),
            "take the square root of the head dimension, not of the model dimension",
        ),
        Mistake(
            "head_count",
            "the root of the number of heads was taken",
            lambda call: tuple(map(inverse_root, {call.heads, call.kv_heads} - {0, 1})),
            "take the square root of the head dimension, not of the number of heads",
        ),
        Mistake(
            "padded_head",
            "the root of the padded head dimension was taken",
            lambda call: tuple(map(inverse_root, _padded_sizes(call))),
            "pass scale=head_dim**-0.5 of the head before padding",
        ),
        Mistake(
            "length_factor",
            "the declared length factor was dropped",
            lambda call: (),
            "multiply the softmax scale by the square of the declared length factor",
        ),
        Mistake(
            "layer_index",
            "it follows the number of the layer",
            lambda call: (),
            "scale every layer by 1/sqrt(head_dim) alone, unless the config declares the factor 1/(layer + 1)",
        ),
        Mistake(
            "unknown",
            "nothing declares or explains it",
            lambda call: (),
            "compare the factors along the lineage with what the model's paper or config says",
        ),
    )
}

# An attribute that holds one of these is not a declaration: it holds the mistake.
NOT_EXCUSED = ("inverted", "head_count", "model_dim", "padded_head")

BY_VALUE = ("missing", "inverted", "model_dim", "head_count", "twice", "padded_head")  # order for a value alone


def root_factors(call: AttentionCall) -> int:
    """How many factors along the lineage are d^-1/2 each."""
    expected = inverse_root(call.head_dim)
    return sum(factor.value is not None and close(factor.value, expected) for factor in call.scale.factors)


def name_mistake(
    call: AttentionCall, effective: float, length: float = 1.0, layered: str | None = None
) -> tuple[str, str | None]:
    """The mistake that explains an effective scale, and how it was told from its look-alikes.

    Args:
        call: head_dim, padded_head_dim, heads, kv_heads, model_dim and the factors are the evidence.
        effective: the scale to explain.
        length: a declared length multiplier (YaRN's mscale squared), which the effective scale may contain as well.
        layered: how r follows the number of the layer, where the layers show that.

    Returns:
        The name, one of `MISTAKES`, and a reason where there are look-alikes.
    """
    if layered:
        return "layer_index", layered
    targets = (effective,) if length in (0.0, 1.0) else (effective, effective / length)
    padded = call.padded_head_dim
    if padded > call.head_dim and any(close(target, inverse_root(padded)) for target in targets):
        return (
            "padded_head",
            f"the product saw {call.head_dim} dimensions padded to {padded}, and the scale is {padded}^-1/2",
        )
    alike = [
        name
        for name in BY_VALUE
        if any(close(target, value) for target in targets for value in MISTAKES[name].values(call))
    ]
    if "twice" in alike:
        roots = root_factors(call)
        if roots >= 2:
            return "twice", f"{roots} factors of {call.head_dim}^-1/2 along the lineage"
        if alike[0] == "twice":
            return "twice", "one factor of 1/head_dim: muP's rule, if a config or an attribute declares it"
    if not alike:
        return "unknown", None
    others = ", ".join(alike[1:])
    return alike[0], f"by value; the same number fits {others}" if others else None
