"""What each of two gloo processes does: a clip after the step of a watch that has joined their maxima."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sqrtdk.errors import SqrtdkError
from sqrtdk.monitor.watch import watch
from sqrtdk.repair import qk_clip_
from tests.monitor.ranks_models import STEPS, batch, decoder, mine, sharded

THRESHOLD = 2.0


def state(model: nn.Module, records: Any) -> dict[str, Any]:
    whole = {
        name.removeprefix("module."): p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in model.named_parameters()
    }
    return {
        "refused": [record.refused for record in records],
        "clipped": [record.clipped for record in records],
        "measured": [record.measured.tolist() for record in records],
        "weights": {name: weight.tolist() for name, weight in whole.items()},
    }


def train(model: nn.Module, passed: nn.Module, inputs: list[list[Tensor]], **options: Any) -> list[dict[str, Any]]:
    """Steps of several forward passes each, none of them for a rank that has no batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with watch(model, every=1, on_alarm=lambda alarm: None) as health:
        for batches in inputs:
            for x in batches:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            health.step()
            found.append(state(model, qk_clip_(passed, health, THRESHOLD, **options)))
    return found


def ddp() -> dict[str, Any]:
    """The inner model is passed, the outer one watched."""
    model = nn.parallel.DistributedDataParallel(decoder())
    return train(model, model.module, [[mine(batch())]] * STEPS)[0]


def accumulated() -> dict[str, Any]:
    """Of two forward passes of each rank, one of one rank has the largest logits."""
    model = nn.parallel.DistributedDataParallel(decoder())
    gain = 3.0 if torch.distributed.get_rank() == 1 else 1.0
    return train(model, model, [[mine(batch()), gain * mine(batch())]])[0]


def fsdp() -> dict[str, Any]:
    model = sharded(decoder())
    return train(model, model, [[mine(batch())]] * STEPS)[0]


def absent() -> list[dict[str, Any]]:
    """The first rank has no batch at the first step; no gradient moves the weights, which no collective joins."""
    model = decoder()
    first = torch.distributed.get_rank() == 0
    with torch.no_grad(), watch(model, every=1, on_alarm=lambda alarm: None) as health:
        found = []
        for step in range(2):
            if step or not first:
                model(batch())
            health.step()
            found.append(state(model, qk_clip_(model, health, THRESHOLD)))
    return found


def refusals() -> dict[str, str]:
    model, found = decoder(), {}
    ways: dict[str, Any] = {"alone": ("alone", None), "merged": ("alone", "merged"), "heads": ("heads", None)}
    for name, (shards, group) in ways.items():
        with torch.no_grad(), watch(model, every=1, on_alarm=lambda alarm: None, shards=shards) as health:
            model(batch())
            health.step()
            try:
                qk_clip_(model, health, group=group)
                found[name] = ""
            except SqrtdkError as error:
                found[name] = str(error).splitlines()[0]
    return found


def alone() -> dict[str, Any]:
    """One process on the whole batch."""
    model = decoder()
    return train(model, model, [[batch()]] * STEPS)[0]


SCENARIOS = ("ddp", "accumulated", "fsdp")


def of_this_rank() -> dict[str, Any]:
    return {scenario.__name__: scenario() for scenario in (ddp, accumulated, fsdp, absent, refusals)}
