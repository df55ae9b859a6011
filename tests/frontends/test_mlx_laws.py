"""Laws asked of MLX functions: right ones keep them, planted breaks are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk import laws
from sqrtdk.frontends import from_mlx
from tests.support.optional import optional

mx = optional("mlx.core")

B, T, D, H, E = 2, 10, 32, 4, 8
Array = Any


def _weights() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "embed": (40, D), "head": (D, 40)}
    return {name: mx.array(generator.standard_normal(shape).astype(np.float32)) / 4 for name, shape in shapes.items()}


def _heads(x: Array, w: Array) -> Array:
    return (x @ w).reshape(*x.shape[:2], H, E).transpose(0, 2, 1, 3)


def _rope(x: Array, positions: Array) -> Array:
    angles = positions[..., None] * 10000.0 ** (-mx.arange(0, E, 2) / E)
    c, s = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
    a, b = x[..., : E // 2], x[..., E // 2 :]
    return mx.concatenate([a * c - b * s, b * c + a * s], -1)


def _attend(p: Any, x: Array, mask: Array, positions: Array | None = None, of_keys: Array | None = None) -> Array:
    q, k, v = (_heads(x, p[name]) for name in "qkv")
    if positions is not None:
        q, k = _rope(q, positions), _rope(k, positions if of_keys is None else of_keys)
    y = mx.fast.scaled_dot_product_attention(q, k, v, scale=E**-0.5, mask=mask)
    return y.transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"]


def _lower(n: int) -> Array:
    return mx.tril(mx.ones((n, n), mx.bool_))


def _x() -> torch.Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))


def _ids() -> torch.Tensor:
    return torch.randint(0, 40, (B, T), generator=torch.Generator().manual_seed(0))


def _ported(function: Any, **inputs: torch.Tensor) -> torch.nn.Module:
    return from_mlx(function, _weights(), **{name: mx.array(x.numpy()) for name, x in inputs.items()})


def _broken(module: torch.nn.Module, inputs: Any, law: str) -> list[str]:
    return [finding.rule for finding in laws.ask(module, inputs, law).findings if finding.severity != "note"]


def test_a_causal_function_keeps_the_laws() -> None:
    module = _ported(lambda p, x: _attend(p, x, "causal"), x=_x())
    answers = laws.ask(module, (_x(),), "causal,samples,finite,heads").answers
    assert {answer.law: answer.state for answer in answers if answer.state == "broken"} == {}
    assert {"causal", "samples"} <= {answer.law for answer in answers if answer.state == "kept"}
    (answer,) = laws.ask(module, (_x(),), "gradient").answers
    assert (answer.state, answer.reason) == ("not asked", "of a program of MLX only the forward pass is read")


@pytest.mark.parametrize("by", [pytest.param(1, marks=pytest.mark.full), -1])
def test_a_token_shift_the_wrong_way_breaks_causal(by: int) -> None:
    """A causal language model that also takes a share of a neighbour."""

    def fn(p: Any, ids: Array) -> Array:
        x = p["embed"][ids]
        x = x + _attend(p, x, "causal")
        zeros = mx.zeros((x.shape[0], 1, D))
        shifted = [zeros, x[:, :-1]] if by > 0 else [x[:, 1:], zeros]
        return (x + 0.1 * mx.concatenate(shifted, 1)) @ p["head"]

    module = _ported(fn, ids=_ids())
    report = sqrtdk.check(module, (_ids(),), laws="causal")
    assert [finding.rule for finding in report.findings] == (["law_causal"] if by < 0 else [])


def test_a_reshape_that_mixes_samples_breaks_samples() -> None:
    def fn(p: Any, x: Array) -> Array:
        y = _attend(p, x, "causal")
        return y.reshape(x.shape[1], x.shape[0], D).transpose(1, 0, 2)

    assert "law_samples" in _broken(_ported(fn, x=_x()), (_x(),), "samples")


@pytest.mark.full
@pytest.mark.parametrize("reads", [True, False])
def test_a_padding_mask_that_never_arrives_breaks_padding(reads: bool) -> None:
    def fn(p: Any, x: Array, attention_mask: Array) -> Array:
        seen = attention_mask[:, None, None].astype(mx.bool_) if reads else None
        return _attend(p, x, seen)

    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 6:] = 0
    inputs = {"x": _x(), "attention_mask": mask}
    assert bool(_broken(_ported(fn, **inputs), inputs, "padding")) is not reads


@pytest.mark.full
@pytest.mark.parametrize("reads", [True, False])
def test_documents_that_see_one_another_break_documents(reads: bool) -> None:
    """Two documents in a row, told by positions that begin anew."""

    def fn(p: Any, ids: Array, position_ids: Array) -> Array:
        x = p["embed"][ids]
        document = mx.cumsum((position_ids == 0).astype(mx.int32), 1)
        mask = _lower(ids.shape[1])[None, None]
        if reads:
            mask = mask & (document[:, None, :, None] == document[:, None, None])
        return (x + _attend(p, x, mask, position_ids)) @ p["head"]

    inputs = {"ids": _ids(), "position_ids": torch.tensor([[*range(6), *range(4)]] * B)}
    assert bool(_broken(_ported(fn, **inputs), inputs, "documents")) is not reads


@pytest.mark.full
@pytest.mark.parametrize("reads", [True, False])
def test_positions_that_are_read_as_they_are_break_shift(reads: bool) -> None:
    """Rotary positions: a shift of all of them changes nothing, unless one side has its own."""

    def fn(p: Any, input_ids: Array, position_ids: Array) -> Array:
        x = p["embed"][input_ids]
        own = position_ids if reads else mx.broadcast_to(mx.arange(x.shape[1]), position_ids.shape)
        return (x + _attend(p, x, "causal", position_ids, own)) @ p["head"]

    inputs = {"input_ids": _ids(), "position_ids": torch.arange(T).expand(B, T).contiguous()}
    assert bool(_broken(_ported(fn, **inputs), inputs, "shift")) is not reads


@pytest.mark.full
@pytest.mark.parametrize("right", [True, False])
def test_a_decoding_step_with_a_cache_continues_the_prompt(right: bool) -> None:
    """A cache is an input, and what it becomes an output: step by step, the outputs are those of the whole text."""

    def step(p: Any, x: Array, cache: dict[str, Array]) -> Any:
        q, k, v = (_heads(x, p[name]) for name in "qkv")
        first = cache["k"].shape[2]
        at = mx.arange(first, first + x.shape[1])[None]
        q, k = _rope(q, at if right else at - first), _rope(k, at)
        k, v = mx.concatenate([cache["k"], k], 2), mx.concatenate([cache["v"], v], 2)
        mask = at[0][:, None] >= mx.arange(k.shape[2])
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=E**-0.5, mask=mask)
        return y.transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"], {"k": k, "v": v}

    empty = {name: torch.zeros(B, H, 0, E) for name in "kv"}
    module = from_mlx(step, _weights(), mx.array(_x().numpy()), {n: mx.array(c.numpy()) for n, c in empty.items()})
    whole, _ = module(_x(), empty)
    cache, parts = empty, []
    for part in (_x()[:, :6], *_x()[:, 6:].split(1, 1)):
        out, cache = module(part, cache)
        parts.append(out)
    gap = float((torch.cat(parts, 1) - whole).detach().abs().max() / whole.detach().abs().max())
    assert (gap < 1e-5) is right


@pytest.mark.full
def test_the_gradient_reaches_the_parameters() -> None:
    def fn(p: Any, x: Array) -> Array:
        return _attend(p, x, "causal")

    module = _ported(fn, x=_x())
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    module(_x()).square().sum().backward()
    theirs = mx.grad(lambda p: (fn(p, mx.array(_x().numpy())) ** 2).sum())(_weights())
    for name in "qkvo":
        right = torch.tensor(theirs[name].tolist())
        own = module.get_parameter(name).grad
        assert own is not None
        assert float((own - right).abs().max()) < 1e-5 * float(right.abs().max()) * D
