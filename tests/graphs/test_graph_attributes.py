"""No attribute of an operator is ignored in silence: the result follows it, it is refused or in `IDLE_ATTRIBUTES`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sqrtdk.graphs.graph import Graph, GraphNode, read_graph
from sqrtdk.graphs.onnx_ops import ONNX_OPERATIONS, operate
from sqrtdk.graphs.onnx_shapes import RANDOM_NODES
from sqrtdk.graphs.onnx_step import IDLE_ATTRIBUTES, OnnxStep
from sqrtdk.graphs.quantised import _QLINEAR_ROWS, _REWRITES, without_quantisation
from tests.graphs.files import MICROSOFT, model_of, onnx
from tests.support.optional import optional

optional("onnxruntime")
Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
ROWS, GAIN, IDS = X[0, 0], X[0, 0, 0, :4] + 3, np.array([[0, 3], [1, 2]])
KERNEL, TABLE, WHOLE = X[:, :, :3, :3].copy(), X[0, 0, :4], np.arange(24).reshape(2, 3, 4) % 7
_SIZES = np.array([2, 4, 6, 6])
POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
FLAT = X[:, :, 0, :4]
GROUPED = (FLAT.repeat(4, -1), X[:, :, 1, :4].repeat(2, -1), X[:, :, 2, :4].repeat(2, -1))
# Inputs of an operator, and the attributes that it must have; of another operator X alone.
GIVEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    **dict.fromkeys(("Add", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mul", "Pow", "Sub",
                     "Max", "Min", "Sum", "Mean", "PRelu", "CastLike", "MatMul", "FusedMatMul", "TransposeMatMul"),
                    ((X, X), {})),
    **dict.fromkeys(("And", "Or", "Xor"), ((X > 0, X > 1), {})),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), ((X,), POOL)),
    **dict.fromkeys(("Conv", "FusedConv"), ((X, KERNEL), {})),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), ((X, X[0, 0, 0]), {})),
    "ArgMax": ((WHOLE,), {}),
    "ArgMin": ((WHOLE,), {}),
    "BatchNormalization": ((X, GAIN, GAIN, GAIN, GAIN), {}),
    "Cast": ((X,), {"to": 1}),
    "ConvTranspose": ((X, KERNEL.swapaxes(0, 1)), {}),
    "Gather": ((X, IDS % 2), {}),
    "GatherND": ((X, IDS % 2), {}),
    "GroupNormalization": ((X, GAIN, GAIN), {"num_groups": 2}),
    "InstanceNormalization": ((X, GAIN, GAIN), {}),
    "IsInf": ((np.float32([-np.inf, 0, np.inf]),), {}),
    "RNN": ((X[0], X[:1, 0], X[:1, 1]), {}),  # 4 steps of 6 rows of 6 features
    "GRU": ((X[0], X[:1, :3].reshape(1, 18, 6), X[1:, :3].reshape(1, 18, 6)), {}),
    "LSTM": ((X[0], X[:1].reshape(1, 24, 6), X[1:].reshape(1, 24, 6)), {}),
    "Resize": ((X, None, None, np.array([2, 4, 12, 12])), {"mode": "cubic"}),
    "Split": ((X[:, :2, :2, :2],), {}),
    "Upsample": ((X, np.float32([1, 1, 2, 2])), {}),
    "Clip": ((X,), {}),
    "Concat": ((X, X), {"axis": 0}),
    "Constant": ((), {}),
    "ConstantOfShape": ((_SIZES,), {}),
    "CumSum": ((X, np.array(1)), {}),
    "DepthToSpace": ((X,), {"blocksize": 2}),
    "SpaceToDepth": ((X,), {"blocksize": 2}),
    "DequantizeLinear": ((WHOLE.astype(np.int8), np.float32([1, 2, 3])), {}),
    "Einsum": ((ROWS,), {"equation": "ij"}),
    "Expand": ((X, _SIZES), {}),
    "GatherElements": ((X, np.zeros((2, 1, 1, 1), int)), {}),
    "Gemm": ((ROWS, ROWS, ROWS), {}),
    "Mod": ((X, -abs(0.7 * X)), {}),
    "OneHot": ((IDS, np.array(5), np.float32([0, 2])), {}),
    "Pad": ((X, np.array([0, 0, 1, 1] * 2)), {}),
    "Range": ((np.float32(0), np.float32(5), np.float32(1)), {}),
    "Reshape": ((X, np.array([0, -1])), {}),
    "ScatterElements": ((X, np.zeros((2, 1, 1, 1), int), X[:, :1, :1, :1]), {}),
    "ScatterND": ((X, np.array([[0]]), X[:1]), {}),
    "Slice": ((X,), {"starts": [0], "ends": [1]}),
    "TopK": ((X, np.array([2])), {}),
    "Tile": ((X, _SIZES), {}),
    "Where": ((X > 0, X, X), {}),
    "BiasSoftmax": ((X, X), {}),
    "EmbedLayerNormalization": ((IDS, None, TABLE, TABLE, None, X[0, 0, 0], X[0, 0, 0]), {}),
    "FusedGemm": ((ROWS, ROWS, ROWS), {"activation": "HardSigmoid"}),
    "SkipLayerNormalization": ((X, X, X[0, 0, 0]), {}),
    "SkipSimplifiedLayerNormalization": ((X, X, X[0, 0, 0]), {}),
    "Attention": ((FLAT.repeat(2, -1),) * 3, {"q_num_heads": 2, "kv_num_heads": 2}),
    "MultiHeadAttention": ((*GROUPED[:1] * 3, None, np.array([2, 4])), {"num_heads": 2}),
    "GroupQueryAttention": ((*GROUPED, None, None, IDS[0], IDS[0, :1], TABLE[:, :2], TABLE[:, :2]),
                            {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}),
    f"{MICROSOFT}.Attention": ((X[:, :, 0], X[0].reshape(6, 24), None, np.array([2, 4])), {"num_heads": 2}),
    "RotaryEmbedding": ((FLAT, TABLE[:, :2], TABLE[:, :2], IDS.repeat(2, 1)), {"num_heads": 1}),
    f"{MICROSOFT}.RotaryEmbedding": ((FLAT, IDS.repeat(2, 1), TABLE[:, :2], TABLE[:, :2]), {"num_heads": 1}),
}  # fmt: skip
TRIED: dict[str, tuple[Any, ...]] = {
    "INT": (0, 1, 2, 3, -1), "FLOAT": (0.0, 0.3, 2.0), "STRING": ("strange",), "FLOATS": ([0.3, 0.7],),
    "INTS": ([0, 1], [1, 2], [1], [2, 1, 0, 3], [1, 1, 1, 1]), "TENSOR": (np.float32([2.0]),), "STRINGS": (["a"],),
}  # fmt: skip


def every_attribute(operators: Collection[Any]) -> list[tuple[str, str, str, str]]:
    """Domain, operator, name and kind of the attributes of operators that we implement, in all their versions."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    found = {
        (schema.domain, schema.name, name, str(entry.type).rpartition(".")[2])
        for schema in (*onnx.defs.get_all_schemas_with_history(), *get_all_operator_schema())
        if schema.domain in ("", MICROSOFT) and not {(schema.domain, schema.name), schema.name}.isdisjoint(operators)
        for name, entry in schema.attributes.items()
    }
    return sorted(found)


