"""One attention in PyTorch and ported to MLX, in many kinds: both sides of a right port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.optional import optional

mx, mnn = optional("mlx.core"), optional("mlx.nn")

B, T, D, H, E = 2, 12, 64, 4, 16  # batch, tokens, width, heads, head dimension


@dataclass(frozen=True)
class Kind:
    """What an attention has.

    Attributes:
        kv: heads of keys and values.
        mask: "causal", "window" of 5 tokens, or "".
        rope: "half", "pairs" or "".
        cap: softcap of the logits; 0 for none.
        norm: whether q and k are normed.
        sinks: whether there is a learned sink a head.
        slope: slope of ALiBi; 0 for none.
        latent: whether keys and values come from one vector, and a part of the channels is rotated.
        patches: whether the inputs are images, of which a convolution makes tokens.
        cross: whether keys and values come from another sequence.
        dtype: dtype of parameters and inputs.
    """

    kv: int = H
    mask: str = "causal"
    rope: str = ""
    cap: float = 0.0
    norm: bool = False
    sinks: bool = False
    slope: float = 0.0
    latent: bool = False
    patches: bool = False
    cross: bool = False
    dtype: torch.dtype = torch.float32


PLAIN, CAUSAL = "softmax(0.25 * q.k)", "softmax(0.25 * q.k + causal)"
ROPE = "softmax(0.25 * rope(q).rope(k) + causal)"
KINDS: dict[str, tuple[Kind, str]] = {
    "plain": (Kind(mask=""), PLAIN),
    "causal": (Kind(), CAUSAL),
    "grouped": (Kind(kv=2), CAUSAL),
    "one_key_head": (Kind(kv=1), CAUSAL),
    "window": (Kind(mask="window"), "softmax(0.25 * q.k + window)"),
    "rope_half": (Kind(rope="half", kv=2), ROPE),
    "rope_pairs": (Kind(rope="pairs"), ROPE),
    "softcap": (Kind(cap=5.0), "softmax(5 * tanh(0.25 * q.k / 5) + causal)"),
    "qk_norm": (Kind(norm=True, rope="half"), "softmax(0.25 * rope(rms(q)).rope(rms(k)) + causal)"),
    "sinks": (Kind(sinks=True), "softmax(0.25 * q.k + causal + sinks)"),
    "alibi": (Kind(slope=0.3), "softmax(0.25 * q.k + alibi + causal)"),
    "latent": (Kind(latent=True), ROPE),
    "vision": (Kind(patches=True, mask=""), PLAIN),
    "cross": (Kind(cross=True, mask=""), PLAIN),
    "bfloat16": (Kind(rope="half", dtype=torch.bfloat16), ROPE),
}


def turned(x: Tensor, layout: str) -> Tensor:
    """Return x (B, H, T, E) with pairs of channels turned by the position."""
    n, e = x.shape[-2:]
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, e, 2) / e)
    c, s = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if layout == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)


class Original(nn.Module):
    """The attention in PyTorch."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.q, self.o = nn.Linear(D, H * E, bias=False), nn.Linear(H * E, D, bias=False)
        if kind.latent:
            self.down, self.turn = nn.Linear(D, 24, bias=False), nn.Linear(D, E // 2, bias=False)
            self.k, self.v = nn.Linear(24, H * E // 2, bias=False), nn.Linear(24, H * E, bias=False)
        else:
            self.k, self.v = (nn.Linear(D, kind.kv * E, bias=False) for _ in range(2))
        if kind.norm:
            self.q_norm, self.k_norm = nn.RMSNorm(E, 1e-6), nn.RMSNorm(E, 1e-6)
        if kind.sinks:
            self.sinks = nn.Parameter(torch.randn(H))
        if kind.patches:
            self.patch = nn.Conv2d(3, D, 4, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(2)
        self.eval().to(kind.dtype)

    def heads(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, (B, heads, T, E)."""
        kind = self.kind
        q = self.q(x).unflatten(-1, (H, E)).transpose(1, 2)
        if kind.latent:
            latent = self.down(x)
            k = self.k(latent).unflatten(-1, (H, E // 2)).transpose(1, 2)
            v = self.v(latent).unflatten(-1, (H, E)).transpose(1, 2)
            shared = turned(self.turn(x)[:, None], "half").expand(-1, H, -1, -1)
            return torch.cat([q[..., : E // 2], turned(q[..., E // 2 :], "half")], -1), torch.cat([k, shared], -1), v
        k, v = (part(memory).unflatten(-1, (kind.kv, E)).transpose(1, 2) for part in (self.k, self.v))
        if kind.norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if kind.rope:
            q, k = turned(q, kind.rope), turned(k, kind.rope)
        return q, *(part.repeat_interleave(H // kind.kv, 1) for part in (k, v))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        kind = self.kind
        if kind.patches:
            x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.heads(x, x if memory is None else memory)
        s = 0.25 * q @ k.mT
        s = kind.cap * torch.tanh(s / kind.cap) if kind.cap else s
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        s = s - kind.slope * (rows - keys).abs() if kind.slope else s
        if kind.mask:
            seen = (rows >= keys) & (rows - keys < (5 if kind.mask == "window" else T))
            s = s.masked_fill(~seen, -torch.inf)
        if kind.sinks:
            s = torch.cat([s, self.sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
        w = functional.softmax(s, -1, dtype=torch.float32).to(v.dtype)
        y = (w[..., :-1] if kind.sinks else w) @ v
        return self.o(y.transpose(1, 2).flatten(2))


def port(kind: Kind, model: Original) -> Any:
    """Return the attention as a module of MLX, with the weights of the model in PyTorch."""

    class Attention(mnn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = mnn.Linear(D, H * E, bias=False), mnn.Linear(H * E, D, bias=False)
            if kind.latent:
                self.down, self.turn = mnn.Linear(D, 24, bias=False), mnn.Linear(D, E // 2, bias=False)
                self.k, self.v = mnn.Linear(24, H * E // 2, bias=False), mnn.Linear(24, H * E, bias=False)
            else:
                self.k, self.v = (mnn.Linear(D, kind.kv * E, bias=False) for _ in range(2))
            if kind.norm:
                self.q_norm, self.k_norm = mnn.RMSNorm(E, 1e-6), mnn.RMSNorm(E, 1e-6)
            if kind.sinks:
                self.sinks = mx.zeros(H)
            if kind.patches:
                self.patch = mnn.Conv2d(3, D, 4, 4)

        def heads(self, x: Any, memory: Any) -> Any:
            def split(y: Any, count: int) -> Any:
                return y.reshape(*y.shape[:2], count, -1).transpose(0, 2, 1, 3)

            def turn(y: Any) -> Any:
                pairs = kind.rope == "pairs"
                return mx.fast.rope(y, y.shape[-1], traditional=pairs, base=10000.0, scale=1.0, offset=0)

            q = split(self.q(x), H)
            if kind.latent:
                latent = self.down(x)
                k, v = split(self.k(latent), H), split(self.v(latent), H)
                shared = mx.broadcast_to(turn(self.turn(x)[:, None]), (*k.shape[:3], E // 2))
                return (
                    mx.concatenate([q[..., : E // 2], turn(q[..., E // 2 :])], -1),
                    mx.concatenate([k, shared], -1),
                    v,
                )
            k, v = split(self.k(memory), kind.kv), split(self.v(memory), kind.kv)
            if kind.norm:
                q, k = self.q_norm(q), self.k_norm(k)
            return (turn(q), turn(k), v) if kind.rope else (q, k, v)

        def __call__(self, x: Any, memory: Any = None) -> Any:
            if kind.patches:
                x = self.patch(x.transpose(0, 2, 3, 1)).flatten(1, 2)
            q, k, v = self.heads(x, x if memory is None else memory)
            rows, keys = mx.arange(q.shape[2])[:, None], mx.arange(k.shape[2])
            mask: Any = kind.mask or None
            if kind.mask == "window":
                mask = (rows >= keys) & (rows - keys < 5)
            if kind.slope:
                mask = mx.where(rows >= keys, -kind.slope * mx.abs(rows - keys), -mx.inf)
            if kind.cap:
                s = kind.cap * mx.tanh((q * 0.25) @ k.swapaxes(2, 3) / kind.cap)
                y = mx.softmax(mx.where(rows >= keys, s, -mx.inf), -1) @ v
            else:
                sinks = self.sinks if kind.sinks else None
                y = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask, sinks=sinks)
            return self.o(y.transpose(0, 2, 1, 3).flatten(2))

    made = Attention()
    weights = [(name, mx.array(value.float().numpy())) for name, value in model.state_dict().items()]
    weights = [(name, value.transpose(0, 2, 3, 1) if value.ndim == 4 else value) for name, value in weights]
    made.load_weights(weights)
    if kind.dtype is torch.bfloat16:
        made.set_dtype(mx.bfloat16)
    return made


def inputs(kind: Kind) -> dict[str, Tensor]:
    """Return the inputs by name."""
    generator = torch.Generator().manual_seed(1)
    if kind.patches:
        return {"x": torch.randn(B, 3, 16, 16, generator=generator)}
    made = {"x": torch.randn(B, T, D, generator=generator).to(kind.dtype)}
    return made | ({"memory": torch.randn(B, 7, D, generator=generator)} if kind.cross else {})
