"""The small models of `tests/compare/ports` as JAX functions: what `Port` describes, written as JAX users write it.

Weights lie as JAX code has them, (in, out). Tables of angles are computed once, by NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from tests.compare.ports.config import LENGTH, Port
from tests.frontends.programs import jax, jnp, lax


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """Return the weights of a torch model as a tree: dicts by name, a list of layers, matrices transposed."""
    tree: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        *path, last = name.split(".")
        here = tree
        for part in path:
            here = here.setdefault(part, {})
        value = jnp.asarray(tensor.numpy())
        here[last] = value.T if last == "weight" and value.ndim == 2 and path[-1] != "embed" else value
    for name, value in tree.items():
        if isinstance(value, dict) and all(key.isdigit() for key in value):
            tree[name] = [value[str(at)] for at in range(len(value))]
    return tree


def port(ports: Sequence[Port]) -> Any:
    """Return the model as a function `(parameters, input_ids, attention_mask=None)`, one `Port` for each layer."""
    first = ports[0]

    def model(p: Any, input_ids: Any, attention_mask: Any = None) -> Any:
        x = p["embed"]["weight"][input_ids]
        if first.embedding != 1:
            x = x * first.embedding
        if first.places:
            x = x + p["places"][: x.shape[1]]
        for number, (one, layer) in enumerate(zip(ports, p[first.names], strict=True)):
            x = block(x, layer, one, number, attention_mask)
        return norm(x, p["last"])

    return model


def block(x: Any, p: Any, port: Port, number: int, attention_mask: Any) -> Any:
    if port.post_norm:
        x = norm(x + attn(x, p["attn"], port, number, attention_mask), p["norm_1"])
        return norm(x + mlp(x, p, port), p["norm_2"])
    x = x + attn(norm(x, p["norm_1"]), p["attn"], port, number, attention_mask)
    return x + mlp(norm(x, p["norm_2"]), p, port)


def norm(x: Any, p: Any) -> Any:
    if "bias" in p:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["weight"] + p["bias"]
    return p["weight"] * (x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6))


def mlp(x: Any, p: Any, port: Port) -> Any:
    act = {"gelu": lambda z: jax.nn.gelu(z, approximate=False), "tanh": jax.nn.gelu, "relu": jax.nn.relu}
    return act[port.activation](x @ p["up"]["weight"]) @ p["down"]["weight"]


def dense(x: Any, p: Any) -> Any:
    return x @ p["weight"] + p["bias"] if "bias" in p else x @ p["weight"]


def attn(x: Any, p: Any, port: Port, number: int, attention_mask: Any) -> Any:
    seen = visible(port, number, attention_mask, x.shape[1])
    q, k, v = projected(x, p, port)
    if port.odd == "tanh q":
        q = jnp.tanh(q)
    elif port.odd == "tanh v":
        v = jnp.tanh(v)
    if port.qk_norm and port.qk_norm_at == "before":
        q, k = head_norm(q, p["q_norm"], port), head_norm(k, p["k_norm"], port)
    q = rope(q, port, positions(port, "q", attention_mask, x.shape[1])) if "q" in port.rope else q
    k = rope(k, port, positions(port, "k", attention_mask, x.shape[1])) if "k" in port.rope else k
    if port.qk_norm and port.qk_norm_at == "after":
        q, k = head_norm(q, p["q_norm"], port), head_norm(k, p["k_norm"], port)
    if port.log_n is not None:
        count = jnp.array([[[k.shape[1]]]]) if seen is None else seen.sum(-1)
        q = q * (jnp.log(count.astype(q.dtype)) / math.log(port.log_n)).swapaxes(1, 2)[..., None]
    k, v = cached(k, p.get("k_step"), port.cache_k), cached(v, p.get("v_step"), port.cache_v)
    narrow = str(port.rounded_to).removeprefix("torch.")
    q = q.astype(narrow).astype(v.dtype) if "q" in port.rounded else q
    k = k.astype(narrow).astype(v.dtype) if "k" in port.rounded else k
    rows, keys = np.arange(port.memory, port.memory + x.shape[1])[:, None], np.arange(port.memory + x.shape[1])
    bias = None
    if port.bias == "alibi":
        slopes = port.bias_steepness * 2.0 ** (-8.0 * jnp.arange(1, port.heads + 1) / port.heads)
        bias = -slopes[:, None, None] * jnp.abs(rows - keys)
    elif port.bias == "t5":
        bias = port.bias_steepness * p["table"][:, np.clip(rows - keys, -LENGTH, LENGTH - 1) + LENGTH]
    if port.kv_heads < port.heads and port.groups == "tile":
        k, v = (jnp.tile(y, (1, 1, port.heads // port.kv_heads, 1)) for y in (k, v))
    elif port.kv_heads < port.heads and port.style != "grouped":
        k, v = (jnp.repeat(y, port.heads // port.kv_heads, 2) for y in (k, v))
    if port.style == "sdpa" and port.fill is None and not port.before_scale and not port.dropout:
        out = jax.nn.dot_product_attention(q, k, v, None if bias is None else bias[None], seen, scale=port.factor)
    else:
        out = by_hand(q, k, v, port, seen, bias, p.get("sinks"))
    return dense(out.reshape(*x.shape[:2], -1), p["o_proj"])


def projected(x: Any, p: Any, port: Port) -> tuple[Any, Any, Any]:
    """q, k and v, (B, L or S, heads, E)."""
    if port.fused:
        sizes = (3, port.heads) if (port.fused_read or port.fused) == "parts" else (port.heads, 3)
        parts = dense(x, p["qkv_proj"]).reshape(*x.shape[:2], *sizes, port.head_dim)
        q, k, v = (jnp.take(parts, at, axis=2 if sizes[0] == 3 else 3) for at in range(3))
        return q, k, v
    every = x
    if port.memory:
        every = jnp.concatenate([jnp.broadcast_to(p["memory"], (x.shape[0], *p["memory"].shape)), x], 1)
    q = dense(x, p["q_proj"])
    if port.q_heads == "transposed":
        q = q.reshape(*q.shape[:2], port.head_dim, port.heads).swapaxes(2, 3)
    else:
        q = q.reshape(*q.shape[:2], port.heads, port.head_dim)
    k, v = (dense(every, p[n]).reshape(*every.shape[:2], port.kv_heads, port.head_dim) for n in ("k_proj", "v_proj"))
    return q, k, v


def head_norm(x: Any, p: Any, port: Port) -> Any:
    whole, gain = x.shape, p["weight"]
    x = x.reshape(*whole[:2], -1) if port.qk_norm_over == "heads" else x
    gain = gain if port.qk_norm_over == "heads" else gain.reshape(whole[2:])
    if port.qk_norm == "l2":
        x = x / jnp.maximum(jnp.sqrt((x * x).sum(-1, keepdims=True)), port.qk_norm_eps)
    else:
        x = x - x.mean(-1, keepdims=True) if port.qk_norm == "layer" else x
        x = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + port.qk_norm_eps)
    return (x * gain).reshape(whole)


def positions(port: Port, of: str, attention_mask: Any, length: int) -> Any:
    """(B or 1, L or S)."""
    tokens = jnp.arange(length)[None]
    if attention_mask is not None and port.padded == "left" and of in port.resets:
        tokens = jnp.maximum(jnp.cumsum(attention_mask, -1) - 1, 0)
    tokens = tokens + port.memory
    if of == "k" and port.memory:
        before = jnp.broadcast_to(jnp.arange(port.memory), (tokens.shape[0], port.memory))
        tokens = jnp.concatenate([before, tokens], 1)
    return tokens + (port.shift_q if of == "q" else port.shift_k)


def rope(x: Any, port: Port, at: Any) -> Any:
    width = port.rope_width or port.head_dim
    angles = np.arange(-LENGTH, 2 * LENGTH)[:, None] * port.rope_base ** (-np.arange(0, width, 2) / width)
    cos, sin = (jnp.asarray((port.amplitude * f(angles)).astype(x.dtype))[at + LENGTH][:, :, None]
                for f in (np.cos, np.sin))  # fmt: skip
    part, rest = x[..., :width], x[..., width:]
    if port.rope_layout == "half":
        one, two = jnp.split(part, 2, -1)
        part = jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)
    else:
        one, two = part[..., ::2], part[..., 1::2]
        part = jnp.stack([one * cos - two * sin, one * sin + two * cos], -1).reshape(part.shape)
    return jnp.concatenate([part, rest], -1) if rest.shape[-1] else part


def cached(x: Any, step: Any, times: str | None) -> Any:
    if times is None:
        return x
    kept = jnp.clip(jnp.round(x / step[:, None]), -127, 127)
    if times == "never":
        return kept
    return kept * step[:, None] if times == "once" else kept * step[:, None] * step[:, None]


def visible(port: Port, number: int, attention_mask: Any, length: int) -> Any:
    """True where the row sees the key, (B or 1, 1, L, S); None if every row sees all."""
    keys = np.arange(length + port.memory)
    own = np.arange(length)[:, None] + (port.memory if port.align == "lower" else 0)
    seen = np.ones((1, 1, length, len(keys)), bool)
    if port.causal:
        seen = seen & (keys <= own + port.offset)
    if (window := port.windows[number]) is not None:
        seen = seen & (own - keys < window) & (keys - own < window)
    if attention_mask is None or port.padding == "lost":
        if seen.all():
            return None
        return jnp.asarray(seen | ((keys == own) & ~seen.any(-1, keepdims=True)))
    tokens = attention_mask.astype(bool)[:, :: -1 if port.padding == "flipped" else 1]
    tokens = jnp.pad(tokens, ((0, 0), (port.memory, 0)), constant_values=True)
    both = jnp.asarray(seen) & tokens[:, None, None, :]
    return both | ((keys == own) & ~both.any(-1, keepdims=True))


def by_hand(q: Any, k: Any, v: Any, port: Port, seen: Any, bias: Any, sinks: Any) -> Any:
    """The attention by einsum; keys in groups where the style has them."""
    scale, early = port.factor, port.before_scale
    grouped = k.shape[2] < q.shape[2]
    hidden = np.finfo(q.dtype).min if port.style in ("grouped", "einsum") else -np.inf
    hidden = hidden if port.fill is None else port.fill

    def hide(z: Any) -> Any:
        if seen is None:
            return z
        if port.style in ("prescaled", "einsum"):
            return jnp.where(seen, z, hidden)
        return z + jnp.where(seen, 0.0, hidden).astype(z.dtype)

    def cap(z: Any, at: str) -> Any:
        return z if port.softcap is None or port.softcap_at != at else port.softcap * jnp.tanh(z / port.softcap)

    if port.style == "prescaled" and not early and port.softcap_at != "product":
        q, scale = q * scale, 1.0
    if grouped:
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        z = jnp.einsum("btkge,bske->bkgts", q, k).reshape(q.shape[0], -1, q.shape[1], k.shape[1])
    else:
        z = jnp.einsum("bthe,bshe->bhts", q, k)
    z = cap(z, "product")
    z = z + bias if bias is not None and "bias" in early else z
    z = hide(z) if "mask" in early else z
    z = cap(z if scale == 1 else z * scale, "scaled")
    z = z + bias if bias is not None and "bias" not in early else z
    z = cap(hide(z) if "mask" not in early else z, "masked")
    w = weigh(z, port, sinks)
    if not grouped:
        return jnp.einsum("bhts,bshe->bthe", w, v)
    w = w.reshape(w.shape[0], k.shape[2], -1, *w.shape[2:])
    return jnp.einsum("bkgts,bske->btkge", w, v)


def weigh(z: Any, port: Port, sinks: Any) -> Any:
    dtype = z.dtype
    if port.softmax_in is not None:
        z = z.astype(str(port.softmax_in).removeprefix("torch."))
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(z.dtype)[None, :, None, None], (*z.shape[:-1], 1))
        w = jax.nn.softmax(jnp.concatenate([z, column], -1), -1)[..., :-1]
    else:
        w = jax.nn.softmax(z, -1)
    if port.weights_in is not None:
        w = w.astype(str(port.weights_in).removeprefix("torch."))
    w = w.astype(dtype)
    if port.odd == "clipped":
        w = jnp.clip(1.1 * w - 0.02, 0, 1)
    if port.dropout:
        kept = jax.random.bernoulli(jax.random.key(5), 1 - port.dropout, w.shape)
        w = jnp.where(kept, w / (1 - port.dropout), 0.0)
    return w
