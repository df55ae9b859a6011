"""What exporters write beside an attention: operators of onnxruntime, numbers beyond an axis, constants in nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sqrtdk
from sqrtdk.errors import ModelError
from tests.graphs.files import MICROSOFT, attention_model, model_of, onnx, write

helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto
make = helper.make_node
B, L, H, E = 2, 6, 4, 24
D = H * E
RIGHT = E**-0.5


def only(path: Path) -> Any:
    (judged,) = sqrtdk.check(str(path)).calls
    return judged


def graph(path: Path, nodes: list[Any], constants: dict[str, Any], *more: Any, **options: Any) -> Path:
    return write(model_of(nodes, [("x", TensorProto.FLOAT, [B, L, D]), *more], constants, **options), path)


def weights(*names: str, width: int = D) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((D, width)).astype(np.float32) / 10 for name in names}


@pytest.mark.parametrize(
    ("attributes", "scale", "formula", "mistake"),
    [
        ({}, RIGHT, "softmax(0.2041 * q.k)", None),
        ({"unidirectional": 1}, RIGHT, "softmax(0.2041 * q.k + causal)", None),
        ({"scale": 1.0}, 1.0, "softmax(q.k)", "missing"),
        ({"scale": 1 / E, "unidirectional": 1}, 1 / E, "softmax(0.04167 * q.k + causal)", "twice"),
    ],
)
def test_an_attention_that_holds_its_projections(
    attributes: dict[str, Any], scale: float, formula: str, mistake: str | None, tmp_path: Path
) -> None:
    """The weight of q, k and v is one input of the operator."""
    constants = weights("w", width=3 * D) | {"b": np.zeros(3 * D, np.float32)}
    node = make("Attention", ["x", "w", "b"], ["y"], "/attn/Attention", domain=MICROSOFT, num_heads=H, **attributes)
    judged = only(graph(tmp_path / "m.onnx", [node], constants))
    assert judged.call.scale.effective == pytest.approx(scale, rel=1e-6)
    assert (judged.call.formula, judged.mistake) == (formula, mistake)
    assert (judged.call.heads, judged.call.head_dim, judged.call.site) == (H, E, "attn")
    assert judged.call.op == f"{MICROSOFT}.Attention"


@pytest.mark.parametrize("interleaved", [0, 1])
def test_a_rotation_that_is_one_operator(interleaved: int, tmp_path: Path) -> None:
    angles = np.arange(L)[:, None] / 10000 ** (np.arange(E // 2) / (E // 2))[None]
    constants = weights("wq", "wk", "wv") | {"at": np.zeros(1, np.int64), "heads": np.array([0, 0, H, E], np.int64)}
    constants |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    constants |= {"scale": np.float32(RIGHT), "merged": np.array([0, 0, D], np.int64)}
    nodes = []
    for name in "qkv":
        nodes.append(make("MatMul", ["x", f"w{name}"], [f"{name}0"], f"/attn/{name}_proj/MatMul"))
        nodes.append(make("Reshape", [f"{name}0", "heads"], [f"{name}1"]))
        nodes.append(make("Transpose", [f"{name}1"], [f"{name}2"], perm=[0, 2, 1, 3]))
    for name in "qk":
        turned = [f"{name}2", "at", "cos", "sin"]
        nodes.append(make("RotaryEmbedding", turned, [f"{name}3"], domain=MICROSOFT, interleaved=interleaved))
    nodes += [
        make("Transpose", ["k3"], ["kt"], perm=[0, 1, 3, 2]),
        make("MatMul", ["q3", "kt"], ["product"], "/attn/MatMul"),
        make("Mul", ["product", "scale"], ["z"]),
        make("Softmax", ["z"], ["weights"], "/attn/Softmax", axis=-1),
        make("MatMul", ["weights", "v2"], ["o"]),
        make("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]),
        make("Reshape", ["o1", "merged"], ["y"]),
    ]
    judged = only(graph(tmp_path / "m.onnx", nodes, constants))
    assert judged.call.formula == "softmax(0.2041 * rope(q).rope(k))"
    assert judged.verdict == "exact"


def test_a_slice_of_all_whatever_its_ends(tmp_path: Path) -> None:
    """Exporters write the least and the largest number of 64 bits for an end that is not given."""
    model = attention_model(
        logits=[make("Add", ["scaled", "mask"], ["z0"]), make("Slice", ["z0", "a", "b", "c"], ["z"])]
    )
    for name, number in (("a", -(2**63)), ("b", 2**63 - 1), ("c", -1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
    assert only(write(model, tmp_path / "m.onnx")).call.formula == "softmax(0.5 * q.k + causal)"


def test_constants_in_nodes(tmp_path: Path) -> None:
    """The arrays of a file can't be written, which torch warns of."""
    fill = numpy_helper.from_array(np.array([0.0], np.float32))
    nodes = [
        make("Constant", [], ["half"], value=numpy_helper.from_array(np.float32([0.5]))),
        make("Constant", [], ["many"], value=numpy_helper.from_array(np.array([1]))),
        make("ConstantOfShape", ["many"], ["nothing"], value=fill),
        make("Mul", ["scaled", "half"], ["less"]),
        make("Add", ["less", "nothing"], ["z"]),
    ]
    path = write(attention_model(logits=nodes), tmp_path / "m.onnx")
    assert only(path).call.scale.effective == pytest.approx(0.25)


