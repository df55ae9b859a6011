"""A bilinear score learns the weights of a teacher: can it find the range of the logits from a given start?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sqrtdk import attention
from sqrtdk.scores import luong_general

VALUE_DIM = 8
LAST = 20  # steps over which the final error is averaged
TEACHER_STD = 2.0  # of the teacher's logits


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of the learners at the best learning rate; every tensor has one number for each learner.

    Attributes:
        rate: that learning rate.
        start: error before the first step, over the mean square of the teacher's output.
        end: the same at the end.
        start_std: standard deviation of the logits before the first step.
        end_std: the same at the end.
        curve: mean error of each step.
    """

    rate: float
    start: Tensor
    end: Tensor
    start_std: Tensor
    end_std: Tensor
    curve: Tensor


def fit(
    rng: torch.Generator,
    *,
    d_k: int,
    weight_std: float,
    scale: float,
    learners: int,
    rates: tuple[float, ...],
    steps: int,
    rows: int,
    keys: int,
) -> Fit:
    """Adam on the squared error of the outputs, new random rows at every step.

    The score is q^T W k times the scale; q, k and the values have components N(0, 1). Each learner has a teacher of
    its own, with logits of standard deviation 2. All learning rates are tried from the same start on the same rows.

    Args:
        rng: of the weights and the rows.
        d_k: components of query and key.
        weight_std: of the entries of W at the start.
        scale: of the learners; the teachers have none.
        learners: independent ones.
        rates: learning rates to choose from, by the mean error at the end.
        steps: of Adam.
        rows: of each step.
        keys: of each row.
    """
    heads = (len(rates), learners)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    teacher = luong_general(TEACHER_STD / d_k * normal(learners, d_k, d_k))
    first = weight_std * normal(learners, d_k, d_k)
    weights: list[Tensor] = [nn.Parameter(first.clone()) for _ in rates]
    adam = torch.optim.Adam([{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)])
    errors = []
    for _ in range(steps):
        shapes = (1, d_k), (keys, d_k), (keys, VALUE_DIM)
        query, key, value = (normal(rows, learners, *shape) for shape in shapes)
        wanted = attention(query, key, value, score=teacher)
        query, key, value = (x.repeat(1, len(rates), 1, 1) for x in (query, key, value))
        found = attention(query, key, value, score=luong_general(torch.cat(weights)), scale=scale)
        assert isinstance(wanted, Tensor)
        assert isinstance(found, Tensor)
        error = (found.reshape(rows, *heads, 1, VALUE_DIM) - wanted.unsqueeze(1)).square().mean((0, 3, 4))
        adam.zero_grad()
        error.sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
        errors.append(error.detach() / wanted.square().mean((0, 2, 3)))
    curves = torch.stack(errors)  # (steps, rates, learners)
    end = curves[-LAST:].mean(0)
    best = int(end.mean(1).argmin())
    return Fit(
        rates[best],
        curves[0, best],
        end[best],
        _logit_std(first, scale),
        _logit_std(weights[best].detach(), scale),
        curves[:, best].mean(1),
    )


def _logit_std(weight: Tensor, scale: float) -> Tensor:
    """Of scale q^T W k for q and k with components of variance 1: the scale times the Frobenius norm."""
    norm: Tensor = torch.linalg.matrix_norm(weight)
    return scale * norm
