"""The operator that torch knows: its schema, its shapes without data, its gradient."""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op, triton_op

from sqrtdk.impl.gpu.gradients import gradients, keep
from sqrtdk.impl.gpu.launch import empty_results, run
from sqrtdk.impl.gpu.load import interpreted

operator = custom_op if interpreted() else triton_op  # an interpreted kernel can't be traced


@operator("sqrtdk_gpu::forward", mutates_args=())
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factor: float,
    scale: Tensor | None,
    softcap: float,
    bias: Tensor | None,
    distances: Tensor | None,
    visible: Tensor | None,
    sinks: Tensor | None,
    above: int | None,
    below: int | None,
    places: Tensor | None,
    statistics: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute attention and statistics of rows, in one pass.

    Args:
        query: (B, Hq, L, E), float32, bfloat16 or float16.
        key: (B, H, S, E); H divides Hq.
        value: (B, H, S, Ev); Ev = 0: statistics only.
        factor: the scale if `scale` is None.
        scale: float32, four dimensions, broadcastable to (B, Hq, L, 1).
        softcap: 0 for none.
        bias: floating, four dimensions, broadcastable to (B, Hq, L, S).
        distances: in its place a table (1, #Hq, 1, L + S - 1) of the distances j - i, from 1 - L on.
        visible: bool, likewise.
        sinks: float32, four dimensions, broadcastable to (B, Hq, L, 1).
        above: row i sees keys j <= i + above; None: no bound.
        below: row i sees keys j >= i - below; None: no bound.
        places: (L,) int64 positions of the rows if they are a sample.
        statistics: see the bits in `row`.

    Returns:
        Output (B, Hq, L, Ev), lse (B, Hq, L), entropy (B, Hq, L) or (0,) if not requested, the planes (P, B, Hq, L):
        the other requested fields in their order, or those of RowStats; and levels (2, B, Hq, L): maxima and log
        masses, whose sum is lse.
    """
    added = bias if distances is None else distances
    others = (visible, sinks, above, below, places, statistics)
    return run(query, key, value, factor, scale, softcap, added, distances is not None, *others)


@forward.register_fake
def _shapes(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    statistics = rest[-1]
    assert isinstance(statistics, int)
    return empty_results(query, value, statistics)


forward.register_autograd(gradients, setup_context=keep)
