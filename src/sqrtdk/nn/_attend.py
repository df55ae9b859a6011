"""One call of `sqrtdk.attention` that can also return the weights, and the masks of a multi-head module.

A module's bool mask hides where it is True, as in `torch.nn`; the functions below it take the inverse, True takes part.
This is the only file that turns one into the other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk._attention import attention
from sqrtdk._subclasses import as_bool_mask, check_class, is_causal_bias
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.impl.call import has_values
from sqrtdk.stats.request import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from jaxtyping import Bool, Shaped

    from sqrtdk._shapes import AnyKey, Logits, Output, Query, Value


# The least negative "lowest number" in use, float16's: a floating mask with it or less hides.
_HIDING = torch.finfo(torch.float16).min


def function_mask(attn_mask: Tensor) -> Tensor:
    """Return the mask of a module, in which True hides a key, as `sqrtdk.attention` takes it, where True shows it.

    A floating mask, and torch's causal bias, mean the same in both.

    Raises:
        InvalidTypeError: It is neither bool nor floating, or a subclass that is not a plain mask.
    """
    if is_causal_bias(attn_mask):
        return attn_mask
    _check_type("attn_mask", attn_mask)
    return ~attn_mask if attn_mask.dtype == torch.bool else attn_mask


def merged_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    is_causal: bool,
    batch: int,
    heads: int,
    length: int,
    keys: int,
    device: Any,
) -> Shaped[Tensor, "#{batch} #{heads} #{length} {keys}"] | None:
    """Merge a module's masks into one for `sqrtdk.attention`: bool if both are, otherwise floating.

    Args:
        attn_mask: (L, S), (N * heads, L, S), or (N or 1, heads or 1, L, S), bool or floating; or torch's causal bias.
        key_padding_mask: (N, S), or (S,) if N is 1, bool or floating.
        is_causal: `attn_mask`, if given, must be the causal mask.
        batch: N.
        heads: query heads.
        length: L.
        keys: S.
        device: for the mask made from a causal bias.

    Raises:
        InvalidTypeError: A mask is neither bool nor floating, or a subclass that is not a plain mask.
        InvalidValueError: A mask has another shape, or is not causal although `is_causal` says so.
    """
    attn = None if attn_mask is None else _attn(attn_mask, batch, heads, length, keys, device)
    if is_causal and attn is not None:
        _check_causal(attn)
    padding = None if key_padding_mask is None else _padding(key_padding_mask, batch, keys)
    if attn is None or padding is None:
        return padding if attn is None else attn
    # Bool masks stay bool where possible: kernels skip hidden keys, but must read a floating mask.
    if attn.dtype == padding.dtype == torch.bool:
        return attn & padding
    if attn.dtype == torch.bool:
        return torch.where(attn, padding, -math.inf)
    return torch.where(padding, attn, -math.inf) if padding.dtype == torch.bool else attn + padding


def with_extra_keys(
    mask: Shaped[Tensor, "#N #Hq #L #S"] | None, extra: int, *, is_causal: bool, length: int, keys: int, device: Any
) -> Any:
    """Return a mask for keys to which `extra` keys were appended that every row sees.

    Args:
        mask: (#N, #Hq, #L, #S) bool (True where a key takes part) or floating mask; None: every key is seen.
        extra: Number of appended keys.
        is_causal: Whether row i sees keys j <= i only, and the appended ones.
        length: Number of rows, L.
        keys: Number of keys without the appended ones, S.
        device: Device of a mask that is made here.

    Returns:
        (..., S + extra); None if all keys are seen.
    """
    # The call's own is_causal would hide the appended keys, which come last: so the triangle is written out.
    if is_causal:
        causal = torch.ones(length, keys, dtype=torch.bool, device=device).tril()
        mask = causal if mask is None else (mask & causal if mask.dtype == torch.bool else _hide(mask, causal))
    if mask is None:
        return None
    # True shows the extra keys in a bool mask, 0.0 adds nothing in a floating one.
    return functional.pad(mask.expand(*mask.shape[:-1], keys), (0, extra), value=bool(mask.dtype == torch.bool))


def _hide(mask: Shaped[Tensor, "#N #Hq #L #S"], visible: Bool[Tensor, "L S"]) -> Shaped[Tensor, "#N #Hq L S"]:
    return torch.where(visible, mask, -math.inf)


def _attn(
    mask: Tensor, batch: int, heads: int, length: int, keys: int, device: Any
) -> Shaped[Tensor, "#{batch} #{heads} {length} {keys}"]:
    """Return a module's `attn_mask` in four dimensions, as the function takes it.

    Raises:
        InvalidValueError: Its shape is none of those that torch's modules take.
    """
    causal = is_causal_bias(mask)
    mask = as_bool_mask("attn_mask", mask, length, keys, device) if causal else function_mask(mask)
    shape = tuple(mask.shape)
    if shape == (length, keys):
        return mask[None, None]
    # torch's order: the heads of one sample follow one another.
    if shape == (batch * heads, length, keys):
        return mask.view(batch, heads, length, keys)
    if len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (length, keys):
        return mask
    raise InvalidValueError(
        f"attn_mask is (L, S) = {(length, keys)}, (N heads, L, S) = {(batch * heads, length, keys)} or "
        f"(N, heads, L, S) = {(batch, heads, length, keys)}; got {shape}",
        hint="A mask of keys alone, (N, S), is key_padding_mask.",
    )


def _padding(mask: Tensor, batch: int, keys: int) -> Shaped[Tensor, "{batch} 1 1 {keys}"]:
    _check_type("key_padding_mask", mask)
    if tuple(mask.shape) == (batch, keys) or (batch == 1 and tuple(mask.shape) == (keys,)):
        return (~mask if mask.dtype == torch.bool else mask).reshape(batch, 1, 1, keys)
    raise InvalidValueError(
        f"key_padding_mask is (N, S) = {(batch, keys)}; got {tuple(mask.shape)}",
        hint="Give one mark for every key: True for padding.",
    )


def _check_type(name: str, mask: Any) -> None:
    if isinstance(mask, Tensor):
        check_class(name, mask)
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidTypeError(
            f"{name} is a bool tensor (True is hidden) or a floating one (added); got {got}",
            hint="Convert a mask whose 0 is padding with `mask == 0`, one whose 1 is padding with `mask.bool()`.",
        )


def _check_causal(mask: Shaped[Tensor, "#N #Hq L S"]) -> None:
    """Refuse a mask beside `is_causal` that is not the causal mask.

    In torch `is_causal` is a hint about `attn_mask`: with weights the mask decides, without them the hint does. They
    agree for the causal mask alone. Where the numbers can't be read (a compiler, a CUDA graph), both apply.
    """
    # Reading the mask would break a CUDA graph's capture, and a compiled model has no values to read.
    if not has_values(mask) or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    # transformers writes hidden keys as finfo.min of the model's dtype, and generate_square_subsequent_mask as -inf:
    # all of these count.
    fits = mask == causal if mask.dtype == torch.bool else torch.where(causal, mask == 0, mask <= _HIDING)
    if not fits.all():
        raise InvalidValueError(
            "is_causal=True says that attn_mask is the causal mask, row i sees keys j <= i; it is another",
            hint="Pass is_causal=False, and attn_mask | torch.ones(L, S).triu(1).bool() to hide the future as well.",
        )


class Attended(NamedTuple):
    """The results of one call of a module.

    Attributes:
        output: (..., Hq, L, Ev).
        weights: (..., Hq, L, S); None if not requested.
        aux: statistics of the rows; None if not requested.
    """

    output: Output
    weights: Logits | None
    aux: AuxOutput | None

    def asked(self) -> Any:
        """Return what the caller asked for: the output alone, or a tuple of the output and the requested extras."""
        extras = tuple(extra for extra in (self.weights, self.aux) if extra is not None)
        return (self.output, *extras) if extras else self.output


def attend(
    query: Query,
    key: AnyKey,
    value: Value,
    *,
    need_weights: bool = False,
    return_aux: AuxRequest | bool | None = None,
    impl: str = "auto",
    **options: Any,
) -> Attended:
    """Return output, weights after dropout, and statistics, as far as they are requested.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        need_weights: Whether the weights are requested.
        return_aux: Which statistics are requested.
        impl: Name of the implementation.
        options: Other arguments of `sqrtdk.attention`.

    Raises:
        UnsupportedError: Weights are requested from an implementation that never has them.
    """
    found = attention(query, key, value, return_aux=return_aux, return_weights=need_weights, impl=impl, **options)
    if not isinstance(found, tuple):
        return Attended(found, None, None)
    output, *extras = found
    return Attended(output, extras[0] if need_weights else None, extras[-1] if len(extras) > need_weights else None)
