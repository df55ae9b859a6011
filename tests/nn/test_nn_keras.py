"""Beside Keras's layers on its torch backend, with copied weights: outputs, weights and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk import AuxRequest, attention, scores
from sqrtdk.nn import AdditiveAttention, MultiHeadAttention, ScaledDotProductAttention
from tests.tolerances import complaint, gradient_complaints

B, L, S, D = 2, 5, 7, 12
HEADS = 4  # at most
LONGEST = 2 * D  # sum of a row: a concatenated query and key
F64 = torch.float64


@pytest.fixture(scope="module")
def keras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Keras, which reads its backend and its settings when it is imported."""
    settings: Path = tmp_path_factory.mktemp("keras")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        patch.setenv("KERAS_HOME", str(settings))
        keras = pytest.importorskip("keras")

        assert keras.config.backend() == "torch"
        before = keras.config.floatx()
        keras.config.set_floatx("float64")
        with torch.device("cpu"):
            yield keras
        keras.config.set_floatx(before)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64).requires_grad_()


def compare(actual: Tensor, expected: Tensor, leaves: list[Tensor], dtype: torch.dtype = F64) -> None:
    """Judged in the dtype that Keras computes in: its torch backend rounds the factors of `ops.matmul` to float32."""
    assert complaint(actual, expected, dtype, length=LONGEST, logit=20.0) is None
    compare_gradients(actual, expected, leaves, leaves, dtype)


def compare_gradients(
    actual: Tensor, expected: Tensor, ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype
) -> None:
    probe = torch.randn(expected.shape, dtype=F64)
    found, wanted = (
        {str(i): g for i, g in enumerate(torch.autograd.grad((x * probe).sum(), leaves, retain_graph=True))}
        for x, leaves in ((actual, ours), (expected, theirs))
    )
    wrong = gradient_complaints(found, wanted, dtype, length=LONGEST, logit=20.0, rows=B * HEADS * L)
    assert not wrong, wrong


def mask_of_keys() -> Tensor:
    real = torch.rand(B, S) < 0.6
    real[:, 0] = True
    return real


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_additive(keras: Any, use_scale: bool, causal: bool) -> None:
    q, k, v, real = leaf(B, L, D), leaf(B, S, D), leaf(B, S, 3), mask_of_keys()
    layer = keras.layers.AdditiveAttention(use_scale=use_scale, dtype="float64")
    layer.build([tuple(q.shape), tuple(v.shape), tuple(k.shape)])
    vector = torch.randn(D, dtype=F64)
    if use_scale:
        layer.set_weights([vector.numpy()])
    expected, weights = layer(
        [q, v, k], mask=[None, real], use_causal_mask=causal, return_attention_scores=True, training=False
    )
    module = AdditiveAttention(D, dtype=F64)
    with torch.no_grad():
        module.score.v.copy_(vector if use_scale else torch.ones(D))
        module.score.query_weight.copy_(torch.eye(D))
        module.score.key_weight.copy_(torch.eye(D))
    output, found = module(q, k, v, ~real[:, None], causal, need_weights=True)
    compare(output, expected, [q, k, v], torch.float32)
    compare(found, weights, [q, k], torch.float32)


