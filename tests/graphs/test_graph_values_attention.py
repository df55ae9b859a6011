"""Attentions that are one operator, written out: on numbers, against onnxruntime's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.graphs.files import MICROSOFT, onnx
from tests.graphs.test_graph_values import Array, normal, same

make = onnx.helper.make_node
B, H, K, L, S, E = 2, 4, 2, 5, 7, 16
D = H * E
SEEN = np.random.default_rng(3).random((L, S)) > 0.3
SEEN[:, 0] = True


def heads(count: int, length: int, seed: int = 0) -> Array:
    return normal(B, count, length, E, seed=seed)


def flat(count: int, length: int, seed: int = 0) -> Array:
    return normal(B, length, count * E, seed=seed)


QKV = {"q": heads(H, L), "k": heads(K, S, 1), "v": heads(K, S, 2)}
SQUARE = {"q": heads(H, L), "k": heads(K, L, 1), "v": heads(K, L, 2)}
FLAT = {"q": flat(H, L), "k": flat(K, S, 1), "v": flat(K, S, 2)}
PAST = {"pk": heads(K, 3, 3), "pv": heads(K, 3, 4)}
ONNX: dict[str, tuple[dict[str, Array], list[str], dict[str, Any]]] = {
    "plain": (QKV, ["q", "k", "v"], {}),
    "flat": (FLAT, ["q", "k", "v"], {"q_num_heads": H, "kv_num_heads": K}),
    "scale, softcap, bias": (
        QKV | {"m": normal(L, S)}, ["q", "k", "v", "m"], {"scale": 0.7, "softcap": 1.5}
    ),
    "bool mask": (QKV | {"m": SEEN}, ["q", "k", "v", "m"], {}),
    "bool mask, softcap": (QKV | {"m": SEEN}, ["q", "k", "v", "m"], {"softcap": 1.0}),
    "causal": (SQUARE, ["q", "k", "v"], {"is_causal": 1}),
    "causal, more keys than rows": (QKV, ["q", "k", "v"], {"is_causal": 1}),
    "causal behind a cache": (SQUARE | PAST, ["q", "k", "v", "", "pk", "pv"], {"is_causal": 1}),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ONNX)
def test_onnx_attention(case: str) -> None:
    given, names, attributes = ONNX[case]
    outputs = ("y", "nk", "nv") if "pk" in names else ("y",)
    same([make("Attention", names, [*outputs], **attributes)], given, opset=23, outputs=outputs)


MHA = {"q": flat(H, L), "k": flat(H, S, 1), "v": flat(H, S, 2)}
MULTI: dict[str, tuple[dict[str, Array], list[str], dict[str, Any]]] = {
    "plain": (MHA, ["q", "k", "v"], {}),
    "bias": (MHA | {"b": normal(3 * D)}, ["q", "k", "v", "b"], {"scale": 0.4}),
    "padding": (
        MHA | {"m": np.array([[1] * S, [1] * 4 + [0] * 3], np.int32)}, ["q", "k", "v", "", "m"],
        {"mask_filter_value": -3.0},
    ),
    "lengths": (MHA | {"m": np.array([S, 3], np.int32)}, ["q", "k", "v", "", "m"], {}),
    "added": (MHA | {"m": normal(1, H, L, S)}, ["q", "k", "v", "", "", "m"], {}),
    "causal": ({n: flat(H, L, i) for i, n in enumerate("qkv")}, ["q", "k", "v"], {"unidirectional": 1}),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", MULTI)
def test_multi_head_attention(case: str) -> None:
    given, names, attributes = MULTI[case]
    same([make("MultiHeadAttention", names, ["y"], domain=MICROSOFT, num_heads=H, **attributes)], given)


WEIGHTS = {"w": normal(12, 3 * D) / 4, "b": normal(3 * D)}
OWN: dict[str, tuple[dict[str, Array], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale, causal": ({}, {"unidirectional": 1, "scale": 0.3}),
    "lengths": ({"m": np.array([L, 2], np.int32)}, {}),
    "ends and beginnings": ({"m": np.array([5, 4, 0, 1], np.int32)}, {}),
    "padding": ({"m": np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], np.int32)}, {"mask_filter_value": -2.0}),
    "a mask of rows and keys": ({"m": (normal(B, L, L) > -1).astype(np.int32)}, {"mask_filter_value": -2.0}),
    "padding, causal": ({"m": np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], np.int32)}, {"unidirectional": 1}),
    "sizes": ({}, {"qkv_hidden_sizes": [D, D, D]}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", OWN)
def test_attention_that_holds_its_projections(case: str) -> None:
    given, attributes = OWN[case]
    names = ["x", "w", "b", *given]
    node = make("Attention", names, ["y"], domain=MICROSOFT, num_heads=H, **attributes)
    same([node], {"x": normal(B, L, 12), **given}, WEIGHTS)


ANGLES = np.arange(16)[:, None] / 10000 ** (np.arange(E // 2) / (E // 2))[None]
TABLES = {"cos": np.cos(ANGLES).astype(np.float32), "sin": np.sin(ANGLES).astype(np.float32)}
GROUPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale, softcap": {"scale": 0.6, "softcap": 2.0},
    "window": {"local_window_size": 3},
    "rotation": {"do_rotary": 1},
    "rotation of neighbours": {"do_rotary": 1, "rotary_interleaved": 1},
    "sinks": {},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", GROUPED)
def test_grouped_attention(case: str) -> None:
    given = {"q": flat(H, L), "k": flat(K, L, 1), "v": flat(K, L, 2)}
    given |= {"last": np.full(B, L - 1, np.int32), "total": np.array([L], np.int32)}
    names = ["q", "k", "v", "", "", "last", "total"]
    if "rotation" in case:
        given |= TABLES
        names += ["cos", "sin"]
    if case == "sinks":
        given |= {"s": normal(H)}
        names += ["", "", "", "", "s"]
    node = make(
        "GroupQueryAttention", names, ["y", "nk", "nv"], domain=MICROSOFT, num_heads=H, kv_num_heads=K, **GROUPED[case]
    )
    same([node], given)
