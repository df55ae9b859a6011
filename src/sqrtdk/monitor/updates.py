"""How far one step moves the weights that give q and k, relative to their size, and with which learning rate.

    relative step = max over these weights of ||W_after - W_before|| / ||W_before||

The learning rate alone does not tell a large step: Adam moves each number by about the rate, SGD by the rate times a
gradient. The norms are over at most `NUMBERS_A_WEIGHT` numbers of each weight, evenly spread, which are copied at the
end of the first forward pass of a sampled step. A weight of zeros has no relative step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_parameters
from sqrtdk.errors import InvalidTypeError, kind_and_text
from sqrtdk.messages import Message

NUMBERS_A_WEIGHT = 4096


class ProjectionUpdate:
    """The update of the weights of one sampled step.

    Attributes:
        learning_rate: with which the step is made; None if it is not known.
        failures: why one of the two could not be measured.

    Args:
        model: that is trained.
        optimizers: of the training loop; empty if they are not known.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self.learning_rate: float | None = None
        self.failures: list[str] = []
        self._model, self._optimizers = model, optimizers
        self._before: dict[str, Tensor] = {}

    def begin(self, names: Collection[str]) -> None:
        """Copy weights before the optimizer changes them; a second call in the same step does nothing.

        Args:
            names: Names of the parameters to copy.
        """
        if not self._before:
            try:
                weights = self._weights(names)
                self.learning_rate = largest_rate(self._optimizers, weights.values())
                self._before = {name: _spread(weight) for name, weight in weights.items()}
            except Exception as error:  # an observer never stops the run
                self._failed(error)

    def relative_step(self) -> float | None:
        """Return the largest relative change of a weight since `begin`: max over the weights of |new - old| / |old|.

        The norms are Frobenius norms. Returns None if no weight could be compared.
        """
        try:
            after = {name: _spread(weight) for name, weight in self._weights(self._before).items()}
            # the shards of a weight may have been gathered in one of the two
            pairs = [(self._before[name], new) for name, new in after.items() if new.shape == self._before[name].shape]
            ratios = [((new - old).norm() / old.norm()).double() for old, new in pairs if old.numel()]
            known = torch.stack([ratio.to(ratios[0].device) for ratio in ratios]).tolist() if ratios else []
            return max((ratio for ratio in known if math.isfinite(ratio)), default=None)
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        self.failures.append(Message("alarms.unmeasured.update", error=kind_and_text(error)))

    def _weights(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: weight for name, weight in named_parameters(self._model) if name in names}


def _spread(weight: Tensor) -> Tensor:
    """Copy some numbers of a weight, of this process's part if it is sharded."""
    local = getattr(weight, "to_local", lambda: weight)().detach().flatten()
    # an odd stride, or numbers of the same few columns would be taken
    return local[:: local.numel() // NUMBERS_A_WEIGHT | 1].to(torch.float32, copy=True)


def largest_rate(optimizers: Sequence[Any], weights: Iterable[Tensor]) -> float | None:
    """Return the largest learning rate of the groups that hold one of the weights, or of all groups if none does.

    Example:
        >>> q, bias = torch.zeros(2), torch.zeros(2)
        >>> adam = torch.optim.Adam([{"params": [q], "lr": 0.01}, {"params": [bias], "lr": 0.5}])
        >>> largest_rate([adam], [q]), largest_rate([adam], []), largest_rate([], [q])
        (0.01, 0.5, None)
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    own = {id(weight) for weight in weights}
    holding = [group for group in groups if any(id(parameter) in own for parameter in group["params"])]
    return max((float(group["lr"]) for group in holding or groups if "lr" in group), default=None)


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers of a training loop, given as one, several, or None.

    Raises:
        InvalidTypeError: One of them has no `param_groups`.
    """
    several = optimizer if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    for one in several:
        if not hasattr(one, "param_groups"):
            raise InvalidTypeError(
                f"optimizer is a torch.optim.Optimizer or a list of them; got {type(one).__name__}",
                hint="None: the learning rate is not recorded.",
            )
    return tuple(several)
