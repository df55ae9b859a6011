"""Processes whose attentions are parts of rows of all ranks: a ring, heads for tokens, gathered keys; and DDP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import scaled_dot_product_attention

from sqrtdk import check, laws
from tests.monitor import ranks_at_work as work
from tests.monitor import ranks_models as models

Meet = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output, and the log of the sum of its exponentials."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1, keepdim=True)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return eager(q, k, v, causal=True)[0]


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values are passed round; a rank leaves out the keys behind its rows, so ranks have unlike calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out, lse = eager(q, k, v, causal=True)
    for step in range(1, size):
        taken = []
        for own in (k, v):
            other = torch.empty_like(own, memory_format=torch.contiguous_format)
            sent = dist.isend(own.detach().contiguous(), (rank + 1) % size)
            dist.irecv(other, (rank - 1) % size).wait()
            sent.wait()
            taken.append(other)
        k, v = taken
        if step <= rank:
            more, other_lse = eager(q, k, v, causal=False)
            both = torch.logaddexp(lse, other_lse)
            out, lse = out * (lse - both).exp() + more * (other_lse - both).exp(), both
    return out


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All tokens of some heads, by functional collectives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD

    def gathered(x: Tensor, axis: int) -> Tensor:
        return functional.all_gather_tensor(x.contiguous(), axis, group)

    q, k, v = (gathered(x, 2).chunk(size, 1)[rank] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return gathered(out, 1).chunk(size, 2)[rank]


def causal(meet: Meet) -> models.Decoder:
    model = models.meeting(meet)
    for layer in model.layers:
        layer.is_causal = True
    return model


def parallel(folder: Path) -> nn.Module:
    return nn.parallel.DistributedDataParallel(causal(models.plainly))


MODELS: dict[str, Callable[[Path], nn.Module]] = {
    "ring": lambda _: causal(ring),
    "ulysses": lambda _: causal(ulysses),
    "gathered": lambda _: causal(models.of_gathered_keys),
    "alone": lambda _: causal(models.plainly),
    "ddp": parallel,
    "fsdp": lambda _: models.sharded(causal(models.plainly)),
}
SPLIT = ("ring", "ulysses", "gathered")  # whose attention is split over the ranks


def work_of(rank: int, size: int, folder: Path) -> None:
    """`check` with all laws, `laws.ask`, and a watch, of each model; each rank writes what it was told."""
    work.join(rank, size, folder)
    found: dict[str, Any] = {}
    for name, build in MODELS.items():
        x = models.batch(length=8)
        x = models.mine(x, 1) if name in ("ring", "ulysses", "gathered") else x
        model = build(folder).eval()
        report = check(model, (x,), laws="all")
        found[name] = {
            "findings": [(one.rule, one.severity) for one in report.findings],
            "verdicts": [judged.verdict for judged in report.calls],
            "reasons": [str(judged.call.stats_reason) for judged in report.calls if judged.call.stats is None],
            "laws": {answer.law: answer.state for answer in report.laws},
            "why": sorted({str(answer.reason) for answer in report.laws if answer.state == "not asked"}),
            "asked": [answer.state for answer in laws.ask(model, (x,), "causal").answers],
            "watched": models.look(build(folder), [x]),
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
