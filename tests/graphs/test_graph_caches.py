"""Keys and values of a cache that is not empty: read, as onnxruntime computes them, when the inputs hold one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk.graphs.onnx import open_onnx, read_onnx
from tests.graphs.files import MICROSOFT, B, D, L, model_of, onnx, write

make = onnx.helper.make_node
FLOAT = onnx.TensorProto.FLOAT
PAST, H, E = 3, 2, 4
X, K, V = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    for seed, shape in enumerate([(B, L, D), (B, H, PAST, E), (B, H, PAST, E)])
)
WEIGHTS = {
    f"w{n}": np.random.default_rng(seed).standard_normal((D, D)).astype(np.float32) / 3 for seed, n in enumerate("qkv")
}
HALVES = [("x", FLOAT, ["b", L, D]), ("past_k", FLOAT, ["b", H, "past", E]), ("past_v", FLOAT, ["b", H, "past", E])]
GIVEN = {"x": X, "past_k": K, "past_v": V}
PROJECTED = [make("MatMul", ["x", f"w{n}"], [f"{n}0"], f"/attn/{n}_proj/MatMul") for n in "qkv"]


def written_out() -> tuple[Any, dict[str, Tensor]]:
    nodes = [*PROJECTED]
    for n in "qkv":
        nodes += [make("Reshape", [f"{n}0", "split"], [f"{n}1"]), make("Transpose", [f"{n}1"], [n], perm=[0, 2, 1, 3])]
    nodes += [
        make("Concat", ["past_k", "k"], ["keys"], axis=2), make("Concat", ["past_v", "v"], ["values"], axis=2),
        make("Transpose", ["keys"], ["kt"], perm=[0, 1, 3, 2]), make("MatMul", ["q", "kt"], ["product"]),
        make("Mul", ["product", "scale"], ["z"], "/attn/Mul"), make("Softmax", ["z"], ["w"], "/attn/Softmax"),
        make("MatMul", ["w", "values"], ["y"], "/attn/MatMul"),
    ]  # fmt: skip
    return model_of(nodes, HALVES, {**WEIGHTS, "scale": np.float32(0.5), "split": np.array([0, 0, H, E])}), GIVEN


def multi_head() -> tuple[Any, dict[str, Tensor]]:
    names = ["q0", "k0", "v0", "", "", "", "past_k", "past_v"]
    node = make(
        "MultiHeadAttention", names, ["y", "pk", "pv"], "/attn/A", domain=MICROSOFT, num_heads=H, unidirectional=1
    )
    return model_of([*PROJECTED, node], HALVES, WEIGHTS), GIVEN


def projecting() -> tuple[Any, dict[str, Tensor]]:
    names = ["x", "w", "bias", "", "past"]
    node = make("Attention", names, ["y", "present"], "/attn/A", domain=MICROSOFT, num_heads=H, unidirectional=1)
    constants = {"w": np.concatenate([*WEIGHTS.values()], 1), "bias": np.arange(3 * D, dtype=np.float32) / 50}
    given = [("x", FLOAT, ["b", L, D]), ("past", FLOAT, [2, "b", H, "past", E])]
    return model_of([node], given, constants), {"x": X, "past": torch.stack((K, V))}


MODELS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Tensor]]], str]] = {
    "written out": (written_out, "softmax(0.5 * q.k)"),
    "MultiHeadAttention": (multi_head, "softmax(0.5 * q.k + causal_lower_right)"),
    "Attention": (projecting, "softmax(0.5 * q.k + causal_lower_right)"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_keys_of_a_cache_are_read(name: str, tmp_path: Path) -> None:
    made, formula = MODELS[name]
    model, given = made()
    path = write(model, tmp_path / "m.onnx")
    assert open_onnx(path, given).off is None
    (call,) = read_onnx(path, given).calls
    assert call.call is not None
    assert (call.call.formula, call.call.query_len, call.call.key_len, call.missing) == (formula, L, L + PAST, None)
    (judged,) = sqrtdk.check(str(path)).calls  # without inputs the cache is empty
    assert (judged.verdict, judged.call.key_len) == ("exact", L)
