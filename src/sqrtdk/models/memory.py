"""Counts the bytes that a model needs, and those that this machine has left."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch import nn

from sqrtdk.errors import ModelError
from sqrtdk.messages import Message

HEADROOM = 1.1  # a build needs a little more memory than the weights
GIB = 2**30


def model_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, counting shared tensors once; works on the meta device.

    Example:
        >>> model_bytes(nn.Linear(8, 4, device="meta"))
        144
    """
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def available_memory(*, mapped: int = 0) -> int | None:
    """Return how many bytes this process may still take: the smallest of free memory, cgroup limit and resource limits.

    Returns None if the system reports none of them. `mapped` is the size of files that will be mapped: `ulimit` counts
    them as memory, whereas free memory and cgroups can reclaim their pages.
    """
    limits = [_free_memory(), _cgroup_room(), *(room - mapped for room in _rlimit_room())]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def require_memory(name: str, needed: int, *, device: str = "cpu", mapped: int = 0) -> None:
    """Check that a model fits into memory, with a tenth as headroom.

    Args:
        name: Name of the model, for the error.
        needed: Bytes that it needs.
        device: "cpu", or a device with memory of its own.
        mapped: Bytes of weights that are mapped from files already.

    Raises:
        ModelError: It does not fit.
    """
    available = available_memory(mapped=mapped) if device == "cpu" else _device_memory(device)
    if available is not None and needed * HEADROOM > available:
        raise ModelError(
            Message("errors.model.memory", name=name, needed=f"{needed / GIB:.2f}", available=f"{available / GIB:.2f}"),
            hint=Message("errors.hint.memory"),
        )


def _device_memory(device: str) -> int | None:
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def _free_memory() -> int | None:
    try:
        for line in _text("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    if sys.platform == "win32":
        return None
    try:
        # Without /proc, as on macOS: all memory of the machine.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _cgroup_room() -> int | None:
    """Return the room below the memory limit of the container (cgroup v2 or v1), or None."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return int(_text(limit)) - int(_text(usage))
        except (OSError, ValueError):  # the file is missing, or holds the word "max"
            continue
    return None


def _rlimit_room() -> list[int]:
    """Return the room below `ulimit -v` and `ulimit -d`, if they are set."""
    if sys.platform == "win32":
        return []
    try:
        import resource

        status = dict(line.split(":", 1) for line in _text("/proc/self/status").splitlines())
        used = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}
        soft = {kind: resource.getrlimit(kind)[0] for kind in used}
        return [
            soft[kind] - int(status[field].split()[0]) * 1024
            for kind, field in used.items()
            if soft[kind] != resource.RLIM_INFINITY
        ]
    except (ImportError, OSError, ValueError, KeyError):
        return []
