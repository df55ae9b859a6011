"""`explain`: which implementation `attention` would take, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqrtdk import _arguments as arguments
from sqrtdk._attention import outside_autocast
from sqrtdk._guesses import parameters_of, refuse_arguments
from sqrtdk._resolve import resolve_arguments
from sqrtdk.errors import SqrtdkError
from sqrtdk.impl.choice import Choice, settle
from sqrtdk.impl.operands import check_term
from sqrtdk.stats.request import AuxRequest

if TYPE_CHECKING:
    from typing_extensions import Never

    from sqrtdk._named import AnyBias, AnyScale, AnyScore, AnyWindow
    from sqrtdk._shapes import AnyKey, Bias, Query, Sinks, Value, Visible
    from sqrtdk.impl.mods import MaskMod, ScoreMod


def explain(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: AnyScale | None = None,
    enable_gqa: bool = False,
    *,
    score: AnyScore | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | None = None,
    bias: AnyBias | None = None,
    window: AnyWindow | None = None,
    sinks: Sinks | float | None = None,
    causal_lower_right: bool = False,
    window_lower_right: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    return_aux: AuxRequest | bool | None = None,
    return_weights: bool = False,
    impl: str = "auto",
    **_unknown: Never,
) -> Choice:
    """Return the implementation that `attention` would take for the same arguments; no attention is computed.

    Returns:
        The implementation's name as `impl`, and the reason for the choice as `reason`.

    Raises:
        InvalidValueError: Shapes or values do not fit.
        InvalidTypeError: An argument has the wrong type or dtype.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 2, 8, 4)
        >>> explain(q.double(), q.double(), q.double(), softcap=30.0).impl
        'dense'
    """
    if _unknown:
        refuse_arguments("explain", _unknown, parameters_of(explain))
    try:
        call = resolve_arguments(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, score=score, score_mod=score_mod,
            mask_mod=mask_mod, block_mask=block_mask, softcap=softcap, bias=bias, window=window, sinks=sinks,
            causal_lower_right=causal_lower_right, window_lower_right=window_lower_right, query_offset=query_offset,
            key_offset=key_offset, return_aux=return_aux,
        )  # fmt: skip
        check_term(call)
        arguments.check_flags(return_weights=return_weights)
        with outside_autocast(query):
            return settle(call, impl, weights=return_weights)[-1]
    except SqrtdkError as error:
        error.args = (f"explain(): {error}",)  # the rules are those of attention, whose name the message would have
        raise
