"""Graphs of strangers given to `check`: one clear error, or an attention that is told as not read; never a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.graphs import graph
from sqrtdk.report.html import to_html
from sqrtdk.report.json import to_json
from sqrtdk.report.terminal import to_text
from tests.graphs.files import attention_model, model_of, onnx, write

helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto
make = helper.make_node


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        sqrtdk.check(str(path))
    assert caught.value.hint
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def whole(tmp_path: Path, **changes: Any) -> bytes:
    return write(attention_model(**changes), tmp_path / "whole.onnx").read_bytes()


@pytest.mark.parametrize("part", [0.0, 0.9])
def test_a_file_that_was_cut_off(part: float, tmp_path: Path) -> None:
    content = whole(tmp_path)
    path = tmp_path / "m.onnx"
    path.write_bytes(content[: int(part * len(content))])
    refused(path)


def test_a_loop_of_nodes(tmp_path: Path) -> None:
    model = attention_model(extra=[make("Add", ["b", "x"], ["a"]), make("Add", ["a", "x"], ["b"])])
    assert "in no order" in refused(write(model, tmp_path / "m.onnx"))


def test_too_many_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST_NODES", 50)
    extra = [make("Identity", ["x"], [f"i{n}"]) for n in range(50)]
    words = refused(write(attention_model(extra=extra), tmp_path / "m.onnx"))
    assert "at most 50" in words


def test_functions_that_double(tmp_path: Path) -> None:
    """Forty functions, each of which calls the one before twice, would be 2**40 nodes."""
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", "f0", ["a"], ["b"], [make("Neg", ["a"], ["b"])], opset)]
    for n in range(1, 40):
        calls = [make(f"f{n - 1}", [a], [b], domain="own") for a, b in (("a", "t"), ("t", "b"))]
        functions.append(helper.make_function("own", f"f{n}", ["a"], ["b"], calls, opset))
    model = attention_model(extra=[make("f39", ["x"], ["far"], domain="own")], opsets=opset)
    model.functions.extend(functions)
    assert "nodes" in refused(write(model, tmp_path / "m.onnx"))


@pytest.mark.parametrize("opset", [0, 99, 2**40])
def test_an_opset_that_nobody_knows(opset: int, tmp_path: Path) -> None:
    model = attention_model(opsets=[helper.make_opsetid("", opset)])
    assert "opset" in refused(write(model, tmp_path / "m.onnx"))


def test_shapes_that_no_memory_holds(tmp_path: Path) -> None:
    model = attention_model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2**50
    refused(write(model, tmp_path / "m.onnx"))


def test_sizes_that_are_computed_stay_without_memory(tmp_path: Path) -> None:
    """Some terabytes by an Expand: shapes alone are worked out."""
    shape = numpy_helper.from_array(np.array([2**14, 2**14, 2**10, 8], np.int64), "huge")
    nodes = [make("Expand", ["scale", "huge"], ["e"]), make("Identity", ["e"], ["f"])]
    model = attention_model(extra=nodes)
    model.graph.initializer.append(shape)
    assert sqrtdk.check(str(write(model, tmp_path / "m.onnx"))).calls


def test_names_with_markup_are_text(tmp_path: Path) -> None:
    model = attention_model()
    name = "/<img src=x onerror=alert(1)>/\x1b[31mred"
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.name = f"{name}/Softmax"
    report = sqrtdk.check(str(write(model, tmp_path / "m.onnx")))
    assert "<img" not in to_html(report)
    assert "\x1b" not in to_text(report)
    assert "\x1b" not in to_json(report)


def test_paths_as_deep_as_they_like(tmp_path: Path) -> None:
    model = attention_model()
    for number, node in enumerate(model.graph.node):
        node.name = "/" + "/".join("a" * 5 for _ in range(3000)) + f"/n{number}"
    model.graph.initializer[0].name = "w.q" * 3000
    model.graph.node[0].input[1] = "w.q" * 3000
    assert len(sqrtdk.check(str(write(model, tmp_path / "m.onnx"))).calls) == 1


def test_names_of_python_are_names(tmp_path: Path) -> None:
    """Modules and tensors that are called as a module's own attributes are."""
    model = attention_model()
    for node in model.graph.node:
        node.name = node.name.replace("/attn/", "/__class__/forward/")
    for tensor in model.graph.initializer:
        for node in model.graph.node:
            node.input[:] = [f"forward.{n}" if n == tensor.name else n for n in node.input]
        tensor.name = f"forward.{tensor.name}"
    (judged,) = sqrtdk.check(str(write(model, tmp_path / "m.onnx"))).calls
    assert judged.call.scale.effective == pytest.approx(0.5)


def test_an_operator_that_is_not_read_is_told(tmp_path: Path) -> None:
    """What comes after it is not judged, and does not look fine."""
    logits = [make("NegativeLogLikelihoodLoss", ["scaled", "mask"], ["z"])]
    words = refused(write(attention_model(logits=logits), tmp_path / "m.onnx"))
    assert "NegativeLogLikelihoodLoss" in words
    nodes = [
        make("DFT", ["y"], ["odd"]),
        make("MatMul", ["odd", "kt"], ["product2"]),
        make("Softmax", ["product2"], ["weights2"], "/late/Softmax"),
        make("MatMul", ["weights2", "v"], ["y2"]),
    ]
    report = sqrtdk.check(str(write(attention_model(extra=nodes), tmp_path / "n.onnx")), fail_on="unmeasured")
    assert [entry.site for entry in report.not_measured] == ["late"]
    assert report.exit_code == 1
    assert report.outcome == "failed"


@pytest.mark.parametrize("known", [True, False])
def test_an_attention_inside_a_branch_is_read_or_told(known: bool, tmp_path: Path) -> None:
    inner = helper.make_graph(
        [make("Softmax", ["product"], ["w"]), make("MatMul", ["w", "v"], ["o"])], "inner", [],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
    )  # fmt: skip
    node = make("If", ["yes"], ["branch"], "/maybe/If", then_branch=inner, else_branch=inner)
    model = attention_model(extra=[node], inputs=[] if known else [("yes", TensorProto.BOOL, [])])
    model.graph.initializer.extend([numpy_helper.from_array(np.array(True), "yes")] if known else [])
    report = sqrtdk.check(str(write(model, tmp_path / "m.onnx")), fail_on="unmeasured")
    assert ["inside of If" in entry.reason for entry in report.not_measured] == ([] if known else [True])
    assert len(report.calls) == (2 if known else 1)
    assert report.exit_code == 1


def test_a_graph_without_attention(tmp_path: Path) -> None:
    model = model_of([make("Relu", ["x"], ["y"])], [("x", TensorProto.FLOAT, [1, 2])], {})
    report = sqrtdk.check(str(write(model, tmp_path / "m.onnx")))
    assert (report.calls, report.exit_code) == ((), 0)


def test_a_random_flip_of_bytes_is_one_error_or_a_report(tmp_path: Path) -> None:
    content = bytearray(whole(tmp_path))
    rng = np.random.default_rng(0)
    for trial in range(25):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 5):
            damaged[place] = int(rng.integers(0, 256))
        path = tmp_path / f"{trial}.onnx"
        path.write_bytes(bytes(damaged))
        with contextlib.suppress(ModelError):
            sqrtdk.check(str(path))
