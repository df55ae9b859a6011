"""The ways in which ports write down softmax(scale * q.k + bias + mask) . v: one function a style.

Each takes q (B, H, L, E), k and v (B, Hkv, S, E), the visible keys (broadcast to (B, H, L, S), or None), what is added
to the logits (H, L, S), or None, and the sinks (H,), or None; and gives (B, H, L, E).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from sqrtdk import attention
from tests.compare.ports.config import LENGTH, Port

Style = Callable[[Port, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
Hide = Callable[[Tensor], Tensor]
DROPPED = 5  # seed of the dropout of a port


def by_slopes(port: Port, length: int) -> Tensor:
    """ALiBi's, (H, L, S)."""
    distance = torch.arange(port.memory, port.memory + length)[:, None] - torch.arange(port.memory + length)
    slopes = port.bias_steepness * 2.0 ** (-8.0 * torch.arange(1, port.heads + 1) / port.heads)
    return -slopes[:, None, None] * distance.abs()


def by_index(port: Port, table: Tensor, length: int) -> Tensor:
    """A table's number for each distance up to LENGTH, as T5's, (H, L, S)."""
    distance = torch.arange(port.memory, port.memory + length)[:, None] - torch.arange(port.memory + length)
    return port.bias_steepness * table[:, distance.clamp(-LENGTH, LENGTH - 1) + LENGTH]


def repeated(port: Port, x: Tensor) -> Tensor:
    """Key heads for the query heads."""
    times = port.heads // port.kv_heads
    if times == 1:
        return x
    return x.repeat_interleave(times, 1) if port.groups == "interleave" else x.repeat(1, times, 1, 1)


def capped(port: Port, logits: Tensor, at: str) -> Tensor:
    if port.softcap is None or port.softcap_at != at:
        return logits
    return port.softcap * torch.tanh(logits / port.softcap)


def logits_of(port: Port, product: Tensor, scale: float, bias: Tensor | None, hide: Hide) -> Tensor:
    """From the product to the softmax, step by step."""
    logits = capped(port, product, "product")
    early = port.before_scale
    if bias is not None and "bias" in early:
        logits = logits + bias
    if "mask" in early:
        logits = hide(logits)
    if scale != 1:
        logits = logits * scale
    logits = capped(port, logits, "scaled")
    if bias is not None and "bias" not in early:
        logits = logits + bias
    if "mask" not in early:
        logits = hide(logits)
    return capped(port, logits, "masked")


