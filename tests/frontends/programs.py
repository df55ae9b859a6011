"""Attentions written in JAX, as users write them: plain, jax.nn, flax linen, flax nnx, equinox.

A program is a function that returns `(function, parameters, inputs)`, as a factory does. Beside it stand the formula,
the verdict and the sites that `check` finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.support.optional import optional

jax = optional("jax")
jnp, lax = jax.numpy, jax.lax

B, T, D, H, K, E = 2, 10, 32, 4, 2, 8  # batch, tokens, width, heads, key heads, head dimension
PLAIN, CAUSAL = "softmax(0.3536 * q.k)", "softmax(0.3536 * q.k + causal)"
ROPE = "softmax(0.3536 * rope(q).rope(k) + causal)"
Program = Callable[[], tuple[Any, Any, tuple[Any, ...]]]


class Expected(NamedTuple):
    """What `check` says of each attention of a program."""

    formula: str
    verdict: str = "exact"
    sites: tuple[str, ...] = ("",)
    package: str = "jax"


def normal(*shape: int, salt: int = 0) -> Any:
    """Return random numbers of a size that keeps logits near 1."""
    return jnp.asarray(np.random.default_rng(salt + sum(shape)).standard_normal(shape), jnp.float32)


def tokens() -> Any:
    """Return inputs (B, T, D)."""
    return normal(B, T, D, salt=9)


def weights(heads: int = H, kv: int = K) -> dict[str, Any]:
    """Return the projections of one attention."""
    return {n: normal(D, k * E, salt=s) / 5 for s, (n, k) in enumerate((("wq", heads), ("wk", kv), ("wv", kv)))} | {
        "wo": normal(heads * E, D, salt=7) / 5
    }


def heads(x: Any, w: Any) -> Any:
    """Project and split into heads, (B, T, heads, E)."""
    return (x @ w).reshape(*x.shape[:-1], w.shape[1] // E, E)


def rms(x: Any, gain: Any = 1.0, eps: float = 1e-6) -> Any:
    """Llama's norm."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * gain


def rope(x: Any, layout: str = "half", first: Any = 0) -> Any:
    """Turn pairs of channels by the position; x is (B, T, heads, E)."""
    frequencies = 10000.0 ** (-jnp.arange(0, E, 2) / E)
    angles = (jnp.arange(x.shape[1]) + first)[:, None] * frequencies
    c, s = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    if layout == "half":
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * c - b * s, b * c + a * s], -1).reshape(x.shape)


