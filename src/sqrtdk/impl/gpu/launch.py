"""Launches the forward kernel: grid, packing of heads, splitting of keys, compile-time switches."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from sqrtdk.impl.gpu import configs
from sqrtdk.impl.gpu import forward as kernels
from sqrtdk.impl.gpu.configs import FP_FUSION, forward_config
from sqrtdk.impl.gpu.load import interpreted
from sqrtdk.impl.gpu.wanted import planes_of
from sqrtdk.stats import _partial

LARGEST_PACKED = 64  # up to this many rows over all heads of a group, the heads share tiles
SHORTEST_PART = 256  # keys of a part if keys are split
MOST_SPLITS = 64
FIELDS = len(_partial.ROW_STATS_FIELDS)


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """Return the strides of a tensor's first dimensions, in elements, as a kernel takes them.

    A dimension of size 1, which is broadcast, has stride 0. For None all strides are 0.

    Args:
        tensor: The tensor, or None.
        dims: Number of dimensions.
    """
    if tensor is None:
        return (0,) * dims
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape[:dims], tensor.stride(), strict=False))


def placed(bias: Tensor | None, distances: bool, length: int) -> tuple[Tensor | int | None, ...]:
    """Return a bias as a kernel takes it: the tensor, and its strides along batch, heads, rows and keys.

    A table of distances is returned from the entry of row 0 and key 0 on, with a negative stride along the rows, so
    that the kernel reads it like a bias of rows and keys.

    Args:
        bias: (#B, #H, #L, #S), or a table of distances (#B, #H, 1, L + S - 1); None for no bias.
        distances: Whether it is a table.
        length: Number of rows, L.
    """
    if bias is None or not distances:
        return bias, *strides(bias, 4)
    step = bias.stride(-1)
    return bias[..., length - 1 :], *strides(bias, 2), -step, step


def padded(width: int) -> int:
    """Return the width of the tile for a width of vectors: the next power of two, at least 16, as `tl.dot` needs."""
    return max(16, triton.next_power_of_2(width)) if width else 16


def target_of(tensor: Tensor) -> str:
    """Return the architecture of a tensor's device: "sm_90", "gfx942", "xpu", or "interpreter" if Triton interprets."""
    if interpreted():
        return "interpreter"
    return _target(tensor.device.type, tensor.device.index)


@cache
def _target(kind: str, index: int | None) -> str:
    if kind == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(index)
        return f"sm_{major}{minor}"
    if kind == "cuda":
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    return kind


@cache
def processors(kind: str, index: int | None) -> int:
    """Return the number of multiprocessors of a device, each of which runs at least one program; 4 for the interpreter.

    Args:
        kind: Type of the device, such as "cuda".
        index: Its index; None is the current device.
    """
    if interpreted():
        return 4
    return int(torch.get_device_module(kind).get_device_properties(index).multi_processor_count)


def precision(tensor: Tensor) -> str:
    """Return the `input_precision` of `tl.dot` for float32 on a tensor's device, "tf32x3" or "ieee"."""
    return configs.precision(target_of(tensor))


def launch(kernel: Callable[..., Any], grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start a kernel, so that torch's compiler can trace it.

    The allocator for tensor descriptors is set only during the launch.

    Args:
        kernel: A function decorated with `triton.jit`.
        grid: Number of programs along each dimension.
        args: Positional arguments of the kernel, of which one or more are tensors.
        constants: Compile-time arguments, `num_warps` and `num_stages`.
    """
    # torch 2.11 refuses a kernel that is interpreted
    wrapped: Any = kernel if interpreted() else wrap_triton(kernel)
    if wrapped is not kernel:
        wrapped[grid](*args, **constants)
        return
    kind = next(arg.device for arg in args if isinstance(arg, Tensor))

    def start() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=kind))
        kernel[grid](*args, **constants, enable_fp_fusion=FP_FUSION)

    contextvars.copy_context().run(start)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factor: float,
    scale: Tensor | None,
    softcap: float,
    bias: Tensor | None,
    distances: bool,
    visible: Tensor | None,
    sinks: Tensor | None,
    above: int | None,
    below: int | None,
    places: Tensor | None,
    statistics: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate, launch and return the results: see `operators.forward`."""
    batch, heads, length, width = query.shape
    keys, value_width = value.shape[-2:]
    output, lse, entropy, planes, levels = empty_results(query, value, statistics)
    if lse.numel() == 0:
        return output, lse, entropy, planes, levels
    widen = interpreted() and query.dtype == torch.bfloat16  # the interpreter multiplies bit patterns of bfloat16
    if widen:
        output = output.float()
    group = heads // key.shape[1]
    packed = group > 1 and length * group <= LARGEST_PACKED
    rows = length * group if packed else length
    target = target_of(query)
    widest = max(padded(width), padded(value_width))
    extras = bias is not None or visible is not None or softcap > 0.0
    config = forward_config(target, query.dtype, widest, above is not None, statistics != 0, rows, extras)
    block_m = min(config.block_m, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    units = batch * heads // (group if packed else 1)
    splits, part = split_keys(tiles * units, keys, config.block_n, processors(query.device.type, query.device.index))
    parts = None
    if splits > 1:
        parts = lse.new_empty(splits * lse.numel() * (FIELDS + value_width))
    plain = scale is None and bias is None and not softcap and factor > 0.0
    direct = config.descriptors and all(fits_descriptor(t) for t in (key, value) if t.shape[-1])
    common = {
        "EV": value_width,
        "BLOCK_EV": padded(value_width),
        "WANTED": statistics,
        "SINKS": sinks is not None,
    }
    sink_strides = strides(sinks, 3)
    launch(
        kernels.forward,
        (tiles * units, splits),
        query,
        *query.stride(),
        key,
        *key.stride(),
        value,
        *value.stride(),
        scale,
        *strides(scale, 3),
        *placed(bias, distances, length),
        visible,
        *strides(visible, 4),
        sinks,
        *sink_strides,
        places,
        output,
        lse,
        levels,
        entropy,
        planes,
        parts,
        batch,
        heads,
        length,
        keys,
        factor,
        softcap,
        above or 0,
        below or 0,
        part,
        GROUP=group,
        E=width,
        BLOCK_E=padded(width),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        LINEAR=plain,
        SCALES=scale is not None,
        SOFTCAP=bool(softcap),
        BIAS=bias is not None,
        VISIBLE=visible is not None,
        ABOVE=above is not None,
        BELOW=below is not None,
        PLACES=places is not None,
        PACKED=packed,
        SPLIT=splits > 1,
        DESCRIPTORS=direct,
        WIDEN=widen,
        PRECISION=precision(query),
        num_warps=config.warps,
        num_stages=config.stages,
        **common,
    )
    if splits > 1:
        launch(
            kernels.combine,
            (triton.cdiv(lse.numel(), 16),),
            parts,
            sinks,
            *sink_strides,
            output,
            lse,
            levels,
            entropy,
            planes,
            batch,
            heads,
            length,
            splits,
            BLOCK_M=16,
            num_warps=4,
            num_stages=1,
            **common,
        )
    return output.to(query.dtype), lse, entropy, planes, levels


def empty_results(query: Tensor, value: Tensor, statistics: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of `operators.forward`, uninitialised.

    Args:
        query: (B, Hq, L, E).
        value: (B, H, S, Ev).
        statistics: Bits of the requested statistics.

    Returns:
        Output (B, Hq, L, Ev) like the query; in float32 lse (B, Hq, L), entropy (B, Hq, L) or (0,) if not requested,
        planes (P, B, Hq, L) and levels (2, B, Hq, L).
    """
    batch, heads, length, _ = query.shape
    output = query.new_empty((batch, heads, length, value.shape[-1]))
    lse = query.new_empty((batch, heads, length), dtype=torch.float32)
    entropy = torch.empty_like(lse) if statistics & 32 else lse.new_empty((0,))
    planes, levels = (lse.new_empty((count, batch, heads, length)) for count in (planes_of(statistics), 2))
    return output, lse, entropy, planes, levels


def split_keys(programs: int, keys: int, block_n: int, processors: int) -> tuple[int, int]:
    """Return into how many parts the keys are split, so that no processor is idle, and the number of keys of a part.

    Args:
        programs: Number of programs without a split.
        keys: Number of keys.
        block_n: Keys of a tile; with more than one part, a part is a multiple of it.
        processors: Number of multiprocessors of the device.

    Returns:
        (parts, keys of a part); (1, keys) if they are not split.
    """
    if programs >= processors or keys < 2 * SHORTEST_PART:
        return 1, keys
    wanted = min(2 * processors // programs, keys // SHORTEST_PART, MOST_SPLITS)
    part = triton.cdiv(triton.cdiv(keys, wanted), block_n) * block_n
    return triton.cdiv(keys, part), part


def fits_descriptor(tensor: Tensor) -> bool:
    """Return whether a descriptor can load the tensor's rows: contiguous columns, all other strides multiples of 16
    bytes."""
    size = tensor.element_size()
    steps = (*tensor.stride()[:-1], tensor.storage_offset())
    return tensor.stride(-1) == 1 and all(step * size % 16 == 0 for step in steps) and tensor.stride(-2) > 0
