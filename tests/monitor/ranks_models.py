"""The model that ranks train together: whole, sharded or by heads, and attentions that let the ranks meet."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

from sqrtdk.monitor.watch import Watch, watch

WIDTH, HEADS, LENGTH = 32, 4, 6


STEPS = 2  # the first one finds where q and k are projected


Sample = dict[str, Any]


class Attention(nn.Module):
    """Causal, of the rows from `start` on; `keys` says what becomes of k and v before they meet."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.meet = plainly

    def forward(self, x: Tensor) -> Tensor:
        split = (each(x).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.q_proj, self.k_proj, self.v_proj))
        output = self.meet(*(each.transpose(1, 2) for each in split))
        return x + self.o_proj(output.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * 1.0  # a view is no output for FSDP


def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1) @ v


def of_gathered_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A rank has some rows of the sequence, and all keys."""
    rank, rows = dist.get_rank(), q.shape[2]
    k, v = (torch.cat(_every(one), 2) for one in (k, v))
    visible = torch.ones(rows, k.shape[2], dtype=torch.bool).tril(rank * rows)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible)


def of_some_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A rank has all rows, and some keys of each: results are weighed by the sums of their exponentials."""
    k, v, hidden = mine(k, 2), mine(v, 2), mine(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), 1)
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, torch.finfo(q.dtype).min)
    lse = torch.stack(_every(logits.logsumexp(-1, keepdim=True)))
    outputs = torch.stack(_every(logits.softmax(-1) @ v))
    return (outputs * lse.softmax(0)).sum(0)


def _every(one: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(one, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, one.contiguous())
    return parts


def decoder(gain: float = 1.0) -> Decoder:
    torch.manual_seed(7)
    model = Decoder().double()
    with torch.no_grad():
        for layer in model.layers:
            layer.q_proj.weight *= 4.0 * gain  # logits of a few units
    return model


def batch(sequences: int = 8, length: int = LENGTH) -> Tensor:
    return torch.randn(sequences, length, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def mine(whole: Tensor, dim: int = 0) -> Tensor:
    """This rank's part."""
    return whole.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def train(model: nn.Module, inputs: list[Tensor], **options: Any) -> list[Sample]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, every=1, on_alarm=lambda alarm: None, **options) as health:
        for x in inputs:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            health.step(loss)
    return plain(health)


def look(model: nn.Module, inputs: list[Tensor | None], **options: Any) -> list[Sample]:
    with torch.no_grad(), watch(model, every=1, on_alarm=lambda alarm: None, **options) as health:
        for x in inputs:
            if x is not None:
                model(x)
            health.step()
    return plain(health)


def plain(health: Watch) -> list[Sample]:
    """The samples as JSON has them."""
    return [
        {
            "step": sample.step,
            "how": sample.how,
            "missed": sample.not_measured,
            "loss": sample.loss,
            "first": None if sample.first is None else [sample.first.site, sample.first.cause, sample.first.rank],
            "modules": sample.modules,
            "alarms": [(alarm.name, alarm.severity) for alarm in health.alarms if alarm.step == sample.step],
            "calls": {
                f"{call.site} {call.index}": {
                    "heads": call.heads,
                    "ratio": call.scale_ratio,
                    "formula": call.formula,
                    "reason": call.reason,
                    "columns": {name: list(column) for name, column in call.columns.items()},
                }
                for call in sample.calls
            },
        }
        for sample in health.samples
    ]


def sharded(model: Decoder, mesh: Any = None) -> Decoder:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_heads(model: Decoder, mesh: Any) -> Decoder:
    first = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    for layer in model.layers:
        parallelize_module(layer, mesh, {**first, "o_proj": RowwiseParallel()})
    return model


def meeting(meet: Any) -> Decoder:
    model = decoder()
    for layer in model.layers:
        layer.meet = meet
    return model
