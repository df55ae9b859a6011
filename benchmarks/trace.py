"""What a trace costs: a GPT-2-small-shaped model at 512 tokens, plain, traced with all statistics, and by hand.

Three ways in one run, interleaved so that drift of the machine hits all alike:

- plain: the forward pass;
- traced: the same under `sqrtdk.trace(model)`, every statistic of every head of every layer;
- by hand: `output_attentions=True`, then entropy, peak, effective keys and Jacobian norm from the weights (the
  logits' own statistics can't be had that way at all).

Prints each time and the ratios, median with the spread between the 10th and 90th percentile of the pairs.

    python benchmarks/trace.py [--repeats 9] [--tokens 512] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import sqrtdk


def build(attn: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50257, n_positions=1024, use_cache=False, attn_implementation=attn)
    return transformers.GPT2LMHeadModel(config).eval()


def by_hand(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The statistics that attention weights give, per head."""
    weights = model(input_ids=ids, output_attentions=True).attentions
    figures = []
    for p in weights:
        collision = p.square().sum(-1)
        cubes = p.pow(3).sum(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        jacobian = (collision - 2 * cubes + collision.square()).clamp_min(0).sqrt()
        figures.append(torch.stack([entropy, p.amax(-1), 1 / collision, jacobian]).mean((1, 3)))
    return figures


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    tenth = max(0, round(0.1 * (len(ordered) - 1)))
    return {
        "median": statistics.median(ordered),
        "p10": ordered[tenth],
        "p90": ordered[len(ordered) - 1 - tenth],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sdpa, eager = build("sdpa"), build("eager")
    ids = torch.randint(0, 50257, (1, options.tokens), generator=torch.Generator().manual_seed(0))

    def traced(model: torch.nn.Module) -> None:
        with sqrtdk.trace(model) as run:
            model(input_ids=ids)
        assert len(run.calls) == 12
        assert all(call.stats is not None for call in run.calls)

    ways: dict[str, Callable[[], object]] = {
        "plain sdpa": lambda: sdpa(input_ids=ids),
        "traced sdpa": lambda: traced(sdpa),
        "plain eager": lambda: eager(input_ids=ids),
        "traced eager": lambda: traced(eager),
        "by hand (output_attentions)": lambda: by_hand(eager, ids),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for work in ways.values():
            work()
        for _ in range(options.repeats):
            for name, work in ways.items():
                times[name].append(timed(work))
    pairs = {
        "traced sdpa / plain sdpa": ("traced sdpa", "plain sdpa"),
        "traced eager / plain eager": ("traced eager", "plain eager"),
        "traced sdpa / by hand": ("traced sdpa", "by hand (output_attentions)"),
        "traced eager / by hand": ("traced eager", "by hand (output_attentions)"),
    }
    record = {
        "benchmark": "trace",
        "model": "GPT-2 small shape (12 layers, 12 heads of 64), random weights, float32",
        "tokens": options.tokens,
        "repeats": options.repeats,
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "seconds": {name: spread(values) for name, values in times.items()},
        "ratios": {
            name: spread([a / b for a, b in zip(times[top], times[bottom], strict=True)])
            for name, (top, bottom) in pairs.items()
        },
    }
    for section in ("seconds", "ratios"):
        for name, figures in record[section].items():
            print(f"{name:32s} {figures['median']:8.3f}   [{figures['p10']:.3f} .. {figures['p90']:.3f}]")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
