"""Branches and loops around an attention are read as the nodes that run, for the inputs that they were read for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk import laws
from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.graphs.onnx import open_onnx, read_onnx
from sqrtdk.models.run import call
from tests.graphs.files import B, D, L, attention_model, model_of, onnx, write

make = onnx.helper.make_node
FLOAT, BOOL, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL, onnx.TensorProto.INT64
X = {"x": torch.randn(B, L, D, generator=torch.Generator().manual_seed(0))}


def info(name: str, kind: int = FLOAT) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind, None if kind == FLOAT else [])


def constant(name: str, value: Any) -> Any:
    return onnx.numpy_helper.from_array(np.asarray(value), name)


def weights(names: str, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [constant(f"attn.{name}.weight", rng.standard_normal((D, D)).astype(np.float32) / 3) for name in names]


def attention(x: str, scale: str, out: str) -> list[Any]:
    """The nodes of one attention, whose names have no prefix: a body has names of its own."""
    return [
        *(make("MatMul", [x, f"attn.{name}.weight"], [name], f"/attn/{name}/MatMul") for name in "qkv"),
        make("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        make("MatMul", ["q", "kt"], ["product"]),
        make("Mul", ["product", scale], ["z"], "/attn/Mul"),
        make("Softmax", ["z"], ["w"], "/attn/Softmax", axis=-1),
        make("MatMul", ["w", "v"], [out], "/attn/MatMul"),
    ]


def body(nodes: list[Any], given: list[Any], gives: list[Any], constants: list[Any] | None = None) -> Any:
    return onnx.helper.make_graph(nodes, "body", given, gives, constants or [])


def branches(condition: list[Any], inputs: list[Any] | None = None) -> Any:
    """`then` divides by the root of 8, `else` does not divide at all."""
    parts = [
        body(
            attention("x", f"by{scale}", "o"),
            [],
            [info("o")],
            [*weights("qkv"), constant(f"by{scale}", np.float32(scale))],
        )
        for scale in (8**-0.5, 1.0)
    ]
    nodes = [*condition, make("If", ["yes"], ["y"], "/maybe/If", then_branch=parts[0], else_branch=parts[1])]
    return model_of(nodes, [("x", FLOAT, ["batch", L, D]), *(inputs or [])], {})


def by_input() -> Any:
    """The first number of the input is positive: then the scale is right."""
    return branches([
        make("Constant", [], ["none"], value=constant("none", np.float32(0))),
        make("Constant", [], ["at"], value=constant("at", np.zeros(3, np.int64))),
        make("GatherND", ["x", "at"], ["first"]),
        make("Greater", ["first", "none"], ["yes"]),
    ])  # fmt: skip


def by_shape(longest: int) -> Any:
    return branches([
        make("Shape", ["x"], ["length"], start=1, end=2),
        make("Squeeze", ["length"], ["n"]),
        make("Constant", [], ["most"], value=constant("most", np.int64(longest))),
        make("LessOrEqual", ["n", "most"], ["yes"]),
    ])  # fmt: skip


def scales(report: Any) -> list[Any]:
    return [round(judged.call.scale.effective, 4) for judged in report.calls]


@pytest.mark.parametrize(("longest", "scale"), [(L, 0.3536), (L - 1, 1.0)])
def test_a_branch_that_shapes_choose_is_read_without_inputs(longest: int, scale: float, tmp_path: Path) -> None:
    report = sqrtdk.check(str(write(by_shape(longest), tmp_path / "m.onnx")))
    assert (scales(report), report.not_measured) == ([scale], ())
    assert report.calls[0].mistake == (None if scale < 1 else "missing")


def test_a_branch_that_the_inputs_choose_is_read_with_them(tmp_path: Path) -> None:
    path = write(by_input(), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="Softmax inside of If"):
        sqrtdk.check(str(path))
    for sign, scale in ((1, 0.3536), (-1, 1.0)):
        x = X["x"].clone()
        x[0, 0, 0] = sign
        run = read_onnx(path, {"x": x})
        assert run.missing == ()
        assert [round(one.call.scale.effective, 4) for one in run.calls if one.call is not None] == [scale]
        opened = open_onnx(path, {"x": x})
        assert opened.off is None
        x[0, 0, 0] = 2 * sign
        call(opened.loaded.module, {"x": x})
        x[0, 0, 0] = -sign
        with pytest.raises(ModelError, match="another branch"):
            call(opened.loaded.module, {"x": x})


def loop(*, most: Any, ends: bool = False, constants: list[Any] | None = None) -> Any:
    """X <- x + attention(x), three times; `ends` by its own condition, else by the number of iterations."""
    nodes = attention("h", "scale", "a")
    nodes += [make("Add", ["h", "a"], ["h2"], "/attn/Add")]
    nodes += [make("Less", ["turn", "last"], ["on"]) if ends else make("Identity", ["going"], ["on"])]
    nodes += [make("ReduceMean", ["a"], ["mean"], keepdims=0)]
    inner = body(
        nodes, [info("turn", INT64), info("going", BOOL), info("h")], [info("on", BOOL), info("h2"), info("mean")]
    )
    before = [make("Loop", ["most", "", "x"], ["h3", "means"], "/layers/Loop", body=inner)]
    after = [make("ReduceSum", ["means"], ["sum"], keepdims=0), make("Add", ["h3", "sum"], ["y"])]
    model = model_of([*most, *before, *after], [("x", FLOAT, ["batch", L, D])], {})
    model.graph.initializer.extend([
        *weights("qkv"), constant("scale", np.float32(8**-0.5)), constant("last", np.int64(2)), *(constants or []),
    ])  # fmt: skip
    return model


LOOPS: dict[str, Callable[[], Any]] = {
    "a number": lambda: loop(most=[], constants=[constant("most", np.int64(3))]),
    "a shape": lambda: loop(most=[
        make("Shape", ["x"], ["n"], start=1, end=2), make("Squeeze", ["n"], ["length"]),
        make("Constant", [], ["two"], value=constant("two", np.int64(2))), make("Sub", ["length", "two"], ["most"]),
    ]),
    "its condition": lambda: loop(most=[], ends=True, constants=[constant("most", np.int64(10))]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_read_once_for_each_iteration(name: str, tmp_path: Path) -> None:
    path = write(LOOPS[name](), tmp_path / "m.onnx")
    if name == "its condition":
        with pytest.raises(ModelError, match="Softmax inside of Loop"):
            sqrtdk.check(str(path))
    else:
        assert scales(sqrtdk.check(str(path))) == [0.3536] * 3
    opened = open_onnx(path, X)
    assert (opened.off, opened.missing) == (None, ())
    assert len(read_onnx(path, X).calls) == 3


def scan(axis: int, backwards: bool) -> Any:
    """Each entry of x along an axis attends, and is added to a state."""
    inner = body(
        [*attention("entry", "scale", "a"), make("Add", ["state", "a"], ["next"])],
        [info("state"), info("entry")], [info("next"), info("a")],
    )  # fmt: skip
    options = {"scan_input_axes": [axis], "scan_output_axes": [axis], "scan_input_directions": [int(backwards)]}
    node = make("Scan", ["zero", "x"], ["last", "every"], "/s/Scan", body=inner, num_scan_inputs=1, **options)
    shape = [B, L, D]
    shape.insert(axis, 3)
    nodes = [node, make("Unsqueeze", ["last", "axis"], ["sum"]), make("Add", ["every", "sum"], ["y"])]
    model = model_of(nodes, [("x", FLOAT, shape)], {})
    model.graph.initializer.extend([
        *weights("qkv"), constant("scale", np.float32(8**-0.5)), constant("zero", np.zeros((B, L, D), np.float32)),
        constant("axis", np.array([axis], np.int64)),
    ])  # fmt: skip
    return model


@pytest.mark.parametrize(("axis", "backwards"), [(0, False), (1, True)])
def test_a_scan_is_read_once_for_each_entry(axis: int, backwards: bool, tmp_path: Path) -> None:
    path = write(scan(axis, backwards), tmp_path / "m.onnx")
    report = sqrtdk.check(str(path))
    assert (scales(report), report.not_measured) == ([0.3536] * 3, ())
    shape = [B, L, D]
    shape.insert(axis, 3)
    opened = open_onnx(path, {"x": torch.randn(shape)})
    assert (opened.off, opened.missing) == (None, ())


def test_a_branch_inside_of_a_loop_is_read(tmp_path: Path) -> None:
    """The branch reads what the body of the loop has made."""
    chosen = body(attention("h", "scale", "o"), [], [info("o")])
    other = body([make("Identity", ["h"], ["o"])], [], [info("o")])
    nodes = [
        make("Less", ["turn", "last"], ["early"]),
        make("If", ["early"], ["a"], "/b/If", then_branch=chosen, else_branch=other),
        make("Add", ["h", "a"], ["h2"]), make("Identity", ["going"], ["on"]),
    ]  # fmt: skip
    inner = body(nodes, [info("turn", INT64), info("going", BOOL), info("h")], [info("on", BOOL), info("h2")])
    model = model_of([make("Loop", ["most", "", "x"], ["y"], body=inner)], [("x", FLOAT, ["batch", L, D])], {})
    model.graph.initializer.extend([
        *weights("qkv"), constant("scale", np.float32(8**-0.5)), constant("last", np.int64(2)),
        constant("most", np.int64(3)),
    ])  # fmt: skip
    path = write(model, tmp_path / "m.onnx")
    assert scales(sqrtdk.check(str(path))) == [0.3536] * 2
    assert open_onnx(path, X).off is None


def test_laws_are_asked_of_a_graph_with_a_branch(tmp_path: Path) -> None:
    path = write(by_shape(L), tmp_path / "m.onnx")
    report = laws.ask(str(path), X, laws="finite,samples")
    assert {answer.law: answer.state for answer in report.answers} == {"finite": "kept", "samples": "kept"}


def test_a_broken_law_of_a_graph_is_found(tmp_path: Path) -> None:
    """The logits have the mean over the samples in them."""
    mixed = [
        make("Constant", [], ["samples"], value=constant("samples", np.array([0]))),
        make("ReduceMean", ["scaled", "samples"], ["mean"], keepdims=1),
        make("Add", ["scaled", "mean"], ["z"]),
    ]
    report = laws.ask(str(write(attention_model(logits=mixed), tmp_path / "m.onnx")), X, laws="samples")
    assert [answer.law for answer in report.broken] == ["samples"]


def test_a_graph_is_asked_on_inputs_alone(tmp_path: Path) -> None:
    path = write(attention_model(), tmp_path / "m.onnx")
    with pytest.raises(InvalidValueError, match="an exported graph is asked laws on inputs"):
        laws.ask(str(path))


def test_a_scale_that_a_branch_chooses_is_read(tmp_path: Path) -> None:
    parts = [body([make("Mul", ["product", name], ["o"])], [], [info("o")]) for name in ("right", "scale")]
    choose = make("If", ["yes"], ["z"], then_branch=parts[0], else_branch=parts[1])
    model = attention_model(logits=[choose])
    model.graph.initializer.extend([constant("yes", np.array(True)), constant("right", np.float32(8**-0.5))])
    assert scales(sqrtdk.check(str(write(model, tmp_path / "m.onnx")))) == [0.3536]
