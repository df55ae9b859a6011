"""Laws asked of JAX functions: right ones keep them, planted breaks are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk import laws
from sqrtdk.frontends import from_jax
from tests.frontends.programs import (
    B,
    D,
    E,
    H,
    T,
    by_blocks,
    heads,
    jax,
    jnp,
    language_model,
    lower,
    normal,
    rope,
    tokens,
    weights,
    written_out,
)


def _program(mask: Any) -> Any:
    """An attention in which position i sees what `mask(n)` says, (B or 1, n, n) or (n, n)."""

    def fn(p: Any, x: Any) -> Any:
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        n = x.shape[1]
        seen = jnp.broadcast_to(mask(n), (x.shape[0], n, n))[:, None]
        return written_out(rope(q), rope(k), v, seen).reshape(*x.shape[:2], -1) @ p["wo"]

    return from_jax(fn, weights(), tokens())


def _x() -> torch.Tensor:
    return torch.tensor(tokens().tolist())


def _broken(module: torch.nn.Module, inputs: Any, law: str) -> list[str]:
    return [finding.rule for finding in laws.ask(module, inputs, law).findings if finding.severity != "note"]


def test_a_causal_function_keeps_the_laws() -> None:
    module = _program(lambda n: lower(n, n))
    answers = laws.ask(module, (_x(),), "causal,samples,finite,heads").answers
    assert {answer.law: answer.state for answer in answers if answer.state == "broken"} == {}
    assert {"causal", "samples"} <= {answer.law for answer in answers if answer.state == "kept"}


@pytest.mark.parametrize("by", [pytest.param(1, marks=pytest.mark.full), -1])
def test_a_token_shift_the_wrong_way_breaks_causal(by: int) -> None:
    """A language model whose attentions are causal; its last block also takes a share of a neighbour."""

    def run(x: Any, layers: Any) -> Any:
        x = by_blocks(x, layers)
        return x + 0.1 * jnp.pad(x, ((0, 0), (max(by, 0), max(-by, 0)), (0, 0)))[:, max(-by, 0) :][:, : x.shape[1]]

    function, parameters, (ids,) = language_model(run, stacked=False, count=1)()
    module = from_jax(function, parameters, ids)
    report = sqrtdk.check(module, (torch.tensor(ids.tolist()),), laws="causal")
    assert [finding.rule for finding in report.findings] == (["law_causal"] if by < 0 else [])


def test_a_reshape_that_mixes_samples_breaks_samples() -> None:
    """(B, T, H, E) merged as (T, B, ...): sequence first where the batch is."""

    def fn(p: Any, x: Any) -> Any:
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        out = written_out(q, k, v).reshape(x.shape[1], x.shape[0], H * E).transpose(1, 0, 2)
        return out @ p["wo"]

    module = from_jax(fn, weights(), tokens())
    assert "law_samples" in _broken(module, (_x(),), "samples")


@pytest.mark.parametrize("reads", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_padding_mask_that_never_arrives_breaks_padding(reads: bool) -> None:
    def fn(p: Any, x: Any, attention_mask: Any) -> Any:
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        seen = attention_mask[:, None, None].astype(bool) if reads else None
        return written_out(q, k, v, seen).reshape(*x.shape[:2], -1) @ p["wo"]

    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 6:] = 0
    module = from_jax(fn, weights(), tokens(), jnp.asarray(mask.numpy()))
    broken = _broken(module, {"x": _x(), "attention_mask": mask}, "padding")
    assert bool(broken) is not reads


@pytest.mark.parametrize("masked", [pytest.param(True, marks=pytest.mark.full), False])
def test_packed_documents_under_a_causal_mask_break_documents(masked: bool) -> None:
    """Documents begin where `position_ids` restart."""

    def fn(p: Any, x: Any, position_ids: Any) -> Any:
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        document = jnp.cumsum(position_ids == 0, -1)
        same = document[:, None, :, None] == document[:, None, None, :]
        seen = lower(x.shape[1], x.shape[1])[None, None]
        return written_out(q, k, v, seen & same if masked else seen).reshape(*x.shape[:2], -1) @ p["wo"]

    places = torch.tensor([[*range(4), *range(T - 4)]] * B)
    module = from_jax(fn, weights(), tokens(), jnp.asarray(places.numpy()))
    broken = _broken(module, {"x": _x(), "position_ids": places}, "documents")
    assert broken == ([] if masked else ["law_documents"])


@pytest.mark.parametrize("both", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_rotation_of_q_alone_breaks_shift(both: bool) -> None:
    def layer(p: Any, x: Any, position_ids: Any) -> Any:
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        frequencies = 10000.0 ** (-jnp.arange(0, E, 2) / E)
        angles = position_ids[:, :, None, None] * frequencies
        c, s = jnp.cos(angles), jnp.sin(angles)

        def turned(y: Any) -> Any:
            a, b = jnp.split(y, 2, -1)
            return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

        out = written_out(turned(q), turned(k) if both else k, v, lower(x.shape[1], x.shape[1]))
        return out.reshape(*x.shape[:2], -1) @ p["wo"]

    def fn(p: Any, x: Any, position_ids: Any) -> Any:
        return x + layer(p, x, position_ids)

    places = torch.arange(T).expand(B, -1)
    module = from_jax(fn, weights(), tokens(), jnp.asarray(places.numpy()))
    broken = _broken(module, {"x": _x(), "position_ids": places}, "shift")
    assert broken == ([] if both else ["law_shift"])


@pytest.mark.parametrize("behind", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_causal_mask_that_forgets_the_cache_breaks_cache(behind: bool) -> None:
    """Row i sees key i of the cached ones and its own, in place of all cached ones and its own up to i."""

    def fn(p: Any, x: Any, past_key: Any, past_value: Any) -> Any:
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        keys, values = jnp.concatenate([past_key, k], 1), jnp.concatenate([past_value, v], 1)
        n, s = q.shape[1], keys.shape[1]
        seen = lower(n, s) if behind else jnp.tril(jnp.ones((n, s), bool))
        return written_out(q, keys, values, seen).reshape(*x.shape[:2], -1) @ p["wo"]

    past = normal(B, 3, H, E), normal(B, 3, H, E, salt=1)
    module = from_jax(fn, weights(kv=H), tokens(), *past)
    broken = _broken(module, (_x(), *(torch.tensor(x.tolist()) for x in past)), "cache")
    assert broken == ([] if behind else ["law_cache"])


@pytest.mark.full
def test_the_gradient_reaches_the_parameters() -> None:
    module = _program(lambda n: lower(n, n))
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    module(_x()).square().sum().backward()

    def loss(p: Any) -> Any:
        q, k, v = (heads(tokens(), p[n]) for n in ("wq", "wk", "wv"))
        return ((written_out(rope(q), rope(k), v, lower()).reshape(B, T, -1) @ p["wo"]) ** 2).sum()

    theirs = jax.grad(loss)(weights())
    for name, parameter in module.named_parameters():
        right = torch.tensor(theirs[name].tolist())
        size = float(right.abs().max())
        assert float((parameter.grad - right).abs().max()) < 1e-5 * size * D  # type: ignore[operator]
