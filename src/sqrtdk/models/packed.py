"""Reads quantised checkpoints as plain weights, whichever library packed them.

The libraries' own kernels mostly need a GPU. What they compute with is the dequantised weight, which is a few
operations on the tensors of the file, and no code of the checkpoint or of a library runs. torchao writes tensors of its
own kinds, of which there are many: those are loaded by transformers and torchao, and asked what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import MissingExtraError, ModelError, kind_and_text
from sqrtdk.messages import Message, joined
from sqrtdk.models.config import read_config_dict, read_json
from sqrtdk.models.packed_formats import METHOD_READERS
from sqrtdk.models.plain import plain_twin

_QUANTO_MAP = "quanto_qmap.json"
_BY_LIBRARY = ("torchao",)


@dataclass(frozen=True, slots=True)
class Packing:
    """How the weights of a checkpoint are packed.

    Attributes:
        method: "gptq", "awq", "torchao", ...
        settings: What the checkpoint says of it: `quantization_config` of its config, or quanto's map of modules.
    """

    method: str
    settings: Mapping[str, Any]


def packing_of(home: Path) -> Packing | None:
    """Return how the weights of a directory are packed; None if they are plain.

    Raises:
        ModelError: They are packed in a way that is not read.
    """
    settings = read_config_dict(home).get("quantization_config")
    if not settings:
        path = home / _QUANTO_MAP
        return Packing("quanto", read_json(path)) if path.is_file() else None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method not in (*METHOD_READERS, *_BY_LIBRARY):
        known = joined([*METHOD_READERS, *_BY_LIBRARY], "comma")
        raise ModelError(
            Message("errors.weights.quantized", method=repr(method)[:60], known=known),
            hint=Message("errors.hint.unquantized"),
        )
    return Packing(method, settings)


def dequantised_state(
    packing: Packing, directory: Path, files: Sequence[str], meta: nn.Module, load: Callable[[Any], nn.Module]
) -> dict[str, Tensor]:
    """Return the state of a quantised checkpoint as plain weights, by name, in float32.

    Args:
        packing: How it is packed.
        directory: The checkpoint.
        files: Names of its safetensors files.
        meta: The model without values.
        load: Loads the directory through transformers, given the settings.

    Raises:
        ModelError: Its tensors don't fit together.
        MissingExtraError: The library that wrote it is needed and missing.
    """
    if packing.method in _BY_LIBRARY:
        return _state_by_library(packing, load)
    from safetensors.torch import load_file

    modules: dict[str, dict[str, Tensor]] = {}
    for file in files:
        for name, tensor in load_file(directory / file).items():
            path, _, part = name.rpartition(".")
            if ".weight." in name:  # q_proj.weight.quant_state.bitsandbytes__nf4, q_proj.weight._data._data
                path, _, part = name.partition(".weight.")
            modules.setdefault(path, {})[part] = tensor
    shapes = {name: parameter.shape for name, parameter in meta.named_parameters()}
    read, state = METHOD_READERS[packing.method], dict[str, Tensor]()
    for path, parts in modules.items():
        prefix = f"{path}." if path else ""
        try:
            weight = read(parts, _settings_of(packing, path, shapes))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                Message("errors.weights.packed", module=repr(path[:200]), reason=kind_and_text(error)),
                hint=Message("errors.hint.damaged_weights"),
            ) from error
        if weight is None:
            state |= {f"{prefix}{part}": tensor for part, tensor in parts.items()}
            continue
        state[f"{prefix}weight"] = weight
        if "bias" in parts:
            state[f"{prefix}bias"] = parts["bias"].float()
    return state


def _settings_of(packing: Packing, path: str, shapes: Mapping[str, torch.Size]) -> Mapping[str, Any]:
    if packing.method != "quanto":
        return packing.settings
    own = packing.settings.get(path)
    return {**(own if isinstance(own, dict) else {}), "shape": shapes.get(f"{path}.weight")}


def _state_by_library(packing: Packing, load: Callable[[Any], nn.Module]) -> dict[str, Tensor]:
    if find_spec(packing.method) is None:
        raise MissingExtraError(
            Message("errors.weights.library", method=packing.method),
            hint=Message("errors.hint.library_or_module", method=packing.method),
        )
    twin = plain_twin(load(dict(packing.settings)))
    if twin.left:
        raise ModelError(
            Message("errors.weights.not_plain", method=packing.method, module=repr(twin.left[0])),
            hint=Message("errors.hint.unquantized"),
        )
    return twin.module.state_dict()
