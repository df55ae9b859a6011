"""What the Triton kernel takes on a GPU, with and without statistics, next to the fastest kernels that torch has.

Bfloat16. Every round runs all ways of a case once, in turn, the cache flushed before each; CUDA events tell the time,
without Python's share. A way is timed only after its output (and gradients) agreed with torch's. The cases come in the
order of their weight; with --budget none starts after so many seconds, and what is left is listed as not measured.
At the end the targets, each met or missed, by the worst of its cases.

    python benchmarks/gpu.py [--cases LIST] [--ways LIST] [--flex all] [--repeats 20] [--budget S] [--json FILE]
    python benchmarks/gpu.py --check      # the same flow at tiny sizes on the CPU, in Triton's interpreter; no figures

--prepare N first runs every way once in N processes, which leave what they compiled in the caches on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "--check" in sys.argv:  # before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from gpu_record import SCHEMA_VERSION, clocks, figure_text, machine
from gpu_ways import FLEX_LENGTHS, FORWARD, MEASURE, TRAINING, flex, measured
from sqrtdk.errors import kind_and_text
from timing import Spread, ratio, rounds_on
from ways import BASE, Way, prepared
from workloads import Case, Workload, chosen

ROOT = Path(__file__).parents[1]
MOST_S = 4.0  # for the rounds of one case and pass
PASSES: dict[str, dict[str, Way]] = {"forward": FORWARD, "training": TRAINING}


def square(length: int, width: int, causal: bool) -> Workload:
    return Workload(2, 32, 32, length, length, width, causal)


CASES: dict[str, Workload] = {
    f"{length}-{width}{'-causal' if causal else ''}": square(length, width, causal)
    for length, width in ((4096, 128), (4096, 64), (16384, 128), (8192, 128), (16384, 64), (8192, 64))
    for causal in (False, True)
}
CASES |= {
    "gqa": Workload(2, 64, 8, 4096, 4096, 128),
    "gqa-causal": Workload(2, 64, 8, 4096, 4096, 128, True),
    "decode-1": Workload(2, 64, 8, 1, 32768, 128, trains=False),
    "decode-4": Workload(2, 64, 8, 4, 32768, 128, trains=False),
}
CASES |= {
    f"2048-{width}{'-causal' if causal else ''}": square(2048, width, causal)
    for width in (128, 64)
    for causal in (False, True)
}


@dataclass(frozen=True, slots=True)
class Target:
    """A bar, and which figure of which cases is held against it; the worst of them decides.

    Attributes:
        text: what is compared.
        pass_: "forward" or "training".
        above: the way that is measured; its time is divided by that of the fastest of `below`.
        below: none: the figure is TFLOP/s of `above`.
        bar: that the figure must reach.
        most: whether it is the largest figure that may be, else the least.
        covers: the cases.
    """

    text: str
    pass_: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    bar: float
    most: bool
    covers: Callable[[Workload], bool]


def long(workload: Workload, width: int | None = None) -> bool:
    return workload.length >= 4096 and width in (None, workload.width)


def whole(workload: Workload) -> bool:
    return workload.length == workload.keys


def compiled(workload: Workload) -> bool:
    return whole(workload) and workload.length in FLEX_LENGTHS


def unshared(workload: Workload) -> bool:
    return whole(workload) and not workload.grouped


STATS = ("ours-stats",)
THRICE = ("cudnn-thrice", "flash-thrice")
TARGETS: dict[str, Target] = {
    "rate": Target(
        "all statistics, forward, E = 128, n >= 4096, at least 400 TFLOP/s",
        "forward", STATS, (), 400.0, False, partial(long, width=128),
    ),
    "statistics": Target(
        "all statistics over none, E = 128, n >= 4096, at most 1.12",
        "forward", STATS, ("ours",), 1.12, True, partial(long, width=128),
    ),
    "statistics-64": Target(
        "all statistics over none, E = 64, n >= 4096, at most 1.3",
        "forward", STATS, ("ours",), 1.3, True, partial(long, width=64),
    ),
    "training": Target(
        "forward and backward with statistics over cuDNN's without, at most 1.6",
        "training", STATS, ("cudnn",), 1.6, True, whole,
    ),
    "training-flex": Target(
        "forward and backward with statistics over FlexAttention's without, at most 1",
        "training", STATS, ("flex",), 1.0, True, compiled,
    ),
    "dense": Target(
        "dense code for all statistics over this kernel, at least 5",
        "forward", ("dense",), STATS, 5.0, False, whole,
    ),
    "thrice": Target(
        "a fused kernel run three times over this kernel with all statistics, at least 1.5",
        "forward", THRICE, STATS, 1.5, False, unshared,
    ),
    "measure": Target(
        "measure over the forward pass with all statistics, at most 0.65",
        "forward", (MEASURE,), STATS, 0.65, True, whole,
    ),
}  # fmt: skip
FASTEST = ("cudnn", "flash", "flex", "flex-max")


def tiny(workload: Workload) -> Workload:
    """The same kind of call, small enough for an interpreter."""
    heads = 4 if workload.grouped else 2
    return replace(
        workload,
        batch=1,
        heads=heads,
        key_heads=heads // 2 if workload.grouped else heads,
        length=max(workload.length // 256, min(workload.length, 4)),
        keys=workload.keys // 256,
        width=workload.width // 4,
    )


def tensors(workload: Workload, training: bool, device: torch.device) -> Case:
    generator = torch.Generator(device).manual_seed(0)
    rows, keys = (workload.heads, workload.length), (workload.key_heads, workload.keys)
    made = [
        torch.randn(
            workload.batch, *size, workload.width, generator=generator, device=device, dtype=torch.bfloat16
        ).requires_grad_(training and i < 3)
        for i, size in enumerate((rows, keys, keys, rows))
    ]
    return Case(workload, training, *made)


def operations(workload: Workload, training: bool) -> float:
    """Of the products: 2 in the forward pass, 5 in the backward one; a causal mask leaves out what it hides."""
    pairs = workload.batch * workload.heads * workload.length * workload.keys
    shown = (workload.length + 1) / (2 * workload.length) if workload.is_causal else 1.0
    return 2.0 * (7 if training else 2) * pairs * shown * workload.width


def ready(case: Case, ways: Mapping[str, Way]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """What runs the case, each way after it gave torch's results; and why the others can't."""
    works: dict[str, Callable[[], object]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others' code
        works, refused = prepared(case, {name: way for name, way in ways.items() if name != MEASURE})
        if MEASURE in ways:
            try:
                works = works | {MEASURE: measured(case)}
                works[MEASURE]()
            except Exception as error:
                del works[MEASURE]
                refused[MEASURE] = kind_and_text(error, 200)
    return works, refused


def timed(name: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case in one pass: seconds of every round, and what follows from them."""
    workload, device = options.shape(CASES[name]), torch.device(options.device)
    cell: dict[str, Any] = {"case": name, "pass": kind, "shape": workload.text, "ways": {}}
    try:
        case = tensors(workload, kind == "training", device)
        works, cell["not_measured"] = ready(case, options.ways_of(kind))
        times = rounds_on(device, works, options.repeats, MOST_S)
    except RuntimeError as error:  # what was measured before is kept
        return cell | {"not_measured": {"all": kind_and_text(error, 300)}}
    cell["clocks"] = clocks(device)
    rate = operations(workload, kind == "training") / 1e12
    for way, seconds in times.items():
        cell["ways"][way] = {
            "ms": asdict(Spread.of([1e3 * s for s in seconds])),
            "tflops": rate / Spread.of(seconds).median,
            "seconds": seconds,
        }
    return cell


