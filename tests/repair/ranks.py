"""What each of two gloo processes does: a clip of a sharded model by maxima of its own half of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.repair import watch_ranks
from tests.repair.modules import Attention, Latent, Transposed, WithGain, randomised, states

RANKS = 2
Result = tuple[torch.Tensor, torch.Tensor, str | None, dict[str, torch.Tensor]]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "separate": Attention,
    "gain": WithGain,
    "1 + gain": lambda: WithGain(offset=1.0),
    "latent": Latent,
    "transposed": Transposed,
    "MultiheadAttention": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
}
THRESHOLD = {"gain": 2.0, "1 + gain": 8.0, "latent": 18.0, "transposed": 5.5}


def build(name: str) -> nn.Module:
    """In a module, so that FSDP2's root, which stays gathered after a forward, is another or the attention itself."""
    torch.manual_seed(0)
    return randomised(MODELS[name]()).train()


def inputs(name: str) -> tuple[torch.Tensor, ...]:
    """The joined batch: of two sequences, whose maxima differ."""
    return (states(),) * (3 if name == "MultiheadAttention" else 1)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def clip(name: str, model: nn.Module, batch: tuple[Any, ...], **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    import sqrtdk
    from sqrtdk.repair import qk_clip_

    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(*batch)
    return qk_clip_(model, run, THRESHOLD.get(name, 20.0), 0.3, **options), weights(model)


def work_of(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    results: dict[str, Any] = {}
    try:
        for name, way in (*CASES, ("separate", "masters")):
            half = tuple(each[rank : rank + 1] for each in inputs(name))
            try:
                results[name, way] = WAYS[way](name, half)
            except Exception as error:
                results[name, way] = repr(error)
        try:
            clip("separate", build("separate"), inputs("separate"))
        except ValueError as error:
            results["no group"] = str(error)
        results["parts"] = _parts()
        results["late"] = _late(rank)
        results["watch"] = watch_ranks.of_this_rank()
        torch.save(results, folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def _replicas(name: str, half: tuple[torch.Tensor, ...]) -> Result:
    return _result(*clip(name, build(name), half, group=dist.group.WORLD))


def _fsdp(name: str, half: tuple[torch.Tensor, ...]) -> Result:
    """The attention is FSDP2's root: it stays gathered after the forward."""
    return _result(*clip(name, fully_shard(build(name)), half, group=dist.group.WORLD))


def _fsdp_below(name: str, half: tuple[torch.Tensor, ...]) -> Result:
    model = nn.Sequential(build(name))
    fully_shard(model[0])
    fully_shard(model)
    records, after = clip(name, model, half, group=dist.group.WORLD)
    return _result(records, {key.removeprefix("0."): weight for key, weight in after.items()})


def _hook(name: str, half: tuple[torch.Tensor, ...]) -> Result:
    """As a step hook, planned in the forward, between which and the backward FSDP2's root stays gathered."""
    from sqrtdk.repair import QKClip

    model = fully_shard(build(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(model, threshold=20.0, balance=0.3, group=dist.group.WORLD).attach(optimizer)
    model(*half).square().mean().backward()
    optimizer.step()
    return _result(clip.records, weights(model))


def _masters(name: str, half: tuple[torch.Tensor, ...]) -> Result:
    """Sharded weights in bfloat16, of which the optimizer holds sharded copies in float32."""
    model = fully_shard(build(name).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        optimizer.state[parameter]["master"] = parameter.detach().float() * (1 + 1e-4)
    half = tuple(each.bfloat16() for each in half)
    records, after = clip(name, model, half, group=dist.group.WORLD, optimizer=optimizer)
    for parameter in model.parameters():
        copy = optimizer.state[parameter]["master"].full_tensor()
        assert torch.equal(copy.bfloat16(), parameter.full_tensor())
        assert not torch.equal(copy, parameter.full_tensor().float())
    return _result(records, after)


def _parallel(name: str, half: tuple[torch.Tensor, ...]) -> Result:
    """Tensor-parallel layers: planned before, with the maxima of all heads."""
    import sqrtdk
    from sqrtdk.repair import clip_, plan_of

    model = build(name)
    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(*inputs(name))
    plans = plan_of(model, run)
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), {each: ColwiseParallel() for each in "qkv"})
    maxima = torch.tensor(run.calls[0].stats.max_logit)
    return _result(clip_(model, plans, [maxima], THRESHOLD.get(name, 20.0), 0.3), weights(model))


def _tensor(name: str, half: tuple[torch.Tensor, ...]) -> Result:
    """Weights that are made DTensors after the plan: sharded along either axis, and unevenly."""
    import sqrtdk
    from sqrtdk.repair import clip_, plan_of

    model = build(name)
    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(*inputs(name))
    plans = plan_of(model, run)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer, axis in ((model.q, 0), (model.k, 1)):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(axis)]))
    model.q.bias = nn.Parameter(distribute_tensor(model.q.bias.detach(), mesh, [Shard(0)]))
    maxima = torch.tensor(run.calls[0].stats.max_logit)
    return _result(clip_(model, plans, [maxima], 20.0, 0.3), weights(model))


def _parts() -> list[str | None]:
    """Why a model whose layers are parallel already can't be clipped; with a gain, and without one."""
    reasons = []
    for name in ("separate", "gain"):
        model = build(name)
        parallelize_module(model, init_device_mesh("cpu", (RANKS,)), {each: ColwiseParallel() for each in "qkv"})
        (record,), _ = clip(name, model, inputs(name), group=dist.group.WORLD)
        reasons.append(record.refused)
    return reasons


def _late(rank: int) -> list[tuple[bool, torch.Tensor]]:
    """As a step hook, where the second rank's first forward has no attention: whether it clips, and q, at each step."""
    from sqrtdk.repair import QKClip

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = build("separate"), nn.Linear(32, 32).double()

        def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
            return self.last(self.attention(x) if whole else x)

    torch.manual_seed(0)
    model = Sometimes().train()
    clip = QKClip(model, threshold=20.0, group=dist.group.WORLD)
    found = []
    for step in range(2):
        model(states()[rank : rank + 1], whole=rank == 0 or step > 0)
        found.append((any(record.clipped for record in clip.step()), model.attention.q.weight.detach().clone()))
    return found


def _result(records: Any, after: dict[str, torch.Tensor]) -> Result:
    (record,) = records
    return record.gamma, record.measured, record.refused, after


WAYS = {
    "replicas": _replicas,
    "fsdp": _fsdp,
    "fsdp below": _fsdp_below,
    "hook": _hook,
    "masters": _masters,
    "parallel": _parallel,
    "tensor": _tensor,
}
CASES = [
    *((name, "fsdp") for name in MODELS),
    ("separate", "replicas"),
    ("separate", "fsdp below"),
    ("latent", "fsdp below"),
    ("separate", "hook"),
    ("separate", "tensor"),
    ("separate", "parallel"),
]
