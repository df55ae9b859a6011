"""Records of a built model with inputs that it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sqrtdk.models.adapters import Adapter

Inputs = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode and one set of inputs: call `module(**inputs)`, or `module(*inputs)` for a tuple.

    `kind` is "hub", "directory", "config", "factory" or "demo". `config` is the Hugging Face config or None. `attn` is
    the attention implementation that the model says it runs, or None. `notes` are sentences about choices made for the
    user: random weights, a clamped length, a name in the config that was ignored. `masks` maps names of buffers to
    their values if they are masks and the module is a copy on meta. `home` is the user's own directory of the model, or
    its config file. `made` says that the inputs were made for the module, in the length of our own choice. `adapter` is
    what was merged into the module.
    """

    module: nn.Module
    inputs: Inputs
    id: str
    kind: str
    config: Any = None
    attn: str | None = None
    notes: tuple[str, ...] = ()
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    home: Path | None = None
    made: bool = False
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class AttnBuild:
    """One item of `iter_attn`: the model built with the attention `attn`, or None and the reason for the failure."""

    attn: str
    loaded: LoadedModel | None
    reason: str | None = None
