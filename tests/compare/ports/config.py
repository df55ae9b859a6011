"""What the small models of `ports` do, as plain values: shapes, weights, positions and masks of each.

Logits have a standard deviation of 1 to 2 and every norm has random gains: what is planted moves the output far more
than rounding.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LENGTH = 24  # tokens of a sequence
PAD = 7  # tokens that the last sequence of a padded batch is short of


@dataclass(frozen=True, slots=True)
class Port:
    """What a model does; the first fields are its shape, those after `scale` are what may be planted."""

    style: str = "eager"  # of `styles.STYLES`
    fused: str | None = None  # one Linear for q, k and v, laid out by "parts" (3, H, E) or "heads" (H, 3, E)
    post_norm: bool = False
    places: bool = True  # learned positions are added to the embeddings
    norm: str = "layer"  # of the blocks: "layer", "rms"
    layers: int = 3
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 12
    width: int = 48
    memory: int = 0  # learned tokens before the first that are keys only: L is not S
    padded: str | None = None  # where the inputs have padding: "left", "right"
    biases: str = "qkvo"  # projections that add one
    names: str = "layers"  # of the list of blocks
    rope_code: str = "turned"  # how a rotation is written: "turned", "parts", "complex"
    folded: bool = False  # the scale is in the weights of q

    scale: float | None = None  # None: head_dim ** -0.5
    softcap: float | None = None
    softcap_at: str = "scaled"  # "product": before the scale; "masked": after bias and mask
    bias: str | None = None  # "alibi", "t5"
    bias_steepness: float = 1.0  # factor on slopes or table
    before_scale: str = ""  # what is added before the scale multiplies: "bias", "mask"
    causal: bool = True
    offset: int = 0  # row i sees up to key i + offset
    align: str = "lower"  # where L is not S: "lower" right, or "upper" left
    windows: tuple[int | None, ...] = (None, None, None)  # keys that a row sees, itself included, one a layer
    padding: str = "kept"  # what becomes of the padding mask: "kept", "lost", "flipped"
    fill: float | None = None  # of hidden keys; None: the style's own
    rope: str = ""  # vectors that turn: "qk"
    rope_base: float = 10000.0
    rope_layout: str = "half"  # or "interleaved"
    rope_width: int | None = None  # channels that turn; None: all
    shift_q: int = 0  # added to the positions of q
    shift_k: int = 0
    resets: str = "qk"  # vectors whose positions begin at the first token, not at the padding on the left
    amplitude: float = 1.0  # YaRN's, of the table
    log_n: int | None = None  # q is multiplied by log(keys of the row) / log(this)
    qk_norm: str | None = None  # "rms", "layer", "l2"
    qk_norm_at: str = "before"  # the rotation, or "after"
    qk_norm_eps: float = 1e-6
    qk_norm_over: str = "head"  # or "heads": all of a token
    sinks: str | None = None  # "learned", "zero"
    groups: str = "interleave"  # query heads 0, 1 read key head 0; "tile": heads 0, 2 do
    fused_read: str | None = None  # how a fused projection is taken apart; None: as it is laid out
    q_heads: str = "same"  # "rolled": rows of the weight stand one head further; "transposed": read as (E, H)
    cache_k: str | None = None  # a quantised cache of k whose scale is applied "once", "twice", "never"
    cache_v: str | None = None
    rounded: str = ""  # vectors rounded before the product: "qk"
    rounded_to: torch.dtype = torch.bfloat16
    softmax_in: torch.dtype | None = None  # logits and weights are of this dtype
    weights_in: torch.dtype | None = None  # weights alone
    dropout: float = 0.0
    odd: str = ""  # what no cause describes: "tanh q", "tanh v", "clipped"
    changed: str = ""  # weights that are not those of the other side: "q", "k", "v", "o", "gain"
    activation: str = "gelu"  # of the MLP: "gelu", "tanh", "relu"
    embedding: float = 1.0  # factor on the embeddings

    @property
    def factor(self) -> float:
        """The scale as a number."""
        if self.folded:
            return 1.0
        return self.head_dim**-0.5 if self.scale is None else self.scale


BASES: dict[str, Port] = {
    "eager": Port(),
    "sdpa": Port(style="sdpa"),
    "gqa": Port(style="grouped", kv_heads=2, norm="rms"),
    "fused": Port(style="baddbmm", fused="parts"),
    "rope": Port(style="prescaled", rope="qk", places=False, norm="rms"),
    "post": Port(style="einsum", post_norm=True, causal=False, padded="right"),
    "rope_gqa": Port(style="sdpa", rope="qk", places=False, kv_heads=2, norm="rms", biases="qkv"),
    "rope_fused": Port(
        style="baddbmm", fused="heads", rope="qk", places=False, rope_layout="interleaved", rope_width=8
    ),
}


def draw(name: str, *shape: int, seed: int = 0, spread: float = 1.0, around: float = 0.0) -> Tensor:
    """Numbers that depend on their name and the seed only, normal, float64."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return around + spread * torch.randn(*shape, generator=generator, dtype=torch.float64)


