"""Attentions that are easily mistaken over two ranks; each with what one process has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

import sqrtdk
from sqrtdk.laws.processes.runs import run_of_rank
from tests.laws.rank_meshes import Stack, by_heads, tokens
from tests.monitor.ranks_at_work import join
from tests.ranks.split_models import (
    FEATURES,
    HEADS,
    LENGTH,
    WIDTH,
    Attention,
    Case,
    Decoder,
    alone,
    gathered,
    here,
    mine,
    ring,
    sequence,
    whole,
)


def of_all(part: Tensor, axis: int) -> Tensor:
    """The parts of all ranks along an axis."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(here()[1])]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, axis)


class ThenWhole(Decoder):
    """The first layer is a ring, in which the last rank has more calls; the second has all tokens on every rank."""

    def __init__(self) -> None:
        super().__init__(alone)
        self.layers[0].meet = ring if here()[1] > 1 else alone

    def forward(self, x: Tensor, position_ids: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        assert places is not None
        x = x + self.layers[0](x, places[0])
        x = of_all(x, 1) if here()[1] > 1 else x
        return x + self.layers[1](x, places[0])


def one_key_head() -> Case:
    """Heads over ranks, all of which read the one key head."""

    def meet(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    rank, size = here()
    model = Decoder(meet, 1)
    layer = model.layers[0]
    layer.k, layer.v = (nn.Linear(FEATURES, WIDTH, dtype=torch.float64) for _ in range(2))
    if size > 1:
        some = Attention(meet, HEADS // size)
        with torch.no_grad():
            some.q.weight.copy_(layer.q.weight.chunk(size)[rank])
            some.q.bias.copy_(layer.q.bias.chunk(size)[rank])
            some.o.weight.copy_(layer.o.weight.chunk(size, 1)[rank])
        layer.q, layer.o = some.q, some.o

        def summed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            total = output.clone()
            dist.all_reduce(total)
            return total

        layer.o.register_forward_hook(summed)
    return model, whole()


class Cross(nn.Module):
    """Rows over a memory, whose keys are gathered, or lie on all ranks while each has all rows."""

    def __init__(self, merges: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.merges = merges
        self.q, self.k, self.v = (nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            part(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for part, tokens in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        if here()[1] == 1 or not self.merges:
            k, v = (of_all(part, 2) for part in (k, v)) if here()[1] > 1 else (k, v)
            return scaled_dot_product_attention(q, k, v)
        logits = q @ k.mT * WIDTH**-0.5
        outputs, lses = of_all(logits.softmax(-1) @ v, 0), of_all(logits.logsumexp(-1), 0)
        return sqrtdk.merge(outputs.chunk(here()[1]), lses.chunk(here()[1]))[0]


def cross(merges: bool) -> Case:
    rank, size = here()
    rows, memory = sequence()[:, : LENGTH // 2], sequence()[:, LENGTH // 2 :]
    rows = rows if merges else sequence().chunk(size, 1)[rank]
    return Cross(merges), {"x": rows, "memory": memory.chunk(size, 1)[rank]}


def one_word() -> Case:
    """All tokens are alike."""
    inputs = mine("plain")
    return Decoder(gathered if here()[1] > 1 else alone), inputs | {"x": torch.ones_like(inputs["x"])}


class OneMore(nn.Module):
    """Heads in DTensors over all ranks; the first rank has one attention more, and reaches one DTensor more."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.more = Stack(1), Attention(alone)
        self.gain = nn.Parameter(torch.ones(4))
        if here()[1] > 1:
            by_heads(self.all)
            mesh = init_device_mesh("cpu", (here()[1],))
            self.gain = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))

    def forward(self, input_ids: Tensor) -> Tensor:
        y = self.all(input_ids)
        if here()[0]:
            return y
        gain = self.gain.to_local() if isinstance(self.gain, DTensor) else self.gain
        places = torch.arange(y.shape[1])
        more = self.more(sequence()[:1, :1].expand(-1, y.shape[1], -1), places)
        return y + more.mean().float() * gain.sum()


def gradients_of_one_more() -> dict[str, Tensor]:
    """What a rank has where only the first one reaches a DTensor."""
    model = OneMore()
    return run_of_rank(model, tokens(), {"0": torch.ones(1, 32, 40)})["grads"]


CASES: dict[str, Callable[[], Case]] = {
    "then_whole": lambda: (ThenWhole(), mine("plain")),
    "one_key_head": one_key_head,
    "gathered_memory": lambda: cross(False),
    "merged_memory": lambda: cross(True),
    "one_word": one_word,
    "one_more": lambda: (OneMore(), tokens()),
}


def reports() -> dict[str, sqrtdk.audit.records.CheckReport]:
    """The report of each case."""
    found = {}
    with torch.no_grad():
        for name, make in CASES.items():
            model, inputs = make()
            found[name] = sqrtdk.check(model.eval(), inputs, laws="none")
    return found


def work_of(rank: int, size: int, folder: Path) -> None:
    join(rank, size, folder)
    torch.save(reports(), folder / f"rank{rank}.pt")
    torch.save({name: grad.tolist() for name, grad in gradients_of_one_more().items()}, folder / f"gradients{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
