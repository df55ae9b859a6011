"""What the attention of a `Port` must give, in float64 and row by row: nothing of it is shared with the models.

From `config` it takes the drawn weights alone.
"""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor
from torch.nn import functional

from tests.compare.ports.config import LENGTH, Port, weights_of
from tests.compare.ports.styles import DROPPED


def reference(port: Port, layer: int, x: Tensor, attention_mask: Tensor | None, seed: int = 0) -> Tensor:
    """The weights times v of all heads, (B, L, H, E), of what comes into the attention of a layer, (B, L, D)."""
    weights = weights_of(port, layer, seed)
    x = x.double()
    batch, length, _ = x.shape
    extra = port.memory
    everything = torch.cat([weights["memory"].expand(batch, -1, -1), x], 1)
    group = port.heads // port.kv_heads
    heads = []
    vectors = {name: _heads(port, weights, name, x if name == "q" else everything) for name in "qkv"}
    bad = {"tanh q": "q", "tanh v": "v"}.get(port.odd)
    if bad:
        vectors[bad] = vectors[bad].tanh()
    for name in "qk":
        if port.qk_norm and port.qk_norm_at == "before":
            vectors[name] = _normal(port, vectors[name], weights[f"{name}_gain"])
        if name in port.rope:
            vectors[name] = _turned(port, vectors[name], name, attention_mask, extra)
        if port.qk_norm and port.qk_norm_at == "after":
            vectors[name] = _normal(port, vectors[name], weights[f"{name}_gain"])
    for name, times in (("k", port.cache_k), ("v", port.cache_v)):
        vectors[name] = _from_cache(vectors[name], weights[f"{name}_step"], times)
    for name in port.rounded:
        vectors[name] = vectors[name].to(port.rounded_to).double()
    seen = [[_sees(port, layer, b, i, length + extra, attention_mask) for i in range(length)] for b in range(batch)]
    kept = _kept(port, batch, length, length + extra)
    for head in range(port.heads):
        kv = head // group if port.groups == "interleave" else head % port.kv_heads
        k, v = vectors["k"][:, kv], vectors["v"][:, kv]
        rows = [
            _row(port, weights, head, i, vectors["q"][b, head, i], k[b], v[b], seen[b][i], kept[b, head, i])
            for b in range(batch)
            for i in range(length)
        ]
        heads.append(torch.stack(rows).unflatten(0, (batch, length)))
    return torch.stack(heads, 2)


