"""Module paths for the nodes of a graph: "blk.3.attn" and the like, from the names of the weights that they read.

llama.cpp has no modules. A node that reads `blk.3.ffn_up.weight` is in `blk.3.ffn.ffn_up`; what lies between the first
and the last projection of an attention is in `blk.3.attn`; what a norm computes before its gain is in the norm. The
projections of an attention have no modules of their own: rows of q and k lie in an order that their product undoes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sqrtdk.frontends.ggml.graph import GgmlTensor

_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_LAYER = re.compile(r"-(\d+)( |$)")
_OWN_MODULES = ("attn_norm", "attn_norm_2", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_post_norm",
          "ffn_post_norm", "layer_output_norm", "attn_output_norm")  # fmt: skip
# Beginnings of names of weights that are of one part of a layer.
_LAYER_PARTS = {"attn": "attn", "ffn": "ffn", "exp_probs": "ffn", "ssm": "ssm", "time_mix": "time_mix"}
_BEFORE_A_GAIN = ("RMS_NORM", "NORM", "L2_NORM")


def node_paths(
    nodes: Sequence[GgmlTensor], leaves: Mapping[int, GgmlTensor], scaled_embedding: bool = False
) -> list[str]:
    """Return the module path of each node, "" for the root.

    Args:
        nodes: In the order in which they ran.
        leaves: What they read.
        scaled_embedding: Whether the factor on the embedding belongs to it, as in Gemma.
    """
    weights = [_weight(node, leaves) for node in nodes]
    readers: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for key in node.src:
            readers.setdefault(key, at)
    for at, node in enumerate(nodes):  # a norm belongs to its gain
        reader = readers.get(node.key)
        if node.op in _BEFORE_A_GAIN and reader is not None and nodes[reader].op == "MUL" and weights[at] is None:
            weights[at] = weights[reader]
    if scaled_embedding:
        for at, node in enumerate(nodes[1:], 1):
            if node.op == "SCALE" and nodes[at - 1].op == "GET_ROWS" and node.src[0] == nodes[at - 1].key:
                weights[at] = weights[at - 1]
    layers = _filled([_layer(node, weight) for node, weight in zip(nodes, weights, strict=True)])
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for at, weight in enumerate(weights):
        part = _part(weight)
        if part:
            first, _ = spans.get((layers[at], part), (at, at))
            spans[layers[at], part] = first, at
    paths = [f"blk.{layer}" if layer else "" for layer in layers]
    for (layer, part), (first, last) in spans.items():
        for at in range(first, last + 1):
            if layers[at] == layer:
                paths[at] = f"blk.{layer}.{part}"
    return [_inside(path, weight) for path, weight in zip(paths, weights, strict=True)]


def _weight(node: GgmlTensor, leaves: Mapping[int, GgmlTensor]) -> str | None:
    """Return the name of the weight that a node reads, without ".weight"."""
    names = [leaves[key].name for key in node.src if key in leaves and leaves[key].is_weight]
    return names[0].rpartition(".")[0] if names else None


def _layer(node: GgmlTensor, weight: str | None) -> str | None:
    found = _LAYER.match(weight or "")
    if found:
        return found.group(1)
    if weight is not None:
        return ""
    numbered = _OF_LAYER.search(node.name)
    return numbered.group(1) if numbered and not node.name.startswith("cache_") else None


def _filled(layers: Sequence[str | None]) -> list[str]:
    """Return the layers, where a node without a layer is in that of the node before it.

    `norm-1` is how llama.cpp calls the first operation of layer 1, and the name of the output's norm ends in no number.
    """
    made: list[str] = []
    for layer in layers:
        made.append(layer if layer is not None else made[-1] if made else "")
    return made


def _part(weight: str | None) -> str:
    """Return the part of its layer that a weight is of, "" for a norm in front or behind."""
    found = _LAYER.match(weight or "")
    if weight is None or not found:
        return ""
    name = weight[found.end() :]
    if name in _OWN_MODULES:
        return ""
    return next((part for begin, part in _LAYER_PARTS.items() if name.startswith(begin)), "")


def _inside(path: str, weight: str | None) -> str:
    if weight is None or path.endswith(".attn"):
        return path
    last = weight[match.end() :] if (match := _LAYER.match(weight)) else weight
    return f"{path}.{last}" if path else last
