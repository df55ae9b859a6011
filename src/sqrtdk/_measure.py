"""Statistics of the logits without values: the same call as `attention`, but no output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk._arguments import autocast_dtype
from sqrtdk._guesses import parameters_of, refuse_arguments
from sqrtdk._resolve import resolve_arguments
from sqrtdk._subclasses import check_class, named_in_errors
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.impl.call import Call, has_values
from sqrtdk.impl.choice import against_compiled, against_triton
from sqrtdk.impl.cpu import row_statistics as on_cpu
from sqrtdk.impl.fused import LARGEST_MASK, mask_elements, obstacle, swept
from sqrtdk.impl.gpu import GPUS
from sqrtdk.impl.product import as_product
from sqrtdk.impl.rows import block_rows, block_stats
from sqrtdk.impl.simplify import simplified
from sqrtdk.impl.triton import row_statistics as on_gpu
from sqrtdk.stats import RowStats
from sqrtdk.stats._partial import ROW_STATS_FIELDS
from sqrtdk.stats.request import AuxRequest

if TYPE_CHECKING:
    from jaxtyping import Int
    from typing_extensions import Never

    from sqrtdk._named import AnyBias, AnyScale, AnyScore, AnyWindow
    from sqrtdk._shapes import AnyKey, Bias, Query, Visible
    from sqrtdk.impl.mods import MaskMod, ScoreMod


def measure(
    query: Query,
    key: AnyKey,
    *_values: Never,  # no third tensor by its place: `measure(q, k, v)` would add v to the logits as a mask
    attn_mask: Visible | Bias | None = None,
    is_causal: bool = False,
    scale: AnyScale | None = None,
    enable_gqa: bool = False,
    score: AnyScore | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | None = None,
    bias: AnyBias | None = None,
    window: AnyWindow | None = None,
    causal_lower_right: bool = False,
    window_lower_right: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    rows: int | Int[Tensor, " R"] | None = None,
    **_unknown: Never,
) -> RowStats:
    """Statistics of every row of logits, exact, without an L x S matrix and without gradients; no sink joins them.

    Args:
        query: (..., Hq, L, E); all arguments have the meaning that they have in `attention`.
        key: (..., H, S, E).
        attn_mask: bool or floating, broadcastable to (..., Hq, L, S).
        is_causal: row i sees keys j <= i.
        scale: number, rule, name of a rule, or tensor.
        enable_gqa: fewer key heads than query heads.
        score: a score of `sqrtdk.scores`, its name, or a function of q and k.
        score_mod: FlexAttention's function of a score and its place.
        mask_mod: FlexAttention's function of a place.
        block_mask: FlexAttention's BlockMask.
        softcap: c of c tanh(z / c).
        bias: tensor, term of `sqrtdk.positions`, or "alibi".
        window: (left, right), or in a causal call a number of keys.
        causal_lower_right: row i sees keys j <= i + S - L.
        window_lower_right: `window` and position terms count from i + S - L in a call that is not causal.
        query_offset: place of the first row in the sequence, if query is a block of it.
        key_offset: place of the first key, if key is a block of the keys.
        rows: measure only this many rows, evenly spread, or the rows of these indices, (R,) int64; None: all.

    Returns:
        RowStats of (..., Hq, L), or (..., Hq, R) with `rows`: float64 for float64 inputs, else float32. It has the
        statistics under the names of `AuxOutput`. Blocks of keys merge (`merge`); `sqrtdk.stats.row_summary` and
        `head_stats` sum rows up a head.

    Raises:
        InvalidValueError: Shapes or values do not fit.
        InvalidTypeError: An argument has the wrong type or dtype.

    Example:
        >>> q = k = torch.zeros(1, 2, 4, 8)
        >>> measure(q, k, is_causal=True, rows=2).effective_keys
        tensor([[[1., 4.],
                 [1., 4.]]])
    """
    if _values:
        raise InvalidTypeError(
            f"measure takes query and key, and no value; got {len(_values) + 2} arguments without a name",
            hint="Pass measure(q, k), and masks by their names.",
        )
    if _unknown:
        refuse_arguments("measure", _unknown, parameters_of(measure))
    tensors = {"query": query, "key": key, "attn_mask": attn_mask, "scale": scale, "bias": bias, "score": score}
    with torch.no_grad(), named_in_errors(tensors):
        if isinstance(key, Tensor):
            check_class("key", key)
        # no values, as only statistics are needed
        call = resolve_arguments(
            query, key, key[..., :0] if isinstance(key, Tensor) and key.ndim else key, attn_mask, 0.0, is_causal, scale,
            enable_gqa, score=score, score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask, softcap=softcap,
            bias=bias, window=window, causal_lower_right=causal_lower_right, window_lower_right=window_lower_right,
            query_offset=query_offset, key_offset=key_offset,
        )  # fmt: skip
        places = None if rows is None else _chosen(rows, call.length, call.query.device)
        if autocast_dtype(query) is None:
            return _measured(call, places)
        # The arguments are cast already; autocast would round the statistics' own products as well.
        with torch.autocast(query.device.type, enabled=False):
            return _measured(call, places)


def _measured(call: Call, places: Int[Tensor, " R"] | None) -> RowStats:
    """Return the statistics of the rows, (..., Hq, L), by the fastest implementation that can compute them."""
    call = simplified(call)
    if places is not None:
        call = call.sample(places)
    call = as_product(call)
    whole = replace(call, aux=AuxRequest.all())
    # Fastest first: our kernels give all statistics in one pass.
    if against_compiled(whole) is None:
        return on_cpu(call)
    if call.query.device.type in GPUS and against_triton(whole) is None:
        return on_gpu(call)
    # the sweep computes the softcap itself; torch's kernels, which `obstacle` asks about, have none
    every = replace(whole, softcap=None)
    if obstacle(every) is None and mask_elements(call) <= LARGEST_MASK:
        return swept(call).rows
    height = block_rows(call)
    spans = [(start, min(call.length, start + height)) for start in range(0, call.length, height)]
    if len(spans) == 1:
        return block_stats(call, 0, call.length)
    found = RowStats.empty((*call.lead, call.length), dtype=call.dtype, device=call.query.device)
    if has_values(call.query, call.key) or not spans:
        for start, stop in spans:
            block = block_stats(call, start, stop)
            for name in ROW_STATS_FIELDS:
                # Written in place, as a concatenation would hold all statistics twice.
                getattr(found, name)[..., start:stop] = getattr(block, name)
        return found
    # Under a compiler or torch.func nothing may be written in place.
    blocks = [block_stats(call, start, stop) for start, stop in spans]
    return RowStats(*(torch.cat([getattr(block, name) for block in blocks], -1) for name in ROW_STATS_FIELDS))


def _chosen(rows: int | Int[Tensor, " R"], length: int, device: torch.device) -> Int[Tensor, " R"]:
    """Return the indices of the rows to measure, (R,) int64; a number stands for as many evenly spread ones.

    Raises:
        InvalidTypeError: It is neither a number nor a tensor of indices.
        InvalidValueError: An index or the number is out of range.
    """
    if isinstance(rows, Tensor):
        check_class("rows", rows)
        if rows.dtype != torch.int64 or rows.ndim != 1:
            raise InvalidTypeError(
                f"rows is a number, or indices (R,) int64; got {rows.dtype} {tuple(rows.shape)}",
                hint="Use torch.arange.",
            )
        if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= length):
            raise InvalidValueError(
                f"rows are from 0 to {length - 1}; got {int(rows.min())} to {int(rows.max())}", hint="Count from 0."
            )
        return rows.to(device)
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise InvalidTypeError(f"rows is a number, or indices (R,) int64; got {rows!r}", hint="Pass None for all rows.")
    if rows < 1:
        raise InvalidValueError(f"rows is at least 1; got {rows}", hint="Pass None for all rows.")
    return torch.linspace(0, length - 1, min(rows, length), device=device).round().long()
