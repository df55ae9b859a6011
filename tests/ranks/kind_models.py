"""One decoder on several ranks in every kind of parallelism. Numbers are float64.

A kind is a factory of this module, `tests.ranks.kind_models:ring`; on one process it is the plain decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sqrtdk.recording import Shard
from tests.laws.rank_meshes import Copy, GatherOf, ShareOf, Sum, by_both, by_heads, by_weights
from tests.laws.rank_models import AllToAll, places, ranks

LENGTH, HEADS, DIM, VOCABULARY, LAYERS = 16, 4, 8, 40, 4
WIDTH = HEADS * DIM
Meet = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v and the places of this rank's tokens


def ring_of(group: Any) -> tuple[int, int, list[int]]:
    """This rank in a group, its size, and the global number of each of its ranks."""
    return dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)


class Turn(torch.autograd.Function):
    """The tensor of the rank before; the gradient goes back to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, by: int) -> Tensor:
        ctx.group, ctx.by = group, by
        rank, size, names = ring_of(group)
        x = x.contiguous()
        came = torch.empty_like(x)
        sent = dist.isend(x, names[(rank + by) % size])
        dist.irecv(came, names[(rank - by) % size]).wait()
        sent.wait()
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return Turn.apply(grads[0], ctx.group, -ctx.by), None, None


def alone(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= at)


def flash_ring(q: Tensor, k: Tensor, v: Tensor, at: Tensor, group: Any = None) -> Tensor:
    """Keys go round with their places; maximum, sum and output run."""
    top = q.new_full((*q.shape[:-1], 1), -1e30)
    total, out, keys = torch.zeros_like(top), torch.zeros_like(q), at
    for step in range(ranks()[1] if group is None else dist.get_world_size(group)):
        if step:
            k, v, keys = (Turn.apply(x, group or dist.group.WORLD, 1) for x in (k, v, keys))
        z = (q @ k.mT * DIM**-0.5).masked_fill(at[:, None] < keys, -1e30)
        new = torch.maximum(top, z.amax(-1, keepdim=True))
        power, keep = (z - new).exp(), (top - new).exp()
        total, out, top = total * keep + power.sum(-1, keepdim=True), out * keep + power @ v, new
    return out / total


