"""Settings of the whole process, put back behind a forward pass that changes them.

A forward that calls `torch.set_default_dtype` or sets a variable of the environment changes what comes behind it: the
next run, our own sums, the user's program.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads it, sets it
_INDUCTOR = "torch._inductor.config"
_CUDA, _CUDNN, _MHA = torch.backends.cuda, torch.backends.cudnn, torch.backends.mha


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    if _INDUCTOR in sys.modules:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    else:  # the public function imports the compiler, which takes a second
        torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return getattr(context, "device", None)


def _attribute(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _autocast(kind: str) -> Setting:
    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def write(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(kind, value[0])
        torch.set_autocast_dtype(kind, value[1])

    return read, write


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _set_directory(path: str | None) -> None:
    if path is not None:
        os.chdir(path)


def _numpy_errors() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _set_numpy_errors(value: Any) -> None:
    if value is not None:
        sys.modules["numpy"].seterr(**value)


SETTINGS: dict[str, Setting] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_default_device, torch.set_default_device),
    "gradients": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "deterministic algorithms": (_deterministic, _set_deterministic),
    "deterministic fill": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "anomalies": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "fast path of attention": (_MHA.get_fastpath_enabled, _MHA.set_fastpath_enabled),
    "flash kernel": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "memory-efficient kernel": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "plain kernel": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "kernel of cuDNN": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    "cuDNN": _attribute(_CUDNN, "enabled"),
    "choice by cuDNN": _attribute(_CUDNN, "benchmark"),
    "deterministic cuDNN": _attribute(_CUDNN, "deterministic"),
    "directory": (_directory, _set_directory),
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "errors of numpy": (_numpy_errors, _set_numpy_errors),
}


@contextmanager
def process_unchanged() -> Iterator[None]:
    """Put back what the block changes of the process: the settings of torch, the environment, the filters of warnings.

    Example:
        >>> with process_unchanged():
        ...     torch.set_default_dtype(torch.float64)
        >>> torch.get_default_dtype()
        torch.float32
    """
    before = [(write, read, read()) for read, write in SETTINGS.values()]
    environment, filters, shown = dict(os.environ), list(warnings.filters), warnings.showwarning
    try:
        yield
    finally:
        for write, read, value in before:
            if read() != value:
                write(value)
        if dict(os.environ) != environment:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
        warnings.showwarning = shown
        if list(warnings.filters) != filters:
            rules: Any = warnings.filters
            rules[:] = filters
            with warnings.catch_warnings():  # which warnings were shown once depended on the filters
                pass
