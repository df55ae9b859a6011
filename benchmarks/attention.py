"""What `sqrtdk.attention` costs next to torch's own operations, to Keras, and to the same figures by dense torch code.

Each group runs its sides in turn, round after round, and prints times and ratios as median [10th .. 90th percentile].
With one thread the times are CPU times, which other work on the machine moves less.
Beside the statistics stands the machine's own limit: the two matrix products alone, in the compiled kernel's tiles.
Memory is measured in processes of their own: what the call adds to the peak of one that has loaded its libraries.
`cliffs.py` has every kind of call at every length; it takes an hour and runs where it is asked for by name.

    python benchmarks/attention.py [--repeats 15] [--threads 2] [--json FILE] [--only plain,tiny,statistics,...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sqrtdk
from cliffs import DTYPES, HEADS, KINDS, cells, name_of
from peers import dense_statistics
from products import build, products
from sqrtdk import AuxRequest, scores
from sqrtdk._environment import cpu_name
from sqrtdk.impl.kernel.libraries import this_target
from sqrtdk.impl.kernel.load import why_not_loaded
from timing import Spread, ratio, rounds

Group = tuple[dict[str, Callable[[], object]], list[tuple[str, str]], int]
ALL = AuxRequest.all()


def tensors(length: int, heads: int = 8, dim: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, dim, dtype=dtype) for _ in range(3)]


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return dense_statistics(q @ k.mT * q.shape[-1] ** -0.5, v)


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
        "sqrtdk 4096, all statistics": lambda: sqrtdk_statistics(q, k, v),
        "measure 4096": lambda: sqrtdk.measure(q, k),
    }
    pairs = [("sqrtdk 4096, all statistics", "sdpa 4096"), ("measure 4096", "sdpa 4096")]
    if why_not_loaded() is None:
        build()
        ways["products alone 4096"] = lambda: products(q, k, v)
        pairs.append(("products alone 4096", "sdpa 4096"))
    if dtype == torch.float32:
        ways["dense torch 4096, all statistics"] = lambda: dense(q, k, v)
        pairs.append(("dense torch 4096, all statistics", "sqrtdk 4096, all statistics"))
    return ways, pairs, 1


def training(dtype: torch.dtype) -> Group:
    """The backward pass, and both passes, in which all statistics are computed too."""
    leaves = [t.requires_grad_() for t in tensors(4096, dtype=dtype)]
    gradient = torch.randn_like(leaves[0])
    calls = {"sdpa": functional.scaled_dot_product_attention, "sqrtdk": partial(sqrtdk.attention, return_aux=ALL)}
    ways: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        with torch.enable_grad():
            output = output_of(call(*leaves))
        ways[f"{name} 4096, backward"] = partial(torch.autograd.grad, output, leaves, gradient, retain_graph=True)
        ways[f"{name} 4096, forward and backward"] = partial(both_passes, call, leaves, gradient)
    return ways, [(f"sqrtdk 4096, {name}", f"sdpa 4096, {name}") for name in ("backward", "forward and backward")], 1


def output_of(found: Tensor | tuple[Tensor, object]) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def both_passes(call: Callable[..., Any], leaves: list[Tensor], gradient: Tensor) -> object:
    with torch.enable_grad():
        return torch.autograd.grad(output_of(call(*leaves)), leaves, gradient)


def learning(dtype: torch.dtype) -> Group:
    """Both passes with dropout, and with a bias that learns; torch holds all weights for either."""
    leaves = [t.requires_grad_() for t in tensors(2048, dtype=dtype)]
    bias = torch.randn(1, 8, 2048, 2048, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(leaves[0])
    theirs, ours = functional.scaled_dot_product_attention, sqrtdk.attention
    ways: dict[str, Callable[[], object]] = {
        "sdpa 2048, dropout": partial(both_passes, partial(theirs, dropout_p=0.1), leaves, gradient),
        "sqrtdk 2048, dropout": partial(both_passes, partial(ours, dropout_p=0.1), leaves, gradient),
        "sdpa 2048, learned bias": partial(both_passes, theirs, [*leaves, bias], gradient),
        "sqrtdk 2048, learned bias": partial(
            both_passes, lambda q, k, v, bias: ours(q, k, v, bias=bias), [*leaves, bias], gradient
        ),
    }
    return ways, [(f"sqrtdk 2048, {name}", f"sdpa 2048, {name}") for name in ("dropout", "learned bias")], 1


def decode(dtype: torch.dtype) -> Group:
    """Few rows over many keys, 32 heads that share 8."""
    ways: dict[str, Callable[[], object]] = {}
    pairs = []
    key, value = (torch.randn(1, 8, 8192, 128, dtype=dtype) for _ in range(2))
    for rows in (1, 4, 16):
        query = torch.randn(1, 32, rows, 128, dtype=dtype)
        theirs, ours = f"sdpa, {rows} rows", f"sqrtdk, {rows} rows, all statistics"
        ways[theirs] = partial(functional.scaled_dot_product_attention, query, key, value, enable_gqa=True)
        ways[ours] = partial(sqrtdk.attention, query, key, value, enable_gqa=True, return_aux=ALL)
        pairs.append((ours, theirs))
    return ways, pairs, 3


def flex_plain() -> Group:
    """FlexAttention's compiled kernel, which gives no statistics on a CPU: torch refuses them."""
    q, k, v = tensors(4096)
    compiled = torch.compile(flex_attention)
    ways: dict[str, Callable[[], object]] = {
        "flex 4096, compiled": lambda: compiled(q, k, v),
        "sqrtdk 4096": lambda: sqrtdk.attention(q, k, v),
        "sqrtdk 4096, all statistics": lambda: sqrtdk_statistics(q, k, v),
    }
    flex, plain, whole = ways
    return ways, [(plain, flex), (whole, flex)], 1


