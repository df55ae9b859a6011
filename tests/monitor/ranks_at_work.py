"""Processes that watch one model together, each a scenario of its own; the processes are real, their network is gloo.

Every scenario gives the samples of its rank; `alone` gives those of one process on the joined batch. All in float64, so
that what several ranks add up in another order differs in the last digits only.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

from sqrtdk.errors import InvalidValueError
from sqrtdk.monitor import journal, ranks
from sqrtdk.monitor.telling import AttentionAlarm
from sqrtdk.monitor.watch import Watch, watch

WIDTH, HEADS, LENGTH = 32, 4, 6
STEPS = 2  # the first one finds where q and k are projected
EQUAL_STEPS = {2: 12, 4: 50}  # that are compared bit by bit, by the number of ranks
SECONDS = 6.0  # that a group waits for a rank
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


# -- scenarios ---------------------------------------------------------------------------------------------------------


def ddp(folder: Path) -> list[Sample]:
    return train(nn.parallel.DistributedDataParallel(decoder()), [mine(batch())] * STEPS)


def fsdp(folder: Path) -> list[Sample]:
    return train(sharded(decoder()), [mine(batch())] * STEPS)


def equal(folder: Path) -> list[Sample]:
    """Steps of DDP and of FSDP, each watched and not: what this rank has of the losses, weights, random numbers."""
    found = []
    for wrap in (nn.parallel.DistributedDataParallel, sharded):
        for watched in (True, False):
            model = wrap(decoder())
            torch.manual_seed(dist.get_rank())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            with watch(model, every=5) if watched else nullcontext() as health:
                for _ in range(EQUAL_STEPS[dist.get_world_size()]):
                    loss = model(torch.nn.functional.dropout(mine(batch()))).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                    if health is not None:
                        health.step(loss)
            weights = [getattr(weight, "to_local", lambda weight=weight: weight)() for weight in model.parameters()]
            told = {"samples": 0 if health is None else len(health.samples), "losses": losses}
            found.append({**told, "weights": [weight.tolist() for weight in weights], "random": torch.rand(4).tolist()})
    return found


def uneven(folder: Path) -> list[Sample]:
    """The first rank has all but one sequence for each other; its last one is broken."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return look(decoder(), [broken()[: 9 - size] if rank == 0 else broken()[8 - size + rank :][:1]])


def broken() -> Tensor:
    x = batch()
    x[-1, 3, 0] = torch.nan
    return x


