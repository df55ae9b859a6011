"""JAX's operations that move, pick or place numbers, as torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.frontends.arrays import along, flat_index, like_other, spread
from sqrtdk.frontends.jax.arrays import held_dtype
from sqrtdk.frontends.jax.elementwise import Operation
from sqrtdk.frontends.program import RunDtypes


def _iota(numbers: RunDtypes, dtype: Any, shape: Sequence[int], dimension: int, **_: Any) -> Tensor:
    line = torch.arange(shape[dimension], dtype=numbers.dtype(held_dtype(dtype)), device=numbers.device)
    return along(dimension, line, len(shape)).expand(shape)


def _broadcast(numbers: RunDtypes, x: Any, *, shape: Sequence[int], broadcast_dimensions: Any, **_: Any) -> Tensor:
    sizes = [1] * len(shape)
    for at, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[at] = size
    x = x if list(x.shape) == sizes else x.reshape(sizes)
    made: Tensor = x if list(x.shape) == list(shape) else x.expand(tuple(shape))
    return made


def _reshape(numbers: RunDtypes, x: Tensor, *, new_sizes: Sequence[int], dimensions: Any = None, **_: Any) -> Tensor:
    return (x if dimensions is None else x.permute(tuple(dimensions))).reshape(tuple(new_sizes))


def _squeeze(numbers: RunDtypes, x: Tensor, dimensions: Any, **_: Any) -> Tensor:
    return x.squeeze(tuple(map(int, dimensions)))


def _expand_dims(numbers: RunDtypes, x: Tensor, dimensions: Any, **_: Any) -> Tensor:
    for at in sorted(dimensions):
        x = x.unsqueeze(at)
    return x


def _transpose(numbers: RunDtypes, x: Tensor, permutation: Any, **_: Any) -> Tensor:
    return x.permute(tuple(map(int, permutation)))


def _concatenate(numbers: RunDtypes, *xs: Tensor, dimension: int, **_: Any) -> Tensor:
    return torch.cat(xs, dimension)


def _stack(numbers: RunDtypes, *xs: Any, axis: int = 0, **_: Any) -> Tensor:
    like = next(x for x in xs if isinstance(x, Tensor))
    return torch.stack([like_other(x, like) for x in xs], axis)


def _tile(numbers: RunDtypes, x: Tensor, reps: Any, **_: Any) -> Tensor:
    return x.repeat(*map(int, reps))


def _split(numbers: RunDtypes, x: Tensor, sizes: Any, axis: int, **_: Any) -> tuple[Tensor, ...]:
    return torch.split(x, list(map(int, sizes)), axis)


def _reverse(numbers: RunDtypes, x: Tensor, dimensions: Any, **_: Any) -> Tensor:
    return x.flip(tuple(map(int, dimensions)))


def _slice(
    numbers: RunDtypes, x: Tensor, start_indices: Any, limit_indices: Any, strides: Any = None, **_: Any
) -> Tensor:
    bounds = zip(start_indices, limit_indices, strides or [1] * x.dim(), x.shape, strict=True)
    # a cut that keeps a whole axis is no cut
    cuts = [slice(None) if (a, b, s) == (0, n, 1) else slice(int(a), int(b), int(s)) for a, b, s, n in bounds]
    return x[tuple(cuts)]


def _pad(numbers: RunDtypes, x: Tensor, value: Any, padding_config: Any, **_: Any) -> Tensor:
    fill = value.to(x.dtype) if isinstance(value, Tensor) else value
    for at, (low, high, inner) in enumerate(padding_config):
        if inner and x.shape[at] > 1:
            x = spread(x, at, inner + 1, like_other(fill, x))
        if low or high:
            number = fill.item() if isinstance(fill, Tensor) else fill
            x = F.pad(x, [0, 0] * (x.dim() - 1 - at) + [int(low), int(high)], value=number)
    return x


def _starts(x: Tensor, starts: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Return the first indices of a slice, moved so that the slice is inside."""
    return [min(max(int(start), 0), whole - size) for start, size, whole in zip(starts, sizes, x.shape, strict=True)]


