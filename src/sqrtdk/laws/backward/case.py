"""The gradients that one backward pass gave an attention, beside those of its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.laws.backward.formula import FormulaGradients, formula_gradients
from sqrtdk.laws.backward.logits import RIGHT_FORMULA, Change, floor_of
from sqrtdk.tracing.tensors import CallTensors

# (dO, dlse or None, whether dO lies in memory as a transposed output does) -> gradients by name, None where none
# arrives: "q", "k", "v" as (B, H, L, E); "sinks" and "factor NAME" of any shape; "bias N" in the shape of the term.
Backward = Callable[[Tensor, Tensor | None, bool], Mapping[str, Tensor | None]]
Learned = Callable[[FormulaGradients], Mapping[str, tuple[Tensor, Tensor]]]
QUERY_KEY_VALUE = ("q", "k", "v")
OF_LEARNED = "learned "  # begins the name of a parameter that is no operand: "learned NAME"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a backward pass.

    Attributes:
        operands: What gets the wrong gradient: "q", "k", "v", "sinks", "bias 2", "factor attn.tau".
        code: Id of the sentence behind `laws.gradient.what.`.
        values: Values of the sentence.
        heads: Heads where it is wrong; empty if in all.
        rows: Rows where it is wrong; empty if in all.
        samples: Samples where it is wrong; empty if in all.
        off: Largest difference, relative to the largest entry of the formula's gradient.
        allowed: Largest difference that rounding may give, likewise.
    """

    operands: tuple[str, ...]
    code: str
    values: dict[str, Any] = field(default_factory=dict, hash=False)
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    off: float = math.nan
    allowed: float = math.nan


@dataclass(frozen=True, slots=True)
class Judged:
    """What was judged of an attention: operands whose gradient is the formula's, and faults."""

    kept: tuple[str, ...]
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Wrong:
    """A gradient that is not the formula's, with the rows where it is wrong: (B, H, L), or its own shape for others."""

    name: str
    got: Tensor
    right: Tensor
    allowed: Tensor
    bad: Tensor

    @property
    def off(self) -> float:
        """Largest difference, relative to the largest entry of the formula's gradient."""
        return largest_of(self.got - self.right) / max(largest_of(self.right), 1e-300)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A backward pass: the attention, the gradients of output and lse, and what `judge_delivered` says of them."""

    call: CallTensors
    d_out: Tensor
    d_lse: Tensor | None
    biases: tuple[int, ...]
    most: int | None
    factors: Mapping[str, Tensor]
    same: tuple[tuple[str, str], ...]
    dtypes: tuple[torch.dtype, ...]
    turn: int
    learned: Learned | None

    def gradients(self, change: Change) -> FormulaGradients:
        """Return the gradients of the formula with a change, whose bounds count the roundings of the run."""
        found = formula_gradients(
            self.call, self.d_out, self.d_lse, change, biases=self.biases, most=self.most, turn=self.turn,
            logits=self.learned is not None and change is RIGHT_FORMULA,
        )  # fmt: skip
        found.unit = max([found.unit, *(torch.finfo(dtype).eps / 2 for dtype in self.dtypes)])
        found.floor = max([found.floor, *map(floor_of, self.dtypes)])
        return found

    def expected(self, name: str, of: FormulaGradients) -> tuple[Tensor, Tensor]:
        """Return the gradient of an operand and its bound on rounding, in the operand's layout."""
        if name in QUERY_KEY_VALUE:
            value, allowed = of.of(name, self.heads(name))
            for pair in self.same:
                if name in pair:
                    twin = pair[0] if name == pair[1] else pair[1]
                    more = of.of(twin, self.heads(name))
                    value, allowed = value + more[0], allowed + more[1]
            return value, allowed
        if name.startswith("factor "):  # d tau = d log(scale) / tau
            tau = self.factors[name.removeprefix("factor ")].detach().to(torch.float64)
            value, allowed = of.of("scale")
            if tau.numel() == 1:
                value, allowed = value.sum(), allowed.sum()
            return value.reshape(tau.shape) / tau, allowed.reshape(tau.shape) / tau.abs()
        return of.of(name)

    def heads(self, name: str) -> int:
        """Return the number of heads of q, k or v."""
        vector = {"q": self.call.query, "k": self.call.key, "v": self.call.value}[name]
        return int(vector.values.shape[1])

    def wrong(self, name: str, gradient: Tensor | None, of: FormulaGradients) -> Wrong | None:
        """Return what is wrong with a gradient, None if nothing is or if it was not computed."""
        if name not in QUERY_KEY_VALUE and not bool(of.looked.all()):
            return None
        right, allowed = self.expected(name, of)
        got = torch.zeros_like(right) if gradient is None else gradient.detach().to(torch.float64).reshape(right.shape)
        bad = ~((got - right).abs() <= allowed)
        if name in QUERY_KEY_VALUE:
            heads = self.heads(name)
            bad = bad.any(-1) & of.looked.reshape(len(of.looked), heads, -1).all(2)[..., None]
        return Wrong(name, got, right, allowed, bad) if bool(bad.any()) else None


def largest_of(x: Tensor) -> float:
    """Return the largest absolute entry, 0 if there is none."""
    return float(x.abs().max()) if x.numel() else 0.0
