"""Files of strangers, inputs that do not fit, and graphs that are not read: one clear error each."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqrtdk import _extras
from sqrtdk.errors import MissingExtraError, ModelError
from sqrtdk.frontends.judge import beyond_rounding
from sqrtdk.graphs import onnx_ops, read_onnx
from sqrtdk.graphs.model_file import load_file
from tests.graphs.exports import allowed, recomputed
from tests.graphs.files import B, D, L, attention_model, beside, onnx, weight_bytes, write

helper, TensorProto = onnx.helper, onnx.TensorProto
make = helper.make_node
X = {"x": torch.randn(B, L, D, generator=torch.Generator().manual_seed(0))}


def refused(path: Path, inputs: Any = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_onnx(path, X if inputs is None else inputs)
    assert caught.value.hint
    assert len(str(caught.value)) < 1000
    return caught.value


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_graph_by_hand(tmp_path: Path) -> None:
    run = read_onnx(write(attention_model(), tmp_path / "m.onnx"), X)
    (call,) = run.calls
    assert (call.site, call.query.values.shape) == ("attn", (B, 1, L, D))
    assert [(term.name, term.detail) for term in call.terms or ()] == [("scale", "number"), ("mask", "causal")]
    assert call.query.projection is not None
    assert call.query.projection.name == "attn.q_proj.weight"
    assert float((recomputed(call) - call.output.double()).abs().max()) <= allowed(call)
    torch.testing.assert_close(run.outputs["y"], call.output[:, 0])  # the walk's, and onnxruntime's


LOGITS: dict[str, tuple[list[Any], list[str]]] = {
    "softcap in one constant": (
        [make("Mul", ["scaled", "scale"], ["a"]), make("Tanh", ["a"], ["t"]), make("Mul", ["t", "cap"], ["z"])],
        ["scale", "scale", "scale", "softcap"],  # 3 tanh(3 z / 3)
    ),
    "mask written over": ([make("Where", ["seen", "scaled", "fill"], ["z"])], ["scale", "mask"]),
    "the other way round": ([make("Where", ["hidden", "fill", "scaled"], ["z"])], ["scale", "mask"]),
    "bias and mask in one": ([make("Add", ["both", "scaled"], ["z"])], ["scale", "bias", "mask"]),
    "maximum taken off": (
        [make("ReduceMax", ["scaled", "last"], ["most"], keepdims=1), make("Sub", ["scaled", "most"], ["z"])],
        ["scale"],
    ),
    "limits that change nothing": ([make("Clip", ["scaled", "low"], ["z"])], ["scale"]),
    "divided by a shape's root": (
        [
            make("Shape", ["q"], ["sizes"], start=2),
            make("Cast", ["sizes"], ["size"], to=TensorProto.FLOAT),
            make("Sqrt", ["size"], ["root"]),
            make("Div", ["scaled", "root"], ["z"]),
        ],
        ["scale", "scale"],
    ),
}


def constants() -> list[Any]:
    seen = np.tril(np.ones((L, L), bool))
    both = np.where(seen, np.arange(L, dtype=np.float32) / 7, np.float32(-3e38))
    arrays = {
        "seen": seen, "hidden": ~seen, "fill": np.float32(-1e4), "cap": np.float32(3), "both": both.astype(np.float32),
        "last": np.array([-1]), "low": np.float32(-1e6),
    }  # fmt: skip
    return [make("Constant", [], [n], value=helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape,
            a.flatten().tolist())) for n, a in ((n, np.asarray(a)) for n, a in arrays.items())]  # fmt: skip


@pytest.mark.parametrize("name", LOGITS)
def test_terms_of_the_logits(name: str, tmp_path: Path) -> None:
    nodes, names = LOGITS[name]
    (call,) = read_onnx(write(attention_model(logits=[*constants(), *nodes]), tmp_path / "m.onnx"), X).calls
    assert [term.name for term in call.terms or ()] == names
    assert call.missing is None
    assert float((recomputed(call) - call.output.double()).abs().max()) <= allowed(call)


def test_what_was_not_followed_is_told(tmp_path: Path) -> None:
    limits = [*constants(), make("Clip", ["scaled", "cap"], ["z"])]
    (call,) = read_onnx(write(attention_model(logits=limits), tmp_path / "clip.onnx"), X).calls
    assert "a clamp is not known" in str(call.missing)
    strange = [make("Erf", ["scaled"], ["z"])]
    (call,) = read_onnx(write(attention_model(logits=strange), tmp_path / "erf.onnx"), X).calls
    assert (call.site, call.missing) == ("attn", "erf is not known")


def test_a_softmax_of_one_projection_is_no_attention(tmp_path: Path) -> None:
    router = [
        make("Softmax", ["q"], ["gates"], axis=-1),
        make("MatMul", ["gates", "wk"], ["experts"]),
    ]
    run = read_onnx(write(attention_model(extra=router), tmp_path / "m.onnx"), X)
    assert (len(run.calls), run.missing) == (1, ())


def test_a_softmax_in_a_branch_is_no_attention(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [make("Softmax", ["product"], ["inner"])], "branch", [], [helper.make_empty_tensor_value_info("inner")]
    )
    nodes = [
        make("Constant", [], ["yes"], value=helper.make_tensor("yes", TensorProto.BOOL, [], [True])),
        make("If", ["yes"], ["chosen"], "branching", then_branch=inner, else_branch=inner),
    ]
    run = read_onnx(write(attention_model(extra=nodes), tmp_path / "m.onnx"), X)
    assert (len(run.calls), run.missing) == (1, ())  # a branch that is known to run, and whose weights meet no values


def test_a_walk_that_gives_other_outputs_concludes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of ours that is off by a thousandth, and then one that is left out."""
    path = write(attention_model(), tmp_path / "m.onnx")
    softmax = onnx_ops.ONNX_OPERATIONS["", "Softmax"]
    for wrong in (lambda step: softmax(step) * 1.001, lambda step: step.tensor(0)):
        monkeypatch.setitem(onnx_ops.ONNX_OPERATIONS, ("", "Softmax"), wrong)
        run = read_onnx(path, X)
        assert run.calls == ()
        assert "the walk gives other outputs than onnxruntime" in run.missing[0].reason


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_tensor_beside_the_graph_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(weight_bytes())
    path = beside(attention_model(), tmp_path / "m.onnx", "w.bin")
    plain = read_onnx(write(attention_model(), tmp_path / "plain.onnx"), X)
    assert torch.equal(read_onnx(path, X).outputs["y"], plain.outputs["y"])


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "x").write_bytes(weight_bytes())
    (snapshot / "w.bin").symlink_to("../../blobs/x")
    assert load_file(beside(attention_model(), snapshot / "m.onnx", "w.bin")).graph.node


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/../../w.bin", "link.bin", "none.bin", "", "pipe"])
def test_a_tensor_elsewhere_is_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(weight_bytes())
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    os.mkfifo(folder / "pipe")
    path = beside(attention_model(), folder / "m.onnx", location)
    with pytest.raises(ModelError):  # before onnx and onnxruntime, which would refuse some of them as well
        load_file(path)


