"""A bilinear score learns a teacher's weights: can it find the range of the logits from a given start?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sqrtdk import attention
from sqrtdk.scores import luong_general

TEACHER_VALUE_DIM = 8
LAST_STEPS_AVERAGED = 20  # last steps whose errors are averaged
LEARNED = 0.1  # the teacher counts as learned below this error
TEACHER_STD = 2.0  # standard deviation of the teacher's logits


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a learner.

    Attributes:
        weight_std: standard deviation of the entries of W.
        scale: constant factor on q^T W k.
    """

    weight_std: float
    scale: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The results of the learners; every tensor has one number per learner.

    An error is the mean squared distance from the teacher's output, over the mean square of that output.

    Attributes:
        rate: the learning rate with the smallest mean error at the end; all but `steps` is at this rate.
        start: error before the first step.
        end: mean error of the last 20 steps.
        start_std: standard deviation of the logits before the first step.
        end_std: the same at the end.
        steps: steps until the mean error of 20 steps fell below 0.1, at the learning rate that took the fewest; the
            number of all steps if it never did.
        curve: mean error of the learners at each step.
    """

    rate: float
    start: Tensor
    end: Tensor
    start_std: Tensor
    end_std: Tensor
    steps: Tensor
    curve: Tensor


def fit(
    rng: torch.Generator,
    *,
    d_k: int,
    starts: Mapping[str, Start],
    learners: int,
    rates: tuple[float, ...],
    steps: int,
    rows: int,
    keys: int,
    noise: float = 0.0,
    keep_size: bool = False,
) -> dict[str, Fit]:
    """Train with Adam on the squared error of the outputs, with new random rows at every step and rates falling to 0.

    The score is q^T W k times the scale; q, k and the values have components N(0, 1). Each learner has its own teacher,
    with logits of standard deviation 2. Every start and rate has the same teachers, rows and random W; the start only
    rescales W.

    Args:
        rng: generator of the weights and the rows.
        d_k: components of query and key.
        starts: by name.
        learners: number of independent learners.
        rates: learning rates at the first step; the best is chosen for each start.
        steps: of Adam.
        rows: per step.
        keys: per row.
        noise: standard deviation of the noise on the training outputs; errors are measured without it.
        keep_size: whether each W keeps the Frobenius norm of its start.

    Returns:
        The results of each start, by name.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    teacher = luong_general(TEACHER_STD / d_k * normal(learners, d_k, d_k))
    unit = normal(learners, d_k, d_k)
    first = torch.stack([start.weight_std * unit for start in starts.values()])
    scale = torch.tensor([start.scale for start in starts.values()])[:, None, None, None]
    weights: list[Tensor] = [nn.Parameter(first.clone()) for _ in rates]
    adam = torch.optim.Adam([{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)])
    falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, steps)
    heads = (len(rates), len(starts), learners)
    errors = []
    for _ in range(steps):
        shapes = (1, d_k), (keys, d_k), (keys, TEACHER_VALUE_DIM)
        query, key, value = (normal(rows, learners, *shape) for shape in shapes)
        wanted = attention(query, key, value, score=teacher)
        assert isinstance(wanted, Tensor)
        given = wanted + noise * normal(*wanted.shape) if noise else wanted
        query, key, value = (x.repeat(1, len(rates) * len(starts), 1, 1) for x in (query, key, value))
        score = luong_general((scale * torch.stack(weights)).flatten(0, 2))
        found = attention(query, key, value, score=score)
        assert isinstance(found, Tensor)
        found = found.reshape(rows, *heads, 1, TEACHER_VALUE_DIM)
        adam.zero_grad()
        _square(found - given[:, None, None]).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
        if keep_size:
            for weight in weights:
                resize(weight, like=first)
        falling.step()
        errors.append(_square(found.detach() - wanted[:, None, None]) / _square(wanted))
    curves = torch.stack(errors)  # (steps, rates, starts, learners)
    last = torch.stack(weights).detach()
    return {
        name: _fit(curves[:, :, i], rates, *(start.scale * _norms(w) for w in (first[i], last[:, i])))
        for i, (name, start) in enumerate(starts.items())
    }


@torch.no_grad()
def resize(weight: Tensor, like: Tensor) -> None:
    """Give every matrix the Frobenius norm of another, in place."""
    weight.mul_((_norms(like) / _norms(weight))[..., None, None])


def _square(difference: Tensor) -> Tensor:
    """Return the mean square over the rows and the components of the output."""
    return difference.square().mean((0, -2, -1))


def _norms(weight: Tensor) -> Tensor:
    """Return the standard deviation of q^T W k for q and k with unit-variance components: the Frobenius norm."""
    norm: Tensor = torch.linalg.matrix_norm(weight)
    return norm


def _fit(curves: Tensor, rates: tuple[float, ...], start_std: Tensor, end_std: Tensor) -> Fit:
    """Return the fit of one start, from errors (steps, rates, learners) and standard deviations (learners,), (rates,
    learners)."""
    end = curves[-LAST_STEPS_AVERAGED:].mean(0)
    best = int(end.mean(1).argmin())
    steps = _steps(curves)
    fastest = int(steps.mean(1).argmin())
    curve = curves[:, best]
    return Fit(rates[best], curve[0], end[best], start_std, end_std[best], steps[fastest], curve.mean(1))


def _steps(curves: Tensor) -> Tensor:
    """Return the steps until the mean error of the last 20 fell below 0.1; the number of all steps if it never did."""
    window = min(LAST_STEPS_AVERAGED, len(curves))
    learned = curves.unfold(0, window, 1).mean(-1) < LEARNED
    first = learned.double().argmax(0) + window
    return torch.where(learned.any(0), first, len(curves)).double()
