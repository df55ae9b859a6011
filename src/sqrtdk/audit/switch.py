"""Attention implementations of a transformers model: which it runs, whether it can run another, and switching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, held, present
from sqrtdk.errors import UnsupportedError
from sqrtdk.models.extras import quiet_transformers

_INTERNAL = "_attn_implementation_internal"
_BACKBONE = "backbone_config"  # a convolutional tower of its own, which has no attention to choose


def _sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in field(config, "sub_configs") or ():
        sub = field(config, name)
        if sub is not None and name != _BACKBONE:
            yield from _sub_configs(sub)


def _parts(model: nn.Module) -> list[Any]:
    """The transformers models in a model, itself included, without backbones."""
    backbone = field(model, f"config.{_BACKBONE}")
    return [
        module
        for module in model.modules()
        if present(type(module), "_supports_sdpa")  # a module may answer to any name
        and present(field(module, "config"), "_attn_implementation")
        and field(module, "config") is not backbone
    ]


def offers_choice(model: nn.Module) -> bool:
    """Whether the model is one of transformers' with a choice of attention."""
    return present(model, "set_attn_implementation") and bool(_parts(model))


def current(model: nn.Module) -> str | None:
    """The implementation that the model says it runs, or None."""
    name = field(model, "config._attn_implementation")
    return name if isinstance(name, str) else None


def supports_sdpa(model: nn.Module) -> bool:
    """Whether every part of a transformers model says that it has an sdpa implementation."""
    return offers_choice(model) and all(part._supports_sdpa for part in _parts(model))


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Switch a transformers model to an attention implementation for the time of the block.

    Raises:
        UnsupportedError: The model can't run it, or fixes its implementation when it is built.
    """
    parts = _parts(model)
    configs = {id(c): c for part in parts for c in _sub_configs(part.config)}
    before = [(c, held(c)[_INTERNAL]) for c in configs.values() if _INTERNAL in held(c)]
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
        choice = {"": name} | {sub: name for sub in model.config.sub_configs if sub != _BACKBONE}
    try:
        with quiet_transformers():
            model.set_attn_implementation(choice)
    except (ValueError, ImportError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} does not support {name} attention", hint="Leave attn out."
        ) from error


def refusal(model: nn.Module, name: str) -> str | None:
    """Why the model can't be switched to an implementation, or None when it can."""
    if not offers_choice(model):
        return f"{type(model).__name__} offers no choice of attention"
    try:
        with implementation(model, name):
            return None
    except UnsupportedError as error:
        return str(error)
