"""Context managers that change a model for one run: random state, training flags, and the attention that runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from sqrtdk.audit.configs import field, own_fields, present
from sqrtdk.errors import ModelError, UnsupportedError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.extras import quiet_transformers
from sqrtdk.tracing.tape.stance import fast_path_off

_INTERNAL = "_attn_implementation_internal"
_BACKBONE = "backbone_config"  # a separate convolutional model, which has no attention to choose


@contextmanager
def random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random state of Python, numpy, torch's CPU and the model's CUDA devices after the block.

    numpy is restored if it was already imported. Devices are those of the model's parameters.
    """
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put a model and its submodules in evaluation mode within the block; restore each one's mode afterwards."""
    return training_of(model, lambda _: False)


@contextmanager
def evaluated(model: nn.Module, attn: str | None) -> Iterator[None]:
    """Run the model in evaluation mode, without fast paths; mode, implementation and random numbers come back.

    Args:
        model: The model.
        attn: The attention implementation to switch to; None leaves the model's own.
    """
    chosen = nullcontext() if attn is None else implementation(model, attn)
    with random_state(model), eval_mode(model), chosen, fast_path_off():
        yield


@contextmanager
def training_of(model: nn.Module, trains: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Set the training flag of every submodule within the block, and restore the flags afterwards.

    Args:
        model: The model, which is included. Frozen TorchScript has no flag and is skipped.
        trains: Called with each module; returns the flag that it gets.
    """
    before = [(module, field(module, "training")) for module in model.modules()]
    before = [(module, training) for module, training in before if training is not None]  # frozen TorchScript has none
    changed: list[tuple[nn.Module, bool]] = []
    try:
        for module, training in before:
            _set_training(module, trains(module))
            changed.append((module, training))
        yield
    finally:
        for module, training in changed:
            _set_training(module, training)


def _set_training(module: nn.Module, training: bool) -> None:
    try:
        module.training = training
    except Exception as error:  # of a user's __setattr__ or property
        raise ModelError(
            f"{type(module).__name__} can't be put in evaluation mode and back: {kind_and_text(error)}",
            hint="Leave `training` as nn.Module has it.",
        ) from error


def _sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in field(config, "sub_configs") or ():
        sub = field(config, name)
        if sub is not None and name != _BACKBONE:
            yield from _sub_configs(sub)


def _parts(model: nn.Module) -> list[Any]:
    """Return the transformers models in a model, including itself, without backbones."""
    backbone = field(model, f"config.{_BACKBONE}")
    return [
        module
        for module in model.modules()
        if present(type(module), "_supports_sdpa")  # asked of the type: an instance may answer to any name
        and present(field(module, "config"), "_attn_implementation")
        and field(module, "config") is not backbone
    ]


def offers_choice(model: nn.Module) -> bool:
    """Return whether this is a transformers model that lets its attention be chosen."""
    return present(model, "set_attn_implementation") and bool(_parts(model))


def fixed_when_built(model: nn.Module) -> bool:
    """Return whether this is a model of a transformers that chooses the attention only while it builds one (4.48)."""
    return bool(_parts(model)) and not present(model, "set_attn_implementation")


def current(model: nn.Module) -> str | None:
    """Return the attention implementation that the model's config names ("eager", "sdpa", ...), or None without one."""
    name = field(model, "config._attn_implementation")
    return name if isinstance(name, str) else None


def supports_sdpa(model: nn.Module) -> bool:
    """Return whether the model is of transformers and each part with a config of its own claims to support sdpa."""
    return offers_choice(model) and all(part._supports_sdpa for part in _parts(model))


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Switch a transformers model to an attention implementation within the block, and back afterwards.

    Args:
        model: The model.
        name: "eager", "sdpa" or another name that transformers knows.

    Raises:
        UnsupportedError: The model can't run it, or fixes its implementation when it is built.
    """
    parts = _parts(model)
    # set_attn_implementation changes sub-configs as well, so the private field of each is put back.
    configs = {id(c): c for part in parts for c in _sub_configs(part.config)}
    before = [(c, own_fields(c)[_INTERNAL]) for c in configs.values() if _INTERNAL in own_fields(c)]
    try:
        if any(part.config._attn_implementation != name for part in parts):
            _switch(model, name)
            if any(part.config._attn_implementation != name for part in parts):
                raise UnsupportedError(
                    f"{type(model).__name__} fixes its attention when it is built, here {current(model)}",
                    hint=f"Build it with attn_implementation={name!r}.",
                )
        yield
    finally:
        for config, value in before:
            vars(config)[_INTERNAL] = value


def _switch(model: Any, name: str) -> None:
    choice: Any = name
    if field(model.config, _BACKBONE) is not None:
        # transformers takes a dictionary: "" is the model, the other keys are its sub-configs.
        choice = {"": name} | {sub: name for sub in model.config.sub_configs if sub != _BACKBONE}
    try:
        with quiet_transformers():
            model.set_attn_implementation(choice)
    except (ValueError, ImportError) as error:
        raise UnsupportedError(
            Message("errors.options.attn_not_supported", model=type(model).__name__, attn=name),
            hint=Message("errors.options.attn_left_out"),
        ) from error


def refusal(model: nn.Module, name: str) -> str | None:
    """Return why a model can't be switched to an attention implementation, or None if it can.

    Tries the switch and undoes it.

    Args:
        model: The model.
        name: "eager" or "sdpa".
    """
    if not offers_choice(model):
        return Message("premises.attention.no_choice", model=type(model).__name__)
    try:
        with implementation(model, name):
            return None
    except UnsupportedError as error:
        return error.message
