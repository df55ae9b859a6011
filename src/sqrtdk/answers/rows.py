"""What a side answered: log-probabilities of the next token after some places of some prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

NO_TOKEN = -1  # stands for a token in rows that list fewer than others
DECIMAL = 1e-6  # of a decimal place: what is that near is a whole number of them
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Rows of log-probabilities, each for the token that follows one place of one prompt.

    Attributes:
        prompt: number of the prompt that each row belongs to, (N,).
        position: last token that the row has seen, (N,): it tells what follows `prompt[: position + 1]`.
        ids: tokens that the row lists, (N, K); -1 where it lists fewer than K.
        values: their log-probabilities in nats, (N, K), float64; NaN where there is no token.
    """

    prompt: Int[Tensor, " N"]
    position: Int[Tensor, " N"]
    ids: Int[Tensor, "N K"]
    values: Float[Tensor, "N K"]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.prompt)

    def select(self, rows: Bool[Tensor, " N"]) -> Answers:
        """Return some rows."""
        return Answers(self.prompt[rows], self.position[rows], self.ids[rows], self.values[rows])

    def with_values(self, values: Float[Tensor, "N K"]) -> Answers:
        """Return the same rows with other log-probabilities."""
        return Answers(self.prompt, self.position, self.ids, values)

    def moved(self, by: int) -> Answers:
        """Return the rows as if each told of the place `by` tokens later; rows that then have no place are left out."""
        moved = Answers(self.prompt, self.position + by, self.ids, self.values)
        return moved.select(moved.position >= 0)


def answers_of_rows(rows: Sequence[tuple[int, int, Mapping[int, float]]]) -> Answers:
    """Return answers from (prompt, position, log-probabilities by token).

    Example:
        >>> answers_of_rows([(0, 4, {7: -0.1, 9: -3.0}), (0, 5, {8: -0.2})]).ids
        tensor([[ 7,  9],
                [ 8, -1]])
    """
    width = max((len(listed) for *_, listed in rows), default=0)
    ids = torch.full((len(rows), width), NO_TOKEN)
    values = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
    for row, (*_, listed) in enumerate(rows):
        ordered = sorted(listed.items(), key=lambda item: -item[1])
        ids[row, : len(ordered)] = torch.tensor([token for token, _ in ordered], dtype=torch.long)
        values[row, : len(ordered)] = torch.tensor([value for _, value in ordered], dtype=torch.float64)
    return Answers(
        torch.tensor([prompt for prompt, *_ in rows], dtype=torch.long),
        torch.tensor([position for _, position, _ in rows], dtype=torch.long),
        ids,
        values,
    )


def joined_answers(parts: Iterable[Answers]) -> Answers:
    """Return the rows of several answers, one after the other."""
    listed = list(parts)
    width = max((part.ids.shape[1] for part in listed), default=0)
    rows = [torch.nn.functional.pad(part.ids, (0, width - part.ids.shape[1]), value=NO_TOKEN) for part in listed]
    values = [torch.nn.functional.pad(part.values, (0, width - part.ids.shape[1]), value=torch.nan) for part in listed]
    prompts, positions = [part.prompt for part in listed], [part.position for part in listed]
    return Answers(torch.cat(prompts), torch.cat(positions), torch.cat(rows), torch.cat(values))


def squares(answers: Answers, own: Float[Tensor, "N K"]) -> Float[Tensor, " N"]:
    """Return how far each row is from a model's log-probabilities, in nats squared.

    For a row that lists log-probabilities b_i of tokens i, where the model has a_i:

        sum_i exp(b_i) (b_i - a_i)^2

    Tokens count as much as the answering side expects them. A row that the model does not have is NaN.

    Args:
        answers: what the other side said.
        own: the model's log-probabilities of the tokens that each row lists.
    """
    listed = answers.ids != NO_TOKEN
    # both sides may rule a token out: -inf - -inf is no difference
    apart = torch.where(answers.values == own, 0.0, answers.values - own)
    weights = torch.where(listed, answers.values.exp(), 0.0)
    return torch.where(weights > 0, weights * apart.square(), 0.0).sum(-1)


def residue(of: Float[Tensor, " N"]) -> float:
    """Return the root of the mean square of `squares`, in nats; NaN without a row."""
    return float(of.nanmean().sqrt())


def fineness(answers: Answers) -> float:
    """Return half of the last decimal that all log-probabilities have, in nats; 0 if they have more than four.

    Example:
        >>> fineness(answers_of_rows([(0, 0, {7: -0.125, 9: -3.0})])), fineness(answers_of_rows([(0, 0, {7: -1 / 3})]))
        (0.0005, 0.0)
    """
    values = answers.values[answers.values.isfinite()]
    for digits in range(5):
        step = 10.0**-digits
        if len(values) and float((values / step - (values / step).round()).abs().max()) < DECIMAL:
            return step / 2
    return 0.0