FLOAT = TensorProto.FLOAT
LAST, TOTAL = ("last", TensorProto.INT32, [B]), ("total", TensorProto.INT32, [1])
ONE: dict[str, tuple[str, str, list[tuple[str, int, list[int]]], dict[str, Any], float, str]] = {
    "Attention": ("Attention", "", [], {}, RIGHT, "softmax(0.2041 * q.k)"),
    "Attention, scale": ("Attention", "", [], {"scale": 0.5}, 0.5, "softmax(0.5 * q.k)"),
    "Attention, causal, softcap": (
        "Attention", "", [], {"is_causal": 1, "softcap": 30.0}, RIGHT, "softmax(30 * tanh(0.2041 * q.k / 30) + causal)"
    ),
    "MultiHeadAttention": ("MultiHeadAttention", MICROSOFT, [], {"num_heads": H}, RIGHT, "softmax(0.2041 * q.k)"),
    "MultiHeadAttention, scale": (
        "MultiHeadAttention", MICROSOFT, [], {"num_heads": H, "scale": 1.0}, 1.0, "softmax(q.k)"
    ),
    "GroupQueryAttention": (
        "GroupQueryAttention", MICROSOFT, [("", 0, []), ("", 0, []), LAST, TOTAL],
        {"num_heads": H, "kv_num_heads": H, "local_window_size": 3}, RIGHT, "softmax(0.2041 * q.k + window)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE)
def test_an_operator(case: str, tmp_path: Path) -> None:
    op, domain, more, attributes, scale, formula = ONE[case]
    if op == "Attention":
        attributes = {"q_num_heads": H, "kv_num_heads": H, **attributes}
    nodes = [make("MatMul", ["x", f"w{n}"], [n], f"/attn/{n}_proj/MatMul") for n in "qkv"]
    names = ["q", "k", "v", *(entry[0] for entry in more)]
    nodes.append(make(op, names, ["y"], "/attn/Op", domain=domain, **attributes))
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    given = [entry for entry in more if entry[0]]
    judged = only(graph(tmp_path / "m.onnx", nodes, weights("wq", "wk", "wv"), *given, opsets=opsets))
    assert judged.call.scale.effective == pytest.approx(scale, rel=1e-6)
    assert judged.call.formula == formula
    assert judged.call.site == "attn"
    assert judged.call.op == f"{domain or 'ai.onnx'}.{op}"


DOTTED = {
    "made up by an optimiser": ("auto.cast.74", 0.21, "softmax(0.21 * q.k)", "unexplained"),
    "a buffer of the module": ("attn.scale", RIGHT, "softmax(0.2041 * q.k)", "exact"),
    "a wrong one": ("attn.scale", 1 / E, "softmax(0.04167 * q.k)", "unexplained"),
    "a temperature that was trained": ("attn.temperature", 0.2137, "softmax(temperature * q.k)", "declared"),
}


@pytest.mark.parametrize("case", DOTTED)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_is_its_value_whatever_its_name(case: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    name, value, formula, verdict = DOTTED[case]
    constants = {f"attn.{n}.weight": array for n, array in weights("q", "k", "v").items()}
    constants |= {"heads": np.array([0, 0, H, E], np.int64), name: np.full(shape, value, np.float32)}
    nodes = []
    for n in "qkv":
        nodes.append(make("MatMul", ["x", f"attn.{n}.weight"], [f"{n}0"]))
        nodes.append(make("Reshape", [f"{n}0", "heads"], [f"{n}1"]))
        nodes.append(make("Transpose", [f"{n}1"], [f"{n}2"], perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3]))
    nodes += [make("MatMul", ["q2", "k2"], ["product"]), make("Mul", ["product", name], ["z"])]
    nodes += [make("Softmax", ["z"], ["weights"], axis=-1), make("MatMul", ["weights", "v2"], ["y"])]
    judged = only(graph(tmp_path / "m.onnx", nodes, constants))
    assert judged.call.scale.effective == pytest.approx(value, rel=1e-6)
    assert (judged.call.formula, judged.verdict) == (formula, verdict)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """An operator that is not read: by its name, and not a guess at whose it is."""
    keep = make("Constant", [], ["keep"], value=numpy_helper.from_array(np.ones(5, bool)))
    built = attention_model(logits=[keep, make("Compress", ["scaled", "keep"], ["z"], axis=2)])
    with pytest.raises(ModelError, match="comes after what is not read: Compress") as caught:
        sqrtdk.check(str(write(built, tmp_path / "m.onnx")))
    assert (
        caught.value.hint == "Not read: Compress. Export the model without these operators, or check the model itself."
    )


@pytest.mark.parametrize(
    ("changes", "formulas"),
    [
        ({"logits": [make("Hardmax", ["scaled"], ["z"])]}, ["softmax(unknown(Hardmax)(0.5 * q.k))"]),
        ({"extra": [make("Hardmax", ["y"], ["far"])]}, ["softmax(0.5 * q.k + causal)"]),
        (
            {
                "last": "y0",
                "extra": [
                    make("Hardmax", ["y0"], ["x1"]),
                    *(make("MatMul", ["x1", f"w{n}"], [f"{n}1"]) for n in "qkv"),
                    make("Transpose", ["k1"], ["kt1"], perm=[0, 2, 1]),
                    make("MatMul", ["q1", "kt1"], ["z1"]),
                    make("Softmax", ["z1"], ["weights1"]),
                    make("MatMul", ["weights1", "v1"], ["y"]),
                ],
            },
            ["softmax(0.5 * q.k + causal)", "softmax(q.k)"],
        ),
    ],
)
@pytest.mark.parametrize("run", [False, True])
def test_an_operator_of_known_shape_is_opaque(
    changes: dict[str, Any], formulas: list[str], run: bool, tmp_path: Path
) -> None:
    """An attention is unmeasured by its name if its formula depends on it; its values are onnxruntime's."""
    path = write(attention_model(**changes), tmp_path / "m.onnx")
    given: dict[str, Any] = {}
    if run:
        save_file({"x": torch.randn(2, 5, 8)}, tmp_path / "x.safetensors")
        given["input_file"] = tmp_path / "x.safetensors"
    report = sqrtdk.check(str(path), fail_on="unmeasured", **given)
    assert [judged.call.formula for judged in report.calls] == formulas
    assert [judged.verdict == "unmeasured" for judged in report.calls] == ["Hardmax" in text for text in formulas]
    assert ["Hardmax" in entry.message for entry in report.unjudged] == [True for text in formulas if "Hardmax" in text]
    assert report.exit_code == 1 or not report.unjudged
    assert [note for note in report.environment["notes"] if "Hardmax" in note]
    assert all((judged.call.stats is not None) is run for judged in report.calls)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("attributes", "mistake"), [({}, None), ({"scale": 1.0}, "missing")])
def test_a_graph_as_onnxruntime_fuses_it(
    masked: bool, attributes: dict[str, Any], mistake: str | None, tmp_path: Path
) -> None:
    """Embeddings, attention and norms as one operator each; how many tokens a row has is an output of the first."""
    rng = np.random.default_rng(0)

    def table(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    constants = {"word": table(30, D), "place": table(L, D), "kind": table(2, D), "g": table(D), "b": table(D)}
    constants |= {"w": table(D, 3 * D) / 10, "wb": table(3 * D), "g1": table(D), "b1": table(D)}
    names = ["ids", "kinds", "word", "place", "kind", "g", "b", *(["attention_mask"] if masked else [])]
    embed = make("EmbedLayerNormalization", names, ["x", "lengths"], "/emb/E", domain=MICROSOFT, epsilon=1e-12)
    attend = make(
        "Attention", ["x", "w", "wb", *(["lengths"] if masked else [])], ["a"], "/layer.0/attn/Attention",
        domain=MICROSOFT, num_heads=H, **attributes,
    )  # fmt: skip
    skip = make("SkipLayerNormalization", ["a", "x", "g1", "b1"], ["y"], "/layer.0/norm/S", domain=MICROSOFT)
    given = [(name, TensorProto.INT32, ["b", L]) for name in ("ids", "kinds", *(["attention_mask"] if masked else []))]
    path = write(model_of([embed, attend, skip], given, constants), tmp_path / "m.onnx")
    report = sqrtdk.check(str(path))
    (judged,) = report.calls
    assert (judged.mistake, judged.call.site, judged.call.heads, judged.call.head_dim) == (
        mistake,
        "layer.0.attn",
        H,
        E,
    )
    assert judged.call.op == f"{MICROSOFT}.Attention"
    assert [finding.rule for finding in report.findings if finding.rule != "scale_ledger"] == []
