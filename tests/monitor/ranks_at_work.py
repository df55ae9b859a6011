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

from sqrtdk.errors import InvalidValueError
from sqrtdk.monitor import journal, ranks
from sqrtdk.monitor.telling import AttentionAlarm
from sqrtdk.monitor.watch import watch
from tests.monitor.ranks_models import (
    HEADS,
    LENGTH,
    STEPS,
    WIDTH,
    Sample,
    batch,
    by_hand,
    by_heads,
    decoder,
    look,
    meeting,
    mine,
    of_gathered_keys,
    of_some_keys,
    plain,
    sharded,
    train,
)

EQUAL_STEPS = {2: 12, 4: 50}  # that are compared bit by bit, by the number of ranks
SECONDS = 6.0  # that a group waits for a rank


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


def run(target: Callable[..., None], size: int, folder: Path) -> None:
    """Let the ranks do what they are to; one that hangs is killed."""
    folder.mkdir(parents=True, exist_ok=True)  # the store that the ranks meet in is a file there
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, size, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600.0)
        if process.is_alive():
            process.kill()


def written(folder: Path, size: int) -> list[Any]:
    """What each rank wrote; None where it wrote nothing."""
    return _read(folder, "", size)


def ends(folder: Path, size: int) -> list[Any]:
    """How each rank ended where one left; None for that one."""
    return _read(folder, "end-", size)


def _read(folder: Path, prefix: str, size: int) -> list[Any]:
    files = [folder / f"{prefix}{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]
