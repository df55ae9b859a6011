"""Rows of a parameter for each head, the plan of a call, and the exception that says why there is no plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing import some_tokens

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Refusal(Exception):
    """Raised for a call that can't be clipped; its text is the reason in the plan."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The entries of one parameter that belong to each head.

    Attributes:
        name: of the parameter in the model.
        side: "q" (scaled by gamma^balance), "k" (by gamma^(1 - balance)), or "whole" (q rows that meet a part of k
            shared by all heads; that part is left alone, so these rows take all of gamma).
        index: (Hq, E), numbers along `axis`, for each query head.
        axis: of the parameter, along which its features lie: 0 in nn.Linear, 1 in GPT-2's Conv1D; None: of the
            flattened parameter.
        offset: the effective gain is `offset` + the parameter: 1 if it is stored as its distance from 1.
        shape: of the whole parameter, to detect another model's parameter of the same name; None: unknown.
    """

    name: str
    side: str
    index: Int[Tensor, "Hq E"]
    axis: int | None = 0
    offset: float = 0.0
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CallPlan:
    """The parameters behind the heads of one attention call.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        heads: number of query heads.
        rows: the rows to scale; empty for a refused call.
        groups: (Hq,): heads of equal number, in any call of the plan, are scaled as one.
        softcap: c of c tanh(z / c) on the logits; None without one.
        shared: weights that several heads share, in words.
        refused: why the call can't be clipped; None if it can.
    """

    site: str
    index: int
    heads: int
    rows: tuple[HeadRows, ...]
    groups: Int[Tensor, " Hq"]
    softcap: float | None = None
    shared: tuple[str, ...] = ()
    refused: str | None = None


def key_head_features(features: Int[Tensor, "H E"], heads: int) -> Int[Tensor, "Hq E"]:
    """Return the features of the key head that each query head reads.

    Example:
        >>> key_head_features(torch.tensor([[0, 1], [2, 3]]), 4).tolist()
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    return features.cpu().repeat_interleave(heads // features.shape[0], 0)


def compared(values: Float[Tensor, "B H L E"]) -> Float[Tensor, "1 H N E"]:
    """Return a sample of the tokens, on the CPU in float64, for comparing tensors.

    Example:
        >>> compared(torch.zeros(8, 2, 100, 4)).dtype
        torch.float64
    """
    return some_tokens(values).to("cpu", torch.float64)


def explained(fitted: Float[Tensor, "..."], values: Float[Tensor, "..."]) -> float:
    """Return the share of the squares of `values` that `fitted` explains: 1 if equal, below 1/2 for unrelated tensors.

    Zeros explain nothing, and give 0.

    Example:
        >>> explained(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
        1.0
    """
    fitted, values = fitted.to(torch.float64), values.to(torch.float64)
    # 1 - |fit - values|^2 / |values|^2, the share of the squares that the fit explains; negative for a bad fit.
    left, size = (fitted - values).square().sum(), values.square().sum()
    return float(1.0 - left / size) if bool(size > 0) else 0.0
