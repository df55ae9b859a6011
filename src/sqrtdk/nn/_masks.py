"""The masks of a multi-head module, brought to one that broadcasts to (N, heads, L, S); True takes part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk._subclasses import as_bool_mask, check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from jaxtyping import Bool, Shaped


def merged_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    batch: int,
    heads: int,
    length: int,
    keys: int,
    device: Any,
) -> Shaped[Tensor, "#{batch} #{heads} #{length} {keys}"] | None:
    """One mask of both: bool where both are, else floating with -inf at what a bool mask hides.

    Args:
        attn_mask: (L, S), (N * heads, L, S), or (N or 1, heads or 1, L, S), bool or floating; or torch's causal bias.
        key_padding_mask: (N, S), or (S,) where N is 1, bool or floating.
        batch: N.
        heads: query heads.
        length: L.
        keys: S.
        device: of a mask that a causal bias becomes.

    Raises:
        InvalidTypeError: a mask that is neither bool nor floating, or a subclass that is no plain mask.
        InvalidValueError: a mask of another shape.
    """
    attn = None if attn_mask is None else _attn(attn_mask, batch, heads, length, keys, device)
    padding = None if key_padding_mask is None else _padding(key_padding_mask, batch, keys)
    if attn is None or padding is None:
        return padding if attn is None else attn
    if attn.dtype == padding.dtype == torch.bool:
        return attn & padding
    if attn.dtype == torch.bool:
        return torch.where(attn, padding, -math.inf)
    return torch.where(padding, attn, -math.inf) if padding.dtype == torch.bool else attn + padding


def with_extra_keys(
    mask: Shaped[Tensor, "#N #Hq #L #S"] | None, extra: int, *, is_causal: bool, length: int, keys: int, device: Any
) -> Any:
    """The mask with `extra` keys appended that every row sees; None where all are seen."""
    if is_causal:
        causal = torch.ones(length, keys, dtype=torch.bool, device=device).tril()
        mask = causal if mask is None else (mask & causal if mask.dtype == torch.bool else _hide(mask, causal))
    if mask is None:
        return None
    return functional.pad(mask.expand(*mask.shape[:-1], keys), (0, extra), value=bool(mask.dtype == torch.bool))


def _hide(mask: Shaped[Tensor, "#N #Hq #L #S"], seen: Bool[Tensor, "L S"]) -> Shaped[Tensor, "#N #Hq L S"]:
    return torch.where(seen, mask, -math.inf)


def _attn(
    mask: Tensor, batch: int, heads: int, length: int, keys: int, device: Any
) -> Shaped[Tensor, "#{batch} #{heads} {length} {keys}"]:
    mask = as_bool_mask("attn_mask", mask, length, keys, device)
    _check_type("attn_mask", mask)
    shape = tuple(mask.shape)
    if shape == (length, keys):
        return mask[None, None]
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
        return mask.reshape(batch, 1, 1, keys)
    raise InvalidValueError(
        f"key_padding_mask is (N, S) = {(batch, keys)}; got {tuple(mask.shape)}",
        hint="Give one mark for every key: True for a real one.",
    )


def _check_type(name: str, mask: Any) -> None:
    if isinstance(mask, Tensor):
        check_class(name, mask)
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidTypeError(
            f"{name} is a bool tensor (True takes part) or a floating one (added); got {got}",
            hint="Convert 0/1 masks with `mask.bool()`.",
        )
