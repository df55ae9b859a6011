"""One small decoder, split over ranks in many ways; each way with the sequence that one process has. All in float64."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import sqrtdk
from tests.monitor.ranks_at_work import join

LENGTH, HEADS, WIDTH = 16, 4, 8
FEATURES = HEADS * WIDTH
Meet = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, positions


def here() -> tuple[int, int]:
    """This rank, and the number of ranks; of one process (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Attention(nn.Module):
    is_causal = True

    def __init__(self, meet: Meet, heads: int = HEADS) -> None:
        super().__init__()
        made = [nn.Linear(FEATURES, heads * WIDTH, dtype=torch.float64) for _ in range(3)]
        self.q, self.k, self.v = made
        self.o = nn.Linear(heads * WIDTH, FEATURES, bias=False, dtype=torch.float64)
        self.meet = meet

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(self.meet(q, k, v, positions).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Two layers; the second is larger, so that layers can be told apart."""

    def __init__(self, meet: Meet, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Attention(meet) for _ in range(layers))
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                layer.q.weight *= 4.0 + 2.0 * number

    def forward(self, x: Tensor, position_ids: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        positions = places if position_ids is None else position_ids
        assert positions is not None
        for layer in self.layers:
            x = x + layer(x, positions[0])
        return x


def sequence(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def order(name: str, size: int) -> list[Tensor]:
    """The positions of each rank's tokens."""
    every = torch.arange(LENGTH)
    if name == "zigzag":
        chunks = every.chunk(2 * size)
        return [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(size)]
    if name == "striped":
        return [every[rank::size] for rank in range(size)]
    return list(every.chunk(size))


def mine(name: str, told: bool = False, group: Any = None, batch: slice = slice(None)) -> dict[str, Tensor]:
    """A rank's tokens; if `told`, with their positions under a name that says what they are."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    at = order(name, size)[rank]
    return {"x": sequence()[batch, at], "position_ids" if told else "places": at[None]}


def whole() -> dict[str, Tensor]:
    """All tokens, on one rank."""
    return {"x": sequence(), "places": torch.arange(LENGTH)[None]}


def alone(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def turned(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
    """The tensors of the rank before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ahead, behind = ((rank + 1) % size, (rank - 1) % size)
    if group is not None:
        ahead, behind = (dist.get_global_rank(group, other) for other in (ahead, behind))
    got = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    for own, other in zip(tensors, got, strict=True):
        sent = dist.isend(own.detach().contiguous(), ahead)
        dist.irecv(other, behind).wait()
        sent.wait()
    return got


def block(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output over a block of keys, and the log of the sum of its exponentials."""
    logits = q @ k.mT * WIDTH**-0.5
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(q.dtype).min)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def powers(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same as flash attention has it."""
    logits = q @ k.mT * WIDTH**-0.5
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(q.dtype).min)
    top = logits.amax(-1, keepdim=True)
    power = (logits - top).exp()
    total = power.sum(-1, keepdim=True)
    return power @ v / total, (top + total.log()).squeeze(-1)


def ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    local: bool = False,
    group: Any = None,
    attend: Callable[..., tuple[Tensor, Tensor]] = block,
) -> Tensor:
    """Blocks of keys go round. `local`: causal in every block by the places in the shards, as with `is_causal`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    parts = []
    for step in range(size):
        if step:
            k, v = turned([k, v], group)
        source = (rank - step) % size
        if source <= rank or local:
            parts.append(attend(q, k, v, triangle if source == rank or local else None))
    return sqrtdk.merge(*zip(*parts, strict=True))[0]


def by_positions(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """A ring of tokens in any order: their positions go round too, and mask every block."""
    keys, parts = positions, []
    for step in range(here()[1]):
        if step:
            k, v, keys = turned([k, v, keys])
        parts.append(block(q, k, v, positions[:, None] >= keys))
    return sqrtdk.merge(*zip(*parts, strict=True))[0]


def halves(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """A zigzag ring that skips what no row sees: all of q with the first half of k, or half of q with all of k."""
    rank, size = here()
    half = q.shape[2] // 2
    output, lse = block(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril())
    for step in range(1, size):
        k, v = turned([k, v])
        if (rank - step) % size < rank:
            more, other = block(q, k[:, :, :half], v[:, :, :half])
            output, lse = sqrtdk.merge([output, more], [lse, other])
        else:
            more, other = block(q[:, :, half:], k, v)
            late, of_late = sqrtdk.merge([output[:, :, half:], more], [lse[..., half:], other])
            output, lse = torch.cat([output[:, :, :half], late], 2), torch.cat([lse[..., :half], of_late], -1)
    return output


def gathered(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, lost: bool = False, window: int | None = None
) -> Tensor:
    """Keys of all ranks, in their order. `lost`: the mask goes by the places in which ranks store their tokens."""
    size = here()[1]
    every = [[torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)] for part in (k, v)]
    for part, parts in zip((k, v), every, strict=True):
        dist.all_gather(parts, part.contiguous())
    k, v = (torch.cat(parts, 2) for parts in every)
    places = [torch.empty_like(positions) for _ in range(size)]
    dist.all_gather(places, positions)
    keys = torch.cat(places)
    if lost:
        stored = torch.arange(LENGTH).chunk(size)
        positions, keys = stored[here()[0]], torch.cat(stored)
    behind = positions[:, None] - keys
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible)


def windowed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    behind = positions[:, None] - positions
    return scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < 5))


def by_heads(group: Any = None, meet: Meet = alone) -> Decoder:
    """Tensor parallel by hand: each rank has some heads, and their outputs are summed."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole, part = Decoder(alone), Decoder(meet)

    def summed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        total = output.clone()
        dist.all_reduce(total, group=group)
        return total

    with torch.no_grad():
        for layer, full in zip(part.layers, whole.layers, strict=True):
            some = Attention(meet, HEADS // size)
            for name in ("q", "k", "v"):
                for kind in ("weight", "bias"):
                    getattr(getattr(some, name), kind).copy_(getattr(getattr(full, name), kind).chunk(size)[rank])
            some.o.weight.copy_(full.o.weight.chunk(size, 1)[rank])
            layer.q, layer.k, layer.v, layer.o = some.q, some.k, some.v, some.o
            layer.o.register_forward_hook(summed)
    return part


class Stage(nn.Module):
    """One layer of the decoder, called `layer` on each rank; what it gives goes to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Decoder(alone).layers[here()[0]]

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        rank, size = here()
        if rank:
            dist.recv(x, rank - 1)
        x = x + self.layer(x, places[0])
        if rank + 1 < size:
            dist.send(x.detach().contiguous(), rank + 1)
        return x


Case = tuple[nn.Module, dict[str, Tensor]]


def two_ways(kind: str) -> Case:
    """Four ranks in a grid of two by two: pairs of neighbours share heads; ranks of one place in a pair, rows."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    heads, rows = pairs[rank // 2], pairs[2 + rank % 2]
    if kind == "ring_of_heads":
        model = by_heads(heads, functools.partial(ring, group=rows))
        return model, mine("plain", group=rows)
    return by_heads(heads), {name: t[rank // 2 :: 2] if name == "x" else t for name, t in whole().items()}


CASES: dict[str, Callable[[], Case]] = {
    "ring": lambda: (Decoder(ring), mine("plain")),
    "powers": lambda: (Decoder(functools.partial(ring, attend=powers)), mine("plain")),
    "zigzag": lambda: (Decoder(by_positions), mine("zigzag")),
    "striped": lambda: (Decoder(by_positions), mine("striped", told=True)),
    "halves": lambda: (Decoder(halves), mine("zigzag")),
    "gathered": lambda: (Decoder(gathered), mine("plain")),
    "gathered_zigzag": lambda: (Decoder(gathered), mine("zigzag", told=True)),
    "window": lambda: (Decoder(functools.partial(gathered, window=5)), mine("zigzag")),
    "heads": lambda: (by_heads(), whole()),
    "data": lambda: (sharded(Decoder(alone)), {n: t.chunk(here()[1])[here()[0]] for n, t in whole().items() if n == "x"}
                     | {"places": whole()["places"]}),
    "stages": lambda: (Stage(), whole()),
    # planted faults
    "local": lambda: (Decoder(functools.partial(ring, local=True)), mine("plain")),
    "lost": lambda: (Decoder(functools.partial(gathered, lost=True)), mine("zigzag", told=True)),
}  # fmt: skip
FOUR: dict[str, Callable[[], Case]] = {
    **CASES,
    "ring_of_heads": lambda: two_ways("ring_of_heads"),
    "batches_of_heads": lambda: two_ways("batches_of_heads"),
}
del FOUR["stages"], FOUR["data"]


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


FAULTS = ("local", "lost")
QUICK = ("ring", "powers", "halves", "heads", "stages", "local")


def reports_of(rank: int, size: int, folder: Path, cases: Iterable[str]) -> None:
    """Each rank saves its report of each case."""
    join(rank, size, folder)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name in cases:
            model, inputs = (CASES | FOUR)[name]()
            found[name] = sqrtdk.check(model.eval(), inputs, laws="none")
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def work_of(rank: int, size: int, folder: Path) -> None:
    reports_of(rank, size, folder, QUICK)


def all_cases(rank: int, size: int, folder: Path) -> None:
    reports_of(rank, size, folder, CASES if size == 2 else FOUR)


# -- what `sqrtdk check` runs under torchrun ---------------------------------------------------------------------------


def factory() -> Case:
    return Decoder(ring).eval(), mine("plain")


def faulty() -> Case:
    return Decoder(functools.partial(ring, local=True)).eval(), mine("plain")


def raising() -> Case:
    if here()[0] == 1:
        raise ValueError("no such weights")
    return factory()


def leaving() -> Case:
    if here()[0] == 1:
        os._exit(7)
    return factory()
