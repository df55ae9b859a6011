"""A run: prepare every way of a case, compare its results with the base's, then time all of them in turn."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from sqrtdk._environment import environment
from sqrtdk._progress import counted
from sqrtdk.bench.paired import rounds
from sqrtdk.bench.peers import Call
from sqrtdk.bench.record import PASSES, BenchRecord, NotTimed, Pass, Place, Timed
from sqrtdk.bench.ways import BASE, WAYS, Way
from sqrtdk.bench.workloads import DTYPES, Case, Workload
from sqrtdk.errors import BenchError, InvalidValueError, MissingExtraError, UnsupportedError, kind_and_text, short_text
from sqrtdk.models.limits import check_seed

Work = Callable[[], tuple[Tensor, ...]]
Progress = Callable[[int, int], None]
SLACK = 4.0  # roundings of the largest number that two right results may be apart
RESULTS = ("the output", "the gradient of the query", "the gradient of the key", "the gradient of the value")


def run(
    workloads: Mapping[str, Workload],
    ways: Mapping[str, Way],
    *,
    dtypes: Sequence[str] = ("float32",),
    passes: Sequence[Pass] = PASSES,
    repeats: int = 5,
    threads: int | None = None,
    seed: int = 0,
    command: str = "",
    progress: Progress | None = None,
) -> BenchRecord:
    """Measure ways on workloads, each in every dtype and pass, beside torch's own operation.

    Args:
        workloads: shapes by name.
        ways: by name; the base is added where it is missing.
        dtypes: names of `DTYPES`.
        passes: "forward", or "training", which is forward and backward.
        repeats: rounds that are counted; one more runs before them.
        threads: of torch and onnxruntime, for the time of the run; None: as torch has it.
        seed: of the tensors.
        command: for the record.
        progress: told of rounds (done, total); None: a bar shows it.

    Returns:
        Every figure, and for every way without one why there is none.

    Raises:
        InvalidValueError: repeats below 1, threads below 1 or more than the CPUs here, or a seed that torch lacks.
        BenchError: a way gives another result than the base.

    Example:
        >>> tiny = Workload(1, 1, 1, 4, 4, 8)
        >>> record = run({"tiny": tiny}, {"eager": WAYS["eager"]}, passes=["forward"], repeats=1)
        >>> [(row.way, len(row.seconds)) for row in record.measured]
        [('sdpa', 1), ('eager', 1)]
    """
    if repeats < 1:
        raise InvalidValueError(f"repeats is 1 or more; got {repeats}", hint="The default is 5.")
    check_seed(seed)
    cpus = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cpus:
        raise InvalidValueError(f"threads is 1 to {cpus}, the CPUs here; got {threads}", hint="Leave it out.")
    started, begin = datetime.now(UTC), time.monotonic()
    ways = {BASE: WAYS[BASE]} | dict(ways)
    places = [Place(*found) for found in product(workloads, dtypes, passes)]
    measured: list[Timed] = []
    missing: list[NotTimed] = []
    total, done = len(places) * (repeats + 1), 0

    def count() -> None:
        nonlocal done
        done += 1
        tell(done, total)

    with _threads(threads), counted("rounds", progress) as tell:
        for place in places:
            workload, training = workloads[place.workload], place.kind == "training"
            if training and not workload.trains:
                missing.append(NotTimed(place, "all", "nobody trains on this workload"))
                total -= repeats + 1
                continue
            case = Case.of(workload, DTYPES[place.dtype], training, seed)
            ready, refused = prepared(case, ways)
            missing += [NotTimed(place, way, reason) for way, reason in refused.items()]
            times = rounds(ready, repeats, after_round=count)
            for way, seconds in times.items():
                choice = ways[way].choice(case)
                impl, reason = (None, None) if choice is None else (choice.impl, choice.reason)
                entry = ways[way].statistics, impl, reason, tuple(seconds), tuple(times[BASE])
                measured.append(Timed(place, way, *entry))
        machine = environment()
    machine["kernel"]["library"] = Path(machine["kernel"]["library"]).name  # records are shown around, homes are not
    return BenchRecord(
        workloads=dict(workloads),
        ways={name: way.text for name, way in ways.items()},
        dtypes=tuple(dtypes),
        passes=tuple(passes),
        repeats=repeats,
        threads=machine["threads"],
        seed=seed,
        measured=tuple(measured),
        not_measured=tuple(missing),
        environment=machine,
        command=command,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - begin, 3),
    )


def prepared(case: Case, ways: Mapping[str, Way]) -> tuple[dict[str, Work], dict[str, str]]:
    """Works by way, each of which gave the base's results once; and for the others why they can't run the case.

    Raises:
        BenchError: a way gives another result than the base, which is the first of `ways`.
    """
    ready: dict[str, Work] = {}
    refused: dict[str, str] = {}
    expected: tuple[Tensor, ...] = ()
    for name, way in ways.items():
        try:
            work = _work(case, way.make(case))
            found = work()
        except (UnsupportedError, MissingExtraError) as error:
            if name == BASE:
                raise
            hint = f"; {error.hint}" if isinstance(error, MissingExtraError) else ""
            refused[name] = short_text(error, 200) + hint
            continue
        except Exception as error:
            if not way.peer:
                raise
            refused[name] = kind_and_text(error, 200)
            continue
        expected = expected or found
        compare(name, found, expected, case)
        ready[name] = work
    return ready, refused


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], case: Case) -> None:
    """Refuse results that are no rounding of the base's.

    Two right results in one dtype differ by roundings of that dtype, and of float32 in sums over the keys: by
    `SLACK (eps + sqrt(S) eps_32)` of the largest number at most.

    Raises:
        BenchError: they differ by more, or in shape or dtype.
    """
    hint = "Leave it out with --way; and report it, as one of the two is wrong."
    for what, own, base in zip(RESULTS, found, expected, strict=False):
        if own.shape != base.shape or own.dtype != base.dtype:
            shapes = f"{tuple(own.shape)} {own.dtype}, {BASE} {tuple(base.shape)} {base.dtype}"
            raise BenchError(f"{name} gives {shapes} as {what} of {case.workload.text}", hint=hint)
        roundings = torch.finfo(base.dtype).eps + math.sqrt(case.workload.keys) * torch.finfo(torch.float32).eps
        limit = SLACK * roundings * base.abs().max().item()
        error = (own.float() - base.float()).abs().max().item()
        if not error <= limit:  # NaN is no agreement
            raise BenchError(
                f"{name} and {BASE} differ by {error:.3g} in {what} of {case.workload.text} in {base.dtype}; "
                f"{limit:.3g} is rounding",
                hint=hint,
            )


def _work(case: Case, call: Call) -> Work:
    """One forward pass without a graph; or one with its backward pass, for output and gradients."""
    if case.training:

        def training() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                output = call()
            return output.detach(), *torch.autograd.grad(output, case.inputs, case.cotangent)

        return training

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    return forward


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
