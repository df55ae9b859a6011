"""Blocked layouts (com.microsoft.nchwc) of graphs that onnxruntime's optimiser wrote: tensors as NCHW, weights as OIHW.

onnxruntime keeps images as (N, C/b, H, W, b), with b = 8 or 16 channels a block, C rounded up to whole blocks, and
zeros in the channels that are added. A file says the shape (N, C, H, W) of such a tensor. All operators between
`ReorderInput` and `ReorderOutput` compute each channel by itself or sum over channels, so here a tensor stays
(N, C, H, W) with its added channels. The weights of a `Conv` are blocked in the file:

- OIHWBiBo (O/b, I/b, H, W, b of I, b of O) where its input is blocked;
- OIHWBo (O/b, I, H, W, b of O) where I is less than a block, and in depthwise convolutions.

The size of a block is that of the machine that optimised the graph, and is not in the file: onnxruntime itself says
which it takes here, unless a number of channels shows that it was the other one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from sqrtdk import _extras
from sqrtdk.graphs.graph import Computed, Graph, GraphNode
from sqrtdk.graphs.model_file import ONNX_EXTRA
from sqrtdk.graphs.onnx_judge import opened_session
from sqrtdk.graphs.onnx_layers import LAYER_OPERATIONS
from sqrtdk.graphs.onnx_step import OnnxStep, Operation

BLOCKED_DOMAIN = "com.microsoft.nchwc"
_BLOCK_SIZES = (8, 16)  # channels a block of onnxruntime's kernels


def without_blocks(graph: Graph) -> Graph:
    """Return the graph with its convolutions on plain weights (O, I, H, W), or the same object if nothing is blocked.

    A weight is renamed after its bias, because the optimiser drops its name: "patch.weight" beside "patch.bias".
    """
    blocked = [node for node in graph.nodes if node.domain == BLOCKED_DOMAIN and node.op in ("Conv", "ReorderInput")]
    if not blocked:
        return graph
    initializers = dict(graph.initializers)
    size = _block_size(graph, blocked)
    plain = {
        node: _plain_conv(graph, node, size, initializers)
        if node.op == "Conv"
        else replace(node, attributes=node.attributes | {"block": size})
        for node in blocked
    }
    return replace(graph, nodes=tuple(plain.get(node, node) for node in graph.nodes), initializers=initializers)


def _block_size(graph: Graph, blocked: list[GraphNode]) -> int:
    held = (graph.initializers.get(node.input(1)) for node in blocked)
    counts = {int(weight.dims[0]) for weight in held if weight is not None and weight.dims}
    fitting = [size for size in _BLOCK_SIZES if not any(count % size for count in counts)]
    here = _block_size_here()
    return here if here in fitting or not fitting else fitting[-1]


@cache
def _block_size_here() -> int:
    """Return the size of a block on this machine: where onnxruntime's own `ReorderInput` puts the channels."""
    helper = _extras.load_extra("onnx", ONNX_EXTRA).helper
    channels = 2 * max(_BLOCK_SIZES)
    node = helper.make_node("ReorderInput", ["x"], ["y"], domain=BLOCKED_DOMAIN)
    sides = [helper.make_tensor_value_info("x", 1, [1, channels, 1, 2]), helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph([node], "blocks", sides[:1], sides[1:])
    versions = [helper.make_opsetid("", 17), helper.make_opsetid(BLOCKED_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=8)
    x = np.arange(2 * channels, dtype=np.float32).reshape(1, channels, 1, 2)
    (y,) = opened_session(model.SerializeToString()).run(None, {"x": x})
    return int(np.flatnonzero(y.flatten() == 1.0)[0])  # element 1, the second pixel of channel 0, comes after a block


def _plain_conv(graph: Graph, node: GraphNode, size: int, initializers: dict[str, Any]) -> GraphNode:
    """Return a convolution on its plain weight, which is added to the constants of the graph."""
    name = node.inputs[1]
    held = graph.initializers.get(name)
    if held is None or len(held.dims) != 4 or int(held.dims[0]) % size:
        return replace(node, op="Conv of a weight in unknown blocks")
    bias = node.input(2)
    label = f"{bias.removesuffix('bias')}weight" if bias.endswith(".bias") else f"{name}::plain"
    label = label if label not in graph.initializers and label not in graph.made_by else f"{name}::plain"
    dims = tuple(map(int, held.dims))
    initializers[label] = Computed(label, dims, int(held.data_type), partial(_unblocked, graph, name, dims, size))
    return replace(node, domain="com.microsoft", op="FusedConv", inputs=(node.inputs[0], label, *node.inputs[2:]))


def _unblocked(graph: Graph, name: str, dims: tuple[int, ...], size: int) -> np.ndarray[Any, Any]:
    """Return a weight (O, I, H, W) from its blocks."""
    array, (rows, columns, *window) = np.asarray(graph.array(name)), dims
    whole: np.ndarray[Any, Any]
    if columns % size:
        whole = np.moveaxis(array.reshape(rows // size, columns, *window, size), -1, 1).reshape(dims)
    else:
        blocks = array.reshape(rows // size, columns // size, *window, size, size)
        whole = blocks.transpose(0, 5, 1, 4, 2, 3).reshape(dims)
    return whole


def _reorder_input(step: OnnxStep) -> Tensor:
    """Return (N, C, H, W) from that or from (N, H, W, C), with C rounded up to whole blocks."""
    x = step.tensor(0)
    x = x.movedim(-1, 1) if step.attribute("channels_last", 0) else x
    added = -x.shape[1] % step.attribute("block", 1)
    return functional.pad(x, (0, 0, 0, 0, 0, added)) if added else x.view_as(x)


def _reorder_output(step: OnnxStep) -> Tensor:
    """Return (N, C, H, W), or (N, H, W, C), without the channels that blocks added."""
    x = step.tensor(0)[:, : step.attribute("channels", 0)]
    return x.movedim(1, -1) if step.attribute("channels_last", 0) else x


BLOCKED_OPERATIONS: dict[tuple[str, str], Operation] = {
    (BLOCKED_DOMAIN, "ReorderInput"): _reorder_input,
    (BLOCKED_DOMAIN, "ReorderOutput"): _reorder_output,
    **{
        (BLOCKED_DOMAIN, name): LAYER_OPERATIONS[name]
        for name in ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "Upsample")
    },
}
