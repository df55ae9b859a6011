"""What `sqrtdk.attention` takes on this machine's CPU next to torch, FlexAttention, the plain formula and onnxruntime.

Every round runs all ways once, in turn, and ratios are to torch's operation in the same round: below 1 is faster. A way
is timed only after its output, and in training its gradients, agreed with torch's; what can't run is listed with the
reason. `benchmarks/kernels.schema.json` describes the record.

    python benchmarks/kernels.py [--workload LIST] [--way LIST] [--dtype LIST] [--pass forward|training|both]
        [--repeats 5] [--threads N] [--seed 0] [--json FILE]
    python benchmarks/kernels.py --list     # what can be measured

Exit code 1: nothing was measured but torch's operation.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sqrtdk import _json
from sqrtdk._environment import environment
from sqrtdk.errors import InvalidValueError
from sqrtdk.models.limits import check_seed
from sqrtdk.report.plain import plain
from timing import Spread, ratio, rounds
from ways import BASE, WAYS, DisagreementError, Way, prepared
from workloads import DTYPES, WORKLOADS, Case, Workload, chosen

SCHEMA_VERSION = 1
PASSES = ("forward", "training")
SIZES = ("batch", "heads", "key_heads", "length", "keys", "width", "is_causal")
Rows = list[dict[str, Any]]


def run(
    workloads: Mapping[str, Workload],
    ways: Mapping[str, Way],
    dtypes: Sequence[str],
    passes: Sequence[str],
    repeats: int,
    seed: int = 0,
) -> tuple[Rows, Rows]:
    """Measure ways on workloads, each in every dtype and pass, and print the figures of each as soon as they are there.

    Returns:
        The figures; and for every way without one why there is none.

    Raises:
        DisagreementError: a way gives another result than the base.
    """
    ways = {BASE: WAYS[BASE]} | dict(ways)  # the base comes first: all others are held against it
    measured: Rows = []
    missing: Rows = []
    for name, dtype, kind in product(workloads, dtypes, passes):
        workload, training = workloads[name], kind == "training"
        place = {"workload": name, "dtype": dtype, "pass": kind}
        print(f"{name}  {workload.text}, {dtype}, {kind}", flush=True)
        if training and not workload.trains:
            rows, refused = [], {"all": "nobody trains on this workload"}
        else:
            case = Case.of(workload, DTYPES[dtype], training, seed)
            works, refused = prepared(case, ways)
            times = rounds(works, repeats)
            rows = [place | figures(way, ways[way], case, times) for way in works]
        for row in rows:
            print(line_of(row))
        for way, reason in refused.items():
            print(f"  not measured: {way}: {plain(reason)}")
        measured += rows
        missing += [place | {"way": way, "reason": reason} for way, reason in refused.items()]
    return measured, missing


def figures(name: str, way: Way, case: Case, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Seconds of every round of a way, and what follows from them."""
    choice, seconds = way.choice(case), times[name]
    return {
        "way": name,
        "statistics": way.statistics,
        "impl": None if choice is None else choice.impl,
        "reason": None if choice is None else choice.reason,
        "seconds": seconds,
        "ms": asdict(Spread.of([1e3 * s for s in seconds])),
        "ratio": asdict(ratio(seconds, times[BASE])),
    }


def line_of(row: Mapping[str, Any]) -> str:
    """Way, milliseconds, ratio to the base, and what ran where the way does not say it."""
    times = "" if row["way"] == BASE else f"x {Spread(**row['ratio']).text(2)}"
    ran = f"on {row['impl']}" if row["impl"] is not None and row["impl"] not in row["way"] else ""
    return f"  {row['way']:12s} {Spread(**row['ms']).text(2):>26s} ms  {times:24s} {ran}".rstrip()


def sizes(workloads: Mapping[str, Workload]) -> dict[str, dict[str, int | bool]]:
    return {name: {size: getattr(workload, size) for size in SIZES} for name, workload in workloads.items()}


def machine() -> dict[str, Any]:
    found = environment()
    # Records are published: the path of the kernel's library would tell whose home directory it lies in.
    found["kernel"]["library"] = Path(found["kernel"]["library"]).name
    return found


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="training,long-64,gqa,decode", help=f"of {', '.join(WORKLOADS)}; or all")
    parser.add_argument(
        "--way", default="cpu,cpu-stats,auto-stats,flex,eager,onnxruntime", help=f"of {', '.join(WAYS)}; or all"
    )
    parser.add_argument("--dtype", default="float32,bfloat16", help=f"of {', '.join(DTYPES)}; or all")
    parser.add_argument("--pass", dest="kind", choices=(*PASSES, "both"), default="both")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that are counted; one more runs before them")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and onnxruntime")
    parser.add_argument("--seed", type=int, default=0, help="of the tensors")
    parser.add_argument("--list", action="store_true", help="show what can be measured, and measure nothing")
    parser.add_argument("--json", type=Path, help="file of the record")
    options = parser.parse_args(arguments)
    try:
        options.workloads = chosen(options.workload, WORKLOADS, "workload")
        options.ways = {BASE: WAYS[BASE]} | chosen(options.way, WAYS, "way")
        options.dtypes = list(chosen(options.dtype, DTYPES, "dtype"))
        check_seed(options.seed)
    except InvalidValueError as error:
        parser.error(f"{error}. {error.hint}")
    options.passes = list(PASSES) if options.kind == "both" else [options.kind]
    if options.repeats < 1:
        parser.error(f"--repeats is 1 or more; got {options.repeats}")
    cpus = os.cpu_count() or 1
    if not 1 <= options.threads <= cpus:
        parser.error(f"--threads is 1 to {cpus}, the CPUs here; got {options.threads}")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    if options.list:
        for title, table in (("workloads", WORKLOADS), ("ways", WAYS)):
            print("\n".join((title, *(f"  {name:12s} {entry.text}" for name, entry in table.items()))))
        return 0
    started, begin = datetime.now(UTC), time.monotonic()
    torch.set_num_threads(options.threads)
    around = machine()
    print(f"{around['cpu']}, {options.threads} of {around['cpus']} CPUs, torch {around['versions']['torch']}")
    print(f"median [10th .. 90th percentile] of {options.repeats} rounds; ratios are to {BASE} in the same round")
    try:
        measured, missing = run(
            options.workloads, options.ways, options.dtypes, options.passes, options.repeats, options.seed
        )
    except DisagreementError as error:
        print(f"{error}: one of the two is wrong; --way leaves it out", file=sys.stderr)
        return 2
    duration = time.monotonic() - begin
    print(f"{len(measured)} measured, {len(missing)} not; {duration:.0f} s")
    if options.json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "environment": machine(),  # again: only now is it known whether the compiled kernel was loaded
            "command": shlex.join(["python", "benchmarks/kernels.py", *arguments]),
            "started": started.isoformat(timespec="seconds"),
            "duration_s": round(duration, 3),
            "base": BASE,
            "options": {
                "workloads": list(options.workloads),
                "ways": list(options.ways),
                "dtypes": options.dtypes,
                "passes": options.passes,
                "repeats": options.repeats,
                "threads": options.threads,
                "seed": options.seed,
            },
            "workloads": sizes(options.workloads),
            "ways": {name: way.text for name, way in options.ways.items()},
            "measured": measured,
            "not_measured": missing,
        }
        options.json.write_text(_json.json_document(document), encoding="utf-8")
    others = {*options.ways} - {BASE}
    return 1 if not measured or (others and not others & {row["way"] for row in measured}) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