def absent(folder: Path) -> list[Sample]:
    """The last rank has no call at all, the first none at the second step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = batch().tensor_split(size - 1)[rank] if rank < size - 1 else None
    return look(decoder(), [x, None if rank == 0 else x])


def sequence(folder: Path) -> list[Sample]:
    return look(meeting(of_gathered_keys), [mine(batch(length=8), 1)], shards="rows")


def keys(folder: Path) -> list[Sample]:
    return look(meeting(of_some_keys), [batch()], shards="keys")


def heads(folder: Path) -> list[Sample]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return train(by_heads(decoder(), mesh), [batch()] * STEPS, group=mesh)


def grid(folder: Path) -> list[Sample]:
    """Sharded rows of sharded heads."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = sharded(by_heads(decoder(), mesh["tp"]), mesh["dp_shard"])
    return train(model, [batch().tensor_split(size // 2)[mesh.get_local_rank("dp_shard")]] * STEPS, group=mesh)


def stages(folder: Path) -> list[Sample]:
    """Each rank has layers of its own under the same names; the last one has none with attention."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(WIDTH, 8).double() if rank == size - 1 else decoder(gain=1.0 + rank)
    return look(model, [batch()], shards="stages")


def growing(folder: Path) -> list[Sample]:
    """How many collectives each sample takes: two like ones, a longer one, one like it."""
    counts = []
    real, objects = ranks._gather, dist.all_gather_object

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[-1].append(name)
            return function(*args, **kwargs)

        return call

    ranks._gather = counted(real, "rows")
    dist.all_gather_object = counted(objects, "names")
    try:
        with torch.no_grad(), watch(decoder(), every=1) as health:
            for length in (LENGTH, LENGTH, 4 * LENGTH, 4 * LENGTH):
                counts.append([])
                health._model(batch(length=length))
                health.step()
    finally:
        ranks._gather, dist.all_gather_object = real, objects
    samples = plain(health)
    return [{**sample, "collectives": names} for sample, names in zip(samples, counts, strict=True)]


def thinned(folder: Path) -> list[Sample]:
    """More rows than may be sent: the first rank has twice those of the others."""
    model = decoder()
    x = batch()
    with torch.no_grad(), watch(model, every=1) as health:
        assert health._ranks is not None
        health._ranks.rows_bytes = 4 * 2 * 2 * HEADS * 4 * LENGTH * dist.get_world_size()
        model(x if dist.get_rank() == 0 else x[:4])
        health.step()
    return plain(health)


def raising(folder: Path) -> list[Sample]:
    """The first rank alone has large logits: all raise. What was warned, which steps came after a restart."""
    model, gain = decoder(), 40.0 if dist.get_rank() == 0 else 1.0
    told: dict[str, Any] = {}
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with watch(model, every=1, on_alarm="raise", to=folder / "run") as health:
                model(batch() * gain)
                health.step()
        except AttentionAlarm as alarm:
            told["raised"] = alarm.alarm.severity
        with watch(model, every=1, to=folder / "run") as health:
            model(batch() * gain)
            health.step()
        told["warned"] = sum("logit" in str(one.message) for one in warned)
    try:
        watch(model, to=folder / "run", first_step=-3).__enter__()
    except Exception as error:
        told["refused"] = type(error).__name__
    return [*plain(health), told]


def unwritten(folder: Path) -> list[Sample]:
    """The first rank's folder is gone after the first step: which alarms each rank has after each of three."""
    model, before = decoder(), journal.SAMPLES_A_PART
    journal.SAMPLES_A_PART = 1  # a part for each
    counts: list[Sample] = []
    try:
        with torch.no_grad(), watch(model, every=1, on_alarm="raise", to=folder / "gone") as health:
            for step in range(3):
                model(batch())
                health.step()
                counts.append({"alarms": [alarm.name for alarm in health.alarms]})
                if dist.get_rank() == 0 and step == 0:
                    shutil.rmtree(folder / "gone")
    except AttentionAlarm as alarm:
        counts.append({"raised": alarm.alarm.name})
    finally:
        journal.SAMPLES_A_PART = before
    return counts


def apart(folder: Path) -> list[Sample]:
    """The first rank samples every second step, the others all; at the fourth they stop, and with them the run."""
    model, told = decoder(), ""
    with torch.no_grad(), watch(model, every=2 if dist.get_rank() == 0 else 1) as health:
        try:
            for _ in range(4):
                model(batch())
                health.step()
        except InvalidValueError as error:
            told = str(error)
    return [{"told": told, "samples": len(health.samples)}]


SCENARIOS = (
    ddp,
    fsdp,
    equal,
    uneven,
    absent,
    sequence,
    keys,
    heads,
    grid,
    stages,
    growing,
    thinned,
    raising,
    unwritten,
    apart,
)


def alone(name: str) -> list[Sample]:
    """What one process gives on the joined batch."""
    if name in ("ddp", "fsdp", "heads", "grid"):
        return train(decoder(), [batch()] * STEPS)
    x = {"uneven": broken(), "sequence": batch(length=8)}.get(name, batch())
    return look(meeting(by_hand) if name == "keys" else decoder(), [x])


# -- processes ---------------------------------------------------------------------------------------------------------


def join(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)


def work(rank: int, size: int, folder: Path) -> None:
    """All scenarios; in the end the last rank dies."""
    join(rank, size, folder)
    found = {scenario.__name__: scenario(folder) for scenario in SCENARIOS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    until_one_leaves(folder, dies=True)


def hang(rank: int, size: int, folder: Path) -> None:
    join(rank, size, folder)
    until_one_leaves(folder, dies=False)


def until_one_leaves(folder: Path, *, dies: bool) -> None:
    """The last rank dies, or hangs, between its forward pass and its step."""
    rank, model, start = dist.get_rank(), decoder(), 0.0
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    try:
        with torch.no_grad(), watch(model, every=1, group=group) as health:
            for step in range(3):
                model(batch())
                if rank == dist.get_world_size() - 1 and step == 1:
                    time.sleep(0.0 if dies else 3.0 * SECONDS)
                    os._exit(3)
                start = time.monotonic()
                health.step()
    except Exception as error:
        told = {"error": type(error).__name__, "notes": error.__notes__, "seconds": time.monotonic() - start}
        (folder / f"end-{rank}.json").write_text(json.dumps({**told, "samples": len(health.samples)}))
    os._exit(0)


def run(target: Callable[..., None], size: int, folder: Path) -> list[Any]:
    """What each rank wrote; None where it wrote nothing."""
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, size, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120.0)
        if process.is_alive():
            process.kill()
    return _read(folder, "", size)


def ends(folder: Path, size: int) -> list[Any]:
    """How each rank ended where one left; None for that one."""
    return _read(folder, "end-", size)


def _read(folder: Path, prefix: str, size: int) -> list[Any]:
    files = [folder / f"{prefix}{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]
