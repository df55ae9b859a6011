"""Rows of a parameter, each head's own, the plan of a call, and the one exception that says why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing import some_tokens

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Refusal(Exception):
    """Why a call can't be clipped; its text goes into the plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which entries of one parameter are a head's.

    Attributes:
        name: of the parameter in the model.
        side: "q" (scaled by gamma^balance), "k" (by gamma^(1 - balance)), or "whole" (by gamma: what meets a part of k
            that heads share and that is left alone).
        index: (Hq, E), numbers along `axis`, of each query head.
        axis: of the parameter, along which its features lie: 0 in nn.Linear, 1 in GPT-2's Conv1D; None: of the
            flattened parameter.
        offset: what multiplies is `offset` + the parameter: 1 for a gain that is stored as its distance from 1.
        shape: of the whole parameter, to tell another model's of the same name; None: not known.
    """

    name: str
    side: str
    index: Int[Tensor, "Hq E"]
    axis: int | None = 0
    offset: float = 0.0
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CallPlan:
    """What one attention call's heads are made of.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        heads: query heads.
        rows: what is scaled; none where the call is refused.
        groups: (Hq,): heads of one number, in any call of the plan, are scaled as one.
        softcap: c of c tanh(z / c) on the logits; None without one.
        shared: what several heads share, in words.
        refused: why the call can't be clipped; None if it can.
    """

    site: str
    index: int
    heads: int
    rows: tuple[Rows, ...]
    groups: Int[Tensor, " Hq"]
    softcap: float | None = None
    shared: tuple[str, ...] = ()
    refused: str | None = None


def spread(features: Int[Tensor, "H E"], heads: int) -> Int[Tensor, "Hq E"]:
    """Features of the key head that each query head reads.

    Example:
        >>> spread(torch.tensor([[0, 1], [2, 3]]), 4).tolist()
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    return features.cpu().repeat_interleave(heads // features.shape[0], 0)


def compared(values: Float[Tensor, "B H L E"]) -> Float[Tensor, "1 H N E"]:
    """A sample of the tokens, on the CPU in float64, by which tensors are told apart.

    Example:
        >>> compared(torch.zeros(8, 2, 100, 4)).dtype
        torch.float64
    """
    return some_tokens(values).to("cpu", torch.float64)


def explained(fitted: Float[Tensor, "..."], values: Float[Tensor, "..."]) -> float:
    """Share of the squares of `values` that `fitted` explains: 1 for equal tensors, below 1/2 for unlike ones.

    Zeros tell nothing: 0.

    Example:
        >>> explained(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
        1.0
    """
    fitted, values = fitted.to(torch.float64), values.to(torch.float64)
    left, size = (fitted - values).square().sum(), values.square().sum()
    return float(1.0 - left / size) if bool(size > 0) else 0.0
