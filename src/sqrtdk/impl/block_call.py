"""A block of rows whose logits come from functions, as a call of dot products plus a bias, which a kernel runs.

Where a `score_mod` only adds to the score, what it adds is the bias. Any other logits are computed in plain torch and
become the bias themselves, beside products of zeros: the kernel then does the softmax, the sum and the statistics,
which take most of the time. Keys that no row of the block sees are left out before; a band stays with the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.impl import rows
from sqrtdk.impl.block_mask import BlockMask, block_mask
from sqrtdk.impl.call import UNBOUNDED, Call, cut_rows, repeat_key_heads
from sqrtdk.impl.dependence import ANYTHING, BATCH, HEAD, ReadScore, read_mask, read_score
from sqrtdk.impl.mods import map_one
from sqrtdk.impl.program import PairProgram
from sqrtdk.impl.rows import row_logits

if TYPE_CHECKING:
    from jaxtyping import Bool

    from sqrtdk._shapes import Bias, Logits, Visible

    Mask = Bool[Tensor, "..."] | None

MOST_AT_ONCE = 2**22  # bytes of a mask, as many as a block of float32 logits has
MOST_ROWS = 128  # rows of a block of one head's bias, as many as a tile of the kernel has
PART_PAIRS = 2**17  # pairs whose logits are computed at once: 512 KiB of float32, so that they stay in the L2 cache
Brought = Callable[[Call, int, int], Call]


def block_calls(call: Call) -> tuple[Brought, int]:
    """Return how to run a call in blocks of rows, each of them as a call of dot products plus a bias.

    Returns:
        A function `bring(call, start, stop)` that returns the call of the rows start..stop - 1; and the number of rows
        to give it at once.
    """
    mods = tuple(read_mask(mod) for mod in call.mask_mods)
    places = frozenset().union(*(ANYTHING if mod.places is None else mod.places for mod in mods))
    score = None if call.score_mod is None else read_score(call.score_mod, call.dtype)
    blocks = None
    if mods and not places & {BATCH, HEAD}:
        programs = [mod.program for mod in mods if mod.program is not None]
        blocks = block_mask(programs, call.length, call.keys) if len(programs) == len(mods) else None

    def block(call: Call, start: int, stop: int) -> tuple[Call, Mask]:
        return _block(replace(call, mask_mods=mods, score_mod=score), blocks, start, stop)

    if call.score is None and call.term is None:
        if score is None:
            return lambda *at: _with_mask(*block(*at)), _height(call, places, MOST_AT_ONCE)
        added = score.added
        if added is not None and (added.cap is None or call.softcap is None):
            cap, height = call.softcap or added.cap, _height(call, places | added.places, rows.BLOCK_PAIRS)
            return lambda *at: _with_what_is_added(*block(*at), cap), height
    return lambda *at: _with_logits(*block(*at)), rows.block_rows(call)


def _height(call: Call, places: frozenset[str], most: int) -> int:
    """Return the rows of a block whose mask and bias depend on these places: of one head, they serve all heads."""
    height = rows.block_rows(call)
    if call.bias is not None or places & {BATCH, HEAD}:
        return height
    if most == MOST_AT_ONCE:  # the kernel skips what a mask hides
        return max(height, most // call.keys // MOST_ROWS * MOST_ROWS)
    return max(height, min(MOST_ROWS, most // call.keys))


def _with_mask(call: Call, visible: Visible | None) -> Call:
    return replace(call, visible=visible, shift=0, places=None, first=0)


def _with_what_is_added(call: Call, visible: Visible | None, cap: float | None) -> Call:
    added = _added(call)
    if not bool(added.detach().amin() > -math.inf):  # not if there is NaN either
        hidden = added == -math.inf
        visible = ~hidden if visible is None else visible & ~hidden
        added = added.masked_fill(hidden, 0.0)
    bias = added if call.bias is None else call.bias + added
    return _with_mask(replace(call, score_mod=None, softcap=cap, bias=bias), visible)


def _added(call: Call) -> Bias:
    assert call.score_mod is not None
    lead = call.lead
    batch, heads = math.prod(lead[:-1]), lead[-1] if lead else 1
    columns = torch.arange(call.first, call.first + call.keys, device=call.query.device)
    return call.in_lead(map_one(call.score_mod, 0.0, call.dtype, batch, heads, call.positions(0, call.length), columns))


def _with_logits(call: Call, visible: Visible | None) -> Call:
    if call.score is None and call.term is None and not isinstance(call.scale, Tensor):
        call = replace(call, query=call.query * call.scale, scale=1.0)  # there are fewer of them than of the products
    free = replace(call, diagonal=None, window=UNBOUNDED)
    program = call.score_mod.program if isinstance(call.score_mod, ReadScore) else None
    if program is None or torch.is_grad_enabled() or call.score is not None or call.term is not None:
        z, visible = row_logits(free, 0, call.length, visible)
    else:
        z, visible = _logits_by_parts(free, program, visible)
    nothing: dict[str, Any] = dict.fromkeys(("score", "term", "softcap", "score_mod"))
    query, key = z.new_zeros(1).expand(*call.lead, call.length, 1), z.new_zeros(1).expand(*call.value.shape[:-1], 1)
    return _with_mask(replace(call, query=query, key=key, scale=1.0, bias=z, **nothing), visible)


def _logits_by_parts(call: Call, program: PairProgram, visible: Mask) -> tuple[Logits, Mask]:
    """Return what `row_logits` does, computed part by part, each of some rows of a head."""
    dtype, sizes = call.dtype, (*call.lead, call.length, call.keys)
    query = call.query.to(dtype) * call.scale
    query = query.expand(*call.lead, *query.shape[-2:]).reshape(-1, *query.shape[-2:])
    key = repeat_key_heads(call.key.to(dtype), call.heads)
    key = key.expand(*call.lead, *key.shape[-2:]).reshape(-1, *key.shape[-2:])
    positions = call.positions(0, call.length).unsqueeze(-1)
    columns = torch.arange(call.first, call.first + call.keys)
    z = query.new_empty(len(query), call.length, call.keys)
    hidden: Tensor | None = None
    height, fits = max(1, PART_PAIRS // call.keys), False
    for of in range(len(query)):
        sample, head = (torch.full((1, 1), place) for place in divmod(of, call.heads))
        for start in range(0, call.length, height):
            rows = slice(start, start + height)
            scores = query[of, rows] @ key[of].mT
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            pair, into = (scores, sample, head, positions[rows], columns), z[of, rows]
            made = program(*pair, out=into if fits else None)
            if made is not into:
                fits = made.shape == into.shape and made.dtype == into.dtype
                into.copy_(made)
            if not bool(made.amin() > -math.inf):
                hidden = torch.zeros_like(z, dtype=torch.bool) if hidden is None else hidden
                hidden[of, rows] = (made == -math.inf) & (scores != -math.inf)
    z = z.view(sizes)
    if hidden is not None:
        visible = ~hidden.view(sizes) if visible is None else visible & ~hidden.view(sizes)
    return z if call.bias is None else z + call.bias.to(dtype), visible


def _block(call: Call, blocks: BlockMask | None, start: int, stop: int) -> tuple[Call, Mask]:
    """Return the rows start..stop as a call without mask_mods and without keys that none of them sees, and which of its
    keys its masks show."""
    block = replace(
        call,
        query=call.query[..., start:stop, :],
        scale=cut_rows(call.scale, start, stop) if isinstance(call.scale, Tensor) else call.scale,
        bias=None if call.bias is None else cut_rows(call.bias, start, stop),
        places=call.positions(start, stop),
        visible=None,
        mask_mods=(),
    )
    visible = _masks(call, blocks, start, stop)
    first, last = _reach(call, blocks, visible, start, stop)
    if (first, last) != (0, call.keys):
        key, value = call.key[..., first:last, :], call.value[..., first:last, :]
        bias = None if block.bias is None else _cut_keys(block.bias, call.keys, first, last)
        visible = None if visible is None else _cut_keys(visible, call.keys, first, last)
        block = replace(block, key=key, value=value, bias=bias, first=call.first + first)
    shown = None if blocks is None else blocks.of(start, stop, first, last)
    if shown is not None:
        visible = shown if visible is None else visible & shown
    band = call.band
    return replace(
        block,
        diagonal=None if band.least is None else start - first - band.least,
        window=(None if band.greatest is None else band.greatest - (start - first), None),
    ), visible


def _masks(call: Call, blocks: BlockMask | None, start: int, stop: int) -> Mask:
    """Return which keys the rows see but for the band and, if there are `blocks`, for mask_mods."""
    mods = call.mask_mods if blocks is None else ()
    return replace(call, mask_mods=mods, diagonal=None, window=UNBOUNDED).visible_mask(start, stop)


def _reach(call: Call, blocks: BlockMask | None, visible: Mask, start: int, stop: int) -> tuple[int, int]:
    """Return the first key that a row sees, and the one after the last."""
    if call.score is not None:  # a score may look at all its keys
        return 0, call.keys
    first, last = (0, call.keys) if blocks is None else blocks.reach(start, stop)
    band = call.band
    if band.least is not None:
        last = min(last, stop - band.least)
    if band.greatest is not None:
        first = max(first, start - band.greatest)
    if visible is not None and visible.shape[-1] == call.keys:
        columns = visible.reshape(-1, call.keys).any(0).nonzero()
        near = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
        first, last = max(first, near[0]), min(last, near[1])
    return (first, last) if first < last else (0, 1)  # one key that no row sees


def _cut_keys(tensor: Tensor, keys: int, first: int, last: int) -> Tensor:
    return tensor[..., first:last] if tensor.ndim and tensor.shape[-1] == keys else tensor
