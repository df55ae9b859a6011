"""The compiled kernel for CPUs: output and statistics from one pass over tiles that stay in the cache.

See `kernel/attention.cpp` for the arithmetic, `kernel/build.py` and `kernel/load.py` for building and loading it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.block_call import block_calls
from sqrtdk.impl.blocks import by_blocks, row_spans, widened_call
from sqrtdk.impl.call import Call, has_values, transformed
from sqrtdk.impl.kernel.build import ready
from sqrtdk.impl.kernel.load import loaded
from sqrtdk.impl.kernel.operators import PLANES
from sqrtdk.impl.operands import (
    SMALLEST_SOFTCAP,
    above_and_below,
    broadcastable,
    expand_heads,
    only_by_blocks,
    operands,
    with_table,
)
from sqrtdk.impl.rows import joined_with_sink
from sqrtdk.stats import RowStats
from sqrtdk.stats._partial import ROW_STATS_FIELDS
from sqrtdk.stats.request import AuxOutput, aux_output

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import Output

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(call: Call) -> str | None:
    """Return the reason, in English, why the compiled kernel can't run a call; None if it can.

    It does not matter here whether the kernel is built.
    """
    tensors = (call.query, call.key, call.value)
    if any(t.device.type != "cpu" for t in tensors):
        return "it runs on CPUs"
    if call.value.dtype not in CPU_DTYPES or torch.float64 in (call.query.dtype, call.key.dtype):
        return call.exact or f"it takes {', '.join(str(d).removeprefix('torch.') for d in CPU_DTYPES)}"
    if not call.query.shape[-1]:
        return "the head dimension is 0"
    if only_by_blocks(call) is not None and torch.compiler.is_compiling():
        return "blocks of rows are compiled as they stand"
    if only_by_blocks(call) is not None and not (call.elements and has_values(call.query, call.key, call.value)):
        return "blocks of rows have no numbers"
    if call.sinks is not None and call.sinks.ndim > 1:
        return "its sinks are one a head, not one a row"
    if call.places is not None:
        return "the rows are a sample"
    if call.unclean:
        return "NaN or infinity stands at a hidden key or value, or q and k may overflow"
    if transformed() or forward_ad._current_level >= 0:
        return "a transform of torch.func or forward-mode differentiation is at work"
    if call.softcap is not None and call.softcap < SMALLEST_SOFTCAP:
        return f"a softcap below {SMALLEST_SOFTCAP} is no number of float32"
    return None


def cpu(call: Call) -> tuple[Output, AuxOutput]:
    """Compute a call by the compiled kernel, which is compiled first if it is not built.

    Args:
        call: The call; if its logits are not dot products plus a bias, it runs in blocks of rows.

    Returns:
        The output (..., Hq, L, Ev), and the requested statistics, (..., Hq, L) each.

    Raises:
        UnsupportedError: See `obstacle`; or the kernel can't be built or loaded, with the reason.
    """
    reason = obstacle(call)
    if reason is None and not loaded() and torch.compiler.is_compiling():
        reason = "it is not loaded, and torch.compile can't follow its compilation; call it once before"
    if reason is not None:
        raise UnsupportedError(
            f"impl='cpu', the compiled kernel, can't run this call: {reason}", hint="Use impl='tiled' or 'auto'."
        )
    if not loaded():
        ready()
    if only_by_blocks(call) is None:
        return _attended(call)
    bring, height = block_calls(call)
    return by_blocks(call, lambda call, start, stop: _attended(bring(call, start, stop)), height)


def _attended(call: Call) -> tuple[Output, AuxOutput]:
    output, lse, entropy, planes, _ = _run(call, statistics=call.aux is not None)
    shape = (*call.lead, call.length)
    output = output.to(call.value.dtype).reshape(*shape, output.shape[-1])
    if call.aux is None:
        return output, AuxOutput()
    keys = _rows(planes, shape)
    sinks = None if call.sinks is None else call.sinks.float()
    return output, aux_output(
        call.aux,
        keys,
        keys if sinks is None else joined_with_sink(keys, sinks),
        lse=lse.reshape(shape),
        entropy=entropy.reshape(shape),
    )


def row_statistics(call: Call) -> RowStats:
    """Return the statistics of the rows, (..., Hq, L).

    Args:
        call: A call without an obstacle, for a kernel that is loaded; its value may have width 0.
    """
    if only_by_blocks(call) is None:
        return _rows(_run(call, statistics=True)[3], (*call.lead, call.length))
    call = widened_call(call)
    bring, height = block_calls(call)
    parts = [row_statistics(bring(call, start, stop)) for start, stop in row_spans(call, height)]
    return RowStats(*(torch.cat([getattr(part, name) for part in parts], -1) for name in ROW_STATS_FIELDS))


def _rows(planes: Float[Tensor, "fields B Hq L"], shape: tuple[int, ...]) -> RowStats:
    return RowStats(**{name: plane.reshape(shape) for name, plane in zip(PLANES, planes.unbind(), strict=True)})


def _run(
    call: Call, statistics: bool
) -> tuple[
    Float[Tensor, "B Hq L Ev"],
    Float[Tensor, "B Hq L"],
    Float[Tensor, "B Hq L"] | Float[Tensor, "0"],
    Float[Tensor, "fields B Hq L"] | Float[Tensor, "0"],
    Float[Tensor, "2 B Hq L"],
]:
    """Return the operator's output, lse, entropy, planes and levels, in four dimensions."""
    call, table = with_table(call)
    lead, rows, bias = call.lead, call.length, call.bias
    heads = lead[-1] if lead else 1
    # A score folded into q makes it float32 beside a half value: then all three are computed in float32.
    same = {call.query.dtype, call.key.dtype} == {call.value.dtype}
    query, key, value = operands(call, call.value.dtype if same else torch.float32)
    scale = call.scale
    # so that autograd derives the scale's gradient through q
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        query, key, value = (t.float() for t in (query, key, value))
        query, scale = query * expand_heads(scale, (*lead, rows, 1)).float(), 1.0
    factor = 1.0 if isinstance(scale, Tensor) else scale
    above, below = above_and_below(call)
    whole = (*lead, rows, call.keys)
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = torch.ops.sqrtdk_cpu.forward(
        query,
        key,
        value,
        factor,
        expand_heads(scale, (*lead, rows, 1)).float() if isinstance(scale, Tensor) else None,
        call.softcap or 0.0,
        # Broadcast dimensions stay 1: the kernel strides over them, and a bias of all pairs is never made.
        None if bias is None else broadcastable(bias if bias.dtype in CPU_DTYPES else bias.float(), lead),
        None if table is None else broadcastable(table.float().contiguous(), lead),
        None if call.visible is None else expand_heads(call.visible, whole),
        None if call.sinks is None else call.sinks.float().expand(heads).contiguous(),
        above,
        below,
        call.dropout_p,
        # A seed from torch's generator: the backward pass draws the same mask from it instead of storing one.
        torch.randint(2**63 - 1, (), device="cpu") if call.dropout_p else None,
        # The gradients of a row's logits add up to 0 as exactly as its output is known, which the sums of a bias show.
        torch.is_grad_enabled() and any(given is not None and given.requires_grad for given in (bias, table)),
        statistics,
    )
    return found
