"""What `sqrtdk.attention` costs next to torch's own operation and to the same figures by dense torch code.

Each group runs its sides in turn, round after round, and prints times and ratios as median [10th .. 90th percentile].

    python benchmarks/attention.py [--repeats 15] [--threads 2] [--json FILE] [--only plain,tiny,statistics,...]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import sqrtdk
from paired import line, ratio, rounds, spread
from sqrtdk import AuxRequest, scores

Group = tuple[dict[str, Callable[[], object]], list[tuple[str, str]], int]
ALL = AuxRequest.all()


def tensors(length: int, heads: int = 8, dim: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, dim, dtype=dtype) for _ in range(3)]


def dense_statistics(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Output and statistics as a careful user writes them, with the L x S matrix."""
    z = q @ k.mT * q.shape[-1] ** -0.5
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp()
    square = p.square()
    collision, cubes = square.sum(-1), (square * p).sum(-1)
    jacobian = (collision - 2 * cubes + collision.square()).clamp_min(0).sqrt()
    entropy = lse - (p * z).sum(-1)
    return p @ v, lse, z.amax(-1), z.amin(-1), z.mean(-1), z.var(-1), entropy, collision, p.amax(-1), jacobian


def plain() -> Group:
    q, k, v = tensors(1024)
    ways = {
        "sdpa": lambda: functional.scaled_dot_product_attention(q, k, v),
        "sqrtdk": lambda: sqrtdk.attention(q, k, v),
        "sdpa causal": lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "sqrtdk causal": lambda: sqrtdk.attention(q, k, v, is_causal=True),
    }
    return ways, [("sqrtdk", "sdpa"), ("sqrtdk causal", "sdpa causal")], 3


def tiny() -> Group:
    q, k, v = tensors(4, heads=1, dim=8)
    long = tensors(64, heads=1, dim=8)
    ways = {
        "sdpa tiny": lambda: functional.scaled_dot_product_attention(q, k, v),
        "sqrtdk tiny": lambda: sqrtdk.attention(q, k, v),
        "sdpa 64 keys": lambda: functional.scaled_dot_product_attention(*long),
        "sqrtdk 64 keys": lambda: sqrtdk.attention(*long),
    }
    return ways, [("sqrtdk tiny", "sdpa tiny"), ("sqrtdk 64 keys", "sdpa 64 keys")], 300


def statistics(dtype: torch.dtype) -> Group:
    q, k, v = tensors(4096, dtype=dtype)
    ways: dict[str, Callable[[], object]] = {
        "sdpa 4096": lambda: functional.scaled_dot_product_attention(q, k, v),
        "sqrtdk 4096, all statistics": lambda: sqrtdk.attention(q, k, v, return_aux=ALL),
        "measure 4096": lambda: sqrtdk.measure(q, k),
    }
    pairs = [("sqrtdk 4096, all statistics", "sdpa 4096"), ("measure 4096", "sdpa 4096")]
    if dtype == torch.float32:
        ways["dense torch 4096, all statistics"] = lambda: dense_statistics(q, k, v)
        pairs.append(("dense torch 4096, all statistics", "sqrtdk 4096, all statistics"))
    return ways, pairs, 1


def additive() -> Group:
    q, k, v = tensors(2048, heads=1)
    score = scores.keras_additive()

    def dense() -> Tensor:
        return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)).sum(-1).softmax(-1) @ v

    ways = {"dense additive": dense, "sqrtdk additive": lambda: sqrtdk.attention(q, k, v, score=score)}
    return ways, [("sqrtdk additive", "dense additive")], 1


GROUPS: dict[str, Callable[[], Group]] = {
    "plain": plain,
    "tiny": tiny,
    "statistics": lambda: statistics(torch.float32),
    "statistics_bf16": lambda: statistics(torch.bfloat16),
    "additive": additive,
}


def extra_memory(length: int = 16384) -> float:
    """MiB that all statistics add to the peak of the plain call, libraries loaded."""
    q, k, v = tensors(length, heads=1)
    with torch.no_grad():
        sqrtdk.attention(*(t[:, :, :64] for t in (q, k, v)), return_aux=ALL)
        functional.scaled_dot_product_attention(q, k, v)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sqrtdk.attention(q, k, v, return_aux=ALL)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="memory," + ",".join(GROUPS))
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record: dict[str, object] = {
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "threads": options.threads},
        "repeats": options.repeats,
    }
    wanted = options.only.split(",")
    if "memory" in wanted:  # first: later groups raise the peak
        record["memory_mib"] = extra_memory()
        print(f"extra peak memory of all statistics at L = 16384: {record['memory_mib']:.0f} MiB")
    for name, make in GROUPS.items():
        if name not in wanted:
            continue
        ways, pairs, calls = make()
        with torch.no_grad():
            times = rounds(ways, options.repeats, calls)
        figures = {"ms": {way: spread([1e3 * t for t in values]) for way, values in times.items()}}
        figures["ratio"] = {f"{a} / {b}": ratio(times, a, b) for a, b in pairs}
        record[name] = figures
        print(f"\n{name}")
        for way, value in figures["ms"].items():
            print(line(way, value, "ms"))
        for pair, value in figures["ratio"].items():
            print(line(pair, value))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