def flex_mods() -> Group:
    """The functions of FlexAttention in its compiled kernel, which gives no statistics, and here."""
    q, k, v = tensors(1024)
    slopes, table, relative = torch.rand(8), torch.randn(8, 1024, 1024), torch.randn(8, 2048)
    document = torch.arange(1024) // 100

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    def distances(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + relative[h, q_idx - kv_idx + 1024]

    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx, kv_idx]

    def gain(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * slopes[h]

    def gate(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * torch.sigmoid(score)

    mods: dict[str, tuple[Any, Any]] = {
        "causal": (None, causal),
        "alibi, causal": (alibi, causal),
        "relative bias": (distances, None),
        "softcap, causal": (softcap, causal),
        "bias": (bias, None),
        "documents": (None, documents),
        "gain": (gain, None),
        "gate": (gate, None),
    }
    ways: dict[str, Callable[[], object]] = {}
    pairs = []
    torch._dynamo.reset()  # after eight functions torch would stop compiling
    compiled = torch.compile(flex_attention, dynamic=False)
    for name, (score, mask) in mods.items():
        blocks = None if mask is None else create_block_mask(mask, None, None, 1024, 1024, device="cpu")
        here = partial(sqrtdk.attention, q, k, v, score_mod=score, mask_mod=mask)
        theirs = partial(compiled, q, k, v, score_mod=score, block_mask=blocks)
        with torch.no_grad():
            theirs()
        ways |= {
            f"flex, {name}": theirs,
            f"sqrtdk, {name}": here,
            f"sqrtdk, {name}, all statistics": partial(here, return_aux=True),
        }
        pairs += [(f"sqrtdk, {name}{more}", f"flex, {name}") for more in ("", ", all statistics")]
    return ways, pairs, 1


def dense_additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)).sum(-1).softmax(-1) @ v


def keras_additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import keras

    with torch.device("cpu"):
        output: Tensor = keras.layers.AdditiveAttention(use_scale=False)([q[0], v[0], k[0]])
    return output


def sqrtdk_additive(q: Tensor, k: Tensor, v: Tensor) -> object:
    return sqrtdk.attention(q, k, v, score=scores.keras_additive())


def sqrtdk_statistics(q: Tensor, k: Tensor, v: Tensor) -> object:
    return sqrtdk.attention(q, k, v, return_aux=ALL)


def additive() -> Group:
    inputs = tensors(2048, heads=1)
    ways = {
        "dense additive": lambda: dense_additive(*inputs),
        "keras additive": lambda: keras_additive(*inputs),
        "sqrtdk additive": lambda: sqrtdk_additive(*inputs),
    }
    return ways, [("sqrtdk additive", "dense additive"), ("sqrtdk additive", "keras additive")], 1


