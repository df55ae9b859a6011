"""The Triton kernel for GPUs: output and statistics from one pass over tiles that stay in shared memory.

See `gpu/forward.py` and `gpu/backward.py` for the arithmetic, `gpu/load.py` for the supported devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.call import Call, transformed
from sqrtdk.impl.gpu.load import unavailable
from sqrtdk.impl.gpu.wanted import APART, ROWS, bits_of
from sqrtdk.impl.operands import (
    SMALLEST_SOFTCAP,
    above_and_below,
    broadcastable,
    only_by_blocks,
    operands,
    with_bias,
    with_table,
)
from sqrtdk.impl.rows import sink_column
from sqrtdk.stats import RowStats
from sqrtdk.stats._partial import ROW_STATS_FIELDS
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import Output

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_WIDTH = 256
MOST_POSITIONS = 2**30  # rows and keys; the kernel's positions and bounds are 32-bit numbers


def obstacle(call: Call) -> str | None:
    """Return the reason, in English, why the Triton kernel can't run a call; None if it can."""
    reason = unavailable(call.query.device)
    if reason is not None:
        return reason
    if call.value.dtype not in TRITON_DTYPES or torch.float64 in (call.query.dtype, call.key.dtype):
        return call.exact or f"it takes {', '.join(str(d).removeprefix('torch.') for d in TRITON_DTYPES)}"
    if not call.query.shape[-1]:
        return "the head dimension is 0"
    reason = only_by_blocks(call)
    if reason is not None:
        return reason
    if max(call.query.shape[-1], call.value.shape[-1]) > LARGEST_WIDTH:
        return f"it takes head dimensions up to {LARGEST_WIDTH}; got {call.query.shape[-1]} and {call.value.shape[-1]}"
    if call.dropout_p:
        return "it has no dropout"
    if call.unclean:
        return "NaN or infinity stands at a hidden key or value, or q and k may overflow"
    if transformed() or forward_ad._current_level >= 0:
        return "a transform of torch.func or forward-mode differentiation is at work"
    if call.softcap is not None and call.softcap < SMALLEST_SOFTCAP:
        return f"a softcap below {SMALLEST_SOFTCAP} is no number of float32"
    return None


def triton(call: Call) -> tuple[Output, AuxOutput]:
    """Return output (..., Hq, L, Ev) and statistics (..., Hq, L).

    Raises:
        UnsupportedError: See `obstacle`.
    """
    reason = obstacle(call)
    if reason is not None:
        raise UnsupportedError(f"impl='triton' can't run this call: {reason}", hint="Use impl='tiled' or 'auto'.")
    wanted = () if call.aux is None else call.aux.wanted
    output, lse, entropy, planes, _ = _run(call, bits_of(wanted))
    shape = (*call.lead, call.length)
    found = dict(zip((name for name in wanted if name not in APART), planes.unbind(), strict=True))
    found |= {name: tensor for name, tensor in zip(APART, (lse, entropy), strict=True) if name in wanted}
    statistics = {name: tensor.reshape(shape) for name, tensor in found.items()}
    return output.reshape(*shape, output.shape[-1]), AuxOutput(**statistics)


def row_statistics(call: Call) -> RowStats:
    """Return the statistics of the rows over their visible keys, float32 (..., Hq, L) each.

    Args:
        call: A call without an obstacle; its value may have width 0.
    """
    planes = _run(call, ROWS)[3]
    shape = (*call.lead, call.length)
    return RowStats(
        **{name: plane.reshape(shape) for name, plane in zip(ROW_STATS_FIELDS, planes.unbind(), strict=True)}
    )


def _run(
    call: Call, statistics: int
) -> tuple[
    Float[Tensor, "B Hq L Ev"],
    Float[Tensor, "B Hq L"],
    Float[Tensor, "B Hq L"] | Float[Tensor, "0"],
    Float[Tensor, "planes B Hq L"],
    Float[Tensor, "2 B Hq L"],
]:
    """Return the operator's output, lse, entropy, planes and levels, in four dimensions."""
    from sqrtdk.impl.gpu.operators import forward

    # a table beside a whole bias is one more bias, for which the kernel has no place
    call, table = with_table(call) if call.bias is None else (with_bias(call), None)
    lead = call.lead
    scale, sinks = call.scale, None
    if call.sinks is not None:
        sinks = broadcastable(sink_column(call, 0, call.length, torch.float32), lead)
    above, below = map(_near, above_and_below(call))
    return forward(  # type: ignore[no-any-return]
        *operands(call, call.value.dtype),
        1.0 if isinstance(scale, Tensor) else scale,
        broadcastable(scale.float(), lead) if isinstance(scale, Tensor) else None,
        call.softcap or 0.0,
        None if call.bias is None else broadcastable(call.bias, lead),
        None if table is None else broadcastable(table, lead),
        None if call.visible is None else broadcastable(call.visible, lead),
        sinks,
        above,
        below,
        call.places,
        statistics,
    )


def _near(bound: int | None) -> int | None:
    """Return a bound of the band; None if it lies beyond all keys."""
    if type(bound) is not int:  # None, or a symbolic number while compiling
        return bound
    return None if bound >= MOST_POSITIONS else max(bound, -MOST_POSITIONS)
