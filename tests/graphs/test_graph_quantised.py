"""Quantised graphs: operators on integers as the numbers that they stand for, and what onnxruntime's tools write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.graphs import read_onnx
from sqrtdk.graphs.graph import load_graph
from sqrtdk.graphs.onnx_source import walkable
from sqrtdk.messages import Message
from tests.graphs.computed import ours, theirs
from tests.graphs.files import MICROSOFT, attention_model, model_of, onnx, write
from tests.graphs.test_graph_values import model, normal
from tests.support.optional import optional

helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto
make = helper.make_node
Array = np.ndarray[Any, Any]
rng = np.random.default_rng(0)

# Whole numbers from -100 to 155: a dynamic scale is 1 and a zero point 100, so that rounding changes no number.
WHOLE = np.concatenate([[-100, 155], rng.integers(-100, 155, 46)]).reshape(2, 3, 8).astype(np.float32)
W8, WU = rng.integers(-128, 127, (8, 5)).astype(np.int8), rng.integers(0, 255, (8, 5)).astype(np.uint8)
SCALES, ZEROS = (rng.random(5) + 0.1).astype(np.float32), rng.integers(-9, 9, 5).astype(np.int8)
ONE, ZERO, STEP = np.float32(1.0), np.int8(0), np.float32(0.01)
C = {"s": np.float32(0.02), "z": np.uint8(7), "one": ONE, "mid": np.uint8(100), "ws": SCALES, "wz": ZEROS, "w": W8}


def kernel(*shape: int, low: int = -90) -> Array:
    return np.random.default_rng(2).integers(low, 90, shape).astype(np.int8)


def quantized(name: str = "x", made: str = "q") -> Any:
    return make("QuantizeLinear", [name, "one", "mid"], [made])


CONV = {"k": kernel(4, 3, 3), "ks": np.float32([0.1, 0.2, 0.3, 0.4]), "kz": np.zeros(4, np.int8),
        "kb": np.array([5, -600, 70, 8], np.int32)}  # fmt: skip
# By name: the nodes; constants; how coarsely the result itself is rounded, 0 where it is not.
OPERATORS: dict[str, tuple[list[Any], dict[str, Array], float]] = {
    "MatMulInteger": (
        [make("DynamicQuantizeLinear", ["x"], ["q", "xs", "xz"]),
         make("MatMulInteger", ["q", "w", "xz", "wz"], ["p"]), make("Cast", ["p"], ["f"], to=1),
         make("Mul", ["xs", "ws"], ["both"]), make("Mul", ["f", "both"], ["y"])], C, 0.0,
    ),
    "MatMulInteger, a scale after the other": (
        [make("DynamicQuantizeLinear", ["x"], ["q", "xs", "xz"]),
         make("MatMulInteger", ["q", "w", "xz"], ["p"]), make("Cast", ["p"], ["f"], to=1),
         make("Mul", ["xs", "f"], ["f1"]), make("Mul", ["f1", "s"], ["y"])], C, 0.0,
    ),
    "MatMulInteger of two activations": (
        [make("DynamicQuantizeLinear", ["x"], ["q", "xs", "xz"]), make("Transpose", ["q"], ["t"], perm=[0, 2, 1]),
         make("MatMulInteger", ["q", "t", "xz", "xz"], ["p"]), make("Cast", ["p"], ["f"], to=1),
         make("Mul", ["xs", "xs"], ["both"]), make("Mul", ["f", "both"], ["y"])], C, 0.0,
    ),
    "ConvInteger": (
        [make("DynamicQuantizeLinear", ["x"], ["q", "xs", "xz"]),
         make("ConvInteger", ["q", "k", "xz"], ["p"], auto_pad="VALID"), make("Cast", ["p"], ["f"], to=1),
         make("Mul", ["xs", "s"], ["both"]), make("Mul", ["f", "both"], ["y"])],
        C | {"k": kernel(4, 3, 3).view(np.uint8)}, 0.0,
    ),
    "MatMulIntegerToFloat": (
        [make("DynamicQuantizeLinear", ["x"], ["q", "xs", "xz"]),
         make("MatMulIntegerToFloat", ["q", "w", "xs", "ws", "xz", "wz", "b"], ["y"], domain=MICROSOFT)],
        C | {"b": normal(5)}, 0.0,
    ),
    "DynamicQuantizeMatMul": (
        [make("DynamicQuantizeMatMul", ["x", "w", "ws", "wz", "b"], ["y"], domain=MICROSOFT)], C | {"b": normal(5)}, 0.0
    ),
    "QDQ": (
        [quantized(), make("DequantizeLinear", ["q", "one", "mid"], ["d"]),
         make("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1), make("MatMul", ["d", "wd"], ["y"])], C, 0.0,
    ),
    "QLinearMatMul": (
        [quantized(), make("QLinearMatMul", ["q", "one", "mid", "w", "ws", "wz", "large", "mid"], ["r"]),
         make("DequantizeLinear", ["r", "large", "mid"], ["y"])], C | {"large": np.float32(700.0)}, 700.0,
    ),
    "QLinearConv": (
        [quantized(), make("QLinearConv", ["q", "one", "mid", "k", "ks", "kz", "large", "mid", "kb"], ["r"]),
         make("DequantizeLinear", ["r", "large", "mid"], ["y"])], C | CONV | {"large": np.float32(150.0)}, 150.0,
    ),
    "QLinearAdd": (
        [quantized(), make("QLinearAdd", ["q", "one", "mid", "q", "one", "mid", "large", "mid"], ["r"],
                           domain=MICROSOFT),
         make("DequantizeLinear", ["r", "large", "mid"], ["y"])], C | {"large": np.float32(2.0)}, 2.0,
    ),
    "QLinearMul by a constant": (
        [quantized(), make("QLinearMul", ["q", "one", "mid", "c", "s", "z", "one", "mid"], ["r"], domain=MICROSOFT),
         make("DequantizeLinear", ["r", "one", "mid"], ["y"])], C | {"c": np.uint8(37)}, 1.0,
    ),
    "QLinearSoftmax": (
        [make("Mul", ["x", "s"], ["small"]), make("QuantizeLinear", ["small", "s", "mid"], ["q"]),
         make("QLinearSoftmax", ["q", "s", "mid", "s256", "zero"], ["r"], domain=MICROSOFT, axis=-1, opset=17),
         make("DequantizeLinear", ["r", "s256", "zero"], ["y"])],
        C | {"s256": np.float32(1 / 256), "zero": np.uint8(0)}, 1 / 256,
    ),
    "QLinearSigmoid": (
        [make("Mul", ["x", "s"], ["small"]), make("QuantizeLinear", ["small", "s", "mid"], ["q"]),
         make("QLinearSigmoid", ["q", "s", "mid", "s256", "zero"], ["r"], domain=MICROSOFT),
         make("DequantizeLinear", ["r", "s256", "zero"], ["y"])],
        C | {"s256": np.float32(1 / 256), "zero": np.uint8(0)}, 1 / 256,
    ),
    "QLinearConcat": (
        [quantized(), make("QLinearConcat", ["one", "mid", "q", "one", "mid", "q", "one", "mid"], ["r"],
                           domain=MICROSOFT, axis=2), make("DequantizeLinear", ["r", "one", "mid"], ["y"])], C, 1.0,
    ),
    "QGemm": (
        [make("Reshape", ["x", "flat"], ["x2"]), quantized("x2"),
         make("QGemm", ["q", "one", "mid", "w", "ws", "wz", "gb"], ["y"], domain=MICROSOFT, alpha=1.0)],
        C | {"flat": np.array([6, 8]), "gb": np.array([4, 3, -2, 9, 0], np.int32)}, 0.0,
    ),
    "integers that are moved": (
        [quantized(), make("Transpose", ["q"], ["t"], perm=[0, 2, 1]), make("Reshape", ["t", "to"], ["r"]),
         make("DequantizeLinear", ["r", "one", "mid"], ["y"])], C | {"to": np.array([2, -1])}, 0.0,
    ),
}  # fmt: skip


def weights_of(path: Path) -> set[str]:
    """Names of the constants of the graph that is walked."""
    return {*walkable(load_graph(path)).initializers}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", OPERATORS)
def test_integers_as_the_numbers_that_they_stand_for(case: str) -> None:
    """The result of integers, up to its own rounding and that of the sums."""
    nodes, constants, step = OPERATORS[case]
    used = {name for node in nodes for name in node.input}
    graph = model(nodes, {"x": WHOLE}, {n: np.asarray(a) for n, a in constants.items() if n in used}, 22, ["y"])
    right, made = theirs(graph, {"x": WHOLE})["y"], ours(graph, {"x": WHOLE})["y"]
    assert made.shape == right.shape
    inside = (right > right.min()) & (right < right.max()) if step else torch.ones_like(right, dtype=torch.bool)
    assert int(inside.sum()) >= 6  # what is cut off at an end of the integers tells nothing
    off = (made.double() - right.double()).abs()[inside]
    size = float(right.abs().max())
    assert float(off.max()) <= 0.51 * step + 64 * torch.finfo(torch.float32).eps * size


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_onnxruntime_multiplies_signed_weights_exactly(dtype: type) -> None:
    """Beside signed activations they stay signed; beside unsigned ones a CPU without VNNI would cut sums."""
    low = np.iinfo(dtype).min
    given = {"a": rng.integers(low, low + 255, (1, 4, 6, 6)).astype(dtype), "m": np.full((), 3, dtype)}
    weights = np.random.default_rng(3).integers(-128, 127, (8, 4, 3, 3)).astype(np.int8)
    nodes = [make("ConvInteger", ["a", "w", *zero], [f"y{len(zero)}"]) for zero in ([], ["z"])]
    graph = model(nodes, given, {"w": weights, "z": given["m"]}, 22, ["y0", "y1"])
    found = theirs(graph, given)
    for name, zero in (("y0", 0), ("y1", 3)):
        x = torch.from_numpy(given["a"].astype(np.float64) - zero)
        assert torch.equal(found[name].double(), nn.functional.conv2d(x, torch.from_numpy(weights).double()))


@pytest.mark.parametrize(
    ("bits", "zeros"), [(4, "none"), (4, "packed"), (4, "floating"), (8, "none"), (8, "packed"), (2, "none")]
)
def test_a_weight_of_few_bits(bits: int, zeros: str) -> None:
    rows, columns, block = 70, 5, 32
    count, span = -(-rows // block), block * bits // 8
    constants = {"b": rng.integers(0, 255, (columns, count, span)).astype(np.uint8)}
    constants["s"] = normal(columns * count) / 10
    packed = rng.integers(0, 255, columns * -(-count * bits // 8)).astype(np.uint8)
    constants |= {"packed": {"z": packed}, "floating": {"z": normal(columns * count)}}.get(zeros, {})
    names = ["x", "b", "s", "z" if "z" in constants else "", "", "c"]
    constants["c"] = normal(columns)
    node = make("MatMulNBits", names, ["y"], domain=MICROSOFT, K=rows, N=columns, bits=bits, block_size=block)
    graph = model([node], {"x": normal(2, 3, rows)}, constants, 22, ["y"])
    given = {"x": normal(2, 3, rows)}
    right, made = theirs(graph, given)["y"], ours(graph, given)["y"]
    assert float((made - right).abs().max()) <= 64 * torch.finfo(torch.float32).eps * float(right.abs().max())


# -- what onnxruntime's tools write ------------------------------------------------------------------------------------

L, H, E = 5, 2, 4
D = H * E


def attention(path: Path, scale: float = E**-0.5, width: int = E) -> Path:
    """Two heads of a width, in the float32 that is quantised."""
    rand, dim = np.random.default_rng(0), H * width
    constants: dict[str, Any] = {
        f"layer.0.attn.{n}.weight": rand.standard_normal((dim, dim)).astype(np.float32) / 3 for n in "qkv"
    }
    constants |= {f"b{n}": rand.standard_normal(dim).astype(np.float32) for n in "qkv"}
    constants |= {"split": np.array([0, 0, H, width]), "merged": np.array([0, 0, dim]), "scale": np.float32(scale)}
    constants["w1"] = rand.standard_normal((dim, dim)).astype(np.float32) / 3
    nodes = []
    for n in "qkv":
        nodes += [make("MatMul", ["x", f"layer.0.attn.{n}.weight"], [f"{n}0"], f"/layer.0/attn/{n}/MatMul")]
        nodes += [make("Add", [f"{n}0", f"b{n}"], [f"{n}1"]), make("Reshape", [f"{n}1", "split"], [f"{n}2"])]
        nodes += [make("Transpose", [f"{n}2"], [f"{n}3"], perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3])]
    nodes += [
        make("MatMul", ["q3", "k3"], ["qk"], "/layer.0/attn/MatMul"),
        make("Mul", ["qk", "scale"], ["z"], "/layer.0/attn/Mul"),
    ]
    nodes += [make("Softmax", ["z"], ["p"], "/layer.0/attn/Softmax", axis=-1), make("MatMul", ["p", "v3"], ["o"])]
    nodes += [make("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]), make("Reshape", ["o1", "merged"], ["o2"])]
    nodes += [make("MatMul", ["o2", "w1"], ["y"], "/layer.0/out/MatMul")]
    opsets = [helper.make_opsetid("", 21)]
    return write(model_of(nodes, [("x", TensorProto.FLOAT, [2, L, dim])], constants, opsets=opsets), path)


class _Reader:
    """Two batches to calibrate with."""

    def __init__(self) -> None:
        self.left = [normal(2, L, D, seed=i) for i in range(2)]

    def get_next(self) -> Any:
        return {"x": self.left.pop()} if self.left else None


def _dynamic(source: Path, target: Path, **options: Any) -> None:
    optional("onnxruntime.quantization").quantize_dynamic(source, target, **options)


def _static(form: str, **options: Any) -> Callable[[Path, Path], None]:
    def run(source: Path, target: Path) -> None:
        tools = optional("onnxruntime.quantization")
        chosen = {name: getattr(tools.QuantType, kind) for name, kind in options.items() if name.endswith("_type")}
        rest = {name: value for name, value in options.items() if name not in chosen}
        form_of = getattr(tools.QuantFormat, form)
        tools.quantize_static(source, target, _Reader(), quant_format=form_of, **chosen, **rest)

    return run


def _nbits(source: Path, target: Path) -> None:
    tools = optional("onnxruntime.quantization.matmul_nbits_quantizer")
    made = tools.MatMulNBitsQuantizer(str(source), block_size=16, is_symmetric=False)
    made.process()
    made.model.save_model_to_file(str(target), False)


def _bnb4(kind: int) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        tools = optional("onnxruntime.quantization.matmul_bnb4_quantizer")
        made = tools.MatMulBnb4Quantizer(onnx.load(source), kind, 16)
        made.process()
        made.model.save_model_to_file(str(target), False)

    return write


FORMS: dict[str, Callable[[Path, Path], None]] = {
    "dynamic": lambda source, target: _dynamic(source, target),
    "dynamic, by channels": lambda source, target: _dynamic(source, target, per_channel=True),
    "dynamic, activations too": lambda source, target: _dynamic(
        source, target, extra_options={"MatMulConstBOnly": False}
    ),
    "QDQ": _static("QDQ"),
    "QDQ, by channels": _static("QDQ", per_channel=True),
    "QDQ, 16 bits": _static("QDQ", activation_type="QUInt16", weight_type="QInt16"),
    "QOperator": _static("QOperator", activation_type="QUInt8"),
    "QOperator, by channels": _static("QOperator", activation_type="QUInt8", per_channel=True),
    "four bits": _nbits,
    "FP4": _bnb4(0),
    "NF4": _bnb4(1),
}
DIALECTS = {"dynamic": "MatMulInteger", "QDQ": "QDQ", "QOperator": "QOperator",
            "four bits": "MatMulNBits (4 bits, blocks of 16)", "FP4": "MatMulBnb4 (FP4, blocks of 16)",
            "NF4": "MatMulBnb4 (NF4, blocks of 16)"}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("scale", "mistake"), [(E**-0.5, None), (1.0, "missing"), (1 / E, "twice")])
@pytest.mark.parametrize("form", FORMS)
def test_what_the_quantiser_writes(form: str, scale: float, mistake: str | None, tmp_path: Path) -> None:
    """Each form has the scale of the graph that was quantised, and the weights of its projections."""
    logging.getLogger().setLevel(logging.ERROR)
    path = tmp_path / "q.onnx"
    FORMS[form](attention(tmp_path / "f.onnx", scale), path)
    assert any(node.op_type not in ("Identity", "MatMul") for node in onnx.load(path).graph.node)
    report = sqrtdk.check(str(path))
    (judged,) = report.calls
    call = judged.call
    assert judged.mistake == mistake
    assert Message("graphs.quantised", what=DIALECTS[form.partition(",")[0]]) in report.environment["notes"]
    assert {f"layer.0.attn.{name}.weight" for name in "qkv"} <= weights_of(path)
    assert (call.site, call.heads, call.head_dim, call.model_dim, call.key_len) == ("layer.0.attn", H, E, D, L)
    assert call.scale.effective == pytest.approx(scale, rel=0.01)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_graph_rounds_as_onnxruntime_does(form: str, tmp_path: Path) -> None:
    """Its walk gives onnxruntime's outputs, so the figures of its logits are those of the file."""
    logging.getLogger().setLevel(logging.ERROR)
    path = tmp_path / "q.onnx"
    FORMS[form](attention(tmp_path / "f.onnx"), path)
    run = read_onnx(path, {"x": torch.from_numpy(normal(2, L, D))})
    assert run.missing == ()
    assert [call.call is not None and call.call.stats is not None for call in run.calls] == [True]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [32**-0.5, 1.0])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("dynamic", "int8, a scale a tensor"),
        ("dynamic, by channels", "int8, a scale a row"),
        ("four bits", "int4, groups of 16, zero points"),
        ("NF4", "nf4, groups of 16"),
    ],
)
def test_a_graph_beside_the_one_that_was_quantised_is_its_rounding(
    form: str, kind: str, scale: float, tmp_path: Path
) -> None:
    """The weights' rounding is no difference, and does not hide a true one."""
    logging.getLogger().setLevel(logging.ERROR)
    whole, path = attention(tmp_path / "f.onnx", 32**-0.5, 32), tmp_path / "q.onnx"
    FORMS[form](attention(tmp_path / "other.onnx", scale, 32), path)
    report = sqrtdk.diff(str(whole), str(path), inputs={"x": torch.from_numpy(normal(2, L, 64))})
    assert report.weights is not None
    assert report.weights.known is not None
    assert [change.kind for change in report.weights.known.changes] == [kind]
    assert report.weights.known.faults == ()
    causes = [cause.name for pair in report.pairs for cause in pair.causes]
    if "dynamic" in form:  # the numbers that enter a product are rounded too, which is a difference
        assert not report.same
        assert {"weights", "scale"} & {*causes} == ({"scale"} if scale == 1.0 else set())
    else:
        assert (report.same, causes) == ((True, []) if scale != 1.0 else (False, ["scale"]))


def test_an_operator_on_integers_that_is_not_read_is_named(tmp_path: Path) -> None:
    """Integers that are cast, and scaled by hand, are not taken for floating-point numbers."""
    nodes = [
        make("QuantizeLinear", ["scaled", "s", "zero"], ["i"]),
        make("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        make("Mul", ["f", "s"], ["z1"]),
        make("Identity", ["z1"], ["z"]),
    ]
    built = attention_model(logits=nodes, opsets=[helper.make_opsetid("", 21)])
    for name, value in (("s", np.float32(0.1)), ("zero", np.uint8(128))):
        built.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    with pytest.raises(ModelError, match="Cast of quantised integers"):
        sqrtdk.check(str(write(built, tmp_path / "m.onnx")))
