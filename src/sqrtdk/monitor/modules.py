"""The modules of a model: their names as they are without what wraps them, and which may hold a projection."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from sqrtdk.tracing import Projection

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def can_project(module: nn.Module) -> bool:
    """Whether it may return what its own weight projects: q or k."""
    return "weight" in module._parameters and not module._modules


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that a compiled one, or one that is copied to several processes, calls.

    So a run has the same names whatever it is run on.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def site_of(path: str) -> str:
    """A module path as it is without compiling, sharding and checkpoints."""
    return ".".join(name for name in path.split(".") if name not in _WRAPPERS)


def module_of(projection: Projection | None, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module that holds a projection's weight and returns what it gave."""
    path, _, name = projection.name.rpartition(".") if projection is not None else ("", "", "")
    module = modules.get(path)
    return module if name == "weight" and module is not None and can_project(module) else None


def was_compiled() -> bool:
    """Whether what runs now was called through the compiler, which runs its Python code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False
