"""What a trace costs: a GPT-2-small-shaped model at 512 tokens, plain, traced with all statistics, and by hand.

Three ways in one run, interleaved so that drift of the machine hits all alike:

- plain: the forward pass;
- traced: the same under `sqrtdk.trace(model)`, every statistic of every head of every layer;
- by hand: `output_attentions=True`, then the same statistics from the weights in plain torch (the largest logit
  itself can't be had that way at all: weights know the logits only up to a constant a row).

Prints each time and the ratios, median with the spread between the 10th and 90th percentile of the pairs.

    python benchmarks/trace.py [--repeats 9] [--tokens 512] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import date

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import sqrtdk
from timing import Spread, ratio, rounds


def build(attn: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50257, n_positions=1024, use_cache=False, attn_implementation=attn)
    return transformers.GPT2LMHeadModel(config).eval()


def by_hand(model: torch.nn.Module, ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The statistics of `HeadStats` from attention weights, as a careful user would write them in torch.

    log p is the logits up to a constant a row, so offsets (largest logit, row offset) can't be had; their place is
    taken by the same reduction of log p.
    """
    figures = []
    for p in model(input_ids=ids, output_attentions=True).attentions:
        rows, keys = p.shape[-2:]
        visible = torch.ones(rows, keys, dtype=torch.bool).tril()
        seen = visible.sum(-1)
        logits = p.log().masked_fill(~visible, 0.0)
        mean = logits.sum(-1) / seen
        variance = (logits - mean[..., None]).masked_fill(~visible, 0.0).square().sum(-1) / seen
        collision = p.square().sum(-1)
        cubes = p.pow(3).sum(-1)
        peak = p.amax(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        quantiles = torch.quantile(entropy.transpose(0, 1).flatten(1), torch.tensor([0.05, 0.5, 0.95]), dim=1)
        spaced = logits[:, :, torch.linspace(0, rows - 1, 64).long()]
        figures.append(
            {
                "max_logit": logits.masked_fill(~visible, -math.inf).amax((0, 2, 3)),
                "min_logit": logits.amin((0, 2, 3)),
                "max_abs_logit": logits.abs().amax((0, 2, 3)),
                "mean_logit": mean.mean((0, 2)),
                "std_logit": variance.mean((0, 2)).sqrt(),
                "row_offset": mean.abs().amax((0, 2)),
                "entropy_nats": entropy.mean((0, 2)),
                "entropy_quantiles": quantiles,
                "entropy_fraction": (entropy / seen.log().clamp_min(1e-9))[..., 1:].mean((0, 2)),
                "effective_keys": (1 / collision).mean((0, 2)),
                "peak": peak.mean((0, 2)),
                "peak_max": peak.amax((0, 2)),
                "saturated": (peak[..., 1:] > 0.99).float().mean((0, 2)),
                "jacobian_norm": (collision - 2 * cubes + collision.square()).clamp_min(0).sqrt().mean((0, 2)),
                "logit_histogram": torch.stack([torch.histc(head, 48) for head in spaced.unbind(1)]),
                "entropy_histogram": torch.stack([torch.histc(head, 24) for head in entropy.unbind(1)]),
            }
        )
    return figures


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
    with torch.no_grad():
        times = rounds(ways, options.repeats)
    pairs = {
        "traced sdpa / plain sdpa": ("traced sdpa", "plain sdpa"),
        "traced eager / plain eager": ("traced eager", "plain eager"),
        "traced sdpa / by hand": ("traced sdpa", "by hand (output_attentions)"),
        "traced eager / by hand": ("traced eager", "by hand (output_attentions)"),
    }
    record = {
        "benchmark": "trace",
        "date": date.today().isoformat(),
        "model": "GPT-2 small shape (12 layers, 12 heads of 64), random weights, float32",
        "tokens": options.tokens,
        "repeats": options.repeats,
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "seconds": {name: asdict(Spread.of(values)) for name, values in times.items()},
        "ratios": {name: asdict(ratio(times[top], times[bottom])) for name, (top, bottom) in pairs.items()},
    }
    for section in ("seconds", "ratios"):
        for name, figures in record[section].items():
            print(f"{name:48s} {Spread(**figures).text()}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
