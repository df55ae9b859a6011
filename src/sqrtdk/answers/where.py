"""Where in a sequence two sides begin to differ, and whether the difference grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.answers.rows import Answers

if TYPE_CHECKING:
    from jaxtyping import Float

BINS = 16
DIFFERS_FROM = 3.0  # floors, above which a bin differs
GROWS = 0.7  # rank correlation with the position from which on a difference grows


@dataclass(frozen=True, slots=True)
class Course:
    """How a difference goes along the sequence.

    Attributes:
        ends: last position of each bin, counted from 0.
        residues: root mean square of the rows in each bin, in nats.
        begins: first position that differs in the first bin that does; None if none does.
        grows: whether it grows with the position.
    """

    ends: tuple[int, ...]
    residues: tuple[float, ...]
    begins: int | None
    grows: bool


def course_of(answers: Answers, squares: Float[Tensor, " N"], floor: float) -> Course:
    """Return how the difference of each row goes along the sequence.

    Args:
        answers: the rows, for their positions.
        squares: see `sqrtdk.answers.rows.squares`.
        floor: what rounding leaves, in nats.

    Example:
        >>> from sqrtdk.answers.rows import answers_of_rows
        >>> rows = answers_of_rows([(0, at, {0: -0.1}) for at in range(32)])
        >>> late = torch.where(rows.position < 21, 0.0, 1.0).double()
        >>> course_of(rows, late, 1e-3).begins
        21
    """
    last = int(answers.position.max())
    bins = min(BINS, last + 1)
    which = answers.position * bins // (last + 1)
    ends, residues = [], []
    for number in range(bins):
        rows = which == number
        ends.append(int(answers.position[rows].max()) if rows.any() else -1)
        residues.append(float(squares[rows].nanmean().sqrt()) if rows.any() else float("nan"))
    places = [number for number, value in enumerate(residues) if value > DIFFERS_FROM * floor]
    begins = _first(answers.position[which == places[0]], squares[which == places[0]], floor) if places else None
    values = torch.tensor([value for value in residues if value == value], dtype=torch.float64)
    return Course(tuple(ends), tuple(residues), begins, _rank_correlation(values) > GROWS)


def _first(positions: Tensor, squares: Float[Tensor, " n"], floor: float) -> int:
    """Return the first position whose rows differ; the first of all if only their mean does."""
    every = sorted({*positions.tolist()})
    differ = (at for at in every if float(squares[positions == at].nanmean().sqrt()) > DIFFERS_FROM * floor)
    return int(next(differ, every[0]))


def _rank_correlation(values: Float[Tensor, " n"]) -> float:
    """Return Spearman's correlation of values with their places."""
    if len(values) < 3 or float(values.max() - values.min()) == 0:
        return 0.0
    ranks = values.argsort().argsort().double()
    places = torch.arange(len(values), dtype=torch.float64)
    return float(torch.corrcoef(torch.stack([ranks, places]))[0, 1])
