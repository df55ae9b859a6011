"""Finds attentions of a model that left no recorded call: those that never ran, and those that were not recognised."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from sqrtdk._wrappers import named_modules

SilentCode = Literal["idle", "unfound"]
_ATTENTION_CLASS_NAME = re.compile("[Aa]ttention|ATTENTION|Attn|attn|ATTN|MHA|Mha|MLA|Mla")
PROJECTIONS_OF_ATTENTION = 2  # one fused for q, k and v, and one for the output


@contextmanager
def watch_modules() -> Iterator[set[int]]:
    """Return a context that collects the ids of all modules called within it, in any thread.

    The modules are not changed: the hook is torch's global one.
    """
    ran: set[int] = set()
    handle = torch_module.register_module_forward_pre_hook(lambda module, _: ran.add(id(module)))
    try:
        yield ran
    finally:
        handle.remove()


def silent_attentions(
    model: nn.Module, ran: Collection[int], accounted_for: Collection[str], unused: Collection[str] = ()
) -> Iterator[tuple[str, SilentCode]]:
    """Yield the paths of the attentions in which nothing was recorded, each with "idle" or "unfound".

    A module is an attention if its class is named like one and it holds projections, but no other attention. It is idle
    if neither it nor a part of it was called, and nothing was recorded inside it or in its parent: fused paths and
    functions take the weights of a child without calling it. It is unfound if it was called itself.

    Args:
        model: The model after its run, because some models choose their attention when they run.
        ran: The result of `watch_modules`.
        accounted_for: Paths of attentions that were read or are known to be lost, and of modules known to be none.
        unused: Paths of softmaxes whose weights were not seen to reach values.

    Example:
        >>> pair = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.MultiheadAttention(8, 2)})
        >>> with watch_modules() as ran:
        ...     _ = pair["a"](*[torch.ones(3, 8)] * 3)
        >>> list(silent_attentions(pair, ran, ["a"]))
        [('b', 'idle')]
        >>> dict(silent_attentions(pair, ran, []))["a"]
        'unfound'
    """
    attentions = {path: module for path, module in named_modules(model) if _is_attention(module)}
    # An attention that holds another is a wrapper: the inner one is judged.
    parents = {parent for path in attentions for parent in _above(path)}
    for path, module in attentions.items():
        if path in parents:
            continue
        if id(module) in ran:
            if not _inside(path, accounted_for):
                yield path, "unfound"
        elif not any(id(part) in ran for part in module.modules()):
            sites = (*accounted_for, *unused)
            if path.rpartition(".")[0] not in sites and not _inside(path, sites):
                yield path, "idle"


def _inside(path: str, sites: Collection[str]) -> bool:
    """Return whether one of the sites is the path or inside it."""
    return any(site == path or site.startswith(path + "." if path else "") for site in sites)


def named_like_attention(module: nn.Module) -> bool:
    """Return whether the name of a module's class says that it is an attention, as `LlamaAttention` does.

    Example:
        >>> named_like_attention(nn.MultiheadAttention(8, 2)), named_like_attention(nn.Linear(8, 8))
        (True, False)
    """
    return _ATTENTION_CLASS_NAME.search(type(module).__name__) is not None


def _is_attention(module: nn.Module) -> bool:
    if not named_like_attention(module) or isinstance(module, torch.jit.ScriptModule):
        return False  # the parts of a TorchScript module run unseen
    weights = (is_lazy(parameter) or parameter.dim() > 1 for parameter in module.parameters())
    return sum(weights) >= PROJECTIONS_OF_ATTENTION


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path
