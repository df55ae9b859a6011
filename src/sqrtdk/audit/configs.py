"""Where a module's configuration is, and how to read a field of it, whatever object it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from sqrtdk.errors import INTERRUPTS


def field(config: Any, path: str) -> Any:
    """The value at a dotted path of a dict or of an object's attributes; None where it is absent or cannot be read.

    >>> field({"attn_config": {"softmax_scale": 0.5}}, "attn_config.softmax_scale")
    0.5
    """
    for name in path.split("."):
        if config is None:
            return None
        try:
            config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        except INTERRUPTS:
            raise
        except BaseException:  # a property of somebody's class, or its __getattr__, may raise anything
            return None
    return config


def present(config: Any, name: str) -> bool:
    """Whether an object has an attribute; False where looking for it raises."""
    try:
        return hasattr(config, name)
    except INTERRUPTS:
        raise
    except BaseException:  # a stranger's __getattr__ may raise anything
        return False


def held(config: Any) -> Mapping[str, Any]:
    """What an object holds in its own `__dict__`; empty where it has none."""
    found = field(config, "__dict__")
    return found if isinstance(found, Mapping) else {}


def module_at(model: nn.Module, site: str) -> nn.Module | None:
    """The module at a site, or None where the path is none of the model's (a site named after a call count)."""
    module: Any = model
    for name in site.split(".") if site else ():
        module = field(module, name)  # get_submodule is refused by TorchScript
        if not isinstance(module, nn.Module):
            return None
    return module  # type: ignore[no-any-return]


def number(config: Any, path: str) -> float | None:
    """The finite number at `path`, else None; a bool is no number."""
    return as_number(field(config, path))


def as_number(value: Any) -> float | None:
    """A Python number as a finite float, else None; a bool is no number, nor is an int beyond the floats.

    >>> as_number(2), as_number(True), as_number(10**400)
    (2.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def model_type(config: Any) -> str:
    """`config.model_type`, or the empty string."""
    value = field(config, "model_type")
    return value if isinstance(value, str) else ""


def is_transformers(config: Any) -> bool:
    """Whether the config is of a class that transformers itself ships, whose code is known."""
    return type(config).__module__.startswith("transformers.")


def _usable(config: Any) -> bool:
    return (
        config is not None
        and not isinstance(config, nn.Module)
        and (isinstance(config, Mapping) or present(config, "__dict__") or present(config, "__slots__"))
    )


def _sub_config(config: Any, site: str) -> Any:
    """The sub-config of a composite that governs `site`: the one whose stem ("vision", "text") is in the path."""
    if isinstance(config, Mapping):
        names = [name for name in config if isinstance(name, str)]
    else:
        names = [name for name in held(config) if isinstance(name, str)]
    for name in names:
        stem = name.removesuffix("_config")
        sub = field(config, name)
        if stem and _usable(sub) and (name.endswith("_config") or stem in ("encoder", "decoder")):
            parts = site.replace("_", ".").split(".")
            if stem in parts:
                return sub
    return config


def config_at(model: nn.Module, site: str) -> Any:
    """The config that governs the module at `site`: its own, else the nearest parent's; None when there is none.

    A composite (text_config, vision_config, decoder, ...) gives way to the part that the path names.
    """
    parts = site.split(".") if site else []
    for depth in range(len(parts), -1, -1):
        path = ".".join(parts[:depth])
        module = module_at(model, path)
        if module is None:
            continue
        config = held(module).get("config", field(type(module), "config"))
        if _usable(config) and not isinstance(config, type):
            return _sub_config(config, ".".join(parts[depth:]) if depth < len(parts) else site)
    return None
