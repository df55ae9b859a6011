"""Styles with rotations, biases, norms and caps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.attentions.eager import attend, product
from tests.attentions.styles import CAUSAL, DIM, ROOT, B, E, H, L, Style, heads, rotary, turned

PART = 6  # rotated channels of a partial rotation
ROPE = {"rope": True, "formula": "softmax(0.25 * rope(q).rope(k))"}
DISTANCE = torch.arange(L)[None, :] - torch.arange(L)[:, None]  # j - i
SLOPES = 2.0 ** -torch.arange(1, H + 1).float().view(H, 1, 1)
ALIBI = -SLOPES * DISTANCE.abs()


# -- rotations ---------------------------------------------------------------------------------------------------------


def half_split(x: Tensor, amplitude: float = 1.0, width: int = E) -> Tensor:
    """As Llama writes it: q cos + rotate_half(q) sin."""
    cos, sin = (torch.cat([t, t], -1).to(x.dtype) for t in rotary(width, amplitude))
    part, rest = x[..., :width], x[..., width:]
    a, b = part.chunk(2, -1)
    part = part * cos + torch.cat([-b, a], -1) * sin
    return part if width == E else torch.cat([part, rest], -1)


def interleaved(x: Tensor) -> Tensor:
    """As GPT-J writes it: every second channel."""
    cos, sin = (t.repeat_interleave(2, -1).to(x.dtype) for t in rotary(E))
    return x * cos + torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2) * sin


def halves(x: Tensor) -> Tensor:
    """Both halves turned apart and put together again."""
    cos, sin = (t.to(x.dtype) for t in rotary(E))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def as_complex(x: Tensor) -> Tensor:
    """As Llama 4 and DeepSeek write it: complex multiplication."""
    cos, sin = rotary(E)
    points = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(points * torch.complex(cos, sin).to(torch.complex64)).flatten(-2).to(x.dtype)


def in_slices(x: Tensor) -> Tensor:
    """A partial rotation, assembled slice by slice in an empty tensor."""
    y = torch.empty_like(x)
    y[..., :PART] = half_split(x, width=PART)[..., :PART]
    y[..., PART:] = x[..., PART:]
    return y


def roped(turn: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    return attend(lambda m, q, k: product(turn(q), turn(k)) * ROOT)


def two_parts(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Like DeepSeek: a part without and a rotated part with positions, from two projections each."""
    q = torch.cat([heads(m.q_plain(x), E - PART), turned_as(x, heads(m.q_turned(x), PART))], -1)
    shared = turned_as(x, m.k_turned(x)[:, None]).expand(B, H, L, PART)
    return q, torch.cat([heads(m.k_plain(x), E - PART), shared], -1), heads(m.v(x), E)


def turned_as(x: Tensor, part: Tensor) -> Tensor:
    """The rotation of the whole part, in the dtype of `x`."""
    cos, sin = (torch.cat([t, t], -1).to(x.dtype) for t in rotary(PART))
    a, b = part.chunk(2, -1)
    return part * cos + torch.cat([-b, a], -1) * sin


def two_projections(m: Any) -> None:
    m.q_plain, m.q_turned = nn.Linear(DIM, H * (E - PART)), nn.Linear(DIM, H * PART)
    m.k_plain, m.k_turned = nn.Linear(DIM, H * (E - PART)), nn.Linear(DIM, PART)
    m.v = nn.Linear(DIM, H * E)


# -- biases ------------------------------------------------------------------------------------------------------------


def table(m: Any) -> None:
    m.bias = nn.Parameter(torch.randn(H, L, L))


def buckets(m: Any) -> None:
    m.buckets = nn.Embedding(5, H)


def bucket_bias(m: Any) -> Tensor:
    return m.buckets(DISTANCE.clamp(-2, 2) + 2).permute(2, 0, 1)


def relative_keys(m: Any) -> None:
    m.relative = nn.Embedding(2 * L - 1, E)


def shaw(m: Any, q: Tensor) -> Tensor:
    return torch.einsum("bhid,ijd->bhij", q, m.relative(DISTANCE + L - 1))


def disentangled(m: Any) -> None:
    m.positions = nn.Embedding(2 * L - 1, DIM)


