"""Cases of the battery: every pair of values of score, scale, bias, mask, softcap, sinks, shape and dtype meets."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.attention.covering import Row, covering
from tests.attention.parts import (
    BIASES,
    DTYPES,
    LONG,
    MASKS,
    SCALES,
    SHAPES,
    SINKS,
    SOFTCAPS,
    Leaves,
    Part,
    Shape,
    randn,
)
from tests.attention.variants import (
    CONTENT,
    FOLDED,
    NO_HEADS,
    POSITIONS,
    ROTATIONS,
    ROUNDED_POSITIONS,
    ROUNDED_RULES,
    ROUNDED_SCORES,
    RULES,
    SCORES,
    TERMS,
    WIDE_KEYS,
)
from tests.tolerances import HALF

# in this order: a scale overrides the score's own, and positions and rules look at the masks
TABLES: dict[str, Mapping[str, Part]] = {
    "mask": MASKS,
    "score": SCORES,
    "scale": SCALES | RULES,
    "bias": BIASES | POSITIONS,
    "softcap": SOFTCAPS,
    "sinks": SINKS,
}
PLAIN = ("none", "default", "dot")
MORE, ENOUGH = 5, 40


@dataclass(frozen=True)
class Case:
    """One value of each factor."""

    shape: str
    dtype: str
    mask: str = "none"
    score: str = "dot"
    scale: str = "default"
    bias: str = "none"
    softcap: str = "none"
    sinks: str = "none"

    @property
    def id(self) -> str:
        """Dtype, shape, and what is not plain."""
        extras = [f"{name}={getattr(self, name)}" for name in TABLES if getattr(self, name) not in PLAIN]
        return "-".join([self.dtype, self.shape, *extras])

    @property
    def sizes(self) -> Shape:
        shape = LONG.get(self.shape) or SHAPES[self.shape]
        if self.torch_dtype not in HALF or self.shape in LONG:
            return shape
        # a rule on mean errors wants more numbers than a formula does
        length, keys = (n if n == 1 else min(MORE * n, ENOUGH) for n in (shape.length, shape.keys))
        return replace(shape, length=length, keys=keys)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def parts(self) -> list[Part]:
        return [table[getattr(self, name)] for name, table in TABLES.items()]

    @property
    def fused_can(self) -> bool:
        """Whether torch's kernels are expected to run it."""
        return self.softcap == "none" and self.sinks == "none" and self.score in FOLDED and self.bias not in CONTENT

    @property
    def cpu_can(self) -> bool:
        """Whether the compiled kernel is expected to run it, at once or by blocks of rows."""
        return self.dtype != "f64" and self.sinks != "rows"

    @property
    def cpu_at_once(self) -> bool:
        """Whether one run of the compiled kernel is expected to take it."""
        return self.cpu_can and self.score in FOLDED and self.bias not in CONTENT

    @property
    def triton_can(self) -> bool:
        """Whether the Triton kernel is expected to run it."""
        return self.dtype != "f64" and self.score in FOLDED and self.bias not in CONTENT

    @property
    def wide_logits(self) -> bool:
        """Whether nothing but the inputs is rounded to a half dtype before the logits."""
        rounded = self.score in ROUNDED_SCORES or self.scale in ROUNDED_RULES or self.bias in ROUNDED_POSITIONS
        return not rounded

    def leaves(self) -> Leaves:
        """Every tensor that carries a gradient, in float64 but rounded to the case's dtype."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))
        s = self.sizes
        heads, kv = ((s.heads,), (s.kv_heads,)) if s.heads else ((), ())
        kv_lead = (1,) * len(s.lead) if s.expanded else s.lead
        found = {
            "query": randn(*s.lead, *heads, s.length, s.dim, generator=generator),
            "key": randn(*kv_lead, *kv, s.keys, s.wide, generator=generator),
            "value": randn(*kv_lead, *kv, s.keys, s.value_dim, generator=generator),
        }
        for part in self.parts:
            found |= part.leaves(s, generator)
        return {name: leaf.to(self.torch_dtype).double() for name, leaf in found.items()}

    def given(self, leaves: Leaves) -> dict[str, Any]:
        """Arguments for the package."""
        found = self._tensors(leaves) | {"enable_gqa": self.sizes.heads != self.sizes.kv_heads}
        for part in self.parts:
            found |= part.given(self.sizes, leaves)
        return found

    def resolved(self, leaves: Leaves) -> dict[str, Any]:
        """Arguments for the oracle and for the plain formula."""
        found: dict[str, Any] = self._tensors(leaves)
        for part in self.parts:
            found |= part.for_oracle(self.sizes, leaves, found)
        return found

    def _tensors(self, leaves: Leaves) -> dict[str, Tensor]:
        q, k, v = leaves["query"], leaves["key"], leaves["value"]
        if self.sizes.expanded:
            q = q.transpose(-2, -3).contiguous().transpose(-2, -3)
            k, v = (t.expand(*self.sizes.lead, *t.shape[len(self.sizes.lead) :]) for t in (k, v))
        return {"query": q, "key": k, "value": v}


def as_leaves(leaves: Leaves, dtype: torch.dtype, grad: bool = True) -> Leaves:
    """Fresh tensors of one dtype that carry gradients."""
    return {name: leaf.detach().to(dtype).requires_grad_(grad) for name, leaf in leaves.items()}


def possible(row: Row) -> bool:
    """Whether the values of a row, perhaps partial, go together."""
    shape = LONG.get(row["shape"]) or SHAPES[row["shape"]] if "shape" in row else None
    score, bias = row.get("score", "bilinear"), row.get("bias", "none")
    if bias in CONTENT and row.get("score", "dot") != "dot":
        return False
    if shape is None:
        return True
    if shape.key_dim and (score not in WIDE_KEYS or bias in CONTENT | ROTATIONS):
        return False
    if shape.dim == 1 and score.startswith("cosine"):
        return False  # a normalised number is its sign: no gradient but rounding
    if not shape.heads and bias in TERMS - NO_HEADS:
        return False
    return bias not in ROTATIONS or (shape.dim % 2 == 0 and not shape.expanded)


def possible_fused(row: Row) -> bool:
    """The same, for what torch's kernels run."""
    return possible(row) and row.get("score", "dot") in FOLDED and row.get("bias", "none") not in CONTENT