def _dynamic_slice(numbers: RunDtypes, x: Tensor, *starts: Any, slice_sizes: Sequence[int], **_: Any) -> Tensor:
    for at, (start, size) in enumerate(zip(_starts(x, starts, slice_sizes), slice_sizes, strict=True)):
        x = x if size == x.shape[at] else x.narrow(at, start, int(size))
    return x


def _dynamic_update_slice(numbers: RunDtypes, x: Tensor, update: Tensor, *starts: Any, **_: Any) -> Tensor:
    first = _starts(x, starts, update.shape)
    made = x.clone()
    made[tuple(slice(start, start + size) for start, size in zip(first, update.shape, strict=True))] = update
    return made


# -- gather and scatter ------------------------------------------------------------------------------------------------


def _coordinates(
    shape: Sequence[int],
    indices: Tensor,
    offset_dims: Sequence[int],
    start_map: Sequence[int],
    collapsed: Sequence[int],
    batching: Sequence[int],
    index_batching: Sequence[int],
    sizes: Sequence[int],
) -> tuple[list[Tensor], Tensor]:
    """Return index tensors, one a dimension of the operand, and which of them are inside.

    Both broadcast to the result of a gather, or to the updates of a scatter. Slices are moved inside.
    """
    rank = len(offset_dims) + indices.dim() - 1
    batch = [at for at in range(rank) if at not in offset_dims]
    kept = [at for at in range(len(shape)) if at not in collapsed and at not in batching]
    device, made = indices.device, []
    inside = torch.ones([1] * rank, dtype=torch.bool, device=device)
    for at, size in enumerate(shape):
        index = torch.zeros([1] * rank, dtype=torch.long, device=device)
        if at in start_map:
            start = indices[..., list(start_map).index(at)].long()
            placed = [1] * rank
            for place, n in zip(batch, start.shape, strict=True):
                placed[place] = n
            start = start.reshape(placed)
            inside = inside & (start >= 0) & (start <= size - sizes[at])
            index = index + start.clamp(0, max(size - sizes[at], 0))
        if at in batching:
            place = batch[index_batching[list(batching).index(at)]]
            index = index + along(place, torch.arange(size, device=device), rank)
        if at in kept and sizes[at] != 1:
            place = offset_dims[kept.index(at)]
            index = index + along(place, torch.arange(sizes[at], device=device), rank)
        made.append(index)
    return made, inside


def _all(condition: Tensor) -> bool:
    """Return whether a condition holds everywhere; on the meta device, where nobody knows, it does."""
    if condition.is_meta:
        return True
    with _disable_current_modes():
        return bool(condition.all())


def _gather(
    numbers: RunDtypes, x: Tensor, indices: Tensor, *, dimension_numbers: Any, slice_sizes: Sequence[int],
    mode: Any = None, fill_value: Any = None, embeds: bool = False, **_: Any,
) -> Tensor:  # fmt: skip
    """`embeds`: the operand comes from parameters and the indices from inputs; cos[jnp.arange(n)] is no embedding."""
    d, drops = dimension_numbers, "FILL" in str(mode)
    whole_rows = tuple(slice_sizes[1:]) == tuple(x.shape[1:]) and x.dim() > 0
    offsets = tuple(range(indices.dim() - 1, indices.dim() + x.dim() - 2))
    if whole_rows and not d.operand_batching_dims and d.start_index_map == d.collapsed_slice_dims == (0,):
        rows = indices[..., 0].long()
        # table[ids]: an embedding
        if d.offset_dims == offsets and (not drops or _all((rows >= 0) & (rows < x.shape[0]))):
            rows = rows if drops else rows.clamp(0, x.shape[0] - 1)
            return F.embedding(rows, x) if embeds and x.dim() == 2 and x.is_floating_point() else x[rows]
    at, inside = _coordinates(
        x.shape, indices, d.offset_dims, d.start_index_map, d.collapsed_slice_dims, d.operand_batching_dims,
        d.start_indices_batching_dims, slice_sizes,
    )  # fmt: skip
    made = x[tuple(at)] if at else x
    if not drops or _all(inside):
        return made
    if fill_value is None:
        fill_value = float("nan") if x.is_floating_point() or x.is_complex() else _least(x.dtype)
    return torch.where(inside, made, like_other(fill_value, x))


