"""How far the forecast of a quantised cache is from the run: with one layer of it quantised, and with all.

Six small random models of two layers in float64 (tests/kv/quantised_caches.py), 64 tokens in the cache and one step.
For each head the KL of the step's weights in a run with the cache really quantised, over that of the forecast. With
one layer quantised at a time its q, k and v are those of the plain run: the ratio is 1. With all, the second layer gets
what the errors of the first have made of its inputs, which no forecast of one layer has in it.

    python benchmarks/kv_cache.py [--seeds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from transformers.cache_utils import Fp8QuantizedLayer

from sqrtdk.kv import forecast_calls
from sqrtdk.tracing import Trace
from tests.kv.quantised_caches import CONFIGS, Cast, Grouped, build, divergences, int8, step, tokens

CACHES = {
    "fp8_e4m3 tensor": ("fp8_e4m3", None, 0, Fp8QuantizedLayer),
    "int8 tensor": ("int8", None, 0, lambda: Cast(int8((0, 1, 2, 3)))),
    "int4 group": ("int4", None, 1, lambda: Grouped(0)),
}
LAYERS = 2


def ratios(family: str, name: str, seed: int) -> dict[str, list[float]]:
    """KL of the run over that of the forecast: of each layer alone, and of the second where both are quantised."""
    dtype, scale, residual, layer_of = CACHES[name]
    model, ids = build(family, seed=seed), tokens(seed)
    with torch.no_grad(), Trace(model, stats=False, keep=True) as run:
        model(ids, use_cache=False)
    calls = forecast_calls(run.tensors, dtype, scale, rows=1, residual=residual).calls
    found: dict[str, list[float]] = {"one layer": [], "first of all": [], "second of all": []}
    for layer in range(LAYERS):
        plain, _ = step(model, ids, layer, {})
        alone, _ = step(model, ids, layer, {layer: layer_of()})
        every, _ = step(model, ids, layer, {at: layer_of() for at in range(LAYERS)})
        told = [head.kl_mean_nats for head in calls[layer].stored.heads]
        for key, came in (("one layer", alone), (("first of all", "second of all")[layer], every)):
            found[key] += [kl / head for kl, head in zip(divergences(plain, came), told, strict=True)]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    for family in CONFIGS:
        for name in CACHES:
            every = [ratios(family, name, seed) for seed in range(1, arguments.seeds + 1)]
            for key in every[0]:
                values = [value for one in every for value in one[key]]
                record = {
                    "model": family, "cache": name, "run": key, "heads": len(values), "least": min(values),
                    "median": statistics.median(values), "largest": max(values),
                }  # fmt: skip
                records.append(record)
                figures = f"median {record['median']:.4f}, {min(values):.4f} to {max(values):.4f}"
                print(f"{family:8} {name:16} {key:14} {figures}")
    if arguments.json is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        document = {"command": sys.argv[1:], "versions": versions, "ratios": records}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