def _heads(port: Port, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Projected, (B, H, L, E), from the features that each head gets."""
    count, size = port.heads if name == "q" else port.kv_heads, port.head_dim
    if port.fused and (port.fused_read or port.fused) != port.fused:
        every = [x @ weights[n].T + weights[f"{n}_bias"] for n in "qkv"]  # (B, L, H E) each
        split = [part.unflatten(-1, (port.heads, size)) for part in every]
        if port.fused == "parts":
            flat = torch.cat(every, -1)
            chosen = [flat[..., (3 * h + "qkv".index(name)) * size :][..., :size] for h in range(count)]
        else:
            flat = torch.cat([split[n][..., h, :] for h in range(count) for n in range(3)], -1)
            chosen = [flat[..., ("qkv".index(name) * count + h) * size :][..., :size] for h in range(count)]
        return torch.stack(chosen, 1)
    flat = x @ weights[name].T + weights[f"{name}_bias"]
    if name == "q" and port.q_heads == "transposed":
        return torch.stack([flat[..., h::count] for h in range(count)], 1)
    return torch.stack([flat[..., h * size : (h + 1) * size] for h in range(count)], 1)


def _normal(port: Port, x: Tensor, gain: Tensor) -> Tensor:
    dims = (1, 3) if port.qk_norm_over == "heads" else (3,)
    shift = x.mean(dims, keepdim=True) if port.qk_norm == "layer" else torch.zeros(())
    square = (x - shift).square()
    if port.qk_norm == "l2":
        length = square.sum(dims, keepdim=True).sqrt().clamp(min=port.qk_norm_eps)
    else:
        length = (square.mean(dims, keepdim=True) + port.qk_norm_eps).sqrt()
    return (x - shift) / length * gain.reshape(1, x.shape[1], 1, -1)


def _turned(port: Port, x: Tensor, name: str, attention_mask: Tensor | None, extra: int) -> Tensor:
    width = port.rope_width or port.head_dim
    half, turned = width // 2, x.clone()
    for b in range(x.shape[0]):
        reset = port.padded == "left" and name in port.resets and attention_mask is not None
        first = int((attention_mask[b] == 0).sum()) if reset else 0
        for i in range(x.shape[2]):
            token = i - extra if name == "k" else i  # negative: of the memory
            place = extra + (token if token < 0 else max(token - first, 0))
            place += port.shift_q if name == "q" else port.shift_k
            for pair in range(half):
                one, two = (pair, pair + half) if port.rope_layout == "half" else (2 * pair, 2 * pair + 1)
                turn = port.amplitude * cmath.exp(1j * place * port.rope_base ** (-pair / half))
                real, imaginary = x[b, :, i, one], x[b, :, i, two]
                turned[b, :, i, one] = real * turn.real - imaginary * turn.imag
                turned[b, :, i, two] = real * turn.imag + imaginary * turn.real
    return turned


def _from_cache(x: Tensor, step: Tensor, times: str | None) -> Tensor:
    if times is None:
        return x
    by = step[None, :, None, None]
    return (x / by).round().clamp(-127, 127) * by ** {"never": 0, "once": 1, "twice": 2}[times]


def _sees(port: Port, layer: int, b: int, i: int, keys: int, attention_mask: Tensor | None) -> Tensor:
    """(S,) bool."""
    length, extra = keys - port.memory, port.memory
    tokens = [] if attention_mask is None else attention_mask[b].tolist()
    own = i + (extra if port.align == "lower" else 0)
    window = port.windows[layer]
    seen = []
    for j in range(keys):
        visible = j <= own + port.offset if port.causal else True
        visible = visible and (window is None or abs(own - j) < window)
        if tokens and port.padding != "lost" and j >= extra:
            token = j - extra if port.padding == "kept" else length - 1 - (j - extra)
            visible = visible and tokens[token] == 1
        seen.append(visible)
    if not any(seen):
        seen[own] = True
    return torch.tensor(seen)


def _cap(port: Port, z: Tensor, at: str) -> Tensor:
    if port.softcap is None or port.softcap_at != at:
        return z
    return port.softcap * (z / port.softcap).tanh()


def _row(
    port: Port,
    weights: dict[str, Tensor],
    head: int,
    i: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    kept: Tensor,
) -> Tensor:
    """Output of one row of one head, (E,)."""
    keys = k.shape[0]
    distance = i + port.memory - torch.arange(keys)
    z = k @ q
    if port.log_n is not None:
        z = z * math.log(int(seen.sum())) / math.log(port.log_n)
    z = _cap(port, _cap(port, z, "product") * port.factor, "scaled")
    bias = torch.zeros(keys, dtype=torch.float64)
    if port.bias == "alibi":
        bias = -port.bias_steepness * 2.0 ** (-8 * (head + 1) / port.heads) * distance.abs().double()
    elif port.bias == "t5":
        bias = port.bias_steepness * weights["t5"][head, distance + LENGTH]
    z = z + bias * (port.factor if "bias" in port.before_scale else 1)
    if port.fill is None or abs(port.fill) >= 1e4:
        z[~seen] = -torch.inf
    else:
        fill = port.fill * (port.factor if "mask" in port.before_scale else 1)
        replaces = port.style in ("prescaled", "einsum")
        z[~seen] = fill if replaces else z[~seen] + fill
    z = _cap(port, z, "masked")
    if port.softmax_in is not None:
        z = z.to(port.softmax_in).double()
    total = z.exp().sum()
    if port.sinks:
        total = total + (weights["sinks"][head].exp() if port.sinks == "learned" else 1)
    p = z.exp() / total
    for dtype in (port.softmax_in, port.weights_in):
        p = p if dtype is None else p.to(dtype).double()
    if port.odd == "clipped":
        p = (1.1 * p - 0.02).clamp(0, 1)
    return (p * kept) @ v


def _kept(port: Port, batch: int, rows: int, keys: int) -> Tensor:
    """What dropout multiplies the weights by, (B, H, L, S)."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(DROPPED)
        return functional.dropout(torch.ones(batch, port.heads, rows, keys, dtype=torch.float64), port.dropout)
