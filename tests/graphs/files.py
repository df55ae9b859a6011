"""Small ONNX files by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

B, L, D = 2, 5, 8


def attention_model(**changes: Any) -> Any:
    """One head: projections of x, scale, causal mask, softmax, values; `changes` are parts to replace.

    Args:
        changes: "extra" (nodes after the others), "opsets", "inputs" (more of them), "logits" (nodes between "scaled"
            and "z").
    """
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((D, D)).astype(np.float32) / 3 for name in ("wq", "wk", "wv")}
    constants = {**weights, "scale": np.float32(0.5), "mask": np.triu(np.full((L, L), -1e9, np.float32), 1)}
    make = helper.make_node
    nodes = [
        *(make("MatMul", ["x", f"w{name}"], [name], f"/attn/{name}_proj/MatMul") for name in "qkv"),
        make("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        make("MatMul", ["q", "kt"], ["product"]),
        make("Mul", ["product", "scale"], ["scaled"]),
        *changes.get("logits", [make("Add", ["scaled", "mask"], ["z"])]),
        make("Softmax", ["z"], ["weights"], "/attn/Softmax", axis=-1),
        make("MatMul", ["weights", "v"], ["y"]),
        *changes.get("extra", []),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", L, D]), *changes.get("inputs", [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    opsets = changes.get("opsets", [helper.make_opsetid("", 18)])
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def write(model: Any, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def beside(model: Any, path: Path, location: str, **entries: str) -> Path:
    """Write a model whose first weight is said to lie in another file."""
    tensor = model.graph.initializer[0]
    content = bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": str(len(content)), **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return write(model, path)


def weight_bytes() -> bytes:
    """Bytes of the first weight."""
    return bytes(attention_model().graph.initializer[0].raw_data)
