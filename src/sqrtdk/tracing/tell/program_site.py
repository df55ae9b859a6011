"""Sites in a program, whose modules are not called: an exported or symbolically traced graph, TorchScript.

Such a program is one call; where in the model an attention stood is told by the weights that project its q and k.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sqrtdk.tracing.read.reading import Reading
from sqrtdk.tracing.read.side import Side

_PROGRAMS = (torch.fx.GraphModule, torch.jit.ScriptModule)


def site_in_program(reading: Reading, modules: Mapping[str, nn.Module]) -> str:
    """The module that holds the projections of q and k, where a program ran; else the site that was seen.

    Args:
        reading: the attention.
        modules: of the model, by path.
    """
    if not isinstance(modules.get(reading.site), _PROGRAMS):
        return reading.site
    query, key = _holder(reading.query), _holder(reading.key)
    both = [left for left, right in zip(query, key, strict=False) if left == right]
    shared = both if query[: len(both)] == key[: len(both)] else []
    inside = reading.site.split(".") if reading.site else []
    while shared and ".".join(shared) not in modules:
        shared.pop()
    return ".".join(shared) if shared[: len(inside)] == inside else reading.site


def _holder(side: Side) -> list[str]:
    """The path of the module around the projection: of `layers.0.attn.q.weight`, and of `layers.0.attn.in_proj`."""
    path = side.root.label.split(".") if side.root is not None else [""]
    return path[:-2] if path[-1] == "weight" else path[:-1]
