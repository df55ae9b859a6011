"""An attention of one process in float64, and the changes of it that may explain what several ranks give.

A change is named if the formula with it gives the output of the ranks (`fitting_changes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.tensors import CallTensors

_HIDDEN = -1e30  # a logit below hides its key


@dataclass(frozen=True, slots=True, eq=False)
class RanksFormula:
    """An attention of one process in float64.

    Attributes:
        query: (B, H, L, E).
        key: (B, H, S, E), repeated to the heads of q.
        value: (B, H, S, Ev), repeated likewise.
        logits: (B, H, L, S), before the mask.
        visible: (B, H, L, S).
        sinks: (H,), or None.
        call: The attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    logits: Tensor
    visible: Tensor
    sinks: Tensor | None
    call: CallTensors

    def output(self, visible: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        """Return the output (B, H, L, Ev) with another mask, or with an addend on the logits; 0 in blind rows."""
        z = self.logits if added is None else self.logits + added
        z = z.masked_fill(~(self.visible if visible is None else visible), -math.inf)
        if self.sinks is not None:
            z = torch.cat((z, self.sinks.view(1, -1, 1, 1).expand(*z.shape[:3], 1)), -1)
        weights = z.softmax(-1).nan_to_num(0.0)
        return weights[..., : self.value.shape[2]] @ self.value

    def block(self, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output over some keys, without sinks, its lse, and its largest logit, (B, H, L, 1) each."""
        z = self.logits.masked_fill(~visible, -math.inf)
        output = z.softmax(-1).nan_to_num(0.0) @ self.value
        return output, z.logsumexp(-1, keepdim=True), z.amax(-1, keepdim=True)


def ranks_formula(
    call: CallTensors, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None
) -> RanksFormula | None:
    """Return the formula of an attention in float64; None if one of its steps is unknown.

    Args:
        call: The attention.
        query: q in place of its own.
        key: k in place of its own.
        value: v in place of its own.
    """
    if call.terms is None or call.missing is not None:
        return None
    heads = call.query.values.shape[1]
    q = (call.query.values if query is None else query).double()
    k = (call.key.values if key is None else key).double()
    v = (call.value.values if value is None else value).double()
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    z = q @ k.mT
    visible, sinks = torch.ones_like(z, dtype=torch.bool), None
    for term in call.terms:
        by = term.value.double() if isinstance(term.value, Tensor) else term.value
        if by is None or term.name == "unknown":
            return None
        if term.name == "scale":
            z = z * by
        elif term.name == "softcap":
            z = z * (z / by).tanh() if term.detail else by * (z / by).tanh()
        elif term.name == "bias":
            hides = by <= _HIDDEN if isinstance(by, Tensor) else torch.tensor(False)
            visible, z = visible & ~hides, z + torch.where(hides, 0.0, by)
        elif term.name == "mask":
            visible = visible & by.bool() if isinstance(by, Tensor) else visible
        elif term.name == "sinks" and isinstance(by, Tensor):
            sinks = by
    return RanksFormula(q, k, v, z, visible, sinks, call)


@dataclass(frozen=True, slots=True, eq=False)
class RanksChange:
    """A change that was tried.

    Attributes:
        name: A key of the messages `laws.ranks.name`.
        output: What the attention gives with it, (B, H, L, Ev), in float64.
        values: Values of the message.
    """

    name: str
    output: Tensor
    values: tuple[tuple[str, str], ...] = ()


def fitting_changes(changes: Iterator[RanksChange], output: Tensor, bar: float) -> list[RanksChange]:
    """Return the changes that give an output, the first of each name.

    Args:
        changes: The changes.
        output: (B, H, L, Ev), of the ranks.
        bar: Largest difference, in units of the largest number of the output.
    """
    found: dict[str, RanksChange] = {}
    size = float(output.abs().max()) or 1.0
    for change in changes:
        off = (change.output - output.double()).abs().max() / size
        if change.name not in found and bool(off <= bar):
            found[change.name] = change
    return list(found.values())
