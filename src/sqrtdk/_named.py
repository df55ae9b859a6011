"""The forms of an argument of `attention`, made into one: names, functions, numbers, FlexAttention's own classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from sqrtdk._guesses import check_parameters, near_value
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.impl.mods import MaskMod
from sqrtdk.positions import Alibi, PositionTerm, alibi, deberta, shaw, t5_bias, transformer_xl
from sqrtdk.scales import SCALES, ScaleRule
from sqrtdk.scores import SCORES, CallableScore, FoldedScore, PairScore
from sqrtdk.stats.request import AuxRequest

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import Bias, Factor

    # what the arguments of `attention` may be
    AnyScore: TypeAlias = FoldedScore | PairScore | Callable[[Tensor, Tensor], Tensor] | str
    AnyScale: TypeAlias = float | Factor | Float[Tensor, " Hq"] | ScaleRule | str
    AnyBias: TypeAlias = Bias | PositionTerm | str
    AnyWindow: TypeAlias = tuple[int | None, int | None] | int

# without rope and yarn, which change q and k
_TERMS: Mapping[str, Callable[..., Any]] = {
    "alibi": alibi,
    "t5_bias": t5_bias,
    "shaw": shaw,
    "transformer_xl": transformer_xl,
    "deberta": deberta,
}


def as_score(score: Any) -> FoldedScore | PairScore:
    """Return the score function that an argument stands for.

    Args:
        score: A name in `SCORES`, a function of q and k, or a score function, which is returned as it is.

    Raises:
        InvalidValueError: The name is unknown.
        InvalidTypeError: It is none of these.
    """
    if isinstance(score, str):
        made: FoldedScore | PairScore = _made("score", score, SCORES, "scores")
        return made
    # one protocol at a time: a compiler reads a union of them as False for a module, such as scores.cosine()
    if isinstance(score, FoldedScore) or isinstance(score, PairScore):  # noqa: SIM101
        return score
    is_maker = any(score is maker for maker in SCORES.values())  # scores.cosine, which has yet to be called
    if callable(score) and not isinstance(score, type) and not is_maker:
        if not torch.compiler.is_compiling():
            check_parameters("score", score, "q, k")
        return CallableScore(score)
    name = getattr(score, "__name__", "cosine")
    hint = f"Call it: scores.{name}(), for one." if callable(score) else "scores.cosine() or 'cosine', for one."
    raise InvalidTypeError(
        f"score is a score of sqrtdk.scores, its name, or a function of q and k; got {score!r}", hint=hint
    )


def as_scale(scale: Any) -> Any:
    """Return the scale rule of a name in `SCALES`; anything else is returned as it is.

    Raises:
        InvalidValueError: The name is unknown.
    """
    return _made("scale", scale, SCALES, "scales") if isinstance(scale, str) else scale


def as_bias(bias: Any, heads: int, ahead: int | None = None) -> Any:
    """Return the position term of a name, and anything else unchanged.

    Args:
        bias: the argument.
        heads: query heads.
        ahead: by how much the rows of a call that is not causal have to move so that the last stands at the last key,
            from where flash-attn and x-transformers count; None: the call is causal.
    """
    if not isinstance(bias, str):
        return bias
    if bias == "alibi":
        return alibi(heads) if ahead is None else Alibi(alibi(heads).slopes, symmetric=True, ahead=ahead)
    return _made("bias", bias, _TERMS, "positions")


def _made(argument: str, name: str, table: Mapping[str, Callable[..., Any]], namespace: str) -> Any:
    if name not in table:
        raise InvalidValueError(
            f"{argument}={name!r} is no name of sqrtdk.{namespace}{near_value(name, table)}",
            hint=f"Its names: {', '.join(table)}.",
        )
    needed = [p.name for p in inspect.signature(table[name]).parameters.values() if p.default is p.empty]
    if needed:
        raise InvalidValueError(
            f"{argument}={name!r} needs {', '.join(needed)}, which a name alone does not give",
            hint=f"Pass {argument}={namespace}.{name}({', '.join(needed)}).",
        )
    return table[name]()


def as_request(request: Any) -> AuxRequest | None:
    """Return which statistics are asked for.

    Args:
        request: True (all), False or None (none), sqrtdk's `AuxRequest`, or that of torch's FlexAttention.

    Returns:
        The request, or None for none.
    """
    if request is None or request is False:
        return None
    if request is True:
        return AuxRequest.all()
    if isinstance(request, AuxRequest):
        return request
    if _is_flex(request, "AuxRequest"):
        return AuxRequest(**request._asdict())
    raise InvalidTypeError(
        f"return_aux is True, or an AuxRequest, or None; got {request!r}",
        hint="AuxRequest(lse=True) asks for one statistic, True for all.",
    )


def as_window(window: Any, diagonal: int | None, shift: int) -> Any:
    """Return (left, right) of a number of keys, and anything else unchanged.

    Args:
        window: the argument.
        diagonal: row i sees keys up to i + diagonal; None: the call is not causal.
        shift: a window of row i is around key i + shift.
    """
    if isinstance(window, bool) or not isinstance(window, int):
        return window
    if window < 1:
        raise InvalidValueError(
            f"window is a number of keys, at least 1, or (left, right); got {window}", hint="None: no bound."
        )
    if diagonal is None:
        raise InvalidValueError(
            f"window={window} is {window} keys up to the row's own only in a causal call, and this call is not causal",
            hint=f"Pass is_causal=True, or one of these: ({window - 1}, 0), {window} keys up to the row's own; "
            f"({window}, {window}), {window} keys on either side; window_lower_right=True counts from the last key.",
        )
    if diagonal != shift:  # as any mask, torch's lower-right bias leaves a window where it is
        raise InvalidValueError(
            f"window={window} ends at the key of the row, and the bias in attn_mask is aligned with the last key",
            hint="Pass causal_lower_right=True in place of the bias: it moves the window as well.",
        )
    return window - 1, 0


def mask_of_blocks(block_mask: Any, batch: int, heads: int, length: int, keys: int) -> MaskMod:
    """Return the `mask_mod` of FlexAttention's BlockMask.

    Raises:
        InvalidTypeError: It is no BlockMask.
        InvalidValueError: It was made for other sizes.
    """
    if not is_block_mask(block_mask):
        raise InvalidTypeError(
            f"block_mask is a BlockMask of torch.nn.attention.flex_attention; got {type(block_mask).__name__}",
            hint="Pass a function as mask_mod, a tensor as attn_mask.",
        )
    made = (*block_mask.shape[:2], *block_mask.seq_lengths)
    if made[0] not in (1, batch) or made[1] not in (1, heads) or made[2:] != (length, keys):
        raise InvalidValueError(
            f"block_mask is made for (batch, heads, L, S) = {(batch, heads, length, keys)}; got {made}",
            hint="Pass the function that it is made of as mask_mod.",
        )
    # FlexAttention's function for masks of blocks alone, which is right where the blocks hide nothing
    if getattr(block_mask.mask_mod, "__name__", "") == "noop_mask" and not block_mask.to_dense().all():
        raise InvalidValueError(
            "block_mask has a mask_mod; got one that only has blocks", hint="Pass BlockMask.from_kv_blocks a mask_mod."
        )
    return block_mask.mask_mod  # type: ignore[no-any-return]


def is_block_mask(mask: Any) -> bool:
    """Return whether an object is a BlockMask of FlexAttention."""
    return _is_flex(mask, "BlockMask")


def _is_flex(value: Any, name: str) -> bool:
    # by name, because importing that module imports torch's compiler
    if value is None:  # as it is in most calls: compilers before torch 2.11 can't follow what stands below
        return False
    return any(c.__name__ == name and c.__module__ == "torch.nn.attention.flex_attention" for c in type(value).__mro__)
