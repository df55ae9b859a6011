"""Attentions in JAX as known code bases write them: Gemma, MaxText; tables of angles, nnx between two sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.frontends.libraries import nnx
from tests.frontends.programs import B, D, E, H, K, T, heads, jax, jnp, lower, rms, rope, tokens, weights, written_out
from tests.frontends.programs import normal as normal_


def gemma() -> Any:
    """Weights (N, D, H), logits (B, T, N, S), a softcap, q scaled behind its rotation."""

    def fn(p: Any, x: Any, positions: Any, mask: Any) -> Any:
        h = rms(x, 1 + p["norm"])
        q = jnp.einsum("BTD,NDH->BTNH", h, p["q_einsum"])
        k, v = jnp.einsum("BSD,CKDH->CBSKH", h, p["kv_einsum"])
        q, k = turned(q, positions) * E**-0.5, turned(k, positions)
        z = jnp.einsum("BTKGH,BSKH->BTKGS", q.reshape(B, T, K, H // K, E), k).reshape(B, T, H, T)
        z = jnp.tanh(z / 50.0) * 50.0
        w = jax.nn.softmax(jnp.where(jnp.expand_dims(mask, -2), z, -2.3819763e38), -1)
        out = jnp.einsum("BTKGS,BSKH->BTKGH", w.reshape(B, T, K, H // K, T), v).reshape(B, T, H, E)
        return x + jnp.einsum("BTNH,NHD->BTD", out, p["attn_vec_einsum"])

    parameters = {
        "norm": normal_(D) / 9, "q_einsum": normal_(H, D, E) / 5, "kv_einsum": normal_(2, K, D, E) / 5,
        "attn_vec_einsum": normal_(H, E, D) / 5,
    }  # fmt: skip
    seen = lower() & (jnp.arange(T) > jnp.arange(T)[:, None] - 4)
    return fn, parameters, (tokens(), jnp.tile(jnp.arange(T), (B, 1)), jnp.tile(seen, (B, 1, 1)))


def turned(x: Any, positions: Any) -> Any:
    """Gemma's rotation; positions are (B, T)."""
    scale = 10000.0 ** (2 * jnp.arange(0, x.shape[-1] // 2) / x.shape[-1])
    angles = (positions[..., None] / scale[None, None])[..., None, :]
    one, two = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def maxtext() -> Any:
    """Weights cast to bfloat16, logits in float32, the weights' sum divided at the end, segments of packed rows."""

    def fn(p: Any, ids: Any, segments: Any) -> Any:
        x = p["embedding"].astype(jnp.bfloat16)[ids]
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[n].astype(jnp.bfloat16)) for n in ("query", "key", "value"))
        q, k = rope(q * E**-0.5).reshape(B, T, K, H // K, E), rope(k)
        z = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32)
        same = segments[:, :, None] == segments[:, None, :]
        z = z + jnp.where((same & lower())[:, None, None], 0.0, -0.7 * float(np.finfo(np.float32).max))
        e = jnp.exp(z - jnp.max(z, -1, keepdims=True))
        out = jnp.einsum("bkgts,bskd->btkgd", e.astype(jnp.bfloat16), v)
        total = jnp.moveaxis(e.sum(-1), (0, 1, 2, 3), (0, 2, 3, 1))[..., None]
        out = (out / total.astype(jnp.bfloat16)).reshape(B, T, H, E)
        return jnp.einsum("btnh,nhd->btd", out, p["out"].astype(jnp.bfloat16))

    parameters = {
        "embedding": normal_(40, D), "query": normal_(D, H, E) / 5, "key": normal_(D, K, E) / 5,
        "value": normal_(D, K, E, salt=1) / 5, "out": normal_(H, E, D) / 5,
    }  # fmt: skip
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, 40)
    return fn, parameters, (ids, jnp.asarray(np.repeat([[0, 1]], T // 2, axis=1).repeat(B, 0)))


def table_of_angles() -> Any:
    """cos[positions]: a table that is made once, whose rows are picked."""
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(0, E, 2) / E)
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))

    def fn(p: Any, x: Any, positions: Any) -> Any:
        c, s = cos[positions][:, :, None], sin[positions][:, :, None]

        def place(y: Any) -> Any:
            one, two = jnp.split(y, 2, -1)
            return jnp.concatenate([one * c - two * s, two * c + one * s], -1)

        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        return written_out(place(q), place(k), v, lower()).reshape(B, T, -1) @ p["wo"]

    return fn, weights(), (tokens(), jnp.tile(jnp.arange(T), (B, 1)) + 3)


def nnx_cross() -> Any:
    """An nnx attention from one sequence to another, normalised q and k."""

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attn = nnx.MultiHeadAttention(4, D, decode=False, normalize_qk=True, rngs=rngs)

        def __call__(self, x: Any, memory: Any) -> Any:
            return self.attn(x, memory)

    return Net(nnx.Rngs(0)), None, (tokens(), normal_(B, 7, D))
