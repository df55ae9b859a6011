"""Decoders that several ranks compute by heads, by stages, with FSDP, and in two ways at once.

A case is a factory of this module: `tests.laws.rank_meshes:tensor`; on one process it is the plain decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.laws.rank_models import DIM, LENGTH, VOCABULARY, WIDTH, ranks


class Copy(torch.autograd.Function):
    """The same tensor on every rank of a group; backward sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """The sum of the ranks' tensors; backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class GatherOf(torch.autograd.Function):
    """All parts of a group along an axis; backward sums, and keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, axis: int) -> Tensor:
        ctx.group, ctx.axis = group, axis
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ShareOf.apply(grads[0], ctx.group, ctx.axis), None, None


class ShareOf(torch.autograd.Function):
    """The sum of the ranks' tensors, of which each keeps its part along an axis; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, axis: int) -> Tensor:
        ctx.group, ctx.axis = group, axis
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group), axis)[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return GatherOf.apply(grads[0], ctx.group, ctx.axis), None, None


class Block(nn.Module):
    """Causal attention over this rank's heads, and the keys of all ranks of `cp`."""

    def __init__(self, tp: Any = None, cp: Any = None, fault: str = "") -> None:
        super().__init__()
        self.tp, self.cp, self.fault = tp, cp, fault
        shard = dist.get_world_size(tp) if tp is not None else 1
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // shard, bias=False) for _ in range(3))
        self.norm, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH // shard, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = Copy.apply(y, self.tp) if self.tp is not None else y
        q, k, v = (part(y).unflatten(-1, (-1, DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        at = keys = torch.arange(x.shape[1])
        if self.cp is not None:
            k, v = (GatherOf.apply(t, self.cp, 2) for t in (k, v))
            at, keys = at + dist.get_rank(self.cp) * len(at), torch.arange(k.shape[2])
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= keys)
        o = self.o(o.transpose(1, 2).flatten(2))
        if self.tp is not None:
            o = Sum.apply(o, self.tp)
            o = o * dist.get_world_size(self.tp) if self.fault == "twice" else o
        return x + o


class Stack(nn.Module):
    """Embedding, blocks and a head; a stage of a pipeline has some of them."""

    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleDict({str(number): Block(**options) for number in range(layers)})

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


class Stage(Stack):
    """This rank's layers; the hidden states come from the rank before and go to the next one."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        rank, size = ranks()
        self.layers = nn.ModuleDict({str(n): self.layers[str(n)] for n in range(layers) if n * size // layers == rank})
        if rank:
            del self.embed
        if rank < size - 1:
            del self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        rank, size = ranks()
        if rank:
            x = torch.empty(*input_ids.shape, WIDTH)
            dist.recv(x, rank - 1)
        else:
            x = self.embed(input_ids)
        for layer in self.layers.values():
            x = layer(x)
        if rank < size - 1:
            dist.send(x.detach(), rank + 1)
            return x
        return self.head(x)


def tokens(rows: int = 1) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(1, VOCABULARY, (rows, LENGTH), generator=made)}


def spread(cut: Callable[[nn.Module], Any], rows: int = 1) -> tuple[nn.Module, Any]:
    """A decoder that a function spreads over the ranks; with several rows each rank has its own."""
    model, (rank, size) = Stack(), ranks()
    inputs = tokens(rows)
    if size > 1:
        cut(model)
        if rows > 1:
            inputs = {name: value.chunk(size)[rank] for name, value in inputs.items()}
    return model, inputs


def by_heads(model: nn.Module, mesh: Any = None) -> None:
    mesh = init_device_mesh("cpu", (ranks()[1],)) if mesh is None else mesh
    plan = dict.fromkeys(("q", "k", "v"), ColwiseParallel())
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {**plan, "o": RowwiseParallel()})


def by_weights(model: nn.Module, mesh: Any = None) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_both(model: nn.Module) -> Any:
    """Return the mesh: samples and weights over "dp", heads over "tp"."""
    mesh = init_device_mesh("cpu", (2, ranks()[1] // 2), mesh_dim_names=("dp", "tp"))
    by_heads(model, mesh["tp"])
    by_weights(model, mesh["dp"])
    return mesh


def by_hand(fault: str = "", *, context: bool = False) -> tuple[nn.Module, Any]:
    """Heads over ranks in plain tensors, whose parts the law puts together by their shapes; with tokens over others."""
    size, inputs = ranks()[1], tokens()
    if size == 1:
        return Stack(), inputs
    tp, cp = dist.group.WORLD, None
    if context:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("cp", "tp"))
        tp, cp = mesh["tp"].get_group(), mesh["cp"].get_group()
        inputs = {name: value.chunk(2, 1)[dist.get_rank(cp)] for name, value in inputs.items()}
    model, whole = Stack(tp=tp, cp=cp, fault=fault), Stack()
    piece, pieces = dist.get_rank(tp), dist.get_world_size(tp)
    for (name, mine), every in zip(model.named_parameters(), whole.parameters(), strict=True):
        axis = {"q": 0, "k": 0, "v": 0, "o": 1}.get(name.split(".")[-2]) if "norm" not in name else None
        mine.data = every.data.clone() if axis is None else every.data.chunk(pieces, axis)[piece].clone()
    return model, inputs


def pipeline(layers: int = 4) -> tuple[nn.Module, Any]:
    return (Stage(layers) if ranks()[1] > 1 else Stack(layers)), tokens()


RIGHT: dict[str, Callable[[], Any]] = {
    "tensor": partial(spread, by_heads),
    "tensor_by_hand": by_hand,
    "fsdp": partial(spread, by_weights, rows=4),
    "pipeline": pipeline,
}
TWO_AT_ONCE: dict[str, Callable[[], Any]] = {  # of four ranks
    "tensor_and_context": partial(by_hand, context=True),
    "tensor_and_fsdp": partial(spread, by_both),
}
FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {"sum_twice": ("", partial(by_hand, "twice"))}


def __getattr__(name: str) -> Callable[[], Any]:
    """The factories by name."""
    every = {**RIGHT, **TWO_AT_ONCE, **{one: make for one, (_, make) in FAULTS.items()}}
    if name in every:
        return every[name]
    raise AttributeError(name)
