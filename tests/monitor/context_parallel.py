"""Decoders whose sequence lies on several ranks, each attended in another way; and what one process gives.

Processes are real (gloo), numbers are float64.
"""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sqrtdk
from sqrtdk.monitor import ranks
from tests.attentions.blocks import flashed
from tests.monitor import parts_of_rows
from tests.monitor import ranks_at_work as work
from tests.monitor import ranks_models as models

LENGTH, STEPS = 8, 2
LONG = 512  # tokens of the sequence whose bytes are counted
LSE = sqrtdk.AuxRequest(lse=True)
Block = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Merge = Callable[[list[tuple[Tensor, Tensor]]], Tensor]  # of outputs and lses


def passed_round(k: Tensor, v: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """This rank's keys and values, then those of each rank before it, with its number."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = [(rank, k, v)]
    for step in range(1, size):
        came = []
        for own in found[-1][1:]:
            other = torch.empty_like(own, memory_format=torch.contiguous_format)
            sent = dist.isend(own.detach().contiguous(), (rank + 1) % size)
            dist.irecv(other, (rank - 1) % size).wait()
            sent.wait()
            came.append(other)
        found.append(((rank - step) % size, *came))
    return found


def met(k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """The keys and values that this rank's rows see, its own first; and whether they are causal among themselves."""
    rank = dist.get_rank()
    return [(key, value, at == rank) for at, key, value in passed_round(k, v) if at <= rank]


def in_blocks(block: Block, merge: Merge) -> parts_of_rows.Meet:
    """A ring of these blocks."""
    return lambda q, k, v: merge([block(q, *one) for one in met(k, v)])


def by_ours(blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sqrtdk.merge(*map(list, zip(*blocks, strict=True)))[0]


def by_lines(blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The lines that people write."""
    out, lse = blocks[0]
    for other, other_lse in blocks[1:]:
        both = torch.logaddexp(lse, other_lse)
        out = out * (lse - both).exp().unsqueeze(-1) + other * (other_lse - both).exp().unsqueeze(-1)
        lse = both
    return out


def by_sigmoid(blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The share of a block is the sigmoid of a difference."""
    out, lse = blocks[0]
    for other, other_lse in blocks[1:]:
        out = out - torch.sigmoid(other_lse - lse).unsqueeze(-1) * (out - other)
        lse = lse - torch.nn.functional.logsigmoid(lse - other_lse)
    return out


def by_weights(blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Weights under one maximum, divided by their sum."""
    out, lse = blocks[0]
    for other, other_lse in blocks[1:]:
        top = torch.maximum(lse, other_lse)
        a, b = ((one - top).exp() for one in (lse, other_lse))
        out = (a.unsqueeze(-1) * out + b.unsqueeze(-1) * other) / (a + b).unsqueeze(-1)
        lse = top + (a + b).log()
    return out


def powers(base: float) -> Block:
    """A block as flash attention has it: a maximum, a sum, one division; in powers of e or of 2."""

    def block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1) if causal else None
        out, lse = flashed(q, k, v, q.shape[-1] ** -0.5, (hidden, None), 0, base)
        return out, lse.squeeze(-1)

    return block


def online(q: Tensor, k: Tensor, v: Tensor, *, tiles: int = 1) -> Tensor:
    """Maximum, sum and output are brought to the maximum of each block, or tile of one; one division in the end."""
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values, causal in met(k, v):
        hidden = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).triu(1)
        parts = (x.chunk(tiles, axis) for x, axis in ((keys, 2), (values, 2), (hidden, 1)))
        for key, value, hides in zip(*parts, strict=True):
            z = q @ key.mT * q.shape[-1] ** -0.5
            z = z.masked_fill(hides, -torch.inf) if causal else z
            new = torch.maximum(top, z.amax(-1, keepdim=True))
            power, keep = (z - new).exp(), (top - new).exp()
            total, out, top = total * keep + power.sum(-1, keepdim=True), out * keep + power @ value, new
    return out / total


def by_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The keys of other ranks meet half of the rows, as in a zigzag ring: calls of unlike rows."""
    (own, *others), block, half = met(k, v), powers(math.e), q.shape[2] // 2
    out, lse = block(q, *own)
    late = by_lines([(out[:, :, half:], lse[..., half:]), *(block(q[:, :, half:], *one) for one in others)])
    return torch.cat([out[:, :, :half], late], 2)


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    output, aux = sqrtdk.attention(q, k, v, is_causal=causal, return_aux=LSE)
    return output, aux.lse


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return output, lse


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = sqrtdk.ring_attention(q, k, v, is_causal=True)
    return output


class Passed(torch.autograd.Function):
    """A ring as people write it: a function of its own, whose gradients of k and v come back to their rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return parts_of_rows.ring(q, k, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        size, rank = dist.get_world_size(), dist.get_rank()
        whole = []
        for own in (*ctx.saved_tensors, gradient):
            parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(parts, own.contiguous())
            whole.append(torch.cat(parts, 2))
        with torch.enable_grad():
            operands = [one.requires_grad_() for one in whole[:3]]
            found = torch.autograd.grad(parts_of_rows.plain(*operands), operands, whole[3])
        return tuple(one.chunk(size, 2)[rank] for one in found)


def passed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = Passed.apply(q, k, v)
    return output


def spoilt_within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last rank's keys overflow behind their projection."""
    if dist.get_rank() == dist.get_world_size() - 1:
        k = (k - k.detach()) / 0.0
    return reference(q, k, v)


WAYS: dict[str, parts_of_rows.Meet] = {
    "ring": reference,
    "merged": in_blocks(ours, by_ours),
    "lines": in_blocks(ours, by_lines),
    "flash": in_blocks(flash, by_lines),
    "powers": in_blocks(powers(math.e), by_lines),
    "powers_merged": in_blocks(powers(math.e), by_ours),
    "base_two": in_blocks(powers(2.0), by_lines),
    "sigmoid": in_blocks(powers(math.e), by_sigmoid),
    "weights": in_blocks(powers(math.e), by_weights),
    "online": online,
    "tiles": functools.partial(online, tiles=2),
    "eager": parts_of_rows.ring,
    "gathered": models.of_gathered_keys,
    "ulysses": parts_of_rows.ulysses,
}
UNKNOWN = {  # without `shards`
    "shared": models.of_some_keys,
    "ulysses": parts_of_rows.ulysses,
    "halves": by_halves,
}


def of_rank() -> dict[str, Any]:
    x = models.mine(models.batch(length=LENGTH), 1)
    found: dict[str, Any] = {
        name: models.look(models.meeting(meet), [x], **({"shards": "heads"} if name == "ulysses" else {}))
        for name, meet in WAYS.items()
    }
    found["trained"] = models.train(nn.parallel.DistributedDataParallel(models.meeting(reference)), [x] * STEPS)
    found["backward"] = models.train(models.meeting(passed), [x], gradient=True)
    found["cut"] = models.look(models.meeting(reference), [x], rows=2)
    whole = models.batch(length=LENGTH)
    found["unknown"] = {
        name: models.look(models.meeting(meet), [whole if name == "shared" else x]) for name, meet in UNKNOWN.items()
    }
    bad = x.clone()
    if dist.get_rank() == 1:
        bad[0, 1, 0] = torch.nan
    found["nan_input"] = models.look(models.meeting(reference), [bad])
    found["nan_within"] = models.look(models.meeting(spoilt_within), [x])
    return found


class Held(TorchDispatchMode):
    """The largest number of bytes of tensors that operations made and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and (at := tensor.untyped_storage().data_ptr()) not in self._known:
                size = tensor.untyped_storage().nbytes()
                self._known.add(at)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self._freed, at, size)
        return output

    def _freed(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.now -= size


def measured() -> dict[str, int]:
    """Bytes that this rank sent and held, of a ring and of a sample in float32."""
    sent: list[int] = []
    needed: list[int] = []
    send, pack = dist.batch_isend_irecv, ranks.pack_step

    def counted(todo: list[Any]) -> Any:
        sent.append(sum(each.tensor.nbytes for each in todo if each.op is dist.isend))
        return send(todo)

    def packed(*args: Any, **kwargs: Any) -> Any:
        step = pack(*args, **kwargs)
        needed.append(int(step.head.needed))
        return step

    def taken() -> int:
        total = sum(sent)
        sent.clear()
        return total

    dist.batch_isend_irecv, ranks.pack_step = counted, packed
    try:
        size = 2, models.HEADS, LONG // dist.get_world_size(), models.WIDTH // models.HEADS
        q, k, v = (torch.randn(size).requires_grad_() for _ in range(3))
        output = sqrtdk.ring_attention(q, k, v, is_causal=True)
        found = {"forward": taken()}
        output.sum().backward()
        found["backward"] = taken()
        with torch.no_grad(), Held() as held:
            sqrtdk.ring_attention(q, k, v)
        taken()
        sqrtdk.ring_attention(q, k, v, return_aux=True)
        own = sum(tensor.nbytes for tensor in (q, k, v))
        found |= {"statistics": taken(), "held": own + held.most}
        x = models.mine(models.batch(2, LONG).float(), 1)
        models.look(models.meeting(reference).float(), [x])
        models.train(models.meeting(reference).float(), [x])
        found |= dict(zip(("sample", "sample_gradients"), needed, strict=True))
    finally:
        dist.batch_isend_irecv, ranks.pack_step = send, pack
    return found


def work_of(rank: int, size: int, folder: Path) -> None:
    """Watch every decoder, and write what this rank was told."""
    folder.mkdir(parents=True, exist_ok=True)
    work.join(rank, size, folder)
    (folder / f"{rank}.json").write_text(json.dumps(of_rank() | {"measured": measured()}))
    dist.barrier()
    dist.destroy_process_group()


def alone(name: str) -> list[models.Sample]:
    """What one process gives on the whole sequence."""
    x = models.batch(length=LENGTH)
    model = models.meeting(parts_of_rows.plain if name == "eager" else models.plainly)
    if name == "trained":
        return models.train(model, [x] * STEPS)
    return models.look(model, [x])
