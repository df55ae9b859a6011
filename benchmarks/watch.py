"""What a watch costs a training step: a GPT-2-small-shaped model with SDPA, forward, backward and AdamW.

Three ways in one run, interleaved so that drift of the machine hits all alike:

- plain: the step, and nothing else;
- unsampled: the same in a watch, a step that is not sampled;
- sampled: the same in a watch, a step that is, from its preparation to its records (the first sample of all reads the
  scale from the logits and finds the projections besides: it is left out, and timed once by itself).

Then the same with at most `--rows` rows of a sequence; with `gradient=True`; and one attention by itself, by a fused
kernel and written out:
a forward pass without a trace, with one that measures all rows, and with one that measures `--rows`. Prints each time
and the ratios, median with the spread between the 10th and 90th percentile of the rounds. What an unsampled step does
besides is far below what rounds of whole steps can tell: `step()` is timed by itself as well, and set against a plain
step. `every=100` is 1 + step() alone + 0.01 of
what a sample costs.

    python benchmarks/watch.py [--repeats 9] [--batch 1] [--tokens 512] [--layers 12] [--rows 64] [--threads 1] [--cpu]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from sqrtdk._environment import cpu_name
from sqrtdk.monitor.schedule import When
from sqrtdk.monitor.watch import Watch, watch
from sqrtdk.tracing.calls.finish import RowLimit
from sqrtdk.tracing.trace import Trace
from timing import Spread, ratio, rounds

ALONE = 20_000  # calls of step() by itself


class Run:
    """A training run, one step a call; the next step of its watch is sampled where `samples` says so."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=options.layers, n_positions=options.tokens, use_cache=False, attn_implementation="sdpa"
        )
        self.model = transformers.GPT2LMHeadModel(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.ids = torch.randint(0, 50257, (options.batch, options.tokens))
        self.samples = False

    def plain(self) -> torch.Tensor:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def unsampled(self, health: Watch) -> None:
        health.step(self.plain())

    def sampled(self, health: Watch) -> None:
        self.samples = True
        health.step()  # an empty step, after which the next one is prepared
        self.samples = False
        health.step(self.plain())


def measure(run: Run, options: argparse.Namespace, rows: int | None, *, gradient: bool = False) -> dict[str, Any]:
    """Times and ratios of the three ways, with at most so many rows of a sequence, or with judged gradients."""
    clock = time.process_time if options.cpu else time.perf_counter
    with (
        tempfile.TemporaryDirectory() as folder,
        watch(
            run.model, every=When(lambda step: run.samples), rows=rows, to=f"{folder}/run", gradient=gradient
        ) as health,
    ):
        start = clock()
        run.unsampled(health)  # the first step of a watch is always sampled
        first = clock() - start
        ways: dict[str, Callable[[], object]] = {
            "plain": run.plain,
            "unsampled": lambda: run.unsampled(health),
            "sampled": lambda: run.sampled(health),
        }
        times = rounds(ways, options.repeats, clock=clock)
        loss, start = torch.zeros(()), clock()
        for _ in range(ALONE):
            health.step(loss)
        alone = (clock() - start) / ALONE / statistics.median(times["plain"])
        assert all(len(sample.calls) == options.layers for sample in health.samples)
        assert len(health.samples) == options.repeats + 2
        assert not any(sample.not_measured for sample in health.samples)
    sampled = ratio(times["sampled"], times["plain"])
    return {
        "seconds": {name: asdict(Spread.of(values)) for name, values in times.items()},
        "ratios": {
            "unsampled / plain": asdict(ratio(times["unsampled"], times["plain"])),
            "sampled / plain": asdict(sampled),
        },
        "first sample / plain": first / statistics.median(times["plain"]),
        "step() alone / plain": alone,
        "every=100 / plain": 1.0 + alone + 0.01 * (sampled.median - 1.0),
    }


class Attention(torch.nn.Module):
    """One attention of GPT-2 small."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.qkv, self.out = fused, torch.nn.Linear(768, 2304), torch.nn.Linear(768, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (12, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mixed = (q @ k.mT / 8).masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def one_attention(fused: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Times of a forward pass of one attention, as it is and as a sampled step runs it."""
    torch.manual_seed(0)
    model, x = Attention(fused), torch.randn(options.batch, options.tokens, 768)

    def traced(rows: int | None) -> None:
        with Trace(model, stats=False, numeric=False, rows=RowLimit(rows)) as run:
            model(x)
        assert run.rows[0] is not None

    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: model(x),
        "all rows": lambda: traced(None),
        f"{options.rows} rows": lambda: traced(options.rows),
    }
    with torch.no_grad():
        times = rounds(ways, 5 * options.repeats, clock=time.process_time if options.cpu else time.perf_counter)
    names = list(ways)[1:]
    return {
        "seconds": {name: asdict(Spread.of(values)) for name, values in times.items()},
        "ratios": {f"{name} / plain": asdict(ratio(times[name], times["plain"])) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="CPU time, where other programs run beside")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = Run(options)
    run.plain()
    record = {
        "benchmark": "watch",
        "date": date.today().isoformat(),
        "model": f"GPT-2 small shape ({options.layers} layers, 12 heads of 64), random weights, float32, SDPA, AdamW",
        **{name: getattr(options, name) for name in ("batch", "tokens", "repeats", "threads")},
        "clock": "CPU time" if options.cpu else "wall time",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": cpu_name(),
        "all rows": measure(run, options, None),
        f"{options.rows} rows": measure(run, options, options.rows),
        "all rows, gradient": measure(run, options, None, gradient=True),
        "one attention, fused": one_attention(True, options),
        "one attention, written out": one_attention(False, options),
    }
    for name, part in record.items():
        if isinstance(part, dict):
            print(f"{name}:")
            for section in ("seconds", "ratios"):
                for way, figures in part[section].items():
                    print(f"  {way:24s} {Spread(**figures).text(4)}")
            for figure in ("first sample / plain", "step() alone / plain", "every=100 / plain"):
                if figure in part:
                    print(f"  {figure:24s} {part[figure]:.6f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
