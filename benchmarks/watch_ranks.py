"""What a watch costs ranks that share a sequence: a small decoder over `sqrtdk.ring_attention`, gloo, on one machine.

Plain steps (forward, backward, SGD) and sampled ones take turns; each is timed in CPU seconds of all ranks together,
as ranks that wait for one another make wall clocks say little. Prints the paired ratio, its median with the 10th and
90th percentile of the rounds, for all rows and for `--rows`, and the bytes that a rank sends for a sample.

    python benchmarks/watch_ranks.py [--ranks 4] [--tokens 1024] [--layers 4] [--rows 32] [--repeats 11] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import sqrtdk
from sqrtdk._environment import cpu_name

WIDTH, HEADS = 256, 4


class Layer(nn.Module):
    """Causal self-attention over the tokens of all ranks, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(sqrtdk.ring_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def measure(model: nn.Module, x: Tensor, rows: int | None, repeats: int) -> dict[str, Any]:
    """Time plain and sampled steps in turns, in CPU seconds of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    next_is_sampled = [False]

    def step(sampled: bool) -> float:
        next_is_sampled[0] = sampled
        health.step()  # after it the next step is prepared
        dist.barrier()
        start = time.process_time()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        next_is_sampled[0] = False
        health.step(loss)
        took = torch.tensor([time.process_time() - start], dtype=torch.float64)
        dist.all_reduce(took)
        return float(took)

    with sqrtdk.watch(model, every=lambda _: next_is_sampled[0], rows=rows, on_alarm=lambda alarm: None) as health:
        for _ in range(2):  # the first sample finds the projections
            step(True)
            step(False)
        rounds = [(step(True), step(False)) for _ in range(repeats)]
    ratios = sorted(one / other for one, other in rounds)
    tenth = len(ratios) // 10
    assert health._ranks is not None
    return {
        "plain_cpu_seconds": statistics.median(other for _, other in rounds),
        "ratio": [statistics.median(ratios), ratios[tenth], ratios[-1 - tenth]],
        "bytes_a_rank": health._ranks._capacity,
        "rows": health.samples[-1].calls[0].columns["rows"][0],
    }


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank; the first one writes what all found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(Layer() for _ in range(options.layers))))
    x = torch.randn(1, options.tokens, WIDTH).chunk(options.ranks, 1)[rank]
    some = f"{options.rows} rows a sequence"
    found = {
        name: measure(model, x, rows, options.repeats) for name, rows in (("all rows", None), (some, options.rows))
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run all ranks and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("tokens", 1024), ("layers", 4), ("rows", 32), ("repeats", 11)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="file to write the record to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [context.Process(target=work, args=(rank, options, folder)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    sizes = {name: value for name, value in vars(options).items() if name != "json"}
    record = {"benchmark": "watch_ranks", "date": str(date.today()), "clock": "CPU seconds of all ranks", **sizes}
    record |= {"torch": torch.__version__, "machine": cpu_name(), "found": found}
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    for name, one in found.items():
        middle, low, high = one["ratio"]
        print(f"{name}: a sampled step takes {middle:.2f} [{low:.2f}, {high:.2f}] times the CPU of a plain one")
        seconds, sent = one["plain_cpu_seconds"], one["bytes_a_rank"]
        print(f"  {seconds:.3f} s of {options.ranks} ranks; {sent:,} bytes from each rank")


if __name__ == "__main__":
    main()
