"""The formats of a cache: what is read back of the stored numbers, and which numbers share a scale.

Formats, computed in float32 (in float64 for float64 inputs, except fp8):

- `fp8_e4m3`, `fp8_e5m2`: x -> scale * fp8(x / scale), scale = max|x| / largest. e4m3 has 3 bits of mantissa and 448 as
  its largest number, e5m2 has 2 bits and 57344. The cast rounds to nearest, ties to even, and saturates: larger
  numbers, which occur only under a fixed scale, become the largest number. torch's own cast gives NaN (e4m3) or
  infinity (e5m2) there. Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; the scale as in
  transformers' `Fp8QuantizedLayer` (one per tensor) and vLLM's calibrated k_scale and v_scale (one per tensor, or per
  head).
- `int8`, symmetric: x -> scale * round(x / scale), scale = max|x| / 127. The integers range from -127 to 127; halves
  round to even. Source: Jacob et al. 2018, "Quantization and training of neural networks for efficient
  integer-arithmetic-only inference", with a zero point of 0; TensorRT-LLM's INT8 cache has one scale per tensor.
- `q8_0` of ggml: blocks of 32 channels, 8-bit integers, the scale of a block in float16. d = max|x| / 127; the integer
  is x / d, halves away from zero; read back is the integer times d rounded to float16. 34 bytes for 32 numbers: 8.5
  bits each. Source: ggml's `quantize_row_q8_0_ref` and `block_q8_0` (ggml-quants.c, ggml-common.h), which llama.cpp's
  `--cache-type-k q8_0` uses; llama.cpp refuses head dimensions that are not a multiple of 32.
- `int4`, asymmetric: x -> scale * round((x - low) / scale) + low, scale = (high - low) / 15. Sixteen levels from the
  smallest to the largest number of a group; scale and smallest number take 16 bits each: 4.5 bits per number in groups
  of 64. Source: transformers' `QuantizedCache(backend="quanto", nbits=4, q_group_size=64)`, that is optimum-quanto's
  `MaxOptimizer` and `quantize_affine`: "group" is its axis 0 (the default), "channel" its axis -1, which KIVI (Liu et
  al. 2024) uses for keys. The HQQ backend differs, as it fits the zero point afterwards (Badri and Shaji 2023), and so
  do engines that round scale and smallest number to 16 bits.

Grains, the numbers of k or v (B, H, S, E) that share a scale:

- "tensor": all of one call. "head": all of a head, of every sequence. "channel": one channel of a head, over all
  sequences and keys. "token": the E numbers of one key of one head.
- "group": 64 consecutive numbers of a head, key after key; the last group may be shorter.
- "tokens64": one channel of 64 consecutive keys. "block": 32 channels of one key.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 64  # transformers' QuantizedCache: q_group_size = 64
BLOCK_SIZE = 32  # ggml: QK8_0
# bits per number for int4 (scale and smallest number, 16 bits each) and q8_0 (a float16 scale)
SCALE_BITS = {"group": 32 / GROUP_SIZE, "tokens64": 32 / GROUP_SIZE, "block": 16 / BLOCK_SIZE}
REDUCED_AXES = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "channel": (0, 2)}  # axes that are reduced, over all of k
GRAINS = ("tensor", "head", "group", "token", "channel")  # coarse to fine; "token" and "channel" are not comparable


def bounds(x: Tensor, grain: str) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number among those that share a scale; both broadcast to (B, H, S, E).

    Args:
        x: (B, H, S, E).
        grain: What shares a scale: "tensor", "head", "token", ...

    Example:
        >>> low, high = bounds(torch.arange(8.0).reshape(1, 2, 2, 2), "head")
        >>> low.flatten().tolist(), high.flatten().tolist()
        ([0.0, 4.0], [3.0, 7.0])
    """
    if grain in REDUCED_AXES:
        return x.amin(REDUCED_AXES[grain], keepdim=True), x.amax(REDUCED_AXES[grain], keepdim=True)
    if grain == "token":
        return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if grain == "tokens64":
        # KIVI and transformers' cache group keys by channel: 64 tokens of one channel share a scale.
        low, high = _runs(x.mT, GROUP_SIZE)
        return low.mT, high.mT
    if grain == "block":
        return _runs(x, BLOCK_SIZE)
    # Groups of 64 run on over tokens where a token has fewer numbers or a rest, as in transformers' quantised cache.
    low, high = _runs(x.flatten(2), GROUP_SIZE)
    return low.reshape(x.shape), high.reshape(x.shape)


def in_float32(x: Tensor) -> Tensor:
    """Return the numbers in float32, the dtype in which engines divide by the scale; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def _runs(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest of each run of `size` numbers along the last axis, one for each number."""
    length = x.shape[-1]
    # the last run repeats its last number, which moves neither its smallest nor its largest
    padded = F.pad(x.reshape(-1, 1, length), (0, -length % size), mode="replicate") if length % size else x
    runs = padded.reshape(*x.shape[:-1], -1, size)
    low, high = (edge.repeat_interleave(size, -1)[..., :length] for edge in (runs.amin(-1), runs.amax(-1)))
    return low, high


