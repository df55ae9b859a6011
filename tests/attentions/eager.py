"""Styles of eager attention: the product, where the scale stands, what shape it has, masks, softmax and sinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.attentions.styles import CAUSAL, PADDING, ROOT, SPOTS, WINDOW, B, E, H, L, Style, autocast, heads

LOW = torch.finfo(torch.float32).min


def attend(logits: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    """Softmax over the last dimension and the value product around `logits`."""
    return lambda m, q, k, v: logits(m, q, k).softmax(-1) @ v


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2)


# -- the product -------------------------------------------------------------------------------------------------------


def by_bmm(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, L, E) for t in (q, k, v))
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * ROOT).softmax(-1), v).view(B, H, L, E)


def by_baddbmm(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, L, E) for t in (q, k, v))
    empty = torch.empty(B * H, L, L, dtype=q.dtype)
    z = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=ROOT)
    return torch.bmm(z.softmax(-1), v).view(B, H, L, E)


def by_biased_baddbmm(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, L, E) for t in (q, k, v))
    z = torch.baddbmm(m.bias.repeat(B, 1, 1), q, k.transpose(1, 2), alpha=ROOT)
    return torch.bmm(z.softmax(-1), v).view(B, H, L, E)


def einsum(equation: str, dim: int, then: str) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    """The product by `equation`, softmax over `dim`, the value product by `then`."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if equation.startswith("bi"):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        z = torch.einsum(equation, q, k) * ROOT
        y = torch.einsum(then, z.softmax(dim), v)
        return y.transpose(1, 2) if then.endswith("bihd") else y

    return attend


def key_operand_first(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.einsum("bhjd,bhid->bhij", k, q) * ROOT).softmax(-1) @ v


def transposed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys along the rows: k q^T, softmax down the columns."""
    return (k @ q.transpose(-1, -2) * ROOT).softmax(-2).transpose(-1, -2) @ v


# -- the scale ---------------------------------------------------------------------------------------------------------


def in_place_on_q(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.clone()
    q *= ROOT
    return product(q, k).softmax(-1) @ v


def in_place_on_logits(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = product(q, k)
    z.mul_(ROOT)
    return z.softmax(-1) @ v


def divided_in_place(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = product(q, k)
    z /= math.sqrt(E)
    return z.softmax(-1) @ v


def buffer(m: Any) -> None:
    m.register_buffer("scale", torch.tensor(ROOT))


def parameter(m: Any) -> None:
    m.gain = nn.Parameter(torch.tensor(0.3))


def per_head(m: Any) -> None:
    m.gain = nn.Parameter(torch.linspace(0.1, 0.4, H).view(H, 1, 1))


# -- masks -------------------------------------------------------------------------------------------------------------


def filled(visible: Tensor, fill: float) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    return attend(lambda m, q, k: (product(q, k) * ROOT).masked_fill(~visible, fill))


def added(visible: Tensor, fill: float) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    table = torch.zeros(visible.shape).masked_fill(~visible, fill)
    return attend(lambda m, q, k: product(q, k) * ROOT + table)


def masked_in_place(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = product(q * ROOT, k)
    z.masked_fill_(~CAUSAL, -math.inf)
    return z.softmax(-1) @ v


def two_masks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = torch.where(CAUSAL, product(q, k) * ROOT, LOW)
    return (z + torch.zeros(PADDING.shape).masked_fill(~PADDING, LOW)).softmax(-1) @ v


# -- softmax, sinks, mixing --------------------------------------------------------------------------------------------


def by_hand(shift: bool) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = product(q, k) * ROOT
        if shift:
            z = z - z.amax(-1, keepdim=True)
        e = z.exp()
        return e / e.sum(-1, keepdim=True) @ v

    return attend


def sink(m: Any) -> None:
    m.sink = nn.Parameter(torch.randn(H))


def with_sink(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = (product(q, k) * ROOT).masked_fill(~CAUSAL, -math.inf)
    z = torch.cat([z, m.sink.view(1, -1, 1, 1).expand(B, H, L, 1)], -1)
    z = z - z.max(-1, keepdim=True).values
    return z.softmax(-1)[..., :-1] @ v


def after_mixing(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (product(q, k) * ROOT).softmax(-1)
    return torch.einsum("bhij,hg->bgij", w, m.after) @ v


def cached(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All but the first three positions as one step after a cache of three."""
    k, v = (torch.cat([t[:, :, :3], t[:, :, 3:]], 2) for t in (k, v))
    q = q[:, :, 3:]
    z = product(q, k) * ROOT
    return z.masked_fill(~CAUSAL[3:], -math.inf).softmax(-1) @ v


# -- fused projections -------------------------------------------------------------------------------------------------


