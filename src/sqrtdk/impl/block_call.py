"""A block of rows whose logits come from functions, as a call of dot products plus a bias, which a kernel runs.

Where a `score_mod` only adds to the score, what it adds is the bias. Any other logits are computed in plain torch and
become the bias themselves, beside products of zeros: the kernel then does the softmax, the sum and the statistics,
which take most of the time. Keys that no row of the block sees are left out before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.impl import rows
from sqrtdk.impl.call import UNBOUNDED, Call, cut_rows
from sqrtdk.impl.dependence import ANYTHING, BATCH, HEAD, added_by, shown_by
from sqrtdk.impl.mods import map_added
from sqrtdk.impl.rows import row_logits

if TYPE_CHECKING:
    from jaxtyping import Bool

    from sqrtdk._shapes import Bias, Visible

    Mask = Bool[Tensor, "..."] | None

MOST_AT_ONCE = 2**22  # bytes of a mask, as many as a block of float32 logits has
MOST_ROWS = 128  # the keys that one of them sees are computed for all, so that more would hide more in vain
Brought = Callable[[Call, int, int], Call]


def block_calls(call: Call) -> tuple[Brought, int]:
    """Return how to run a call in blocks of rows that kernels can compute.

    Returns:
        A function of (call, start, stop) that returns rows start..stop as a call of dot products plus a bias; and the
        number of rows of a block.
    """
    places = _places_of_masks(call)
    if call.score is None and call.term is None:
        if call.score_mod is None:
            return lambda call, start, stop: _with_mask(*_block(call, start, stop)), _height(call, places)
        added = added_by(call.score_mod, call.dtype)
        if added is not None and (added.cap is None or call.softcap is None):
            cap, height = call.softcap or added.cap, _height(call, places | added.places)
            return lambda call, start, stop: _with_what_is_added(*_block(call, start, stop), cap), height
    return lambda call, start, stop: _with_logits(*_block(call, start, stop)), rows.block_rows(call)


def masked_at_once(call: Call) -> Call:
    """Return the call with a mask in place of its `mask_mods` if it is small, as running them takes 0.4 ms a block."""
    small = call.length * call.keys <= MOST_AT_ONCE and call.visible is None
    if not small or not call.mask_mods or _places_of_masks(call) & {BATCH, HEAD}:
        return call
    visible = replace(call, diagonal=None, window=UNBOUNDED).visible_mask(0, call.length)
    return replace(call, visible=visible, mask_mods=())


def _places_of_masks(call: Call) -> frozenset[str]:
    masks = [shown_by(mod) for mod in call.mask_mods]
    return frozenset().union(*(ANYTHING if mask is None else mask for mask in masks))


def _height(call: Call, places: frozenset[str]) -> int:
    """Return the rows of a block whose mask and bias depend on these places: of one head, they serve all heads."""
    height = rows.block_rows(call)
    if call.bias is not None or places & {BATCH, HEAD}:
        return height
    return max(height, min(MOST_ROWS, rows.BLOCK_PAIRS // call.keys))


def _with_mask(call: Call, visible: Visible | None) -> Call:
    return replace(call, visible=visible, shift=0, places=None, first=0)


def _with_what_is_added(call: Call, visible: Visible | None, cap: float | None) -> Call:
    added = _added(call)
    bare = bool(added.detach().amin() > -math.inf)  # not if there is NaN either
    if not bare:
        hidden = added == -math.inf
        visible = ~hidden if visible is None else visible & ~hidden
        added = added.masked_fill(hidden, 0.0)
    bias = added if call.bias is None else call.bias + added
    call = replace(call, score_mod=None, softcap=cap, bias=bias)
    return _with_mask(*((call, visible) if bare else _near_keys(call, visible)))


def _added(call: Call) -> Bias:
    assert call.score_mod is not None
    lead = call.lead
    batch, heads = math.prod(lead[:-1]), lead[-1] if lead else 1
    columns = torch.arange(call.first, call.first + call.keys, device=call.query.device)
    added = map_added(call.score_mod, call.dtype, batch, heads, call.positions(0, call.length), columns)
    if len(lead) > 2 and added.shape[0] != 1:
        return added.reshape(*lead[:-1], *added.shape[1:])
    return added[(0,) * max(0, 2 - len(lead))]


def _with_logits(call: Call, visible: Visible | None) -> Call:
    if call.score is None and call.term is None and not isinstance(call.scale, Tensor):
        call = replace(call, query=call.query * call.scale, scale=1.0)  # there are fewer of them than of the products
    z, visible = row_logits(call, 0, call.length, visible)
    nothing: dict[str, Any] = dict.fromkeys(("score", "term", "softcap", "score_mod"))
    query, key = z.new_zeros(1).expand(*call.lead, call.length, 1), z.new_zeros(1).expand(*call.value.shape[:-1], 1)
    return _with_mask(replace(call, query=query, key=key, scale=1.0, bias=z, **nothing), visible)


def _block(call: Call, start: int, stop: int) -> tuple[Call, Mask]:
    """Return the rows start..stop as a call without masks and without keys that none of them sees, and which of its
    keys they see."""
    block = replace(
        call,
        query=call.query[..., start:stop, :],
        scale=cut_rows(call.scale, start, stop) if isinstance(call.scale, Tensor) else call.scale,
        bias=None if call.bias is None else cut_rows(call.bias, start, stop),
        places=call.positions(start, stop),
        visible=None,
        mask_mods=(),
        diagonal=None,
        window=UNBOUNDED,
    )
    return _near_keys(block, call.visible_mask(start, stop))


def _near_keys(call: Call, visible: Visible | None) -> tuple[Call, Mask]:
    """Return the call without the keys before the first and after the last that a row sees, and which it sees of the
    others."""
    if visible is None or visible.shape[-1] != call.keys or call.score is not None:  # a score may look at all its keys
        return call, visible
    columns = visible.reshape(-1, call.keys).any(0).nonzero()
    first, last = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, call.keys)

    def cut(tensor: Tensor) -> Tensor:
        return tensor[..., first:last] if tensor.ndim and tensor.shape[-1] == call.keys else tensor

    if last - first < call.keys:
        key, value = call.key[..., first:last, :], call.value[..., first:last, :]
        bias = None if call.bias is None else cut(call.bias)
        call, visible = replace(call, key=key, value=value, bias=bias, first=call.first + first), cut(visible)
    return call, None if visible.all() else visible