def written_out(q: Any, k: Any, v: Any, mask: Any = None, scale: float = E**-0.5, cap: float = 0, **more: Any) -> Any:
    """Attention by einsum; q (B, T, H, E), k and v (B, S, K, E)."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, 2) for x in (k, v))
    s = jnp.einsum("bthe,bshe->bhts", q, k) * scale
    s = cap * jnp.tanh(s / cap) if cap else s
    s = s + more["bias"] if "bias" in more else s
    s = s if mask is None else jnp.where(mask, s, -1e30)
    if "sinks" in more:
        column = jnp.broadcast_to(more["sinks"][None, :, None, None], (*s.shape[:3], 1))
        w = jax.nn.softmax(jnp.concatenate([s, column], -1), -1)[..., :-1]
    else:
        w = jax.nn.softmax(s, -1)
    return jnp.einsum("bhts,bshe->bthe", w, v)


def lower(n: int = T, s: int = T) -> Any:
    """Return a causal mask."""
    return jnp.tril(jnp.ones((n, s), bool), s - n)


def simple(attend: Callable[..., Any], more: dict[str, Any] | None = None, **sizes: int) -> Program:
    """Return a program of one attention: `attend(q, k, v, parameters)`."""

    def program() -> Any:
        def fn(p: Any, x: Any) -> Any:
            q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
            return attend(q, k, v, p).reshape(*x.shape[:2], -1) @ p["wo"]

        return fn, weights(**sizes) | {n: f() for n, f in (more or {}).items()}, (tokens(),)

    return program


def of_jax_nn(**options: Any) -> Program:
    """Return a program of `jax.nn.dot_product_attention`; options may be functions."""
    return simple(lambda q, k, v, p: jax.nn.dot_product_attention(
        q, k, v, **{n: o() if callable(o) else o for n, o in options.items()}))  # fmt: skip


def padded() -> Any:
    """Return which keys are visible: (B, 1, 1, T)."""
    return (jnp.arange(T) < jnp.array([T, 6])[:, None])[:, None, None]


# -- layers ------------------------------------------------------------------------------------------------------------


def layer_weights(count: int) -> list[dict[str, Any]]:
    """Return the parameters of blocks with norms and an MLP."""
    return [{"attn": {n: w + normal(*w.shape, salt=99 + i) / 50 for n, w in weights().items()}, "n1": jnp.ones(D) * 1.1,
             "n2": jnp.ones(D), "up": normal(D, 2 * D, salt=i) / 6, "down": normal(2 * D, D, salt=i) / 8}
            for i in range(count)]  # fmt: skip


def attention(x: Any, p: Any, **options: Any) -> Any:
    """Causal attention with rotary positions."""
    q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
    return (
        written_out(rope(q), rope(k), v, lower(x.shape[1], x.shape[1]), **options).reshape(*x.shape[:2], -1) @ p["wo"]
    )


def block(x: Any, p: Any, **options: Any) -> Any:
    """One layer."""
    x = x + attention(rms(x, p["n1"]), p["attn"], **options)
    return x + jax.nn.silu(rms(x, p["n2"]) @ p["up"]) @ p["down"]


def language_model(run: Callable[[Any, Any], Any], stacked: bool, count: int = 3) -> Program:
    """Return a program of ids: `run(x, layers)` between an embedding and its transpose."""

    def program() -> Any:
        layers: Any = layer_weights(count)
        if stacked:
            layers = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)

        def fn(p: Any, ids: Any) -> Any:
            return rms(run(p["embed"][ids], p["layers"]), p["norm"]) @ p["embed"].T

        ids = jax.random.randint(jax.random.key(1), (B, T), 0, 40)
        return fn, {"embed": normal(40, D), "layers": layers, "norm": jnp.ones(D)}, (ids,)

    return program


def by_scan(x: Any, layers: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda x, p: (block(x, p), None)), x, layers)[0]


def by_blocks(x: Any, layers: Any) -> Any:
    for p in layers:
        x = block(x, p)
    return x


def by_lines(x: Any, layers: Any) -> Any:
    for p in layers:
        h = rms(x, p["n1"])
        x = x + attention(h, p["attn"])
        h = rms(x, p["n2"])
        x = x + jax.nn.silu(h @ p["up"]) @ p["down"]
    return x


def by_jit(x: Any, layers: Any) -> Any:
    jitted = jax.jit(block)
    for p in layers:
        x = jitted(x, p)
    return x


def in_bfloat16(program: Program) -> Program:
    """Return a program with parameters, and inputs that are floating, in bfloat16."""

    def cast(x: Any) -> Any:
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def half() -> Any:
        fn, parameters, inputs = program()
        return fn, jax.tree.map(cast, parameters), tuple(map(cast, inputs))

    return half


# -- programs of their own ---------------------------------------------------------------------------------------------


def latent() -> Any:
    """DeepSeek's: keys and values from one latent vector, a part of the channels rotated."""

    def fn(p: Any, x: Any) -> Any:  # fmt: skip
        q = heads(x, p["wq"]).reshape(B, T, 2, 2 * E)
        latent = rms(x @ p["down"])
        k, v = heads(latent, p["up_k"]), heads(latent, p["up_v"])
        turned = rope((x @ p["k_rope"])[:, :, None])
        q = jnp.concatenate([q[..., :E], rope(q[..., E:])], -1)
        k = jnp.concatenate([k, jnp.broadcast_to(turned, k.shape)], -1)
        return written_out(q, k, v, lower(), (2 * E) ** -0.5).reshape(B, T, -1) @ p["wo"]

    shapes = {"wq": (D, 4 * E), "down": (D, 12), "up_k": (12, 2 * E), "up_v": (12, 2 * E), "k_rope": (D, E),
              "wo": (2 * E, D)}  # fmt: skip
    return fn, {n: normal(*s) / 5 for n, s in shapes.items()}, (tokens(),)


def decode() -> Any:
    """One token, with a cache of earlier keys that is hidden behind the position."""

    def fn(p: Any, x: Any, cache: Any, position: Any) -> Any:  # fmt: skip
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        at = (0, position, 0, 0)
        keys, values = lax.dynamic_update_slice(cache["k"], k, at), lax.dynamic_update_slice(cache["v"], v, at)
        mask = (jnp.arange(T) <= position)[None, None, None]
        out = jax.nn.dot_product_attention(q, keys, values, mask=mask).reshape(B, 1, -1) @ p["wo"]
        return out, {"k": keys, "v": values}

    cache = {n: normal(B, T, K, E, salt=s) for s, n in enumerate("kv")}
    return fn, weights(), (tokens()[:, :1], cache, jnp.asarray(6))