def fastest(cell: Mapping[str, Any], ways: tuple[str, ...]) -> str | None:
    """Of the ways that ran."""
    ran = [way for way in ways if way in cell["ways"]]
    return min(ran, key=lambda way: cell["ways"][way]["ms"]["median"], default=None)


def figure(target: Target, cell: Mapping[str, Any]) -> float | None:
    """What is held against the bar; None where a way did not run."""
    above, below = fastest(cell, target.above), fastest(cell, target.below)
    if above is None or (target.below and below is None):
        return None
    if below is None:
        return float(cell["ways"][above]["tflops"])
    return ratio(cell["ways"][above]["seconds"], cell["ways"][below]["seconds"]).median


def judged(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst figure of a target, and whether it is met; not, where a case of it was not measured and none missed."""
    target = TARGETS[name]
    found = {cell["case"]: figure(target, cell) for cell in cells if cell["pass"] == target.pass_}
    covered = [case for case, shape in CASES.items() if target.covers(shape)]
    figures = {case: value for case in covered if (value := found.get(case)) is not None}
    missing = [case for case in covered if case not in figures]
    worst = (max if target.most else min)(figures, key=lambda case: figures[case], default=None)
    met = None
    if worst is not None:
        reached = figures[worst] <= target.bar if target.most else figures[worst] >= target.bar
        met = reached and (None if missing else True)
    return {
        "name": name,
        "text": target.text,
        "bar": target.bar,
        "unit": "times" if target.below else "TFLOP/s",
        "figure": None if worst is None else figures[worst],
        "worst": worst,
        "met": met,
        "figures": figures,
        "missing": missing,
    }


def shown(cell: Mapping[str, Any], check: bool) -> Iterator[str]:
    yield f"{cell['case']}  {cell['shape']}, {cell['pass']}, SM clock {cell.get('clocks', {}).get('sm_mhz')} MHz"
    for way, row in cell["ways"].items():
        if check:  # of an interpreter: no figures
            yield f"  {way} ran, with the same results"
            continue
        yield f"  {way:14s} {Spread(**row['ms']).text(3):>32s} ms {row['tflops']:8.1f} TFLOP/s"
    best = fastest(cell, FASTEST)
    for way in ("ours", "ours-stats") if best and not check else ():
        if way in cell["ways"]:
            over = ratio(cell["ways"][way]["seconds"], cell["ways"][best]["seconds"])
            yield f"  {way} / {best}, the fastest of others: {over.text(3)}"
    for way, reason in cell["not_measured"].items():
        yield f"  not measured: {way}: {reason}"


def prepare(options: argparse.Namespace) -> None:
    """Run every way once in processes beside one another: what they compile stays on the disk."""
    command = [sys.executable, __file__, *options.passed, "--part"]
    started = [
        subprocess.Popen([*command, f"{i}/{options.prepare}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(options.prepare)
    ]
    until = time.monotonic() + 0.4 * options.budget
    for process in started:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_part(options: argparse.Namespace) -> None:
    at, of = map(int, options.part.split("/"))
    for name in list(options.cases)[at::of]:
        for kind in options.passes(name):
            case = tensors(options.shape(CASES[name]), kind == "training", torch.device(options.device))
            ways = {way: what for way, what in options.ways_of(kind).items() if way != "dense"}
            ready(case, ways)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="all", help=", ".join(CASES))
    parser.add_argument("--ways", default="all", help=", ".join((*FORWARD, MEASURE)))
    parser.add_argument("--flex", choices=("few", "all"), default="few")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--prepare", type=int, default=0, help="processes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    if options.check:
        options.device, options.repeats, options.prepare = "cpu", 1, 0
    elif not torch.cuda.is_available():
        parser.exit(2, "torch sees no GPU; --check runs the flow on the CPU and measures nothing\n")
    options.passed = ["--cases", options.cases, "--ways", options.ways, "--flex", options.flex]
    options.cases = chosen(options.cases, CASES, "case")
    known = chosen(options.ways, FORWARD | {MEASURE: FORWARD["ours"]}, "way")
    if options.flex == "all" or options.check:
        for name, most in (("flex", False), ("flex-max", True)):
            FORWARD[name] = replace(FORWARD[name], make=partial(flex, max_scores=most, lengths=()))
        TRAINING["flex"] = FORWARD["flex"]
    options.shape = tiny if options.check else lambda workload: workload
    options.passes = lambda name: [kind for kind in PASSES if kind == "forward" or CASES[name].trains]
    options.ways_of = lambda kind: {
        name: way
        for name, way in (PASSES[kind] | ({MEASURE: FORWARD["ours"]} if kind == "forward" else {})).items()
        if name in known or name == BASE
    }
    return options


def main(arguments: list[str]) -> int:
    begin, started = time.monotonic(), datetime.now(UTC)
    options = parsed(arguments)
    torch._dynamo.config.recompile_limit = 1000  # else torch stops compiling after a few shapes, in a log only
    if options.part:
        run_part(options)
        return 0
    device = torch.device(options.device)
    record = {
        "benchmark": "gpu",
        "schema_version": SCHEMA_VERSION,
        "check": options.check,
        "command": shlex.join(["python", "benchmarks/gpu.py", *arguments]),
        "started": started.isoformat(timespec="seconds"),
        **machine(device, ROOT),
        "dtype": "bfloat16",
        "repeats": options.repeats,
        "ways": {name: way.text for name, way in FORWARD.items()} | {MEASURE: "statistics alone"},
        "shapes": {name: asdict(options.shape(CASES[name])) for name in options.cases},
    }
    print(f"{record['device']['name']}, torch {torch.__version__}, commit {record['commit']['id']}", flush=True)
    if options.prepare:
        prepare(options)
    cells: list[dict[str, Any]] = []

    def keep(**more: Any) -> None:
        if options.json:
            found = record | {"cells": cells, **more, "duration_s": round(time.monotonic() - begin, 1)}
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for name in options.cases:
        for kind in options.passes(name):
            late = time.monotonic() - begin > options.budget
            skipped = {"case": name, "pass": kind, "shape": options.shape(CASES[name]).text, "ways": {}}
            reason = {"late": True, "not_measured": {"all": f"the time was over, {options.budget:.0f} s"}}
            cells.append(skipped | reason if late else timed(name, kind, options))
            keep(targets=[])
            print("\n".join(shown(cells[-1], options.check)), flush=True)
    targets = [judged(name, cells) for name in TARGETS]
    keep(targets=targets)
    for target in targets:
        where = "" if target["worst"] is None else f" ({target['worst']})"
        print(f"{target['text']}: {'dry run' if options.check else figure_text(target) + where}")
    own = {"all", "ours", "ours-stats", MEASURE}
    failed = [cell for cell in cells if own & {*cell["not_measured"]} and not cell.get("late")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
