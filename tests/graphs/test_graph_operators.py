"""Attentions that are one operator: each against onnxruntime's own result, by the law of its terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqrtdk.graphs import GraphRun, read_onnx
from tests.graphs.exports import allowed, recomputed
from tests.graphs.files import MICROSOFT, onnx

helper = onnx.helper
B, H, K, L, E = 2, 4, 2, 6, 16
Array = np.ndarray[Any, Any]


def graph(
    path: Path, nodes: list[Any], given: dict[str, Array], outputs: list[str], constants: dict[str, Array] | None = None
) -> GraphRun:
    """Write a graph, and read it."""

    def told(name: str, array: Array) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    made = helper.make_graph(
        nodes,
        "graph",
        [told(name, array) for name, array in given.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=11), path)
    return read_onnx(path, {name: torch.from_numpy(array) for name, array in given.items()})


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def flat(heads: int, length: int = L, seed: int = 0) -> Array:
    return normal(B, length, heads * E, seed=seed)


def check(run: GraphRun, names: list[str]) -> None:
    assert run.missing == ()
    (call,) = run.calls
    assert [term.name for term in call.terms or ()] == names
    assert float((recomputed(call) - call.output.double()).abs().max()) <= allowed(call)


SEEN = np.tril(np.ones((L, L), bool))
SEEN[:, 1] = True
ATTENTION: dict[str, tuple[dict[str, Array], dict[str, Any], list[str]]] = {
    "plain": ({}, {}, ["scale"]),
    "scale, softcap and bias": ({"mask": normal(L, L)}, {"scale": 0.4, "softcap": 2.0}, ["scale", "softcap", "bias"]),
    "bool mask": ({"mask": SEEN}, {"softcap": 1.5}, ["scale", "softcap", "mask"]),
    "causal": ({}, {"is_causal": 1}, ["scale", "mask"]),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_onnx_attention(case: str, tmp_path: Path) -> None:
    more, attributes, names = ATTENTION[case]
    given = {"q": normal(B, H, L, E), "k": normal(B, K, L, E, seed=1), "v": normal(B, K, L, E, seed=2), **more}
    node = helper.make_node("Attention", [*given], ["y"], **attributes)
    check(graph(tmp_path / "a.onnx", [node], given, ["y"]), names)


def test_onnx_attention_with_a_cache(tmp_path: Path) -> None:
    """Its causal mask begins after the cached keys; key and value are those of the cache too."""
    given = {"q": normal(B, H, 3, E), "k": normal(B, H, 3, E, seed=1), "v": normal(B, H, 3, E, seed=2)}
    given |= {"pk": normal(B, H, 4, E, seed=3), "pv": normal(B, H, 4, E, seed=4)}
    node = helper.make_node("Attention", ["q", "k", "v", "", "pk", "pv"], ["y", "nk", "nv"], is_causal=1)
    run = graph(tmp_path / "a.onnx", [node], given, ["y"])
    check(run, ["scale", "mask"])
    assert run.calls[0].key.values.shape == (B, H, 7, E)


def test_multi_head_attention(tmp_path: Path) -> None:
    given = {"q": flat(H), "k": flat(H, seed=1), "v": flat(H, seed=2), "bias": normal(3 * H * E)}
    given |= {"pad": np.array([[1] * L, [1] * 4 + [0] * 2], np.int32), "add": normal(1, H, L, L)}
    node = helper.make_node(
        "MultiHeadAttention", [*given], ["y"], domain=MICROSOFT, num_heads=H, unidirectional=1, scale=0.3
    )
    check(graph(tmp_path / "a.onnx", [node], given, ["y"]), ["scale", "bias", "mask", "mask"])


@pytest.mark.parametrize("interleaved", [0, 1])
def test_grouped_attention_with_its_rotation(interleaved: int, tmp_path: Path) -> None:
    angles = np.arange(L)[:, None] / 10000 ** (np.arange(E // 2) / (E // 2))[None]
    given = {"q": flat(H), "k": flat(K, seed=1), "v": flat(K, seed=2)}
    given |= {"last": np.full(B, L - 1, np.int32), "total": np.array([L], np.int32)}
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "", "", "last", "total", "cos", "sin"], ["y", "pk", "pv"],
        domain=MICROSOFT, num_heads=H, kv_num_heads=K, do_rotary=1, rotary_interleaved=interleaved,
        local_window_size=3, softcap=5.0,
    )  # fmt: skip
    run = graph(tmp_path / "a.onnx", [node], given, ["y"], tables)
    check(run, ["scale", "softcap", "mask"])
    assert [step.name for step in run.calls[0].query.steps] == ["rope"]


def test_attention_that_holds_its_projections(tmp_path: Path) -> None:
    given = {"x": normal(B, L, 24), "pad": np.array([L, 4], np.int32)}
    constants = {"w": normal(24, 3 * H * E) / 5, "b": normal(3 * H * E)}
    node = helper.make_node("Attention", ["x", "w", "b", "pad"], ["y"], domain=MICROSOFT, num_heads=H)
    run = graph(tmp_path / "a.onnx", [node], given, ["y"], constants)
    call = run.calls[0]
    assert call.missing is None
    assert [term.name for term in call.terms or ()] == ["scale", "mask"]
    assert float((recomputed(call) - call.output.double()).abs().max()) <= allowed(call)
    assert call.key.projection is not None
    assert call.key.projection.features[0, 0] == H * E


@pytest.mark.parametrize("past", [0, 3])
def test_grouped_attention_of_packed_vectors(past: int, tmp_path: Path) -> None:
    """One tensor holds the query heads, then those of k, then those of v."""
    rows = 1 if past else B  # onnxruntime takes no more with a cache
    given = {"qkv": flat(H + 2 * K)[:rows], "pk": normal(rows, K, past, E), "pv": normal(rows, K, past, E, seed=1)}
    given |= {"last": np.full(rows, past + L - 1, np.int32), "total": np.array([past + L], np.int32)}
    node = helper.make_node(
        "GroupQueryAttention", ["qkv", "", "", "pk", "pv", "last", "total"], ["y", "nk", "nv"], domain=MICROSOFT,
        num_heads=H, kv_num_heads=K,
    )  # fmt: skip
    run = graph(tmp_path / "a.onnx", [node], given, ["y"])
    check(run, ["scale", "mask"])
    call = run.calls[0]
    assert call.missing is None
    assert (call.query.values.shape[1], call.key.values.shape) == (H, (rows, H, past + L, E))  # repeated
    first = torch.from_numpy(given["qkv"])[..., : H * E]
    assert torch.equal(call.query.values.transpose(1, 2).flatten(2), first)


@pytest.mark.parametrize(("axis", "read"), [(-1, True), (3, True), (2, False)])
def test_a_softmax_that_is_written_out(axis: int, read: bool, tmp_path: Path) -> None:
    given = {"q": normal(B, H, L, E), "kt": normal(B, H, E, L, seed=1), "v": normal(B, H, L, E, seed=2)}
    make = helper.make_node
    nodes = [
        make("MatMul", ["q", "kt"], ["product"]),
        make("Mul", ["product", "scale"], ["z"]),
        make("ReduceMax", ["z", "axis"], ["most"], keepdims=1),
        make("Sub", ["z", "most"], ["less"]),
        make("Exp", ["less"], ["e"]),
        make("ReduceSum", ["e", "axis"], ["sum"], keepdims=1),
        make("Div", ["e", "sum"], ["weights"]),
        make("MatMul", ["weights", "v"], ["y"]),
    ]
    constants = {"scale": np.float32(0.4), "axis": np.array([axis])}
    run = graph(
        tmp_path / "a.onnx", nodes, given, ["y"], {name: np.asarray(array) for name, array in constants.items()}
    )
    if read:
        check(run, ["scale"])
        assert run.calls[0].missing is None
    else:
        assert "the weights of a query do not sum to 1" in str(run.calls[0].missing)


def test_what_is_not_read_is_told(tmp_path: Path) -> None:
    given = {"q": flat(H), "k": flat(K), "v": flat(K)}
    given |= {"last": np.full(B, L - 1, np.int32), "total": np.array([L], np.int32)}
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "", "", "last", "total"], ["y", "pk", "pv"], domain=MICROSOFT,
        num_heads=H, kv_num_heads=K, smooth_softmax=1,
    )  # fmt: skip
    run = graph(tmp_path / "a.onnx", [node], given, ["y"])
    assert run.calls == ()
    assert "smooth_softmax" in run.missing[0].reason
