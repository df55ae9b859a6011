"""What sqrtdk costs before it computes anything: CPU seconds of imports and of `sqrtdk --help`, and room on the disk.

Each command runs as a process of its own, all of them in turn, round by round; the first round fills the caches and is
not counted. Time is CPU time, user and system, of the whole process, the start of Python included: it depends little on
what else the machine does. Size is that of the files that pip's record of a distribution lists; of sqrtdk itself, which
may be installed in place, that of its package.

    python benchmarks/startup.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sqrtdk
from sqrtdk._environment import environment

RECORD = Path(__file__).parent / "results" / "startup.json"
COMMANDS = {
    "python": ("-c", ""),
    "import sqrtdk": ("-c", "import sqrtdk"),
    "sqrtdk --help": ("-m", "sqrtdk", "--help"),
    "import torch": ("-c", "import torch"),
    "sqrtdk.attention": ("-c", "import sqrtdk; sqrtdk.attention"),
    "sqrtdk.check": ("-c", "import sqrtdk; sqrtdk.check"),
}
EXTRAS = ("hf", "lab", "watch", "app", "onnx")


def cpu_seconds(arguments: Iterable[str]) -> float:
    """CPU time of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_times(rounds: int) -> dict[str, dict[str, Any]]:
    """Of each command median, least and largest, and what they were taken from."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            times[name].append(cpu_seconds(arguments))
    return {
        name: {
            "median": statistics.median(seconds[1:]),
            "least": min(seconds[1:]),
            "largest": max(seconds[1:]),
            "seconds": [round(second, 4) for second in seconds[1:]],
        }
        for name, seconds in times.items()
    }


def needed(name: str, extras: Iterable[str] = ()) -> set[str]:
    """The distributions that one needs here, with theirs; itself not among them."""
    waiting, seen = [(canonicalize_name(name), frozenset(extras))], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        for text in importlib.metadata.requires(one[0]) or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in one[1] or ("",)
            )
            if wanted:
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {found for found, _ in seen} - {canonicalize_name(name)}


def size(name: str) -> int:
    """Bytes of a distribution's files."""
    files = importlib.metadata.files(name) or ()
    return sum(path.stat().st_size for file in files if (path := Path(str(file.locate()))).is_file())


def own_size() -> int:
    """Bytes of the package's files, as a wheel has them: without what Python compiled."""
    folder = Path(sqrtdk.__file__).parent
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def sizes() -> dict[str, Any]:
    """sqrtdk, each distribution that it needs, and what each extra adds to them."""
    base = needed("sqrtdk")
    return {
        "sqrtdk": own_size(),
        "needed": {name: size(name) for name in sorted(base)},
        "extras": {extra: {name: size(name) for name in sorted(needed("sqrtdk", [extra]) - base)} for extra in EXTRAS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds that are counted (default: 9)")
    parser.add_argument("--json", type=Path, default=RECORD, metavar="FILE", help=f"default: {RECORD.name} in results")
    options = parser.parse_args()
    here = environment()
    record = {
        "command": f"python benchmarks/startup.py --rounds {options.rounds}",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {name: here[name] for name in ("versions", "platform", "cpu", "cpus")},
        "load_before": os.getloadavg()[0],
        "cpu_s": start_times(options.rounds),
        "bytes": sizes(),
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, spread in record["cpu_s"].items():
        print(f"{name:18} {spread['median']:6.3f} s CPU ({spread['least']:.3f} to {spread['largest']:.3f})")
    total = record["bytes"]["sqrtdk"] + sum(record["bytes"]["needed"].values())
    print(f"sqrtdk {record['bytes']['sqrtdk'] / 2**20:.1f} MiB, with all that it needs {total / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
