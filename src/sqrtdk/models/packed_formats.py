"""The tensors of a quantised weight in a checkpoint, by format, and the weight that they stand for.

    GPTQ                  W^T = s[g] (q - z - 1)         `qweight`, `qzeros`, `scales`, `g_idx` of the inputs
    AWQ                   W^T = s (q - z)                the same, eight outputs to a word, in an order of its own
    compressed-tensors    W = s (q - z)                  `weight_packed` or `weight`, `weight_scale`
    bitsandbytes          W = code[q] |W|_max            `weight`, `absmax`, `quant_map`; int8 with `SCB` / 127
    FP8                   W = s w                        `weight_scale_inv` a block, or `weight_scale`
    HQQ                   W = s (q - z)                  `W_q`, `scale`, `zero`, a row or a column a group
    quanto                W = s q - o, or s (q - z)      `weight._data`, `weight._scale`, `weight._shift`

Each reader returns the weight, or None if the tensors are those of a plain module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each 4 bits of a word
_WORD_BITS, _WORD = 32, 2**32 - 1
_SETTING_DTYPES = (torch.uint8, torch.int32, torch.int64)  # HQQ keeps numbers and strings as tensors
_STORED_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MOST_STATE = 2**16  # bytes of JSON beside a weight of 4 bits

Parts = Mapping[str, Tensor]  # tensors of a module, by what follows its path
Config = Mapping[str, Any]


def unpacked(words: Tensor, bits: int, along: int) -> Tensor:
    """Return the whole numbers that words of 32 bits hold, one after the other, the lowest bits first.

    Args:
        words: (rows, columns) of int32.
        bits: 2, 3, 4 or 8 of each number; one of 3 bits may begin in one word and end in the next.
        along: 0 if the words lie along the rows, 1 along the columns.

    Example:
        >>> unpacked(torch.tensor([[0x21]], dtype=torch.int32), 4, 1)[0, :3].tolist()
        [1, 2, 0]
    """
    if bits not in (2, 3, 4, 8) or words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(f"{bits} bits in {words.dtype} of {words.dim()} dimensions")
    if along == 0:
        return unpacked(words.mT, bits, 1).mT
    if _WORD_BITS % bits == 0:
        shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
        numbers: Tensor = words[..., None] >> shifts & (2**bits - 1)
        return numbers.flatten(1)
    # 3 words hold 32 numbers of 3 bits
    parts = functional.pad(words, (0, -words.shape[1] % bits)).reshape(words.shape[0], -1, bits).long() & _WORD
    starts = torch.arange(0, _WORD_BITS * bits, bits)
    first, shift = starts // _WORD_BITS, starts % _WORD_BITS
    following = parts[..., (first + 1).clamp(max=bits - 1)]
    numbers = (parts[..., first] >> shift | following << (_WORD_BITS - shift)) & (2**bits - 1)
    return numbers.flatten(1)


def _stacked(words: Tensor, bits: int, *, lowest_first: bool) -> Tensor:
    """Return the whole numbers of words: of all words the first ones as the first rows, then the second ones."""
    word_bits = _WORD_BITS if words.dtype == torch.int32 else 8
    shifts = range(0, word_bits // bits * bits, bits)
    return torch.cat([words >> shift & (2**bits - 1) for shift in (shifts if lowest_first else reversed(shifts))])


def _gptq(parts: Parts, config: Config) -> Tensor | None:
    if "qweight" not in parts:
        return None
    bits = _whole(config, "bits")
    scales = parts["scales"].float()
    codes = unpacked(parts["qweight"], bits, 0).float()
    zeros = unpacked(parts["qzeros"], bits, 1)[:, : scales.shape[1]].float()
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1  # the first version stores them less 1
    size = codes.shape[0] // scales.shape[0]
    group = parts["g_idx"].long() if "g_idx" in parts else torch.arange(codes.shape[0]) // size
    weight = scales[group] * (codes[: len(group)] - zeros[group])
    return weight.mT.contiguous()


def _awq(parts: Parts, config: Config) -> Tensor | None:
    if "qweight" not in parts:
        return None
    if _whole(config, "bits") != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"version {config.get('version')!r} with {config.get('bits')} bits")
    order = torch.tensor(_AWQ_ORDER).argsort()
    codes, zeros = (
        unpacked(parts[name], 4, 1).view(parts[name].shape[0], -1, 8)[..., order].flatten(1).float()
        for name in ("qweight", "qzeros")
    )
    scales = parts["scales"].float()
    size = codes.shape[0] // scales.shape[0]
    scales, zeros = (each.repeat_interleave(size, 0) for each in (scales, zeros))
    return (scales * (codes - zeros)).mT.contiguous()


def _compressed(parts: Parts, config: Config) -> Tensor | None:
    if "weight_scale" not in parts:
        return None
    if "weight_global_scale" in parts:
        raise ValueError("weight_global_scale, of nvfp4")
    scale = parts["weight_scale"].float()
    zero = parts.get("weight_zero_point")
    if "weight_packed" in parts:
        groups = config.get("config_groups") or {}
        bits = {_whole((one.get("weights") or {}), "num_bits") for one in groups.values()}
        if len(bits) != 1:
            raise ValueError(f"{sorted(bits)} bits in one checkpoint")
        width = bits.pop()
        rows, columns = (int(size) for size in parts["weight_shape"])
        middle = 2 ** (width - 1)
        if parts["weight_packed"].shape[1] != -(-columns * width // _WORD_BITS):
            raise ValueError(f"{width} bits that are not packed one after the other")
        codes = unpacked(parts["weight_packed"], width, 1)[:rows, :columns].float() - middle
        if zero is not None and zero.dtype == torch.int32:
            zero = unpacked(zero, width, 0)[:rows] - middle
    else:
        codes = parts["weight"].float()
    if "weight_g_idx" in parts and bool((parts["weight_g_idx"] >= 0).all()):
        raise ValueError("weight_g_idx, an order of its own")
    if zero is not None:
        codes = codes - _spread(zero.float(), codes.shape)
    weight: Tensor = codes * _spread(scale, codes.shape)
    return weight


def _spread(numbers: Tensor, shape: torch.Size) -> Tensor:
    """Return numbers of groups or blocks at each entry of the weight: (out, in / g) or (1,) at (out, in)."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1)
    if numbers.dim() == 1:
        numbers = numbers[:, None]
    for axis in (0, 1):
        if numbers.shape[axis] not in (1, shape[axis]):
            size = -(-shape[axis] // numbers.shape[axis])
            numbers = numbers.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return numbers


def _fp8(parts: Parts, config: Config) -> Tensor | None:
    weight = parts.get("weight")
    if weight is None or weight.dtype not in _STORED_FP8:
        return None
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if scale is None:
        raise KeyError("weight_scale_inv")
    block = config.get("weight_block_size")
    scale = scale.float()
    if scale.numel() > 1 and isinstance(block, list) and len(block) == 2:
        rows, columns = (int(size) for size in block)
        if min(rows, columns) < 1:
            raise ValueError(f"blocks of {block}")
        spread = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
        return weight.float() * spread
    return weight.float() * _spread(scale, weight.shape)


def _bitsandbytes(parts: Parts, config: Config) -> Tensor | None:
    if "SCB" in parts:
        return parts["weight"].float() * parts["SCB"].float()[:, None] / 127
    named = next((name for name in parts if name.startswith("quant_state.bitsandbytes__")), None)
    if named is None:
        return None
    if parts[named].numel() > _MOST_STATE:
        raise ValueError(f"{parts[named].numel()} bytes of state")
    state = json.loads(bytes(parts[named].tolist()))
    absmax = parts["absmax"]
    if "nested_absmax" in parts:
        nested = parts["nested_absmax"].float().repeat_interleave(_whole(state, "nested_blocksize"))[: absmax.numel()]
        absmax = parts["nested_quant_map"].float()[absmax.long()] * nested + float(state["nested_offset"])
    both = parts["weight"].flatten().long()
    codes = torch.stack([both >> 4, both & 15], 1).flatten()
    values = parts["quant_map"].float()[codes]
    weight = values.view(-1, _whole(state, "blocksize")) * absmax.float()[:, None]
    shape = [int(size) for size in state["shape"]]
    return weight.flatten().view(shape)


def _hqq(parts: Parts, config: Config) -> Tensor | None:
    if "W_q" not in parts:
        return None
    settings = {name: part.tolist() for name, part in parts.items() if part.dtype in _SETTING_DTYPES and name != "W_q"}
    if settings["quant_scale"] or settings["quant_zero"]:
        raise ValueError("scales or zero points that are quantised themselves")
    bits = _whole(settings, "nbits")
    words = parts["W_q"]
    if settings["view_as_float"]:
        words = words.view(torch.int32 if bits == 3 else torch.uint8)
    codes, scale = _stacked(words, bits, lowest_first=False), parts["scale"].float()
    shape = [int(size) for size in settings["shape"]]
    columns = scale.shape[1] if scale.shape[0] == 1 else math.prod(shape) // scale.shape[0]
    codes = codes.reshape(-1, columns)[: math.prod(shape) // columns].float()
    weight: Tensor = (codes - parts["zero"].float()) * scale
    return weight.view(shape)


def _quanto(parts: Parts, config: Config) -> Tensor | None:
    scale = parts.get("_scale")
    if scale is None:
        return None
    scale, shift = scale.float(), parts.get("_shift")
    if "_data" in parts:
        return parts["_data"].float() * scale
    if shift is None or (bits := {"qint4": 4, "qint2": 2}.get(config.get("weights", ""))) is None:
        raise ValueError(f"weights of the kind {config.get('weights')!r}")
    codes = _stacked(parts["_data._data"], bits, lowest_first=True)[: scale.shape[0]].float()
    weight = scale * codes - shift if shift.is_floating_point() else scale * (codes - shift.float())
    return weight.view(config["shape"])


def _whole(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 2**20:
        raise ValueError(f"{name} is {value!r}")
    return value


METHOD_READERS: Mapping[str, Callable[[Parts, Config], Tensor | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "hqq": _hqq,
    "quanto": _quanto,
}
