"""What a graph holds is counted whole, random numbers are read, and no softmax but that of an attention is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sqrtdk
from tests.graphs.files import D, L, attention_model, model_of, onnx, write
from tests.support.program import called

make = onnx.helper.make_node
FLOAT = onnx.TensorProto.FLOAT


def test_constants_of_every_dtype_are_counted(tmp_path: Path) -> None:
    model = attention_model(
        extra=[make("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.ones(5, np.float32), "c"))]
    )
    int4 = onnx.helper.make_tensor("four", onnx.TensorProto.INT4, [3, 8], [1] * 24)
    more = {"eight": np.ones((7, 9), np.int8), "half": np.ones(11, np.float16), "at": np.ones(2, np.int64)}
    before = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)
    model.graph.initializer.extend([int4, *(onnx.numpy_helper.from_array(a, name) for name, a in more.items())])
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert report.model.parameters == before + 5 + 24 + 7 * 9 + 11 + 2


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_counted_unpacked(bits: int, tmp_path: Path) -> None:
    packed = np.zeros((D, 1, 32 * bits // 8), np.uint8)  # K of 32, in one block
    constants = {"w": packed, "s": np.ones(D, np.float32)}
    node = make("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=32, N=D, bits=bits, block_size=32)
    model = model_of([node], [("x", FLOAT, [1, L, 32])], constants)
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert report.model.parameters == 32 * D + D


RANDOM: dict[str, tuple[list[str], dict[str, Any]]] = {
    "RandomNormalLike": (["x"], {}),
    "RandomUniformLike": (["x"], {"dtype": FLOAT}),
    "RandomNormal": ([], {"shape": [1, L, D]}),
    "RandomUniform": ([], {"shape": [1, L, D], "low": 0.1, "high": 0.2}),
    "Bernoulli": (["x"], {}),
}


@pytest.mark.parametrize("op", RANDOM)
def test_random_numbers_before_an_attention_are_read(op: str, tmp_path: Path) -> None:
    inputs, attributes = RANDOM[op]
    model = attention_model()
    for node in model.graph.node:
        node.input[:] = ["noised" if name == "x" else name for name in node.input]
    for node in (make("Add", ["x", "noise"], ["noised"]), make(op, inputs, ["noise"], **attributes)):
        model.graph.node.insert(0, node)
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert [judged.call.formula for judged in report.calls] == ["softmax(0.5 * q.k + causal)"]
    assert not report.not_measured


def test_the_bins_of_a_spline_are_no_attention(tmp_path: Path) -> None:
    # the widths of the bins of a rational-quadratic spline, behind an operator that is not read
    spline = [
        make("NonZero", ["y"], ["places"]),
        make("Transpose", ["places"], ["rows"], perm=[1, 0]),
        make("GatherND", ["y", "rows"], ["picked"]),
        make("Softmax", ["picked"], ["widths"], "/spline/Softmax", axis=-1),
        make("Mul", ["widths", "scale"], ["wide"]),
        make("CumSum", ["wide", "zero"], ["knots"]),
    ]
    model = attention_model(extra=spline)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "zero"))
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert len(report.calls) == 1
    assert not report.not_measured
    assert not [finding for finding in report.findings if finding.rule == "unmeasured"]


def test_a_graph_without_attention_is_said_in_one_sentence(tmp_path: Path) -> None:
    nodes = [make("MatMul", ["x", "w"], ["h"]), make("Relu", ["h"], ["y"])]
    model = model_of(nodes, [("x", FLOAT, [1, L, D])], {"w": np.ones((D, D), np.float32)})
    result = called("check", write(model, tmp_path / "g.onnx"))
    assert result.returncode == 0
    assert "No attention was seen" in result.stdout
    assert "torch.compile" not in result.stdout + result.stderr