def weights_of(port: Port, layer: int, seed: int = 0) -> dict[str, Tensor]:
    """What the attention of a layer computes with, as the description has it: heads one after the other."""
    heads, kv, size, width = port.heads, port.kv_heads, port.head_dim, port.width

    def drawn(name: str, *shape: int, spread: float, around: float = 0.0) -> Tensor:
        values = draw(f"{layer}/{name}", *shape, seed=seed, spread=spread, around=around)
        if name not in port.changed.split():
            return values
        return values + draw(f"{layer}/{name}/other", *shape, seed=seed, spread=0.05 * spread)

    each = 1.2 * width**-0.5  # q and k of standard deviation 1.2: logits of 1.4
    weights = {
        "q": drawn("q", heads * size, width, spread=each),
        "k": drawn("k", kv * size, width, spread=each),
        "v": drawn("v", kv * size, width, spread=each),
        "o": drawn("o", width, heads * size, spread=width**-0.5),
        "q_gain": drawn("q_gain", heads * size, spread=0.25, around=1.0),
        "k_gain": drawn("k_gain", kv * size, spread=0.25, around=1.0),
        "sinks": drawn("sinks", heads, spread=0.7, around=0.5),
        "memory": drawn("memory", port.memory, width, spread=1.0),
        "t5": drawn("t5", heads, 2 * LENGTH, spread=1.0),
        "k_step": drawn("k_step", kv, spread=0.005, around=0.05).abs(),
        "v_step": drawn("v_step", kv, spread=0.005, around=0.05).abs(),
    }
    for name, count in (("q", heads), ("k", kv), ("v", kv), ("o", None)):
        bias = drawn(f"{name}_bias", width if count is None else count * size, spread=0.4)
        weights[f"{name}_bias"] = bias * (name in port.biases)
    if port.folded:
        weights["q"], weights["q_bias"] = (weights[name] * port.head_dim**-0.5 for name in ("q", "q_bias"))
    if port.q_heads == "rolled":
        for name in ("q", "q_bias"):
            weights[name] = weights[name].unflatten(0, (heads, size)).roll(1, 0).flatten(0, 1)
    return weights


def positions_of(port: Port, of: str, attention_mask: Tensor | None, length: int) -> Tensor:
    """Positions of the rows ("q") or the keys ("k"), (B or 1, L or S)."""
    shift = port.shift_q if of == "q" else port.shift_k
    if attention_mask is not None and port.padded == "left" and of in port.resets:
        tokens = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    else:
        tokens = torch.arange(length)[None]
    tokens = tokens + port.memory
    if of == "k" and port.memory:
        tokens = torch.cat([torch.arange(port.memory).expand(tokens.shape[0], -1), tokens], 1)
    return tokens + shift


def visible_of(port: Port, layer: int, attention_mask: Tensor | None, length: int) -> Tensor | None:
    """True where the row sees the key, (B or 1, 1, L, S); None where every row sees all. No row is blind."""
    keys = torch.arange(length + port.memory)
    own = torch.arange(length)[:, None] + (port.memory if port.align == "lower" else 0)
    window = port.windows[layer]
    seen = torch.ones(1, 1, length, len(keys), dtype=torch.bool)
    if port.causal:
        seen = seen & (keys <= own + port.offset)
    if window is not None:
        seen = seen & (own - keys < window) & (keys - own < window)
    if attention_mask is not None and port.padding != "lost":
        tokens = attention_mask.bool().flip(-1) if port.padding == "flipped" else attention_mask.bool()
        tokens = functional.pad(tokens, (port.memory, 0), value=True)
        seen = seen & tokens[:, None, None, :]
    if seen.all():
        return None
    return seen | ((keys == own) & ~seen.any(-1, keepdim=True))
