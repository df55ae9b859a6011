"""A module that somebody hands over, with or without inputs: made ready to run, on its device or on meta."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.audit.configs import field
from sqrtdk.audit.guard import random_state
from sqrtdk.audit.switch import ATTN, current, offers_choice, refusal
from sqrtdk.errors import InvalidTypeError, ModelError
from sqrtdk.models.inputs import guess_inputs
from sqrtdk.models.records import AttnBuild, Inputs, LoadedModel


def as_inputs(inputs: Any) -> Inputs:
    """Inputs as a dict or a tuple."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs)
    raise InvalidTypeError(f"inputs are a {type(inputs).__name__}", hint="Give a dict, a tuple, or one tensor.")


def _experts(model: nn.Module) -> Any:
    return field(model, "config._experts_implementation")


def _to_meta(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy of the model on the meta device, made without copying a weight, and the inputs there."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")

    def move(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    moved = {k: move(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(move, inputs))
    try:
        twin = copy.deepcopy(model, memo)
        choose: Any = field(twin, "set_experts_implementation")
        if choose is not None and _experts(model) is not None:
            choose("batched_mm")  # the others route by values, which meta tensors lack
        return twin, moved
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} can't be copied to the meta device: {type(error).__name__}: {error}",
            hint="Build it under `with torch.device('meta')` and check that.",
        ) from error


def from_module(
    model: nn.Module, given: Inputs | None, static: bool, batch: int | None, seq_len: int | None, seed: int
) -> LoadedModel:
    """The module with its inputs, in the form that `resolve` gives to a name; with `static` its twin on meta."""
    notes: tuple[str, ...] = ()
    if given is None:
        with random_state(model):
            made, notes = guess_inputs(model, batch=1 if batch is None else batch, seq_len=seq_len, seed=seed)
    else:
        made = given
    module = model
    if static and not any(parameter.is_meta for parameter in model.parameters()):
        module, made = _to_meta(model, made)
    config = field(model, "config")
    return LoadedModel(module, made, type(model).__name__, "module", config, current(model), notes)


def choices(loaded: LoadedModel, attn: str | None) -> Iterator[AttnBuild]:
    """What to run of a module: its own attention, the one asked for, or both; with the reason for what can't be."""
    if attn is None:
        yield AttnBuild("own", loaded)
    elif not offers_choice(loaded.module):
        yield AttnBuild("own", loaded, f"{type(loaded.module).__name__} offers no choice of attention")
    elif attn != "both":
        yield AttnBuild(attn, loaded)
    else:
        reasons = {name: refusal(loaded.module, name) for name in ATTN}
        for name, reason in reasons.items():
            yield AttnBuild(name, None if reason else loaded, reason)
        if all(reasons.values()):
            yield AttnBuild("own", loaded)
