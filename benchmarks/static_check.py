"""What a static audit costs: a configuration of Llama 70B's shape through the whole program, and the time of --help.

A config.json is written to a temporary directory; `sqrtdk check DIR --static --json` runs as a process of its own.
Wall time is of the whole process, imports included; peak memory is its largest resident set. Bars: 20 s, 2 GB (1e9
bytes); `sqrtdk --help` has 0.3 s, median of ten. Exits 1 if a bar is missed.

    python benchmarks/static_check.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from sqrtdk._environment import cpu_name

BARS = {"wall_s": 20.0, "peak_gb": 2.0, "help_s": 0.3}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "dtype": "bfloat16",
}
SQRTDK = (sys.executable, "-m", "sqrtdk")


def static() -> dict[str, float]:
    """Run the audit once; the only child so far, so the children's peak is its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        start = time.perf_counter()
        done = subprocess.run(
            [*SQRTDK, "check", folder, "--static", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        wall = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"the audit exited with {done.returncode}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    document = json.loads(done.stdout)
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss * unit / 1e9,
        "parameters": document["model"]["parameters"],
        "calls": len(document["calls"]),
        "exact": sum(call["verdict"] == "exact" for call in document["calls"]),
        "not_measured": len(document["not_measured"]),
        "findings": len(document["findings"]),
    }


def help_s(runs: int = 10) -> list[float]:
    """Wall seconds of `sqrtdk --help`, run by run."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([*SQRTDK, "--help"], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    figures = static()
    times = help_s()
    figures["help_s"] = statistics.median(times)
    calls = f"{figures['calls']:.0f} calls, {figures['exact']:.0f} exact, {figures['findings']:.0f} findings"
    print(f"Llama-70B-shaped config, {figures['parameters'] / 1e9:.1f} billion parameters: {calls}")
    print(f"  wall      {figures['wall_s']:7.2f} s   bar {BARS['wall_s']:g} s (cpu {figures['cpu_s']:.2f} s)")
    print(f"  peak RSS  {figures['peak_gb']:7.2f} GB  bar {BARS['peak_gb']:g} GB")
    print(f"sqrtdk --help, median of {len(times)} ({min(times):.2f} to {max(times):.2f} s)")
    print(f"  wall      {figures['help_s']:7.2f} s   bar {BARS['help_s']:g} s")
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    if options.json:
        here = {
            "date": date.today().isoformat(),
            "machine": cpu_name(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
        record = here | figures | {"help_runs_s": times, "bars": BARS}
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    missed = [name for name, bar in BARS.items() if figures[name] > bar]
    complete = figures["calls"] == figures["exact"] == CONFIG["num_hidden_layers"]
    print("missed: " + ", ".join(missed) if missed else "every bar is met" if complete else "calls are missing")
    return int(bool(missed) or not complete)


if __name__ == "__main__":
    sys.exit(main())