def all_to_all(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """All tokens of some heads."""
    if ranks()[1] == 1:
        return alone(q, k, v, at)
    q, k, v = (AllToAll.apply(x, 1, 2) for x in (q, k, v))
    return AllToAll.apply(alone(q, k, v, GatherOf.apply(at[None], dist.group.WORLD, 1)[0]), 2, 1)


def of_gathered(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Tokens were gathered before, and their places are now."""
    return alone(q, k, v, GatherOf.apply(at[None], dist.group.WORLD, 1)[0])


class Block(nn.Module):
    """A norm and an attention over this rank's heads; `enter` and `leave` are what ranks do around it."""

    def __init__(self, meet: Meet, shard: int = 1) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // shard, bias=False) for _ in range(3))
        self.norm, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH // shard, WIDTH, bias=False)
        self.meet = meet
        self.enter: Callable[[Tensor], Tensor] = lambda x: x
        self.leave: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        y = self.enter(self.norm(x))
        q, k, v = (part(y).unflatten(-1, (-1, DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + self.leave(self.o(self.meet(q, k, v, at).transpose(1, 2).flatten(2)))


class Model(nn.Module):
    """Embedding, blocks and a head; a stage of a pipeline has some of them."""

    def __init__(self, meet: Meet = alone, shard: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleDict({str(number): Block(meet, shard) for number in range(LAYERS)})
        self.staged = False
        with torch.no_grad():
            for layer in self.layers.values():
                layer.q.weight *= 4.0
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rank, size = ranks()
        behind, ahead = (rank > 0, rank < size - 1) if self.staged else (False, False)
        if behind:
            x = torch.empty(*input_ids.shape, WIDTH, dtype=torch.float64)
            dist.recv(x, rank - 1)
        else:
            x = self.embed(input_ids)
        for layer in self.layers.values():
            x = layer(x, position_ids[0])
        if ahead:
            dist.send(x.detach().contiguous(), rank + 1)
            return x
        return self.head(x)


def inputs_of(at: Tensor, rows: slice = slice(0, 2)) -> dict[str, Tensor]:
    """The tokens of some places."""
    ids = torch.randint(1, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[rows][:, at], "position_ids": at[None]}


Case = tuple[nn.Module, dict[str, Tensor]]


def context(meet: Meet, order: str = "whole", group: Any = None) -> Case:
    """Tokens over ranks."""
    rank, size = ranks() if group is None else (dist.get_rank(group), dist.get_world_size(group))
    return Model(meet).eval(), inputs_of(places(order, rank, size, LENGTH))


def cut_heads(model: Model, group: Any) -> Model:
    """This rank's heads of a whole model."""
    rank, size, _ = ring_of(group)
    part = Model(next(iter(model.layers.values())).meet, size)
    for (name, mine), every in zip(part.named_parameters(), model.parameters(), strict=True):
        axis = {"q": 0, "k": 0, "v": 0, "o": 1}.get(name.split(".")[-2])
        mine.data = every.data.clone() if axis is None else every.data.chunk(size, axis)[rank].clone()
    return part


def tensor() -> Case:
    model = Model()
    if ranks()[1] > 1:
        by_heads(model, init_device_mesh("cpu", (ranks()[1],), mesh_dim_names=("tp",)))
    return model.eval(), inputs_of(torch.arange(LENGTH))


def sequence() -> Case:
    """Heads over ranks within the attention, tokens outside of it."""
    rank, size = ranks()
    model = Model()
    if size == 1:
        return model.eval(), inputs_of(torch.arange(LENGTH))
    model = cut_heads(Model(of_gathered), dist.group.WORLD)
    for layer in model.layers.values():
        layer.enter = lambda x: GatherOf.apply(x, dist.group.WORLD, 1)
        layer.leave = lambda x: ShareOf.apply(x, dist.group.WORLD, 1)
    return model.eval(), inputs_of(places("whole", rank, size, LENGTH))


def pipeline() -> Case:
    rank, size = ranks()
    model = Model()
    if size > 1:
        model.staged = True
        model.layers = nn.ModuleDict({n: b for n, b in model.layers.items() if int(n) * size // LAYERS == rank})
        if rank:
            del model.embed
        if rank < size - 1:
            del model.head
    return model.eval(), inputs_of(torch.arange(LENGTH))


def fsdp2() -> Case:
    rank, size = ranks()
    model, rows = Model(), slice(0, 4)
    if size > 1:
        by_weights(model)
        rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
    return model.eval(), inputs_of(torch.arange(LENGTH), rows)


def fsdp2_and_ring() -> Case:
    """Weights and tokens over the same ranks."""
    model, inputs = context(flash_ring)
    if ranks()[1] > 1:
        by_weights(model)
    return model, inputs


def tensor_and_ring() -> Case:
    """Two ranks share the heads of each half of the tokens."""
    size = ranks()[1]
    if size == 1:
        return context(flash_ring)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("cp", "tp"))
    tp, cp = mesh["tp"].get_group(), mesh["cp"].get_group()
    model = cut_heads(Model(partial(flash_ring, group=cp)), tp)
    for layer in model.layers.values():
        layer.enter = lambda x: Copy.apply(x, tp)
        layer.leave = lambda x: Sum.apply(x, tp)
    return model.eval(), inputs_of(places("whole", dist.get_rank(cp), dist.get_world_size(cp), LENGTH))


def fsdp2_and_tensor() -> Case:
    size, model, rows = ranks()[1], Model(), slice(0, 4)
    if size > 1:
        mesh = by_both(model)
        rows = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    return model.eval(), inputs_of(torch.arange(LENGTH), rows)


def ring() -> Case:
    return context(flash_ring)


def zigzag() -> Case:
    return context(flash_ring, "zigzag")


def ulysses() -> Case:
    return context(all_to_all)


KINDS: dict[str, Callable[[], Case]] = {
    "tensor": tensor,
    "sequence": sequence,
    "ring": ring,
    "zigzag": zigzag,
    "ulysses": ulysses,
    "pipeline": pipeline,
    "fsdp2": fsdp2,
    "fsdp2_and_ring": fsdp2_and_ring,
}
OF_FOUR = {"tensor_and_ring": tensor_and_ring, "fsdp2_and_tensor": fsdp2_and_tensor}  # a grid of two by two
_FOUR_ROWS = ("fsdp2", "fsdp2_and_tensor")
NOT_JOINED = (*_FOUR_ROWS, "pipeline")  # files say no places of samples or layers


def kinds(size: int) -> dict[str, Callable[[], Case]]:
    return KINDS | OF_FOUR if size == 4 else KINDS


def whole_inputs(name: str) -> dict[str, Tensor]:
    return inputs_of(torch.arange(LENGTH), slice(0, 4) if name in _FOUR_ROWS else slice(0, 2))


def shard_of(name: str) -> Shard:
    """Which part of the attention this rank has."""
    rank, size = ranks()
    heads, share = HEADS // size, LENGTH // size
    if name in ("tensor", "sequence", "ulysses"):
        return Shard(heads=((rank * heads, (rank + 1) * heads),), heads_of=HEADS)
    if name in ("ring", "fsdp2_and_ring"):
        own: Any = ((rank * share, (rank + 1) * share),)
        return Shard(rows=own, rows_of=LENGTH, keys=own, keys_of=LENGTH)
    if name == "zigzag":
        half, last = share // 2, 2 * size - 1 - rank
        own = ((rank * half, (rank + 1) * half), (last * half, (last + 1) * half))
        return Shard(rows=own, rows_of=LENGTH, keys=own, keys_of=LENGTH)
    if name == "tensor_and_ring":  # two rows of ranks, each with half of the tokens; two ranks share their heads
        first, tokens = 2 * (rank % 2), LENGTH // 2
        own = ((rank // 2 * tokens, (rank // 2 + 1) * tokens),)
        by_heads = {"heads": ((first, first + 2),), "heads_of": HEADS}
        return Shard(rows=own, rows_of=LENGTH, keys=own, keys_of=LENGTH, **by_heads)
    return Shard()
