"""What a comparison costs: forwards, time over that of plain forwards, and memory by the length of the sequence.

Time: two GPT-2-small-shaped models (12 layers, width 768), the same weights, plain forwards of both and the comparison
in one run, interleaved so that drift of the machine hits all alike; once with two that are the same, once with one
cause planted (B divides its logits by the number of the layer). Ratios are of the comparison over one plain forward of
each side, median with the 10th and 90th percentile of the rounds.

Memory (Linux): the peak of a process while it compares two models of 4 layers (SDPA, width 256), above what it held
after a forward of each, at several lengths. What grows with the rows alone has a constant slope; what grows with rows
times keys has one that doubles.

    python benchmarks/diff.py [--repeats 5] [--tokens 128 512] [--rows 256 512 1024 2048] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import sqrtdk
from sqrtdk.compare.records import DiffReport
from timing import Spread, ratio, rounds

MEMORY = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from diff import build
import sqrtdk
torch.set_num_threads(int(sys.argv[3]))
length, works = int(sys.argv[2]), sys.argv[4]
sizes = dict(n_layer=4, n_embd=256, n_head=4, vocab_size=1024, n_positions=length)
a, b = (build(planted, **sizes) for planted in (False, works == "planted"))
ids = torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0))
warm = {"input_ids": ids[:, :16]}
sqrtdk.diff(a, b, warm)
with torch.no_grad():
    for model in (a, b):
        model(input_ids=ids)
def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = kib("VmRSS")
sqrtdk.diff(a, b, {"input_ids": ids})
print(kib("VmHWM") - before)
"""


def build(planted: bool, **sizes: int) -> torch.nn.Module:
    """GPT-2 with its own weights from one seed."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **({"vocab_size": 50257, "n_positions": 1024} | sizes),
        use_cache=False,
        attn_implementation="sdpa",
        scale_attn_by_inverse_layer_idx=planted,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def timed(tokens: int, planted: bool, repeats: int) -> dict[str, Any]:
    """One length, the same twice or with a cause."""
    a, b = build(False), build(planted)
    ids = torch.randint(0, 50257, (1, tokens), generator=torch.Generator().manual_seed(0))
    reports: list[DiffReport] = []

    def plain() -> None:
        with torch.no_grad():
            a(input_ids=ids)
            b(input_ids=ids)

    def compare() -> None:
        reports.append(sqrtdk.diff(a, b, {"input_ids": ids}))

    times = rounds({"a forward of each": plain, "diff": compare}, repeats)
    report = reports[-1]
    causes = sorted({cause.name for pair in report.pairs for cause in pair.causes})
    return {
        "tokens": tokens,
        "planted": "scale" if planted else None,
        "same": report.same,
        "causes": causes,
        "forwards": list(report.forwards),
        "seconds": {name: asdict(Spread.of(values)) for name, values in times.items()},
        "diff / a forward of each": asdict(ratio(times["diff"], times["a forward of each"])),
    }


def peak(length: int, threads: int, works: str) -> int:
    """KiB that a comparison takes above forwards, in a process of its own."""
    command = [
        sys.executable,
        "-c",
        MEMORY,
        os.path.dirname(os.path.abspath(__file__)),
        str(length),
        str(threads),
        works,
    ]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 512, 1024, 2048])
    parser.add_argument("--sides", nargs="*", default=["same", "planted"], choices=["same", "planted"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()
    times = []
    for tokens in options.tokens:
        for planted in (False, True):
            times.append(timed(tokens, planted, options.repeats))
            figures = times[-1]
            text = Spread(**figures["diff / a forward of each"]).text(1)
            print(f"{tokens} tokens, planted {figures['planted']}: {figures['causes']}, {figures['forwards']}, {text}")
    memory = []
    for works in options.sides:
        for length in options.rows:
            kib = peak(length, options.threads, works)
            memory.append({"sides": works, "rows": length, "peak_kib": kib, "kib_per_row": kib / length})
            print(f"{works}, {length} rows: {kib / 1024:.1f} MiB, {kib / length:.1f} KiB a row")
    record = {
        "benchmark": "diff",
        "model": "GPT-2 small shape (12 layers, 12 heads of 64), float32, sdpa; memory: 4 layers of 256",
        "repeats": options.repeats,
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load_before": load_before[0],
        "load_after": os.getloadavg()[0],
        "times": times,
        "memory": memory,
    }
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