# Three values that go wrong together, and what pairs alone would leave to chance: torch's kernels with plain arguments.
TRIPLES = [
    Case(shape, dtype, mask=mask, scale=scale)
    for shape in ("self", "gqa", "cross", "three_dims")
    for dtype in ("f32", "f64")
    for mask in ("none", "causal", "lower_right", "bool_causal", "float_causal")
    for scale in ("default", "zero", "negative", "head_tensor")
]


def all_cases() -> list[Case]:
    """Every two values meet that may; once more among those that torch's kernels run."""
    factors = {"shape": list(SHAPES), "dtype": list(DTYPES)} | {name: list(table) for name, table in TABLES.items()}
    rows = covering(factors, possible, seed=1)
    few = {name: values for name, values in factors.items() if name not in ("softcap", "sinks")}
    rows += covering(few, possible_fused, seed=2)
    cases = [Case(**row) for row in rows] + TRIPLES
    return list({case.id: case for case in cases}.values())


CASES = all_cases()


def holding_every_value(cases: list[Case]) -> list[Case]:
    """Few of the cases, in which every value of every factor stands that stands in one of all."""
    factors = ("shape", "dtype", *TABLES)
    missing = {(name, getattr(case, name)) for case in cases for name in factors}
    picked: list[Case] = []
    for least in range(len(factors), 0, -1):
        for case in cases:
            new = {(name, getattr(case, name)) for name in factors} & missing
            if len(new) >= least:
                picked.append(case)
                missing -= new
    return picked


# What runs every time: every value of every factor, also of the calls that torch's kernels and the compiled one take.
BASE = holding_every_value(CASES)
FUSED = holding_every_value([case for case in CASES if case.fused_can])
COMPILED = holding_every_value([case for case in CASES if case.cpu_at_once])
CORE = [*dict.fromkeys([*BASE, *FUSED, *COMPILED])]


def long_cases() -> list[Case]:
    """Of the compiled kernel alone: many tiles and blocks, in which every two values meet."""
    factors = {
        "shape": list(LONG),
        "dtype": ["f32", "bf16", "f16"],
        "mask": list(MASKS),
        "scale": ["default", "negative", "row_tensor"],
        "bias": ["none", "pairs", "keys", "alibi"],
        "softcap": ["none", "2"],
        "sinks": ["none", "heads"],
    }
    return [Case(**row) for row in covering(factors, possible, seed=3)]


LONG_CASES = long_cases()


def few_cases() -> list[Case]:
    """Of the Triton kernel in its interpreter, where a case takes a second.

    Every value of every factor that it takes, and every two of mask, dtype, softcap and sinks meet; the others take
    turns beside them.
    """
    factors = {"mask": list(MASKS), "dtype": ["f32", "bf16", "f16"], "softcap": list(SOFTCAPS), "sinks": list(SINKS)}
    taken = {
        "shape": list(SHAPES),
        # every second one plain: a score that is folded into q widens half types, and a bias ends the shortest way
        "score": [n for name in SCORES if name in FOLDED and name != "dot" for n in ("dot", name)],
        "scale": list(SCALES | RULES),
        "bias": [n for name in BIASES | POSITIONS if name not in {*CONTENT, "none"} for n in ("none", name)],
    }
    turns = {name: deque(values) for name, values in taken.items()}
    cases = []
    for row in covering(factors, possible, seed=4):
        for name, values in turns.items():
            row[name] = next(value for value in values if possible(row | {name: value}))
            values.remove(row[name])
            values.append(row[name])
        cases.append(Case(**row))
    return cases


FEW_CASES = few_cases()
