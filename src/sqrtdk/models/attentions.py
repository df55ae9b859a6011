"""Attentions of a model that never ran: known by their class's name, as they left no call to know them by."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

LEAST_PROJECTIONS = 2  # a fused one for q, k and v, and one for the output


@contextmanager
def watch_modules() -> Iterator[set[int]]:
    """Collect the ids of the modules that are called within the block, in any thread; the modules stay untouched."""
    ran: set[int] = set()
    handle = torch_module.register_module_forward_pre_hook(lambda module, _: ran.add(id(module)))
    try:
        yield ran
    finally:
        handle.remove()


def idle_attentions(model: nn.Module, ran: Collection[int], sites: Collection[str]) -> Iterator[str]:
    """Paths of the attentions in which nothing ran.

    An attention is a module whose class is named so, which holds projections, and no other attention. It ran if it or
    a part of it was called, or if a call was seen inside it or in its parent: fused paths take the weights of a child
    without calling it, and functions take them too.

    Args:
        model: The model, after its run, as some choose their attention when they run.
        ran: From `watch_modules`.
        sites: Paths where the run showed anything.

    Example:
        >>> pair = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.MultiheadAttention(8, 2)})
        >>> with watch_modules() as ran:
        ...     _ = pair["a"](*[torch.ones(3, 8)] * 3)
        >>> list(idle_attentions(pair, ran, []))
        ['b']
    """
    attentions = {path: module for path, module in model.named_modules() if _is_attention(module)}
    parents = {parent for path in attentions for parent in _above(path)}
    for path, module in attentions.items():
        inside = path + "." if path else ""
        if path in parents or any(id(part) in ran for part in module.modules()):
            continue
        if not any(site in (path, path.rpartition(".")[0]) or site.startswith(inside) for site in sites):
            yield path


def _is_attention(module: nn.Module) -> bool:
    if "attention" not in type(module).__name__.lower() or isinstance(module, torch.jit.ScriptModule):
        return False  # TorchScript runs its parts unseen
    weights = (is_lazy(parameter) or parameter.dim() > 1 for parameter in module.parameters())
    return sum(weights) >= LEAST_PROJECTIONS


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path
