"""Functions for FlexAttention, each with the same formula on whole tensors, and a grid of 200 calls with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

DOCUMENT = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3])
Tables = Mapping[str, Tensor]
Formula = Callable[..., Tensor]  # (tables, [z,] b, h, i, j), all of which broadcast to (B, Hq, L, S)


@dataclass(frozen=True)
class Sizes:
    """Of a call."""

    batch: int
    heads: int
    key_heads: int
    length: int
    keys: int
    dim: int
    value_dim: int


@dataclass(frozen=True)
class Mod:
    """A function of one pair, and its formula."""

    function: Callable[[Tables], Callable[..., Tensor]]
    formula: Formula
    tables: tuple[str, ...] = ()
    flex_learns: bool = True  # torch's eager path has no gradient of a table of which an index takes a part


def table_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "bias": (s.heads, s.length, s.keys),
        "slopes": (s.heads,),
        "relative": (s.length + s.keys,),
        "gain": (s.batch, s.heads),
        "left": (s.heads, s.length, 3),
        "right": (s.heads, s.keys, 3),
    }


SCORE_MODS: dict[str, Mod | None] = {
    "none": None,
    "bias": Mod(
        lambda t: lambda score, b, h, i, j: score + t["bias"][h, i, j],
        lambda t, z, b, h, i, j: z + t["bias"],
        ("bias",),
    ),
    "alibi": Mod(
        lambda t: lambda score, b, h, i, j: score - t["slopes"][h] * (i - j).abs(),
        lambda t, z, b, h, i, j: z - t["slopes"].view(-1, 1, 1) * (i - j).abs(),
        ("slopes",),
    ),
    "relative": Mod(
        lambda t: lambda score, b, h, i, j: score + t["relative"][i - j + 5],
        lambda t, z, b, h, i, j: z + t["relative"][(i - j + 5).expand(1, 1, *z.shape[-2:])],
        ("relative",),
    ),
    "softcap": Mod(
        lambda t: lambda score, b, h, i, j: 2.0 * torch.tanh(score / 2.0),
        lambda t, z, b, h, i, j: 2.0 * torch.tanh(z / 2.0),
    ),
    # one index after the other: index tensors that broadcast would pick something else
    "gain of a head": Mod(
        lambda t: lambda score, b, h, i, j: score * t["gain"][b][h],
        lambda t, z, b, h, i, j: z * t["gain"][..., None, None],
        ("gain",),
        flex_learns=False,
    ),
    "product of vectors": Mod(
        lambda t: lambda score, b, h, i, j: score + (t["left"][h, i] * t["right"][h, j]).sum(),
        lambda t, z, b, h, i, j: z + t["left"] @ t["right"].mT,
        ("left", "right"),
        flex_learns=False,
    ),
    "causal by -inf": Mod(
        lambda t: lambda score, b, h, i, j: torch.where(i >= j, score, -math.inf),
        lambda t, z, b, h, i, j: torch.where(i >= j, z, -math.inf),
    ),
    "document by -inf": Mod(
        lambda t: lambda score, b, h, i, j: torch.where(DOCUMENT[i] == DOCUMENT[j], 1.5 * score, -math.inf),
        lambda t, z, b, h, i, j: torch.where(DOCUMENT[i] == DOCUMENT[j], 1.5 * z, -math.inf),
    ),
    "parity": Mod(
        lambda t: lambda score, b, h, i, j: torch.where((i + j + b) % 2 == 0, score, t["slopes"][0] * score),
        lambda t, z, b, h, i, j: torch.where((i + j + b) % 2 == 0, z, t["slopes"][0] * z),
        ("slopes",),
    ),
}
MASK_MODS: dict[str, Mod | None] = {
    "none": None,
    "causal": Mod(lambda t: lambda b, h, i, j: i >= j, lambda t, b, h, i, j: i >= j),
    "window": Mod(lambda t: lambda b, h, i, j: (i >= j) & (i - j < 4), lambda t, b, h, i, j: (i >= j) & (i - j < 4)),
    "document": Mod(
        lambda t: lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j + 0 * b],
        lambda t, b, h, i, j: DOCUMENT[i] == DOCUMENT[j],
    ),
    "prefix": Mod(lambda t: lambda b, h, i, j: (j <= b + 1) | (i >= j), lambda t, b, h, i, j: (j <= b + 1) | (i >= j)),
    "of the head": Mod(lambda t: lambda b, h, i, j: j % (h + 1) == 0, lambda t, b, h, i, j: j % (h + 1) == 0),
    "blind rows": Mod(lambda t: lambda b, h, i, j: (j > i) & (i % 3 > 0), lambda t, b, h, i, j: (j > i) & (i % 3 > 0)),
}
SIZES = (
    Sizes(2, 4, 4, 9, 9, 8, 8),
    Sizes(1, 4, 2, 7, 11, 8, 6),
    Sizes(3, 2, 1, 13, 6, 4, 4),
    Sizes(2, 6, 2, 16, 16, 16, 16),
    Sizes(1, 1, 1, 5, 5, 8, 8),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A call."""

    score: str
    mask: str
    sizes: Sizes
    dtype: torch.dtype

    @property
    def id(self) -> str:
        s = self.sizes
        shape = f"{s.batch}x{s.heads}over{s.key_heads}x{s.length}x{s.keys}x{s.dim}"
        return f"{self.score}, {self.mask}, {shape}, {str(self.dtype).removeprefix('torch.')}".replace(" ", "_")

    def leaves(self) -> dict[str, Tensor]:
        """float64 leaves whose numbers the dtype holds."""
        s = self.sizes
        generator = torch.Generator().manual_seed(hash((s, len(self.score))) % 1000)
        shapes: dict[str, tuple[int, ...]] = {
            "query": (s.batch, s.heads, s.length, s.dim),
            "key": (s.batch, s.key_heads, s.keys, s.dim),
            "value": (s.batch, s.key_heads, s.keys, s.value_dim),
        }
        mod = SCORE_MODS[self.score]
        shapes |= {name: table_shapes(s)[name] for name in (mod.tables if mod else ())}
        made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        return {name: t.to(self.dtype).double().requires_grad_() for name, t in made.items()}

    def functions(self, leaves: Tables) -> dict[str, Any]:
        """`score_mod` and `mask_mod` over these tables."""
        mods = {"score_mod": SCORE_MODS[self.score], "mask_mod": MASK_MODS[self.mask]}
        return {name: mod.function(leaves) for name, mod in mods.items() if mod is not None}

    def logits(self, leaves: Tables) -> tuple[Tensor, Tensor]:
        """The logits by the formula, (B, Hq, L, S), -inf where a key is hidden, and which keys each row sees."""
        s = self.sizes
        b, h, i, j = (
            torch.arange(n).view(tuple(n if d == at else 1 for d in range(4)))
            for at, n in enumerate((s.batch, s.heads, s.length, s.keys))
        )
        key = leaves["key"].repeat_interleave(s.heads // s.key_heads, 1)
        z = leaves["query"] @ key.mT * s.dim**-0.5
        score, mask = SCORE_MODS[self.score], MASK_MODS[self.mask]
        if score is not None:
            z = score.formula(leaves, z, b, h, i, j)
        if mask is not None:
            z = torch.where(mask.formula(leaves, b, h, i, j), z, -math.inf)
        return z, z.detach() != -math.inf


def grid() -> list[Case]:
    """Each pair of a score and a mask comes at least twice, each time with another size and dtype."""
    pairs = list(product(SCORE_MODS, MASK_MODS))
    wheel = list(product(SIZES, DTYPES))
    cases = [Case(*pairs[n % len(pairs)], *wheel[(7 * n + n // len(pairs)) % len(wheel)]) for n in range(200)]
    assert len(set(cases)) == 200
    return cases


CASES = grid()
