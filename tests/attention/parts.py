"""The parts that cases are put together from: one literal table a factor.

A part makes leaves (tensors that carry gradients), says what the package is given, and what the oracle is given: the
oracle's form is resolved, numbers and tensors and formulas of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; `lead` is what stands in front of the heads, `heads` 0 a call of two dimensions."""

    lead: tuple[int, ...] = (2,)
    heads: int = 2
    kv_heads: int = 2
    length: int = 7
    keys: int = 7
    dim: int = 8
    value_dim: int = 8
    key_dim: int = 0  # 0: that of the query
    expanded: bool = False  # key and value expanded over the batch, query with heads and positions swapped in memory

    @property
    def logits(self) -> tuple[int, ...]:
        """(..., H, L, S)."""
        return (*self.lead, *((self.heads,) if self.heads else ()), self.length, self.keys)

    @property
    def wide(self) -> int:
        """Ek."""
        return self.key_dim or self.dim

    @property
    def per_head(self) -> tuple[int, ...]:
        """(H, 1, 1), or (1, 1) without heads."""
        return (self.heads, 1, 1) if self.heads else (1, 1)


def nothing(shape: Shape, generator: Generator) -> Leaves:
    return {}


def no_arguments(shape: Shape, leaves: Leaves) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Part:
    """One value of a factor."""

    given: Callable[[Shape, Leaves], dict[str, Any]] = no_arguments
    leaves: Callable[[Shape, Generator], Leaves] = nothing
    # of shape, leaves, and the arguments found so far, masks first; None: the same as `given`
    resolved: Callable[[Shape, Leaves, dict[str, Any]], dict[str, Any]] | None = None

    def for_oracle(self, shape: Shape, leaves: Leaves, found: dict[str, Any]) -> dict[str, Any]:
        return self.given(shape, leaves) if self.resolved is None else self.resolved(shape, leaves, found)


def randn(*sizes: int, generator: Generator) -> Tensor:
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


def number(value: float) -> Part:
    return Part(lambda s, t: {"scale": value})


def scale_tensor(sizes: Callable[[Shape], tuple[int, ...]]) -> Part:
    return Part(
        lambda s, t: {"scale": t["scale"]},
        lambda s, g: {"scale": 0.2 + torch.rand(sizes(s), generator=g, dtype=torch.float64)},
    )


def bias_tensor(sizes: Callable[[Shape], tuple[int, ...]]) -> Part:
    return Part(lambda s, t: {"bias": t["bias"]}, lambda s, g: {"bias": randn(*sizes(s), generator=g)})


def shown(shape: Shape, sizes: tuple[int, ...], share: float) -> Tensor:
    """bool, the same in every call of the same sizes; every row sees its first key."""
    seed = torch.Generator().manual_seed(hash(sizes) % 1000)
    visible = torch.rand(sizes, generator=seed) < share
    if visible.shape[-1]:
        visible[..., 0] = True
    return visible


def padded(shape: Shape) -> Tensor:
    """(..., 1, 1, S): each batch element has its own number of keys, the last of them none."""
    batch = math.prod(shape.lead)
    lengths = torch.linspace(shape.keys, 0, batch).long() if batch > 1 else torch.tensor([shape.keys - 1])
    rows = torch.arange(shape.keys) < lengths[:, None]
    ones = (1, 1) if shape.heads else (1,)
    return rows.reshape(*(shape.lead or ()), *ones, shape.keys)


def blind(shape: Shape) -> Tensor:
    """(L, S): every second row sees nothing."""
    visible = shown(shape, shape.logits[-2:], 0.6)
    visible[::2] = False
    return visible


def hidden_floats(shape: Shape, generator: Generator, sizes: tuple[int, ...]) -> Leaves:
    mask = randn(*sizes, generator=generator)
    return {"mask": mask.masked_fill(~shown(shape, sizes, 0.7), -math.inf)}


