"""Small ONNX files by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.optional import optional

onnx = optional("onnx")

B, L, D = 2, 5, 8
MICROSOFT = "com.microsoft"


def attention_model(**changes: Any) -> Any:
    """One head: projections of x, scale, causal mask, softmax, values; `changes` are parts to replace.

    Args:
        changes: "extra" (nodes after the others), "opsets", "inputs" (more of them, by name, kind and shape), "logits"
            (nodes between "scaled" and "z"), "last" (name of the attention's result, if it is not the graph's).
    """
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((D, D)).astype(np.float32) / 3 for name in ("wq", "wk", "wv")}
    constants = {**weights, "scale": np.float32(0.5), "mask": np.triu(np.full((L, L), -1e9, np.float32), 1)}
    make = onnx.helper.make_node
    nodes = [
        *(make("MatMul", ["x", f"w{name}"], [name], f"/attn/{name}_proj/MatMul") for name in "qkv"),
        make("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        make("MatMul", ["q", "kt"], ["product"]),
        make("Mul", ["product", "scale"], ["scaled"]),
        *changes.get("logits", [make("Add", ["scaled", "mask"], ["z"])]),
        make("Softmax", ["z"], ["weights"], "/attn/Softmax", axis=-1),
        make("MatMul", ["weights", "v"], [changes.get("last", "y")]),
        *changes.get("extra", []),
    ]
    given = [("x", onnx.TensorProto.FLOAT, ["batch", L, D]), *changes.get("inputs", [])]
    opsets = changes.get("opsets", [onnx.helper.make_opsetid("", 18)])
    return model_of(nodes, given, constants, opsets=opsets)


def model_of(nodes: list[Any], given: list[tuple[str, int, list[Any]]], constants: dict[str, Any], **more: Any) -> Any:
    """A model of some nodes, whose last output is y.

    Args:
        nodes: of the graph.
        given: name, kind of number and shape of each input.
        constants: arrays by name.
        more: `opsets`; without them opset 18, and onnxruntime's own operators.
    """
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [onnx.helper.make_tensor_value_info(*entry) for entry in given],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    opsets = more.get("opsets") or [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(MICROSOFT, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def write(model: Any, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def beside(model: Any, path: Path, location: str, **entries: str) -> Path:
    """Write a model whose first weight is said to lie in another file."""
    tensor = model.graph.initializer[0]
    content = bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": str(len(content)), **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return write(model, path)


def weight_bytes() -> bytes:
    """Bytes of the first weight."""
    return bytes(attention_model().graph.initializer[0].raw_data)