@pytest.mark.parametrize("entries", [{"offset": "8"}, {"length": "9999"}, {"offset": "-4"}, {"length": "many"}])
def test_a_tensor_beyond_its_file_is_refused(entries: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(weight_bytes())
    error = refused(beside(attention_model(), tmp_path / "m.onnx", "w.bin", **entries))
    assert "w.bin" in str(error)


@pytest.mark.parametrize("content", [b"", b"no graph", random.Random(0).randbytes(64), b"\x08\x09"], ids=range(4))
def test_what_is_no_graph_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    refused(path)


def test_a_file_that_is_cut_off_or_missing_or_none_is_refused(tmp_path: Path) -> None:
    path = write(attention_model(), tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:-200])
    refused(path)
    refused(tmp_path / "none.onnx")
    refused(tmp_path)


def test_a_tensor_with_fewer_bytes_than_its_shape_is_refused(tmp_path: Path) -> None:
    model = attention_model()
    model.graph.initializer[0].dims[0] = 2**40
    refused(write(model, tmp_path / "m.onnx"))


def test_custom_operators_are_refused_by_name(tmp_path: Path) -> None:
    nodes = [make("Evil", ["y"], ["made"], domain="com.stranger")]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.stranger", 1)]
    error = refused(write(attention_model(extra=nodes, opsets=opsets), tmp_path / "m.onnx"))
    assert "com.stranger::Evil" in str(error)


