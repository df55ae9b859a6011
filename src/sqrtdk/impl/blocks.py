"""Runs a call in blocks of rows, one after the other, and again in the backward pass.

Memory then grows with L + S, not with L S. An implementation gives the function that computes a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from sqrtdk._modes import as_one
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl import rows
from sqrtdk.impl.call import Call, has_values, transformed
from sqrtdk.impl.mods import captured_tensors
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from sqrtdk._shapes import Output

Block = Callable[[Call, int, int], tuple["Output", AuxOutput]]  # of the rows start..stop of a call


def row_spans(call: Call, height: int | None = None) -> list[tuple[int, int]]:
    """Return the range of each block of rows, (start, stop).

    Args:
        call: The call.
        height: Rows of a block; None: `block_rows(call)`.
    """
    height = rows.block_rows(call) if height is None else height
    return [(start, min(call.length, start + height)) for start in range(0, call.length, height)]


def by_blocks(call: Call, attend: Block, height: int | None = None) -> tuple[Output, AuxOutput]:
    """Return the output (..., Hq, L, Ev) and the statistics (..., Hq, L) of a call, computed in blocks of rows.

    For the backward pass, only the output of each block after the first is stored; the block is computed again there,
    with the same dropout. Under the transforms of `torch.func`, which can't recompute, everything is stored.

    Args:
        call: The call.
        attend: Computes the rows start..stop.
        height: Rows of a block; None: `block_rows(call)`.
    """
    result: tuple[Output, AuxOutput] = as_one(call, partial(_by_blocks, attend=attend, height=height))
    return result


def _by_blocks(call: Call, attend: Block, height: int | None) -> tuple[Output, AuxOutput]:
    dtype, places = call.value.dtype, row_spans(call, height)
    if len(places) == 1:
        output, statistics = attend(call, *places[0])
        return output.to(dtype), statistics
    call = widened_call(call)
    if not torch.is_grad_enabled() and has_values(call.query):
        return _written(call, places, dtype, attend)
    first = attend(call, *places[0])
    # Nothing is computed again if nothing learns: torch's checkpoint imports the compiler, which takes over a second.
    learns = any(result is not None and result.requires_grad for result in (first[0], *first[1]))
    if learns and not transformed():
        block = attend if torch.compiler.is_compiling() else _unless_changed(call, attend)
        rest = [checkpoint(block, call, start, stop, use_reentrant=False) for start, stop in places[1:]]
    else:
        rest = [attend(call, start, stop) for start, stop in places[1:]]
    outputs, aux = zip(first, *rest, strict=True)
    return torch.cat(outputs, -2).to(dtype), join_statistics(aux)


def _unless_changed(call: Call, attend: Block) -> Block:
    """Return `attend`, which raises if a tensor that a mod reads was written since: gradients would be wrong."""
    mods = [mod for mod in (call.score_mod, *call.mask_mods) if mod is not None]
    read = [tensor for mod in mods for tensor in captured_tensors(mod) if not tensor.is_inference()]
    versions = [tensor._version for tensor in read]

    def block(call: Call, start: int, stop: int) -> tuple[Output, AuxOutput]:
        if versions != [tensor._version for tensor in read]:
            raise UnsupportedError(
                "a tensor that score_mod or mask_mod reads was changed in place between forward and backward pass",
                hint="Make a new tensor for each step, or pass impl='dense', which computes nothing again.",
            )
        return attend(call, start, stop)

    return block


def widened_call(call: Call) -> Call:
    """Return the call with query, key and value in the dtype of its logits.

    The gradients of its blocks are then summed in that dtype, rather than rounded after each block.
    """
    return replace(call, **{name: getattr(call, name).to(call.dtype) for name in ("query", "key", "value")})


def join_statistics(statistics: Sequence[AuxOutput]) -> AuxOutput:
    """Return the statistics of all rows from those of blocks of rows, in their order."""
    return AuxOutput(*(None if parts[0] is None else torch.cat(parts, -1) for parts in zip(*statistics, strict=True)))


def _written(call: Call, places: list[tuple[int, int]], dtype: torch.dtype, attend: Block) -> tuple[Output, AuxOutput]:
    """Return the same, with each block's results written in place.

    Results kept in a list until the end, though small, would keep the memory between the large temporaries from being
    reused.
    """
    output = call.value.new_empty(*call.lead, call.length, call.value.shape[-1], dtype=dtype)
    wanted = () if call.aux is None else call.aux.wanted
    whole = {name: call.query.new_empty(*call.lead, call.length, dtype=call.dtype) for name in wanted}
    for start, stop in places:
        output[..., start:stop, :], found = attend(call, start, stop)
        for name, field in whole.items():
            field[..., start:stop] = getattr(found, name)
    return output, AuxOutput(**whole)