SHAPES = {
    "self": Shape(),
    "cross": Shape(length=5, keys=9, dim=6, value_dim=4),
    "long": Shape(length=9, keys=4, value_dim=12),
    "gqa": Shape(heads=4, kv_heads=2, length=5, keys=6),
    "mqa": Shape(heads=3, kv_heads=1, length=4, keys=8, dim=5),
    "groups": Shape(lead=(1,), heads=6, kv_heads=3, length=8, keys=8, dim=4, value_dim=3),
    "decode": Shape(length=1, keys=11),
    "one_key": Shape(length=5, keys=1),
    "other_width": Shape(heads=4, kv_heads=2, keys=9, dim=4, value_dim=3, key_dim=6),
    "narrow": Shape(dim=1, value_dim=1, keys=5),
    "two_dims": Shape(lead=(), heads=0, kv_heads=0, keys=6),
    "three_dims": Shape(lead=(), heads=3, kv_heads=3, length=6),
    "five_dims": Shape(lead=(2, 3), length=4, keys=5),
    "strides": Shape(lead=(3,), length=6, keys=5, expanded=True),
    "vector": Shape(lead=(1,), length=19, keys=37, dim=16, value_dim=16),
}
# More than a tile of 128 rows or a block of 512 keys; the last two have few rows, whose keys are split over threads:
# four to a key head, for which the kernel takes dot products, and more.
LONG = {
    "tiles": Shape(lead=(1,), heads=2, kv_heads=1, length=130, keys=520, dim=3, value_dim=3),
    "blocks": Shape(lead=(1,), heads=1, kv_heads=1, length=140, keys=1030, dim=2, value_dim=1),
    "few": Shape(lead=(2,), heads=4, kv_heads=2, length=2, keys=1300, dim=33, value_dim=17),
    "sixteen": Shape(lead=(1,), heads=3, kv_heads=1, length=16, keys=1700, dim=33, value_dim=4),
}
SCALES = {
    "default": Part(),
    "third": number(1 / 3),
    "one": number(1.0),
    "negative": number(-0.4),
    "zero": number(0.0),
    "scalar_tensor": scale_tensor(lambda s: ()),
    "head_tensor": scale_tensor(lambda s: s.per_head),
    "row_tensor": scale_tensor(lambda s: (s.length, 1)),
    "full_tensor": scale_tensor(lambda s: (*s.logits[:-1], 1)),
}
BIASES = {
    "none": Part(),
    "full": bias_tensor(lambda s: s.logits),
    "pairs": bias_tensor(lambda s: s.logits[-2:]),
    "keys": bias_tensor(lambda s: (s.keys,)),
    "heads": bias_tensor(lambda s: (*s.per_head[:-2], s.length, 1)),
}
MASKS = {
    "none": Part(),
    "bool": Part(lambda s, t: {"attn_mask": shown(s, s.logits, 0.6)}),
    "bool_pairs": Part(lambda s, t: {"attn_mask": shown(s, s.logits[-2:], 0.6)}),
    "bool_keys": Part(lambda s, t: {"attn_mask": shown(s, s.logits[-1:], 0.6)}),
    "padding": Part(lambda s, t: {"attn_mask": padded(s)}),
    "blind": Part(lambda s, t: {"attn_mask": blind(s)}),
    "float": Part(lambda s, t: {"attn_mask": t["mask"]}, lambda s, g: hidden_floats(s, g, s.logits)),
    "float_pairs": Part(lambda s, t: {"attn_mask": t["mask"]}, lambda s, g: hidden_floats(s, g, s.logits[-2:])),
    "causal": Part(lambda s, t: {"is_causal": True}),
    "lower_right": Part(lambda s, t: {"causal_lower_right": True}),
    "window": Part(lambda s, t: {"window": (2, 1)}),
    "window_left": Part(lambda s, t: {"window": (1, None)}),
    "window_right": Part(lambda s, t: {"window": (-1, 0)}),
    "window_causal": Part(lambda s, t: {"window": (2, 2), "is_causal": True}),
    "window_lower_right": Part(lambda s, t: {"window": (2, 0), "causal_lower_right": True}),
    "bool_causal": Part(lambda s, t: {"attn_mask": shown(s, s.logits[-2:], 0.6), "is_causal": True}),
    "padding_causal": Part(lambda s, t: {"attn_mask": padded(s), "is_causal": True}),
    "float_causal": Part(
        lambda s, t: {"attn_mask": t["mask"], "is_causal": True}, lambda s, g: hidden_floats(s, g, s.logits[-2:])
    ),
    "float_window": Part(
        lambda s, t: {"attn_mask": t["mask"], "window": (3, 3)}, lambda s, g: hidden_floats(s, g, s.logits[-2:])
    ),
    "all_of_them": Part(
        lambda s, t: {"attn_mask": blind(s), "window": (3, 1), "causal_lower_right": True, "is_causal": True}
    ),
}
SOFTCAPS = {"none": Part(), "2": Part(lambda s, t: {"softcap": 2.0}), "30": Part(lambda s, t: {"softcap": 30.0})}
SINKS = {
    "none": Part(),
    "zero": Part(lambda s, t: {"sinks": 0.0}),
    "heads": Part(lambda s, t: {"sinks": t["sinks"]}, lambda s, g: {"sinks": randn(s.heads or 1, generator=g)}),
    "rows": Part(lambda s, t: {"sinks": t["sinks"]}, lambda s, g: {"sinks": randn(*s.logits[:-1], 1, generator=g)}),
}
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