@pytest.mark.parametrize("causal", [True, False])
def test_dot_product(keras: Any, causal: bool) -> None:
    q, k, v, real = leaf(B, L, D), leaf(B, S, D), leaf(B, S, 3), mask_of_keys()
    layer = keras.layers.Attention(use_scale=False, dtype="float64")
    expected = layer([q, v, k], mask=[None, real], use_causal_mask=causal, training=False)
    compare(
        ScaledDotProductAttention(D, scale=1.0)(q, k, v, ~real[:, None], causal), expected, [q, k, v], torch.float32
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", ["dot", "concat"])
def test_luong_with_a_learned_scale(keras: Any, mode: str, causal: bool) -> None:
    q, k, v, real = leaf(B, L, D), leaf(B, S, D), leaf(B, S, 3), mask_of_keys()
    layer = keras.layers.Attention(use_scale=True, score_mode=mode, dtype="float64")
    layer.build([tuple(q.shape), tuple(v.shape), tuple(k.shape)])
    layer.set_weights([w.numpy() for w in torch.tensor([0.3, 1.7], dtype=F64)[: len(layer.weights)]])
    expected, weights = layer(
        [q, v, k], mask=[None, real], use_causal_mask=causal, return_attention_scores=True, training=False
    )
    theirs = [w.value for w in layer.weights]
    scale, *factor = mine = [w.detach().clone().requires_grad_() for w in theirs]
    given: dict[str, Any] = {"scale": scale.view(1, 1)}
    if mode == "concat":
        both = scale * torch.eye(D, dtype=F64).repeat(2, 1)
        given = {"score": scores.luong_concat(factor[0] * torch.ones(D, dtype=F64), both)}
    output, aux = attention(q, k, v, real[:, None], is_causal=causal, return_aux=AuxRequest(peak=True), **given)
    compare(output, expected, [q, k, v], torch.float32)
    assert complaint(aux.peak, weights.amax(-1), torch.float32, length=LONGEST, logit=20.0) is None
    compare_gradients(output, expected, [q, k, v, *mine], [q, k, v, *theirs], torch.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head(keras: Any, bias: bool, causal: bool, cross: bool) -> None:
    heads, key_dim, value_dim = 3, 5, 4
    layer = keras.layers.MultiHeadAttention(heads, key_dim, value_dim, use_bias=bias, dtype="float64")
    q = leaf(B, L, D)
    k, v = (leaf(B, S, 8), leaf(B, S, 6)) if cross else (q, q)
    layer.build(tuple(q.shape), tuple(v.shape), tuple(k.shape))
    layer.set_weights([torch.randn(tuple(w.shape), dtype=F64).numpy() for w in layer.weights])
    held = {w.path.split("/", 1)[1]: w.value.detach() for w in layer.weights}
    module = MultiHeadAttention(
        D,
        heads,
        bias=bias,
        kdim=k.shape[-1],
        vdim=v.shape[-1],
        batch_first=True,
        head_dim=key_dim,
        value_head_dim=value_dim,
        dtype=F64,
    )
    assert module.parameter_count() == sum(w.numel() for w in held.values())
    parts = ("query", "key", "value")
    kernels = [held[f"{part}/kernel"].flatten(1).T for part in parts]
    state = {"out_proj.weight": held["attention_output/kernel"].flatten(0, 1).T}
    if cross:
        state |= {f"{part[0]}_proj_weight": kernel for part, kernel in zip(parts, kernels, strict=True)}
    else:
        state["in_proj_weight"] = torch.cat(kernels)
    if bias:
        state["in_proj_bias"] = torch.cat([held[f"{part}/bias"].flatten() for part in parts])
        state["out_proj.bias"] = held["attention_output/bias"]
    module.load_state_dict(state)
    mask = torch.rand(B, L, k.shape[1]) < 0.6
    mask[..., 0] = True
    expected, weights = layer(
        q, v, k, attention_mask=mask, use_causal_mask=causal, return_attention_scores=True, training=False
    )
    seen = mask.tril() if causal else mask
    output, found = module(q, k, v, attn_mask=~seen[:, None], average_attn_weights=False)
    leaves = [q, k, v] if cross else [q]
    compare(output, expected, leaves)
    compare(found, weights, leaves[:2])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query(keras: Any, kv_heads: int) -> None:
    heads, head_dim = 4, 3
    layer = keras.layers.GroupQueryAttention(head_dim, heads, kv_heads, dtype="float64")
    x = leaf(B, L, D)
    layer.build(tuple(x.shape), tuple(x.shape))
    layer.set_weights([torch.randn(tuple(w.shape), dtype=F64).numpy() for w in layer.weights])
    held = {w.path.split("/", 1)[1]: w.value.detach() for w in layer.weights}
    module = MultiHeadAttention(D, heads, batch_first=True, head_dim=head_dim, kv_heads=kv_heads, dtype=F64)
    assert module.parameter_count() == sum(w.numel() for w in held.values())
    parts = ("query", "key", "value")
    module.load_state_dict(
        {
            "in_proj_weight": torch.cat([held[f"{part}/kernel"].flatten(1).T for part in parts]),
            "in_proj_bias": torch.cat([held[f"{part}/bias"].flatten() for part in parts]),
            "out_proj.weight": held["attention_output/kernel"].flatten(0, 1).T,
            "out_proj.bias": held["attention_output/bias"],
        }
    )
    compare(module(x, x, x, need_weights=False)[0], layer(x, x, training=False), [x], torch.float32)