def vision() -> Any:
    """Patches by a convolution, attention without a mask, a mean."""

    def fn(p: Any, images: Any) -> Any:  # fmt: skip
        x = lax.conv_general_dilated(images, p["patch"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = x.reshape(B, -1, D) + p["positions"]
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        return (jax.nn.dot_product_attention(q, k, v).reshape(*x.shape[:2], -1) @ p["wo"]).mean(1)

    more = {"patch": normal(4, 4, 3, D) / 7, "positions": normal(16, D) / 5}
    return fn, weights() | more, (normal(B, 16, 16, 3),)


def cross() -> Any:
    """Queries from one sequence, keys and values from another."""

    def fn(p: Any, x: Any, memory: Any) -> Any:  # fmt: skip
        q, (k, v) = heads(x, p["wq"]), (heads(memory, p[n]) for n in ("wk", "wv"))
        return jax.nn.dot_product_attention(q, k, v).reshape(*x.shape[:2], -1) @ p["wo"]

    return fn, weights(), (tokens(), normal(B, 7, D))


def online() -> Any:
    """MaxText: logits in float32, the division after the product with v."""

    def fn(p: Any, x: Any) -> Any:  # fmt: skip
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        q = (rope(q) * E**-0.5).reshape(B, T, K, H // K, E)
        w = jnp.einsum("btkge,bske->bkgts", q, rope(k)).astype(jnp.float32)
        w = w + jnp.where(lower(), 0.0, -0.7 * float(np.finfo(np.float32).max))
        e = jnp.exp(w - jnp.max(w, -1, keepdims=True))
        out = jnp.einsum("bkgts,bske->btkge", e, v) / e.sum(-1, keepdims=True).transpose(0, 3, 1, 2, 4)
        return out.reshape(B, T, -1) @ p["wo"]

    return fn, weights(), (tokens(),)


def per_row() -> Any:
    """A function of one sequence, mapped over the batch."""

    def fn(p: Any, x: Any) -> Any:  # fmt: skip
        def one(row: Any) -> Any:
            q, k, v = (heads(row, p[n]) for n in ("wq", "wk", "wv"))
            return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(T, -1) @ p["wo"]

        return jax.vmap(one)(x)

    return fn, weights(), (tokens(),)


def sharded() -> Any:
    """The same under shard_map, on a mesh of one device."""
    fn, parameters, inputs = of_jax_nn(is_causal=True)()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"))
    return mapped, parameters, inputs


def with_key() -> Any:
    """Dropout after the attention, by a key among the inputs."""

    def fn(p: Any, x: Any, key: Any) -> Any:  # fmt: skip
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        out = written_out(q, k, v, lower()).reshape(B, T, -1)
        return jnp.where(jax.random.bernoulli(key, 0.9, out.shape), out / 0.9, 0) @ p["wo"]

    return fn, weights(), (tokens(), jax.random.key(3))


def branches() -> Any:
    """A branch on the values, and a loop without a fixed number of turns, around the attention."""

    def fn(p: Any, x: Any) -> Any:  # fmt: skip
        x = lax.cond(x.mean() > 5, lambda y: y * 0, rms, x)
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        out = written_out(q, k, v, lower()).reshape(B, T, -1) @ p["wo"]
        return lax.while_loop(lambda y: jnp.abs(y).max() > 1, lambda y: y / 2, out)

    return fn, weights(), (tokens(),)


@jax.custom_vjp
def own_softmax(x: Any) -> Any:
    """A softmax with a derivative of its own."""
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


own_softmax.defvjp(lambda x: (own_softmax(x),) * 2, lambda w, g: (w * (g - (g * w).sum(-1, keepdims=True)),))


def own_derivative() -> Any:
    """An attention whose softmax is a `custom_vjp`."""

    def fn(p: Any, x: Any) -> Any:  # fmt: skip
        q, k, v = (heads(x, p[n]) for n in ("wq", "wk", "wv"))
        w = own_softmax(jnp.einsum("bthe,bshe->bhts", q, k) / np.sqrt(E))
        return jnp.einsum("bhts,bshe->bthe", w, v).reshape(B, T, -1) @ p["wo"]

    return fn, weights(kv=H), (tokens(),)
