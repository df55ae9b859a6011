"""What a watch costs a training step: a GPT-2-small-shaped model with SDPA, forward, backward and AdamW.

Four ways in one run, interleaved so that drift of the machine hits all alike:

- plain: the step, and nothing else;
- unsampled: the same within a watch, a step that is not sampled;
- sampled: the same within a watch, a step that is, with the records of it (not the first, which reads the scale from
  the logits and finds the projections besides);
- rows: the same with at most `--rows` rows of a sequence.

Prints each time and the ratios, median with the spread between the 10th and 90th percentile of the rounds, and what a
run at `every=100` costs in all by them: 0.99 unsampled + 0.01 sampled. What an unsampled step does besides is timed by
itself as well, as `step()` alone against the median plain step: it is far below what rounds of whole steps can tell.

    python benchmarks/watch.py [--repeats 9] [--batch 1] [--tokens 512] [--layers 12] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import sqrtdk
from sqrtdk.bench.paired import Spread, ratio, rounds
from sqrtdk.monitor.schedule import When
from sqrtdk.monitor.watch import Watch

ALONE = 100_000  # calls of step() by itself


class Run:
    """A training run: one step a call."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=options.layers, n_positions=options.tokens, use_cache=False, attn_implementation="sdpa"
        )
        self.model = transformers.GPT2LMHeadModel(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.ids = torch.randint(0, 50257, (options.batch, options.tokens))

    def step(self) -> torch.Tensor:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = Run(options)

    def within(health: Watch) -> Callable[[], None]:
        """A step of a watch that is open for as long as the step lasts: its schedule says which kind it is."""

        def step() -> None:
            health.step(run.step())

        return step

    def watched(sampled: bool, rows: int | None = None) -> dict[str, object]:
        """Seconds of one kind of step of a watch, whose first, sampled step has been left behind."""
        health = sqrtdk.watch(run.model, every=When(lambda step: sampled), rows=rows, on_alarm=lambda alarm: None)
        return {"health": health, "work": within(health)}

    times = in_turn(run, watched, options)
    alone = alone_seconds(run)
    plain = statistics.median(times["plain"])
    ratios = {f"{name} / plain": ratio(times[name], times["plain"]) for name in times if name != "plain"}
    total = [0.99 * u + 0.01 * s for u, s in zip(times["unsampled"], times["sampled"], strict=True)]
    ratios["every=100 / plain"] = ratio(total, times["plain"])
    record = {
        "benchmark": "watch",
        "model": f"GPT-2 small shape ({options.layers} layers, 12 heads of 64), random weights, float32, SDPA, AdamW",
        **{name: getattr(options, name) for name in ("batch", "tokens", "repeats", "threads", "rows")},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "seconds": {name: asdict(Spread.of(values)) for name, values in times.items()},
        "ratios": {name: asdict(value) for name, value in ratios.items()},
        "step() alone, seconds": alone,
        "step() alone / plain": alone / plain,
        "every=100, from step() alone": 1.0 + alone / plain + 0.01 * (ratios["sampled / plain"].median - 1.0),
    }
    for section in ("seconds", "ratios"):
        for name, figures in record[section].items():
            print(f"{name:32s} {Spread(**figures).text(4)}")
    print(f"{'step() alone':32s} {1e6 * alone:.2f} us, {alone / plain:.2e} of a plain step")
    print(f"{'every=100, from step() alone':32s} {record['every=100, from step() alone']:.5f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