def _least(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return torch.iinfo(dtype).max if dtype in (torch.uint8, torch.int64) else torch.iinfo(dtype).min


_REDUCES = {"scatter-mul": "prod", "scatter-min": "amin", "scatter-max": "amax"}


def _scatter(kind: str) -> Operation:
    def run(
        numbers: RunDtypes,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        *,
        dimension_numbers: Any,
        mode: Any = None,
        **_: Any,
    ) -> Tensor:
        d = dimension_numbers
        kept = [at for at in range(x.dim()) if at not in d.inserted_window_dims and at not in d.operand_batching_dims]
        sizes = [1] * x.dim()
        for at, place in zip(kept, d.update_window_dims, strict=True):
            sizes[at] = updates.shape[place]
        at_each, inside = _coordinates(
            x.shape, indices, d.update_window_dims, d.scatter_dims_to_operand_dims, d.inserted_window_dims,
            d.operand_batching_dims, d.scatter_indices_batching_dims, sizes,
        )  # fmt: skip
        places = [index.expand(updates.shape) for index in at_each]
        if "CLIP" not in str(mode) and not _all(inside):  # what lies outside is dropped
            inside = inside.expand(updates.shape)
            places, updates = [index[inside] for index in places], updates[inside]
        if kind in _REDUCES:
            flat = flat_index(places, x).reshape(-1)
            reduced = x.reshape(-1).scatter_reduce(0, flat, updates.reshape(-1), _REDUCES[kind])
            return reduced.reshape(x.shape)
        return torch.index_put(x, tuple(places), updates.to(x.dtype), accumulate=kind == "scatter-add")

    return run


# -- order -------------------------------------------------------------------------------------------------------------


def _sort(numbers: RunDtypes, *xs: Tensor, dimension: int, num_keys: int = 1, **_: Any) -> tuple[Tensor, ...]:
    order = None
    for key in reversed(xs[:num_keys]):  # the last key first: each sort keeps the order of equal ones
        values = key if order is None else key.gather(dimension, order)
        by = torch.sort(values, dim=dimension, stable=True).indices
        order = by if order is None else order.gather(dimension, by)
    assert order is not None
    return tuple(x.gather(dimension, order) for x in xs)


def _top_k(numbers: RunDtypes, x: Tensor, k: int, axis: int | None = None, **_: Any) -> tuple[Tensor, Tensor]:
    at = x.dim() - 1 if axis is None else axis
    values, order = torch.sort(
        x, dim=at, descending=True, stable=True
    )  # of equal ones the first, which torch.topk does not say
    return values.narrow(at, 0, k), order.narrow(at, 0, k)


def _approx_top_k(
    numbers: RunDtypes, x: Tensor, k: int, reduction_dimension: int, is_max_k: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    at = reduction_dimension % x.dim()
    values, order = torch.sort(x, dim=at, descending=is_max_k, stable=True)
    return values.narrow(at, 0, k), order.narrow(at, 0, k)


def _gathered(numbers: RunDtypes, x: Tensor, all_gather_dimension: int = 0, tiled: bool = False, **_: Any) -> Tensor:
    return x if tiled else x.unsqueeze(all_gather_dimension)  # from the one device that there is


def _axis_index(numbers: RunDtypes, **_: Any) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=numbers.device)


SHAPE_OPERATIONS: dict[str, Operation] = {
    "iota": _iota, "broadcast_in_dim": _broadcast, "reshape": _reshape, "squeeze": _squeeze,
    "expand_dims": _expand_dims, "transpose": _transpose, "concatenate": _concatenate, "stack": _stack, "tile": _tile,
    "split": _split, "rev": _reverse, "slice": _slice, "pad": _pad, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice, "gather": _gather, "scatter": _scatter("scatter"),
    "scatter-add": _scatter("scatter-add"), "scatter_add": _scatter("scatter-add"),
    "scatter-mul": _scatter("scatter-mul"), "scatter_mul": _scatter("scatter-mul"),
    "scatter-min": _scatter("scatter-min"), "scatter_min": _scatter("scatter-min"),
    "scatter-max": _scatter("scatter-max"), "scatter_max": _scatter("scatter-max"), "sort": _sort, "top_k": _top_k,
    "approx_top_k": _approx_top_k, "all_gather": _gathered, "axis_index": _axis_index,
}  # fmt: skip