def fused(layout: str, kv: int = H) -> dict[str, Any]:
    """One linear layer for q, k, v: "thirds", "per_head" (H, 3, E) or "grouped" (KV, H / KV + 2, E)."""

    def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if layout == "thirds":
            q, k, v = (heads(part, E) for part in x.chunk(3, -1))
            return q, k, v
        if layout == "per_head":
            q, k, v = x.view(B, L, H, 3, E).permute(3, 0, 2, 1, 4)
            return q, k, v
        x = x.view(B, L, kv, H // kv + 2, E)
        q, k, v = x[:, :, :, :-2], x[:, :, :, -2], x[:, :, :, -1]
        return q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def setup(m: Any) -> None:
        m.qkv = nn.Linear(24, (H + 2 * kv) * E)

    def project(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(m.qkv(x))

    return {"setup": setup, "project": project, "dense_project": project, "kv_heads": kv}


def repeated(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    return product(q * ROOT, k).softmax(-1) @ v


def expanded(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t[:, :, None].expand(B, t.shape[1], H // t.shape[1], L, E).reshape(B, H, L, E) for t in (k, v))
    return (product(q, k) * ROOT).softmax(-1) @ v


def grouped_product(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries folded into their group; keys not repeated."""
    q = q.view(B, 2, H // 2, L, E)
    z = torch.einsum("bgrid,bgjd->bgrij", q, k) * ROOT
    return torch.einsum("bgrij,bgjd->bgrid", z.softmax(-1), v).reshape(B, H, L, E)


LOGITS = attend(lambda m, q, k: product(q, k) * ROOT)
GAIN = {"setup": parameter, "scale": lambda m: m.gain.view(1)}
PER_HEAD = {"setup": per_head, "scale": lambda m: m.gain}

EAGER: dict[str, Style] = {
    "matmul": Style(LOGITS),
    "bmm": Style(by_bmm),
    "baddbmm_alpha": Style(by_baddbmm),
    "baddbmm_bias": Style(
        by_biased_baddbmm,
        "softmax(0.25 * q.k + bias)",
        bias="bias",
        setup=lambda m: m.register_buffer("bias", torch.randn(H, L, L)),
        addend=lambda m: m.bias,
    ),
    "einsum_bhid_bhjd": Style(einsum("bhid,bhjd->bhij", -1, "bhij,bhjd->bhid")),
    "einsum_bihd_bjhd": Style(einsum("bihd,bjhd->bhij", -1, "bhij,bjhd->bihd")),
    "einsum_bihd_heads_last": Style(einsum("bihd,bjhd->bijh", 2, "bijh,bjhd->bihd")),
    "einsum_keys_first": Style(einsum("bhid,bhjd->bhji", 2, "bhji,bhjd->bhid")),
    "einsum_k_first": Style(key_operand_first),
    "k_q_transposed": Style(transposed),
    "scale_on_q": Style(attend(lambda m, q, k: product(q * ROOT, k))),
    "scale_on_k": Style(attend(lambda m, q, k: product(q, k * ROOT))),
    "scale_on_both": Style(attend(lambda m, q, k: product(q * E**-0.25, k * E**-0.25))),
    "scale_on_transposed_k": Style(attend(lambda m, q, k: q @ (k.transpose(-1, -2) * ROOT))),
    "divided_logits": Style(attend(lambda m, q, k: product(q, k) / math.sqrt(E))),
    "divided_q": Style(attend(lambda m, q, k: product(q / E**0.5, k))),
    "divided_by_0d_tensor": Style(attend(lambda m, q, k: product(q, k) / torch.tensor(float(E)).sqrt())),
    "divided_by_full": Style(attend(lambda m, q, k: product(q, k) / torch.full([], E**0.5, dtype=q.dtype))),
    "0d_tensor": Style(attend(lambda m, q, k: product(q, k) * torch.tensor(ROOT))),
    "0d_tensor_on_the_left": Style(attend(lambda m, q, k: torch.rsqrt(torch.tensor(float(E))) * product(q, k))),
    "buffer": Style(attend(lambda m, q, k: product(q * m.scale, k)), setup=buffer),
    "learned": Style(attend(lambda m, q, k: product(q, k) * m.gain), "softmax(gain * q.k)", **GAIN),
    "learned_on_q": Style(attend(lambda m, q, k: product(q * m.gain, k)), "softmax(gain * q.k)", **GAIN),
    "per_head": Style(attend(lambda m, q, k: product(q, k) * m.gain), "softmax(gain[h] * q.k)", **PER_HEAD),
    "per_head_on_q": Style(attend(lambda m, q, k: product(q * m.gain, k)), "softmax(gain[h] * q.k)", **PER_HEAD),
    "per_head_and_number": Style(
        attend(lambda m, q, k: product(q * m.gain, k) * 0.5),
        "softmax(0.5 * gain[h] * q.k)",
        setup=per_head,
        scale=lambda m: m.gain * 0.5,
    ),
    "q_in_place": Style(in_place_on_q),
    "logits_in_place": Style(in_place_on_logits),
    "divided_in_place": Style(divided_in_place),
    "unscaled": Style(attend(lambda m, q, k: product(q, k)), "softmax(q.k)", scale=1.0),
    "twice": Style(attend(lambda m, q, k: product(q * ROOT, k) * ROOT), "softmax(0.0625 * q.k)", scale=1 / E),
    "negative": Style(attend(lambda m, q, k: -product(q, k) * ROOT), "softmax(-0.25 * q.k)", scale=-ROOT),
    "causal_fill": Style(
        filled(CAUSAL, -math.inf), "softmax(0.25 * q.k + causal)", mask="causal", form="bool", visible=CAUSAL
    ),
    "causal_finfo": Style(
        filled(CAUSAL, LOW), "softmax(0.25 * q.k + causal)", mask="causal", form="bool", visible=CAUSAL
    ),
    "causal_added": Style(
        added(CAUSAL, -math.inf), "softmax(0.25 * q.k + causal)", mask="causal", form="float", visible=CAUSAL
    ),
    "causal_in_place": Style(
        masked_in_place, "softmax(0.25 * q.k + causal)", mask="causal", form="bool", visible=CAUSAL
    ),
    "window_added": Style(
        added(WINDOW, LOW), "softmax(0.25 * q.k + window)", mask="window", form="float", visible=WINDOW
    ),
    "padding_added": Style(
        added(PADDING, LOW), "softmax(0.25 * q.k + padding)", mask="padding", form="float", visible=PADDING
    ),
    "padding_ten_thousand": Style(
        added(PADDING, -1e4), "softmax(0.25 * q.k + padding)", mask="padding", form="float", visible=PADDING
    ),
    "spots_fill": Style(
        filled(SPOTS, -math.inf), "softmax(0.25 * q.k + mask)", mask="mask", form="bool", visible=SPOTS
    ),
    "causal_and_padding": Style(
        two_masks, "softmax(0.25 * q.k + causal + padding)", mask="causal", form="bool", visible=CAUSAL & PADDING
    ),
    "mask_times_scale": Style(
        attend(lambda m, q, k: (product(q, k) + torch.zeros(L, L).masked_fill(~CAUSAL, -math.inf)) * ROOT),
        "softmax(0.25 * (q.k + causal))",
        mask="causal",
        form="float",
        visible=CAUSAL,
        scaled_mask=ROOT,
    ),
    "exp_over_sum": Style(by_hand(shift=False)),
    "exp_over_sum_shifted": Style(by_hand(shift=True)),
    "softmax_in_float64": Style(lambda m, q, k, v: (product(q, k) * ROOT).double().softmax(-1).to(v.dtype) @ v),
    "less_own_maximum": Style(
        attend(lambda m, q, k: (z := product(q, k) * ROOT) - z.max(-1, keepdim=True).values.detach())
    ),
    "sink": Style(
        with_sink,
        "softmax(0.25 * q.k + causal + sinks)",
        mask="causal",
        form="bool",
        visible=CAUSAL,
        setup=sink,
        sinks=lambda m: m.sink,
    ),
    "talking_heads_after": Style(
        after_mixing,
        setup=lambda m: m.register_parameter("after", nn.Parameter(torch.randn(H, H))),
        mixing=lambda m, w: torch.einsum("bhij,hg->bgij", w, m.after),
    ),
    "dropout": Style(lambda m, q, k, v: functional.dropout((product(q, k) * ROOT).softmax(-1), 0.2) @ v, dropout=0.2),
    "kv_cache": Style(
        cached,
        "softmax(0.25 * q.k + causal_lower_right)",
        mask="causal_lower_right",
        form="bool",
        visible=CAUSAL[3:],
        first_row=3,
    ),
    "fused_thirds": Style(LOGITS, **fused("thirds")),
    "fused_per_head": Style(LOGITS, **fused("per_head")),
    "fused_grouped": Style(repeated, **fused("grouped", 2)),
    "gqa_repeat_interleave": Style(repeated, kv_heads=2),
    "gqa_expand": Style(expanded, kv_heads=2),
    "mqa_expand": Style(expanded, kv_heads=1),
    "mqa_broadcast": Style(LOGITS, kv_heads=1),
    "gqa_grouped_product": Style(grouped_product, kv_heads=2),
    "eager_inference_mode": Style(LOGITS, context=torch.inference_mode),
    "eager_no_grad": Style(LOGITS, context=torch.no_grad),
    "eager_autocast": Style(LOGITS, context=autocast),
    "eager_float64": Style(LOGITS, dtype=torch.float64),
    "eager_bfloat16": Style(LOGITS, dtype=torch.bfloat16),
}