MOST_E4M3, MOST_E5M2 = (torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))


def store_e4m3(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return what is read back of numbers stored as `torch.float8_e4m3fn`, in float64.

    Example:
        >>> x = torch.tensor([448.0, 1.0, 1.1])
        >>> store_e4m3(x, x.min(), x.max()).tolist()
        [448.0, 1.0, 1.125]
    """
    return _store(x, low, high, torch.float8_e4m3fn)


def store_e5m2(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return what is read back of numbers stored as `torch.float8_e5m2`, in float64.

    Example:
        >>> x = torch.tensor([57344.0, 1.0, 1.1])
        >>> store_e5m2(x, x.min(), x.max()).tolist()
        [57344.0, 1.0, 1.0]
    """
    return _store(x, low, high, torch.float8_e5m2)


def _store(x: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.maximum(low.abs(), high.abs()).float()
    most = torch.finfo(dtype).max
    # zeros alone have no largest number: 0 / tiny is 0, and 0 / 0 would be NaN
    scale = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)
    return ((x.float() / scale).clamp(-most, most).to(dtype).float() * scale).double()


MOST_INT8 = 127


def store_int8(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return what is read back of numbers stored as int8, in float64.

    Example:
        >>> x = torch.tensor([127.0, -3.4, 0.6])
        >>> store_int8(x, x.min(), x.max()).tolist()
        [127.0, -3.0, 1.0]
    """
    x = in_float32(x)
    largest = torch.maximum(low.abs(), high.abs()).to(x.dtype)
    scale = (largest / MOST_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    return ((x / scale).round().clamp(-MOST_INT8, MOST_INT8) * scale).double()


def store_q8_0(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return what is read back of numbers stored as q8_0, in float64; `low` and `high` are those of each block.

    Example:
        >>> x = torch.cat([torch.tensor([127.0, 2.5, -2.5]), torch.zeros(29)])
        >>> store_q8_0(x, x.min(), x.max())[:3].tolist()
        [127.0, 3.0, -3.0]
    """
    x = in_float32(x)
    d = torch.maximum(low.abs(), high.abs()).to(x.dtype) / 127
    ratio = x / d.masked_fill(d == 0, 1.0)
    # roundf of C, halves away from zero; torch.round takes halves to even
    integers = (ratio.abs() + 0.5).floor() * ratio.sign()
    return integers.double() * d.half().double()


INT4_LEVELS = 15


def store_int4(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return what is read back of numbers stored as int4, in float64.

    Example:
        >>> x = torch.tensor([-1.0, 14.0, 3.4])
        >>> store_int4(x, x.min(), x.max()).tolist()
        [-1.0, 14.0, 3.0]
    """
    x = in_float32(x)
    low = low.to(x.dtype)
    scale = ((high.to(x.dtype) - low) / INT4_LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    return (((x - low) / scale).round().clamp(0, INT4_LEVELS) * scale + low).double()


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        store: from numbers, and the smallest and largest that share a scale, to what is read back, in float64.
        bits: of one number, without its share of a scale.
        scale: the default grain.
        grains: from requested names to names of ``bounds``.
        source: id of the message that names the definition.
        most: the largest stored number, in units of the scale; None if the scale can't be fixed, because a smallest
            number is stored beside it, or the format has its own.
    """

    store: Callable[[Tensor, Tensor, Tensor], Tensor]
    bits: float
    scale: str
    grains: dict[str, str]
    source: str
    most: float | None = None


_COMMON_GRAINS = {"tensor": "tensor", "head": "head", "token": "token", "channel": "channel"}
_INT4_GRAINS = _COMMON_GRAINS | {"group": "group", "channel": "tokens64"}
FORMATS: dict[str, Format] = {
    "fp8_e4m3": Format(store_e4m3, 8.0, "tensor", _COMMON_GRAINS, "cache.source.fp8", MOST_E4M3),
    "fp8_e5m2": Format(store_e5m2, 8.0, "tensor", _COMMON_GRAINS, "cache.source.fp8", MOST_E5M2),
    "int8": Format(store_int8, 8.0, "tensor", _COMMON_GRAINS, "cache.source.int8", MOST_INT8),
    "q8_0": Format(store_q8_0, 8.0, "block", {"block": "block"}, "cache.source.q8_0"),
    "int4": Format(store_int4, 4.0, "group", _INT4_GRAINS, "cache.source.int4"),
}


def fixed_scale(scale: str | float) -> float | None:
    """Return the number to which a scale is fixed; None for the name of a grain, whose scales come from the data.

    Example:
        >>> fixed_scale("1"), fixed_scale("head")
        (1.0, None)
    """
    with suppress(ValueError):
        return float(scale)
    return None


def limit_of(dtype: str, scale: str) -> float | None:
    """Return the largest number that the format stores under a fixed scale; None if no scale is fixed.

    Example:
        >>> limit_of("fp8_e4m3", "1"), limit_of("int8", "tensor")
        (448.0, None)
    """
    most, number = FORMATS[dtype].most, fixed_scale(scale)
    return None if number is None or most is None else number * most
