"""How far one step moves the weights that give q and k, relative to their size, and with which learning rate.

    relative step = max over these weights of ||W_after - W_before|| / ||W_before||

    drift = max over these weights of ||W_before - W_last|| / ||W_last||, W_last at the end of the sampled step before

The learning rate alone does not tell a large step: Adam moves each number by about the rate, SGD by the rate times a
gradient. The norms are over at most `NUMBERS_A_WEIGHT` numbers of each weight, evenly spread, which are copied at the
end of the first forward pass of a sampled step. A weight of zeros has no relative step. The drift is that of all steps
between two samples, and costs no copy of its own. Weights that grow from zeros have none: a sampled step that moved a
weight by more than half its size is followed by healthy ones that move it by many times its size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_parameters
from sqrtdk.errors import InvalidTypeError, kind_and_text
from sqrtdk.messages import Message

NUMBERS_A_WEIGHT = 4096
LARGEST_CALM_STEP = 0.5  # relative step of a weight whose drift is measured


class ProjectionUpdate:
    """The update of the weights of one sampled step.

    Attributes:
        learning_rate: with which the step is made; None if it is not known.
        failures: why one of the two could not be measured.

    Args:
        model: that is trained.
        optimizers: of the training loop; empty if they are not known.
        last: the update of the sampled step before; None if there was none.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], last: ProjectionUpdate | None = None) -> None:
        self.learning_rate: float | None = None
        self.failures: list[str] = []
        self._model, self._optimizers = model, optimizers
        self._before: dict[str, Tensor] = {}
        self._last = last._after if last is not None else {}
        self._after: dict[str, Tensor] = {}  # of the weights whose drift is to be measured

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

    def changes(self) -> tuple[float | None, float | None]:
        """Return the relative step and the drift (see the module), each None if no weight could be compared."""
        try:
            after = {name: _spread(weight) for name, weight in self._weights(self._before).items()}
            steps, drifts = _changes(self._before, after), _changes(self._last, self._before)
            ratios = [*steps.values(), *drifts.values()]
            known = torch.stack([ratio.to(ratios[0].device) for ratio in ratios]).tolist() if ratios else []
            moved = dict(zip(steps, known, strict=False))
            self._after = {name: after[name] for name, ratio in moved.items() if ratio <= LARGEST_CALM_STEP}
            return _largest(known[: len(steps)]), _largest(known[len(steps) :])
        except Exception as error:
            self._failed(error)
            return None, None

    def _failed(self, error: Exception) -> None:
        self.failures.append(Message("alarms.unmeasured.update", error=kind_and_text(error)))

    def _weights(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: weight for name, weight in named_parameters(self._model) if name in names}


def _changes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return |new - old| / |old| (Frobenius) of each weight that both have."""
    # the shards of a weight may have been gathered in one of the two
    pairs = {name: (old[name], x) for name, x in new.items() if name in old and x.shape == old[name].shape}
    return {name: ((x - before).norm() / before.norm()).double() for name, (before, x) in pairs.items() if x.numel()}


def _largest(ratios: Iterable[float]) -> float | None:
    return max((ratio for ratio in ratios if math.isfinite(ratio)), default=None)


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
