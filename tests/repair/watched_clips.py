"""What a watch sees of a model that is clipped: its maxima, the weights that moved, and what rounding allows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.monitor.watch import Watch
from tests.repair.layouts import Layout, terms
from tests.tolerances import allowed


def silent(model: nn.Module, **options: Any) -> Watch:
    return Watch(model, **{"every": 1, "on_alarm": lambda alarm: None, **options})


def maxima(watch: Watch, site: int = 0) -> Tensor:
    sample = watch.last_sample()
    assert sample is not None
    return torch.tensor(sample.calls[site].columns["max_logit"], dtype=torch.float64)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]


def rounding(layout: Layout) -> float:
    """What sums of the inputs and of the features may cost a logit, which none of the terms exceeds by far."""
    with sqrtdk.trace(layout.model, keep=True) as run:
        layout.run()
    return allowed(layout.dtype, length=64, logit=0.0, magnitude=terms(run.tensors[0]))


def between(values: Tensor) -> float:
    """A threshold that some heads are above, and some below."""
    low, high = values.sort().values[[len(values) // 2 - 1, len(values) // 2]].tolist()
    return math.sqrt(low * high)