def position_terms(m: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Content to position and position to content, as DeBERTa gathers them."""
    where = m.positions(torch.arange(2 * L - 1))
    key, query = (heads(f(where)[None], E) for f in (m.k, m.q))
    index = (DISTANCE + L - 1).expand(B, H, L, L)
    c2p = torch.gather(q @ key.transpose(-1, -2), -1, index)
    p2c = torch.gather(k @ query.transpose(-1, -2), -1, (-DISTANCE + L - 1).T.expand(B, H, L, L)).transpose(-1, -2)
    return c2p, p2c


# -- norms -------------------------------------------------------------------------------------------------------------


def l2(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1)


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def normed(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """The same kind of norm on q and on k; gains unlike one."""

    def setup(m: Any) -> None:
        m.norm = make()
        for gain in m.norm.parameters():
            nn.init.uniform_(gain, 0.5, 1.5)

    return {
        "setup": setup,
        "attend": attend(lambda m, q, k: product(m.norm(q), m.norm(k)) * ROOT),
        "turn": lambda m, x: m.norm(x),
    }


def swin(m: Any) -> None:
    m.logit_scale = nn.Parameter(torch.linspace(1.0, 3.0, H).view(H, 1, 1))


def capped(cap: float, z: Tensor) -> Tensor:
    return torch.tanh(z / cap) * cap


POSITIONS: dict[str, Style] = {
    "rope_half_split": Style(roped(half_split), turn=lambda m, x: turned(x), **ROPE),
    "rope_interleaved": Style(roped(interleaved), turn=lambda m, x: turned(x, interleaved=True), **ROPE),
    "rope_halves": Style(roped(halves), turn=lambda m, x: turned(x), **ROPE),
    "rope_complex": Style(roped(as_complex), turn=lambda m, x: turned(x, interleaved=True), **ROPE),
    "rope_partial": Style(roped(lambda x: half_split(x, width=PART)), turn=lambda m, x: turned(x, width=PART), **ROPE),
    "rope_in_slices": Style(roped(in_slices), turn=lambda m, x: turned(x, width=PART), **ROPE),
    "rope_after_scale": Style(
        attend(lambda m, q, k: product(half_split(q * ROOT), half_split(k))), turn=lambda m, x: turned(x), **ROPE
    ),
    "rope_before_scale_on_q": Style(
        attend(lambda m, q, k: product(half_split(q) * ROOT, half_split(k))), turn=lambda m, x: turned(x), **ROPE
    ),
    "rope_yarn": Style(
        roped(lambda x: half_split(x, amplitude=1.2)),
        "softmax(0.36 * rope(q).rope(k))",
        scale=ROOT * 1.44,
        turn=lambda m, x: turned(x),
        rope=True,
    ),
    "rope_sdpa_causal": Style(
        lambda m, q, k, v: functional.scaled_dot_product_attention(half_split(q), half_split(k), v, is_causal=True),
        "softmax(0.25 * rope(q).rope(k) + causal)",
        kind="sdpa",
        turn=lambda m, x: turned(x),
        rope=True,
        mask="causal",
        form="implicit",
        visible=CAUSAL,
    ),
    "two_projections": Style(
        attend(lambda m, q, k: product(q, k) * ROOT),
        setup=two_projections,
        project=two_parts,
        dense_project=two_parts,
        **ROPE,
    ),
    "additive_bias": Style(
        attend(lambda m, q, k: product(q, k) * ROOT + m.bias),
        "softmax(0.25 * q.k + bias)",
        bias="bias",
        setup=table,
        addend=lambda m: m.bias,
    ),
    "alibi": Style(
        attend(lambda m, q, k: product(q, k) * ROOT + ALIBI),
        "softmax(0.25 * q.k + alibi)",
        bias="alibi",
        addend=lambda m: ALIBI,
    ),
    "t5_buckets": Style(
        attend(lambda m, q, k: product(q, k) + bucket_bias(m)),
        "softmax(q.k + relative)",
        scale=1.0,
        bias="relative",
        setup=buckets,
        addend=bucket_bias,
    ),
    "alibi_and_causal": Style(
        attend(lambda m, q, k: (product(q, k) * ROOT + ALIBI).masked_fill(~CAUSAL, -math.inf)),
        "softmax(0.25 * q.k + alibi + causal)",
        bias="alibi",
        addend=lambda m: ALIBI,
        mask="causal",
        form="bool",
        visible=CAUSAL,
    ),
    "shaw_relative": Style(
        attend(lambda m, q, k: (product(q, k) + shaw(m, q)) * ROOT),
        "softmax(0.25 * (q.k + relative))",
        score="relative",
        terms=2,
        setup=relative_keys,
        content=lambda m, q, k: shaw(m, q) * ROOT,
        bias="relative",
    ),
    "disentangled": Style(
        attend(lambda m, q, k: product(q, k / math.sqrt(3 * E)) + sum(position_terms(m, q, k)) / math.sqrt(3 * E)),
        "softmax(0.1443 * q.k + disentangled)",
        scale=(3 * E) ** -0.5,
        score="disentangled",
        terms=3,
        setup=disentangled,
        content=lambda m, q, k: sum(position_terms(m, q, k)) / math.sqrt(3 * E),
        bias="disentangled",
    ),
    "l2": Style(
        attend(lambda m, q, k: product(l2(q), l2(k)) * 10),
        "softmax(10 * l2(q).l2(k))",
        scale=10.0,
        norm="l2",
        score="cosine",
        turn=lambda m, x: l2(x),
    ),
    "l2_learned": Style(
        attend(lambda m, q, k: product(l2(q), l2(k)) * m.logit_scale.clamp(max=math.log(100)).exp()),
        "softmax(exp(logit_scale)[h] * l2(q).l2(k))",
        scale=lambda m: m.logit_scale.clamp(max=math.log(100)).exp(),
        setup=swin,
        norm="l2",
        score="cosine",
        turn=lambda m, x: l2(x),
    ),
    "rms": Style(
        attend(lambda m, q, k: product(rms(q), rms(k)) * ROOT),
        "softmax(0.25 * rms(q).rms(k))",
        norm="rms",
        turn=lambda m, x: rms(x),
    ),
    "rms_gains": Style(norm="rms", formula="softmax(0.25 * rms(q).rms(k))", **normed(lambda: nn.RMSNorm(E))),
    "layer_norm": Style(
        norm="layer",
        formula="softmax(0.25 * layer(q).layer(k))",
        **normed(lambda: nn.LayerNorm(E, elementwise_affine=False)),
    ),
    "layer_norm_gains": Style(
        norm="layer", formula="softmax(0.25 * layer(q).layer(k))", **normed(lambda: nn.LayerNorm(E))
    ),
    "rope_then_rms": Style(
        attend(lambda m, q, k: product(rms(half_split(q)), rms(half_split(k))) * ROOT),
        "softmax(0.25 * rms(rope(q)).rms(rope(k)))",
        norm="rms",
        rope=True,
        turn=lambda m, x: rms(turned(x)),
    ),
    "rope_yarn_then_l2": Style(  # the norm takes the amplitude away
        attend(lambda m, q, k: product(*(l2(half_split(x, amplitude=1.2)) for x in (q, k))) * 10),
        "softmax(10 * l2(rope(q)).l2(rope(k)))",
        scale=10.0,
        norm="l2",
        score="cosine",
        rope=True,
        turn=lambda m, x: l2(turned(x)),
    ),
    "rms_then_rope": Style(
        attend(lambda m, q, k: product(half_split(rms(q)), half_split(rms(k))) * ROOT),
        "softmax(0.25 * rope(rms(q)).rope(rms(k)))",
        norm="rms",
        rope=True,
        turn=lambda m, x: turned(rms(x)),
    ),
    "softcap": Style(
        attend(lambda m, q, k: capped(2.0, product(q, k) * ROOT)), "softmax(2 * tanh(0.25 * q.k / 2))", cap=2.0
    ),
    "softcap_causal": Style(
        attend(lambda m, q, k: capped(2.0, product(q * ROOT, k)).masked_fill(~CAUSAL, -math.inf)),
        "softmax(2 * tanh(0.25 * q.k / 2) + causal)",
        cap=2.0,
        mask="causal",
        form="bool",
        visible=CAUSAL,
    ),
}