GROUPS: dict[str, Callable[[], Group]] = {
    "plain": plain,
    "tiny": tiny,
    "statistics": lambda: statistics(torch.float32),
    "statistics_bf16": lambda: statistics(torch.bfloat16),
    "training": lambda: training(torch.float32),
    "training_bf16": lambda: training(torch.bfloat16),
    "learning": lambda: learning(torch.float32),
    "learning_bf16": lambda: learning(torch.bfloat16),
    "decode": lambda: decode(torch.float32),
    "decode_bf16": lambda: decode(torch.bfloat16),
    "flex": flex_plain,
    "mods": flex_mods,
    "additive": additive,
}
PEAKS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], int]] = {
    "all statistics, 16384 keys": (sqrtdk_statistics, 16384),
    "all statistics, 131072 keys": (sqrtdk_statistics, 131072),
    "dense additive, 2048 keys": (dense_additive, 2048),
    "keras additive, 2048 keys": (keras_additive, 2048),
    "sqrtdk additive, 2048 keys": (sqrtdk_additive, 2048),
}


def peak(name: str) -> dict[str, float]:
    """What a call of one head adds to the peak of torch's plain one, and how long each takes."""
    call, length = PEAKS[name]
    inputs = tensors(length, heads=1)
    with torch.no_grad():
        call(*(t[:, :, :64] for t in inputs))
        start = time.perf_counter()
        functional.scaled_dot_product_attention(*inputs)
        middle = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call(*inputs)
        seconds = time.perf_counter() - middle
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"extra_mib": (after - before) / 1024, "seconds": seconds, "seconds_of_sdpa": middle - start}


def peaks(threads: int) -> dict[str, dict[str, float]]:
    """`peak` of every name, each in a process of its own."""
    found = {}
    for name in PEAKS:
        command = [sys.executable, __file__, "--threads", str(threads), "--peak", name]
        found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def machine(threads: int) -> dict[str, Any]:
    """The CPU, what the kernel was compiled for, and which instructions torch and its libraries were limited to."""
    limits = {name: os.environ[name] for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA") if name in os.environ}
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "cpu": cpu_name(),
        "target": this_target() if why_not_loaded() is None else None,
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
        "limits": limits,
    }


def write_cliffs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the cells that are asked for, and print each."""
    found = []
    for cell in cells(options.kind.split(","), [int(n) for n in options.length.split(",")], options.dtype.split(",")):
        found.append(cell)
        place = f"{cell['kind']:15s} {cell['length']:6d} {cell['dtype']:9s} {cell['pass']:12s}"
        growth = "" if cell["growth"] is None else f"growth {cell['growth']:.2f}"
        text = Spread(**cell["ratio"]).text(2)
        print(
            f"{place} {text:22s} {cell['ms']:9.1f} ms {cell['added_mib']:8.1f} MiB {cell['impl']:6s} {growth}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="memory," + ",".join(GROUPS))
    parser.add_argument("--kind", default=",".join(KINDS), help="of --only cliffs")
    parser.add_argument("--length", default=",".join(map(str, HEADS)), help="of --only cliffs")
    parser.add_argument("--dtype", default=",".join(map(name_of, DTYPES)), help="of --only cliffs")
    parser.add_argument("--json")
    parser.add_argument("--peak", choices=PEAKS, help="only this, in this process, as JSON")
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "torch"
    torch.set_num_threads(options.threads)
    if options.peak:
        print(json.dumps(peak(options.peak)))
        return
    record: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "environment": machine(options.threads),
        "repeats": options.repeats,
    }
    wanted = options.only.split(",")
    if "memory" in wanted:
        record["memory"] = found = peaks(options.threads)
        for name, value in found.items():
            times = f"{value['seconds']:8.2f}s, plain SDPA {value['seconds_of_sdpa']:.2f}s"
            print(f"{name:32s} {value['extra_mib']:9.1f} MiB {times}")
    if "cliffs" in wanted:
        record["load_before"] = os.getloadavg()[0]
        record["cliffs"] = write_cliffs(options)
    for name, make in GROUPS.items():
        if name not in wanted:
            continue
        ways, pairs, calls = make()
        with torch.no_grad():
            clock = time.process_time if options.threads == 1 else time.perf_counter
            times = rounds(ways, options.repeats, calls, clock)
        ms = {way: Spread.of([1e3 * t for t in values]) for way, values in times.items()}
        ratios = {f"{a} / {b}": ratio(times[a], times[b]) for a, b in pairs}
        groups = {"ms": ms, "ratio": ratios}
        record[name] = {key: {way: asdict(found) for way, found in group.items()} for key, group in groups.items()}
        print(f"\n{name}")
        for way, found in (ms | ratios).items():
            print(f"{way:48s} {found.text()}{' ms' if way in ms else ''}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