def weigh(port: Port, logits: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax, with all that may happen to the weights."""
    dtype = logits.dtype
    if port.softmax_in is not None:
        logits = logits.to(port.softmax_in)
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    if port.weights_in is not None:
        weights = weights.to(port.weights_in)
    weights = weights.to(dtype)
    if port.odd == "clipped":
        weights = (1.1 * weights - 0.02).clamp(0, 1)
    if port.dropout:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(DROPPED)
            weights = functional.dropout(weights, port.dropout)
    return weights


def adding(port: Port, visible: Tensor | None, like: Tensor, fill: float) -> Hide:
    """Hides keys by a number that is added."""
    if visible is None:
        return lambda logits: logits
    mask = torch.zeros(visible.shape, dtype=like.dtype).masked_fill(~visible, fill if port.fill is None else port.fill)
    return lambda logits: logits + mask


def eager(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """Like the paper."""
    k, v = repeated(port, k), repeated(port, v)
    hide = adding(port, visible, q, -torch.inf)
    return weigh(port, logits_of(port, q @ k.mT, port.factor, bias, hide), sinks) @ v


def grouped(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """Query heads in groups, so that no key is repeated."""
    names = "kg" if port.groups == "interleave" else "gk"
    sizes = {"k": port.kv_heads, "g": port.heads // port.kv_heads}
    q = q.unflatten(1, tuple(sizes[name] for name in names))
    product = torch.einsum(f"b{names}le,bkse->b{names}ls", q, k).flatten(1, 2)
    hide = adding(port, visible, q, torch.finfo(q.dtype).min)
    weights = weigh(port, logits_of(port, product, port.factor, bias, hide), sinks)
    weights = weights.unflatten(1, tuple(sizes[name] for name in names))
    return torch.einsum(f"b{names}ls,bkse->b{names}le", weights, v).flatten(1, 2)


def baddbmm(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """Batch and heads are one axis; what is added and the scale are arguments of the product."""
    k, v = repeated(port, k), repeated(port, v)
    batch, heads, rows, _ = q.shape
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    hide = adding(port, visible, q, -torch.inf)
    if port.softcap is None and not port.before_scale:
        added = q.new_zeros(1, 1, rows, k.shape[1]) if bias is None else bias[None]
        added = hide(added).expand(batch, heads, -1, -1).flatten(0, 1)
        logits = torch.baddbmm(added, q, k.mT, alpha=port.factor).unflatten(0, (batch, heads))
    else:
        product = torch.bmm(q, k.mT).unflatten(0, (batch, heads))
        logits = logits_of(port, product, port.factor, bias, hide)
    return torch.bmm(weigh(port, logits, sinks).flatten(0, 1), v).unflatten(0, (batch, heads))


def prescaled(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """With q scaled before the product, where nothing stands between; hidden logits are replaced."""
    k, v = repeated(port, k), repeated(port, v)
    scale = port.factor
    if not port.before_scale and port.softcap_at != "product":
        q, scale = q * scale, 1.0

    def hide(logits: Tensor) -> Tensor:
        fill = logits.new_tensor(-torch.inf if port.fill is None else port.fill)
        return logits if visible is None else torch.where(visible, logits, fill)

    return torch.matmul(weigh(port, logits_of(port, torch.matmul(q, k.mT), scale, bias, hide), sinks), v)


def einsum(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """Heads stay behind the tokens; the product is divided; hidden logits are the least number."""
    q, k, v = (x.transpose(1, 2) for x in (q, repeated(port, k), repeated(port, v)))

    def hide(logits: Tensor) -> Tensor:
        fill = torch.finfo(logits.dtype).min if port.fill is None else port.fill
        return logits if visible is None else logits.masked_fill(~visible, fill)

    logits = logits_of(port, torch.einsum("blhe,bshe->bhls", q, k), port.factor, bias, hide)
    return torch.einsum("bhls,bshe->blhe", weigh(port, logits, sinks), v).transpose(1, 2)


def sdpa(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """By torch's own operation."""
    k, v = repeated(port, k), repeated(port, v)
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    bare = bias is None and port.fill is None and not port.dropout
    if bare and visible is not None and visible.shape[0] == 1 and bool((visible[0, 0] == causal).all()):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=port.factor)
    mask = visible
    if bias is not None or port.fill is not None:
        added = q.new_zeros(1, 1) if bias is None else bias * (port.factor if "bias" in port.before_scale else 1)
        fill = (-torch.inf if port.fill is None else port.fill) * (port.factor if "mask" in port.before_scale else 1)
        mask = added if visible is None else added + torch.zeros(visible.shape).to(q).masked_fill(~visible, fill)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(DROPPED)
        return functional.scaled_dot_product_attention(q, k, v, mask, port.dropout, scale=port.factor)


def flex(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """By torch's FlexAttention, not compiled."""
    seen = None if visible is None else visible.expand(q.shape[0], 1, -1, -1)

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        logit = logit if bias is None else logit + bias[h, i, j]
        return logit if seen is None else torch.where(seen[b, 0, i, j], logit, -torch.inf)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return flex_attention(q, k, v, score_mod=score, scale=port.factor, enable_gqa=port.heads != port.kv_heads)


def compiled(port: Port, q: Tensor, k: Tensor, v: Tensor, visible, bias, sinks) -> Tensor:
    """The kernel of this library."""
    return attention(q, k, v, visible, scale=port.factor, enable_gqa=True, bias=bias, impl="cpu")


STYLES: dict[str, Style] = {
    "eager": eager,
    "grouped": grouped,
    "baddbmm": baddbmm,
    "prescaled": prescaled,
    "einsum": einsum,
    "sdpa": sdpa,
    "flex": flex,
    "cpu": compiled,
}
