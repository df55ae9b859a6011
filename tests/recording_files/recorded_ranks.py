"""Ranks that record what they have of one model, right or with a fault of one rank; real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sqrtdk
from sqrtdk.recording import Shard
from tests.monitor import ranks_models as models
from tests.monitor.parts_of_rows import ulysses
from tests.monitor.ranks_at_work import join

LENGTH = 8
Meet = Callable[[Tensor, Tensor, Tensor], Tensor]


def gathered(fault: str) -> Meet:
    """All keys and this rank's rows; the last rank may do something else."""

    def meet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size, rows = dist.get_rank(), dist.get_world_size(), q.shape[2]
        last = rank == size - 1
        k, v = (torch.cat(models._every(one), 2) for one in (k, v))
        start = 0 if fault == "mask" and last else rank * rows
        visible = torch.ones(rows, k.shape[2], dtype=torch.bool).tril(start)
        if fault == "values" and last:
            v = v.roll(1, 2)
        scale = q.shape[-1] ** (-1.0 if fault == "scale" and last else -0.5)
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)

    return meet


def zigzag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.cat(models._every(zigzag_places()[None]), 1)[0]
    k, v = (torch.cat(models._every(one), 2) for one in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=zigzag_places()[:, None] >= places)


def zigzag_places() -> Tensor:
    rank, chunks = dist.get_rank(), torch.arange(LENGTH).chunk(2 * dist.get_world_size())
    return torch.cat((chunks[rank], chunks[len(chunks) - 1 - rank]))


WAYS: dict[str, Meet] = {fault or "right": gathered(fault) for fault in ("", "mask", "scale", "values")}
WAYS |= {"zigzag": zigzag, "heads": ulysses}


def shard_of(name: str) -> Shard:
    """Which part of the attention this rank has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = LENGTH // size
    rows = ((rank * share, (rank + 1) * share),)
    if name == "heads":
        heads = models.HEADS // size
        return Shard(heads=((rank * heads, (rank + 1) * heads),), heads_of=models.HEADS)
    if name == "zigzag":
        half, chunks = LENGTH // (2 * size), 2 * size
        own = tuple((at * half, (at + 1) * half) for at in (rank, chunks - 1 - rank))
        order = tuple((at * half, (at + 1) * half) for r in range(size) for at in (r, chunks - 1 - r))
        return Shard(rows=own, rows_of=LENGTH, keys=order, keys_of=LENGTH)
    return Shard(rows=rows, rows_of=LENGTH)


def work_of(rank: int, size: int, folder: Path) -> None:
    """Record every way."""
    folder.mkdir(parents=True, exist_ok=True)
    join(rank, size, folder)
    whole = models.batch(2, LENGTH)
    for name, meet in WAYS.items():
        places = zigzag_places() if name == "zigzag" else torch.arange(LENGTH).chunk(size)[rank]
        path = folder / f"{name}-rank{rank}.safetensors"
        sqrtdk.record(models.meeting(meet), {"x": whole[:, places]}, path, shard=shard_of(name))
    dist.barrier()
    dist.destroy_process_group()