def test_functions_that_call_themselves_are_refused(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    model = attention_model(extra=[make("Round", ["y"], ["made"], domain="own")], opsets=opsets)
    inner = [make("Round", ["a"], ["b"], domain="own")]
    model.functions.append(helper.make_function("own", "Round", ["a"], ["b"], inner, opsets))
    refused(write(model, tmp_path / "m.onnx"))


def test_functions_are_written_out(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    model = attention_model(logits=[make("Mask", ["scaled", "mask"], ["z"], domain="own")], opsets=opsets)
    inner = [make("Add", ["a", "m"], ["b"])]
    model.functions.append(helper.make_function("own", "Mask", ["a", "m"], ["b"], inner, opsets))
    (call,) = read_onnx(write(model, tmp_path / "m.onnx"), X).calls
    assert [term.name for term in call.terms or ()] == ["scale", "mask"]


def test_rounding_goes_by_what_the_walk_itself_rounds() -> None:
    exact = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = exact.float()
    assert beyond_rounding(ours.nextafter(torch.tensor(9.0)), ours, exact) is None
    wrong = ours.clone()
    wrong[3, 2] += 1e-4
    assert beyond_rounding(wrong, ours, exact) == pytest.approx(1e-4, rel=1e-2)
    wrong[3, 2] = torch.nan
    assert str(beyond_rounding(wrong, ours, exact)) == "nan"
    assert beyond_rounding(ours[1:], ours, exact) == float("inf")


def test_an_attention_after_a_resize_that_torch_has_not(tmp_path: Path) -> None:
    """Its values would be those of uninitialised memory: the node and its mode are told, and what is computed."""
    logits = [
        make("Constant", [], ["factors"], value_floats=[1.0, 1.0, 1.0]),
        make("Resize", ["scaled", "", "factors"], ["z"], mode="linear", coordinate_transformation_mode="asymmetric"),
    ]
    run = read_onnx(write(attention_model(logits=logits), tmp_path / "m.onnx"), X)
    assert run.calls == ()
    reason = "Softmax comes after what is not read: Resize 'z' of the mode linear, asymmetric, on 1 axes: nearest is"
    assert run.missing[0].reason.startswith(reason)


def test_an_operator_that_onnxruntime_lacks_is_an_error(tmp_path: Path) -> None:
    assert "onnxruntime" in str(refused(write(attention_model(extra=[make("No", ["y"], ["n"])]), tmp_path / "m.onnx")))


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr(_extras, "import_module", missing)
    with pytest.raises(MissingExtraError) as caught:
        read_onnx(write(attention_model(), tmp_path / "m.onnx"), X)
    assert "sqrtdk[onnx]" in caught.value.hint


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_ids(tmp_path: Path) -> Path:
    ids = ("ids", TensorProto.INT32, ["batch", L])
    return write(attention_model(inputs=[ids], extra=[make("Identity", ["ids"], ["same"])]), tmp_path / "m.onnx")


IDS = torch.arange(B * L).reshape(B, L)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "lacks its inputs x, ids"),
        ({**X, "input_ids": IDS}, "lacks its inputs ids, and got input_ids"),
        ({**X, "ids": IDS, "mask": IDS}, "takes no input mask"),
        ({"x": X["x"][:, :3], "ids": IDS}, r"is (2, 3, 8), and the graph was exported for (batch, 5, 8)"),
        ({"x": X["x"], "ids": IDS[0]}, r"(5,)"),
        ({"x": X["x"], "ids": IDS.float()}, "float32; the graph takes int32"),
        ({"x": X["x"], "ids": IDS + 2**40}, "int32 does not have"),
        ((X["x"], IDS, IDS), "takes 2 inputs, got 3"),
        ({"x": X["x"].to("meta"), "ids": IDS}, "no plain values"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, words: str, with_ids: Path) -> None:
    assert words in str(refused(with_ids, inputs))


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": X["x"], "ids": IDS},
        (X["x"], IDS.to(torch.int32)),
        {"x": X["x"].double(), "ids": IDS, "none": None},
        {"x": X["x"].mT.contiguous().mT, "ids": IDS.to(torch.uint8)},
    ],
)
def test_inputs_get_the_dtypes_of_the_graph(inputs: Any, with_ids: Path) -> None:
    assert len(read_onnx(with_ids, inputs).calls) == 1
