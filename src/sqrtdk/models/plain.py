"""Writes the layers of quantisation and adapter libraries as plain ones, by what they compute.

A quantised layer holds packed integers, scales and zero points, each library in its own way. But it is still linear in
its input, so its weight is what it gives for the unit vectors: W = (f(I) - f(0))^T, bias f(0). An adapter beside a
layer is in it as well. The copy is tried on random inputs; a layer that is not linear stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import MODEL_ERRORS

# Packages whose layers stand for a plain one.
_LAYER_LIBRARIES = ("peft", "torchao", "bitsandbytes", "compressed_tensors", "hqq", "optimum", "gptqmodel", "auto_gptq",
              "awq", "fbgemm_gpu", "eetq", "vptq", "aqlm")  # fmt: skip
_OF_TRANSFORMERS = ("FP8Linear", "BitLinear", "HiggsLinear", "FbgemmFp8Linear", "AutoBitLinear")
_RANDOM_ROWS = 8  # random rows
_MOST_OFF = 0.05  # relative: inputs rounded to 8 bits move a product by 1%
_ROWS_AT_ONCE = 2**10
_OWN_KINDS = (nn.Parameter, Tensor)


@dataclass(frozen=True, slots=True, eq=False)
class PlainTwin:
    """A model with plain layers in place of those of a library.

    Attributes:
        module: The copy; the model itself if it has no such layers.
        layers: Number of layers that were written as plain ones.
        off: Largest relative difference of their outputs on random inputs.
        left: Paths of layers that could not be.
    """

    module: nn.Module
    layers: int = 0
    off: float = 0.0
    left: tuple[str, ...] = ()


def plain_twin(module: nn.Module) -> PlainTwin:
    """Return a copy of a model whose quantised and adapted layers are plain, or the model if it has none.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> plain_twin(model).module is model
        True
    """
    made: dict[int, nn.Module] = {}
    left: list[str] = []
    off = 0.0
    for path, layer in _layers(module):
        if id(layer) in made:
            continue
        written = _written(layer)
        if written is None:
            left.append(path)
        else:
            made[id(layer)] = written[0]
            off = max(off, written[1])
    if not made:
        return PlainTwin(module, left=tuple(left))
    memo: dict[int, Any] = {
        id(p): _in_float32(p) for p in (*module.parameters(), *module.buffers()) if type(p) in _OWN_KINDS
    }
    twin = copy.deepcopy(module, memo | made)
    twin = _unwrapped(twin)
    twin.eval()
    return PlainTwin(twin, len(made), off, tuple(left))


def _in_float32(tensor: Tensor) -> Tensor:
    """Return a parameter or buffer for the copy: itself, or in float32, as that is what the plain layers give."""
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    wide = tensor.detach().float()
    return nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost layers of a library, each with its path."""
    outer = ""
    for path, layer in module.named_modules():
        if outer and path.startswith(outer):
            continue
        if _is_of_library(layer):
            outer = f"{path}."
            yield path, layer


def _is_of_library(layer: nn.Module) -> bool:
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    table = getattr(layer, "num_embeddings", None) or isinstance(getattr(layer, "base_layer", None), nn.Embedding)
    if not table and not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    weight = getattr(layer, "weight", None)
    # a tensor that only looks like numbers: torchao's, quanto's
    wrapped = isinstance(weight, Tensor) and type(weight) not in _OWN_KINDS and hasattr(weight, "dequantize")
    wrapped = wrapped and type(weight).__module__.partition(".")[0] in _LAYER_LIBRARIES
    kind = type(layer)
    own = kind.__module__.partition(".")[0] in _LAYER_LIBRARIES or kind.__name__ in _OF_TRANSFORMERS
    return own or wrapped or hasattr(layer, "quantization_scheme")


def _written(layer: nn.Module) -> tuple[nn.Module, float] | None:
    if layer.training:  # an adapter's dropout; the user's own layer keeps its mode
        with suppress(*MODEL_ERRORS):  # quanto's tensors can't be copied, and have no dropout
            layer = copy.deepcopy(layer).eval()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with suppress(*MODEL_ERRORS), torch.no_grad():
            found = _of_table(layer) if _is_table(layer) else _of_product(layer, dtype)
            if found is not None:
                return found
    return None


def _is_table(layer: nn.Module) -> bool:
    return bool(getattr(layer, "num_embeddings", None)) or isinstance(getattr(layer, "base_layer", None), nn.Embedding)


def _of_table(layer: Any) -> tuple[nn.Module, float]:
    inner = getattr(layer, "base_layer", layer)
    rows = layer(torch.arange(inner.num_embeddings, device=inner.weight.device)).float()
    return nn.Embedding(rows.shape[0], rows.shape[1], padding_idx=inner.padding_idx, _weight=rows), 0.0


def _of_product(layer: Any, dtype: torch.dtype) -> tuple[nn.Module, float] | None:
    size, device = layer.in_features, next(layer.parameters()).device
    if type(getattr(layer, "base_layer", None)).__name__ == "Conv1D":
        size = layer.base_layer.weight.shape[0]
    nothing = layer(torch.zeros(1, size, dtype=dtype, device=device)).float()
    units = torch.eye(size, dtype=dtype, device=device)
    weight = torch.cat([layer(some).float() - nothing for some in torch.split(units, _ROWS_AT_ONCE)]).mT.contiguous()
    generator = torch.Generator().manual_seed(0)
    tried = torch.randn(_RANDOM_ROWS, size, generator=generator).to(device)
    given = layer(tried.to(dtype)).float()
    expected = tried @ weight.mT + nothing
    off = float((given - expected).norm() / given.norm().clamp(min=1e-30))
    if not off <= _MOST_OFF:
        return None
    if type(getattr(layer, "base_layer", None)).__name__ == "Conv1D":
        return _conv1d(layer.base_layer, weight, nothing), off
    plain = nn.Linear(size, weight.shape[0], bias=bool(nothing.any()), device=device)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if plain.bias is not None:
        plain.bias = nn.Parameter(nothing[0], requires_grad=False)
    return plain, off


def _conv1d(base: nn.Module, weight: Tensor, nothing: Tensor) -> nn.Module:
    plain = copy.deepcopy(base)
    plain.weight = nn.Parameter(weight.mT.contiguous(), requires_grad=False)
    plain.bias = nn.Parameter(nothing[0], requires_grad=False)
    return plain


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's own classes, whose names of weights are the base's."""
    while type(model).__module__.partition(".")[0] == "peft":
        inner = model._modules.get("base_model") or model._modules.get("model")  # getattr would look further inside
        if inner is None:
            return model
        model = inner
    return model
