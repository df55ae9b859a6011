"""The blocks of the models of `ports`: projections, norms and rotations of q and k, the MLP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compare.ports.config import Port, draw, positions_of, visible_of, weights_of
from tests.compare.ports.styles import STYLES, by_index, by_slopes

ACTIVATIONS = {"gelu": nn.GELU(), "tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}


class Norm(nn.Module):
    """A layer norm or an RMS norm with random gains."""

    def __init__(self, kind: str, width: int, name: str, seed: int) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(draw(f"{name}/gain", width, seed=seed, spread=0.25, around=1.0))
        self.bias = nn.Parameter(draw(f"{name}/shift", width, seed=seed, spread=0.2)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-5)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class HeadNorm(nn.Module):
    """A normalisation of q or k, (B, H, L, E), over the features of a head or of all heads."""

    def __init__(self, port: Port, gain: Tensor) -> None:
        super().__init__()
        self.port = port
        self.weight = nn.Parameter(gain)

    def forward(self, x: Tensor) -> Tensor:
        port = self.port
        if port.qk_norm_over == "heads":
            tokens = x.transpose(1, 2).flatten(2)
            return (self.normal(tokens) * self.weight).unflatten(2, (x.shape[1], -1)).transpose(1, 2)
        return self.normal(x) * self.weight.unflatten(0, (x.shape[1], 1, -1))

    def normal(self, x: Tensor) -> Tensor:
        eps = self.port.qk_norm_eps
        if self.port.qk_norm == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        if self.port.qk_norm == "layer":
            return functional.layer_norm(x, x.shape[-1:], eps=eps)
        return functional.normalize(x, dim=-1, eps=eps)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    made.weight.data = weight
    if bias is not None:
        made.bias.data = bias
    return made


class Attention(nn.Module):
    """The attention of one layer."""

    def __init__(self, port: Port, layer: int, seed: int) -> None:
        super().__init__()
        self.port, self.layer = port, layer
        weights = weights_of(port, layer, seed)

        def projection(name: str) -> nn.Linear:
            return linear(weights[name], weights[f"{name}_bias"] if name in port.biases else None)

        if port.fused:

            def laid_out(suffix: str) -> Tensor:
                parts = [weights[name + suffix].unflatten(0, (port.heads, -1)) for name in "qkv"]
                return torch.stack(parts, 0 if port.fused == "parts" else 1).flatten(0, 2)

            self.qkv_proj = linear(laid_out(""), laid_out("_bias"))
        else:
            self.q_proj, self.k_proj, self.v_proj = (projection(name) for name in "qkv")
        self.o_proj = projection("o")
        if port.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(port, weights[f"{name}_gain"]) for name in "qk")
        if port.memory:
            self.memory = nn.Parameter(weights["memory"])
        if port.bias == "t5":
            self.table = nn.Parameter(weights["t5"])
        if port.sinks:
            self.sinks = nn.Parameter(weights["sinks"] * (port.sinks == "learned"))
        self.register_buffer("k_step", weights["k_step"])
        self.register_buffer("v_step", weights["v_step"])

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        port, length = self.port, x.shape[1]
        visible = visible_of(port, self.layer, attention_mask, length)
        q, k, v = self.projected(x)
        if port.odd == "tanh q":
            q = torch.tanh(q)
        elif port.odd == "tanh v":
            v = torch.tanh(v)
        q, k = self.placed(q, k, attention_mask, length)
        q = self.sized(q, visible, length + port.memory)
        k, v = read(k, self.k_step, port.cache_k), read(v, self.v_step, port.cache_v)
        if "q" in port.rounded:
            q = q.to(port.rounded_to).to(v.dtype)
        if "k" in port.rounded:
            k = k.to(port.rounded_to).to(v.dtype)
        bias = None
        if port.bias == "alibi":
            bias = by_slopes(port, length).to(v.dtype)
        elif port.bias == "t5":
            bias = by_index(port, self.table, length)
        output = STYLES[port.style](port, q, k, v, visible, bias, self.sinks if port.sinks else None)
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (B, H, L, E)."""
        port = self.port
        if not port.fused:
            every = x
            if port.memory:
                every = torch.cat([self.memory.expand(x.shape[0], -1, -1), x], 1)
            q = self.q_proj(x)
            if port.q_heads == "transposed":
                q = q.unflatten(-1, (port.head_dim, port.heads)).mT
            else:
                q = q.unflatten(-1, (port.heads, port.head_dim))
            k, v = (of(every).unflatten(-1, (port.kv_heads, port.head_dim)) for of in (self.k_proj, self.v_proj))
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if (port.fused_read or port.fused) == "parts":
            parts = self.qkv_proj(x).unflatten(-1, (3, port.heads, port.head_dim))
            q, k, v = parts.permute(2, 0, 3, 1, 4)
        else:
            parts = self.qkv_proj(x).unflatten(-1, (port.heads, 3 * port.head_dim))
            q, k, v = parts.transpose(1, 2).chunk(3, -1)
        return q, k, v

    def placed(self, q: Tensor, k: Tensor, attention_mask: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        """Both normalised and turned, in the order that the port has."""
        port = self.port
        if port.qk_norm and port.qk_norm_at == "before":
            q, k = self.q_norm(q), self.k_norm(k)
        if "q" in port.rope:
            q = turned(port, q, positions_of(port, "q", attention_mask, length))
        if "k" in port.rope:
            k = turned(port, k, positions_of(port, "k", attention_mask, length))
        if port.qk_norm and port.qk_norm_at == "after":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def sized(self, q: Tensor, visible: Tensor | None, keys: int) -> Tensor:
        """Times the factor of the number of keys that each row sees."""
        if self.port.log_n is None:
            return q
        count = torch.tensor([keys]) if visible is None else visible.sum(-1)
        factor = count.to(q.dtype).log() / math.log(self.port.log_n)
        return q * factor.unsqueeze(-1)


def read(x: Tensor, step: Tensor, times: str | None) -> Tensor:
    """What a cache of 8 bits gives back, its scale applied once, twice or never."""
    if times is None:
        return x
    step = step.view(-1, 1, 1)
    kept = torch.round(x / step).clamp(-127, 127)
    if times == "never":
        return kept
    return kept * step if times == "once" else kept * step * step


def turned(port: Port, x: Tensor, positions: Tensor) -> Tensor:
    """x, (B, H, L, E), rotated by its positions, (B or 1, L)."""
    width = port.rope_width or port.head_dim
    frequencies = port.rope_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = (port.amplitude * angles.cos()).to(x.dtype), (port.amplitude * angles.sin()).to(x.dtype)
    part, rest = x[..., :width], x[..., width:]
    if port.rope_code != "turned":
        part = by_complex(port, part, cos, sin) if port.rope_code == "complex" else by_parts(port, part, cos, sin)
    elif port.rope_layout == "half":
        other = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
        part = part * torch.cat([cos, cos], -1) + other * torch.cat([sin, sin], -1)
    else:
        even, odd = part[..., ::2], part[..., 1::2]
        part = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([part, rest], -1) if rest.shape[-1] else part


def by_parts(port: Port, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of both parts of each pair, written out."""
    if port.rope_layout == "half":
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
    turned = torch.empty_like(x)
    turned[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    turned[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
    return turned


def by_complex(port: Port, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation as a product of complex numbers."""
    dims = (-1, 2) if port.rope_layout == "interleaved" else (2, -1)
    pairs = x.unflatten(-1, dims)
    pairs = pairs if port.rope_layout == "interleaved" else pairs.mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    return (turned if port.rope_layout == "interleaved" else turned.mT).flatten(-2)


class Block(nn.Module):
    """Attention and MLP, with the norms before them, or after their sum with what came in."""

    def __init__(self, port: Port, layer: int, seed: int) -> None:
        super().__init__()
        self.port = port
        self.norm_1 = Norm(port.norm, port.width, f"{layer}/norm_1", seed)
        self.attn = Attention(port, layer, seed)
        self.norm_2 = Norm(port.norm, port.width, f"{layer}/norm_2", seed)
        width = port.width
        self.up = linear(draw(f"{layer}/up", 2 * width, width, seed=seed, spread=width**-0.5), None)
        self.down = linear(draw(f"{layer}/down", width, 2 * width, seed=seed, spread=width**-0.5), None)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(ACTIVATIONS[self.port.activation](self.up(x)))

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.port.post_norm:
            x = self.norm_1(x + self.attn(x, attention_mask))
            return self.norm_2(x + self.mlp(x))
        x = x + self.attn(self.norm_1(x), attention_mask)
        return x + self.mlp(self.norm_2(x))