def made(domain: str, op: str, **attributes: Any) -> list[Tensor]:
    """What an operator makes of its inputs; onnx's newest opset."""
    arrays, base = GIVEN.get(f"{domain}.{op}", GIVEN.get(op, ((X,), {})))
    tensors = [None if array is None else torch.as_tensor(np.asarray(array)) for array in arrays]
    names = ["" if tensor is None else f"in{i}" for i, tensor in enumerate(tensors)]
    outputs = ("y", "z") if op == "Split" else ("y",)
    node = GraphNode(0, op, domain, "", tuple(names), outputs, base | attributes, None)
    known = {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
    graph = Graph((node,), {}, model_of([], [], {}), (), Path(), onnx.defs.onnx_opset_version())
    return [*operate(OnnxStep(node, graph, tuple(tensors), known, "cpu", set(known))).values()]


READ_ALONE = [pair for pair in ONNX_OPERATIONS if pair[1] not in RANDOM_NODES]  # random numbers have a shape alone


@pytest.mark.parametrize(("domain", "op"), READ_ALONE)
def test_an_operator_runs_with_its_defaults(domain: str, op: str) -> None:
    if op not in ("Constant", "Rounded"):
        assert made(domain, op)


@pytest.mark.parametrize(("domain", "op", "name", "kind"), every_attribute(READ_ALONE))
def test_an_attribute_is_read_or_refused(domain: str, op: str, name: str, kind: str) -> None:
    if (name in IDLE_ATTRIBUTES and (name, "Pool" in op) != ("kernel_shape", True)) or kind == "SPARSE_TENSOR":
        return
    more = {"mode": "nearest"} if name == "nearest_mode" else {}
    plain = [] if op == "Constant" else made(domain, op, **more)
    for value in TRIED[kind]:
        try:
            now = made(domain, op, **more, **{name: value})
        except Exception:
            return
        if len(now) != len(plain) or not all(map(torch.equal, now, plain)):
            return
    pytest.fail(f"{op}: nothing follows from {name}")


# What the rewriting of an operator on integers reads itself; the rest is the floating-point operator's to read.
READ = {
    "QuantizeLinear": {"axis", "block_size", "output_dtype", "precision"},  # the last is that of a division
    "DequantizeLinear": {"axis", "block_size", "output_dtype"},
    "MatMulNBits": {"K", "N", "bits", "block_size", "accuracy_level"},
    "MatMulBnb4": {"K", "N", "block_size", "quant_type", "transB", "training_mode"},
    "GatherBlockQuantized": {"bits", "block_size", "gather_axis", "quantize_axis"},
}


@pytest.mark.parametrize(("domain", "op", "name", "kind"), every_attribute(_REWRITES))
def test_an_attribute_of_an_operator_on_integers(domain: str, op: str, name: str, kind: str) -> None:
    if name in IDLE_ATTRIBUTES | READ.get(op, set()):
        return
    numbers = {"whole": np.zeros((4, 4), np.int8), "scale": np.float32(1), "zero": np.int8(0)}
    inputs = [("whole", "scale", "zero")[index % 3] for index in range(18)]
    if op in _QLINEAR_ROWS:  # three inputs of each operand, in any order
        for operand in (operand for operand in _QLINEAR_ROWS[op].operands if not isinstance(operand, int)):
            for index, kind_of in zip(operand, numbers, strict=True):
                inputs[index] = kind_of
    node = onnx.helper.make_node(op, inputs, ["y"], domain=domain, **{name: TRIED[kind][0]})
    graph = without_quantisation(read_graph(model_of([node], [], numbers), Path()))
    assert any(name in node.attributes or " " in node.op for node in graph.nodes)
