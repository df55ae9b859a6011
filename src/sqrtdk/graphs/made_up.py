"""Inputs for a graph that is run, where none are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import ModelError
from sqrtdk.graphs.graph import Graph
from sqrtdk.graphs.onnx_step import dtype_of
from sqrtdk.graphs.symbols import shape_of

_SHOWN = 6  # inputs in a note
_LEAST = 2  # ids, where no vocabulary is known
MOST_INPUT = 2**28  # elements


def made_up(graph: Graph, seed: int) -> dict[str, Tensor]:
    """Random ids and features, masks of ones, positions in order.

    Args:
        graph: that takes them.
        seed: of them.

    Raises:
        ModelError: an input is no tensor, or too large.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, int] = {}
    made: dict[str, Tensor] = {}
    for value in graph.inputs:
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise ModelError(
                f"no value can be made up for the input {value.name[:100]!r}", hint="Give it with --input FILE."
            )
        shape = shape_of(value, sizes)
        if torch.Size(shape).numel() > MOST_INPUT:
            raise ModelError(f"the input {value.name[:100]!r} has the shape {shape[:8]}", hint="Give it with --input.")
        made[value.name] = _made(graph, value.name, shape, dtype_of(int(kind.elem_type)), generator)
    return made


def told_inputs(made: Mapping[str, Tensor]) -> str:
    """What the inputs hold, for a reader.

    Example:
        >>> told_inputs({"input_ids": torch.tensor([[3, 1]]), "attention_mask": torch.ones(1, 2)})
        'input_ids (1, 2), attention_mask (1, 2) of ones'
    """
    shown = []
    for name, tensor in [*made.items()][:_SHOWN]:
        alike = tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())
        value = {1: " of ones", 0: " of zeros"}.get(int(tensor.flatten()[0]), "") if alike else ""
        shown.append(f"{name[:40]} {tuple(tensor.shape)}{value}")
    more = f" and {len(made) - _SHOWN} more" if len(made) > _SHOWN else ""
    return ", ".join(shown) + more


def _made(graph: Graph, name: str, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point and "mask" not in name:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype is torch.bool or "mask" in name:
        return torch.ones(shape, dtype=dtype)
    if "position" in name and shape:
        return torch.arange(shape[-1], dtype=dtype).expand(shape).clone()
    if "type" in name:
        return torch.zeros(shape, dtype=dtype)
    return torch.randint(0, _vocabulary(graph, name), shape, generator=generator, dtype=dtype)


def _vocabulary(graph: Graph, name: str) -> int:
    """Rows of the table that an input looks up."""
    pending, seen = [name], {name}
    while pending and len(seen) < 256:
        for node in graph.taken_by.get(pending.pop(0), ()):
            table: Any = graph.initializers.get(node.input(0)) if node.op == "Gather" else None
            if table is not None and len(table.dims) == 2 and node.input(1) in seen:
                return max(int(table.dims[0]), 1)
            if node.op in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze") and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append(node.outputs[0])
    return _LEAST
