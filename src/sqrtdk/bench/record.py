"""What a run measured, with every second of it, as a JSON document; docs/bench.schema.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal, get_args

from sqrtdk import _json
from sqrtdk.bench.paired import Spread, ratio
from sqrtdk.bench.ways import BASE
from sqrtdk.bench.workloads import Workload

SCHEMA_VERSION = 1
Pass = Literal["forward", "training"]
PASSES: tuple[Pass, ...] = get_args(Pass)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a figure stands: one workload in one dtype and one pass.

    Attributes:
        workload: its name.
        dtype: as torch names it.
        kind: "forward", or "training", which is forward and backward.
    """

    workload: str
    dtype: str
    kind: Pass


@dataclass(frozen=True, slots=True)
class Timed:
    """One way at one place.

    Attributes:
        place: where.
        way: its name.
        statistics: whether all row statistics are computed too.
        impl: that `sqrtdk.attention` ran it on; None for others' code.
        reason: for that choice.
        seconds: of every round.
        base: seconds of the base in the same rounds.
    """

    place: Place
    way: str
    statistics: bool
    impl: str | None
    reason: str | None
    seconds: tuple[float, ...]
    base: tuple[float, ...]

    @property
    def ms(self) -> Spread:
        """Milliseconds over the rounds."""
        return Spread.of([1e3 * seconds for seconds in self.seconds])

    @property
    def ratio(self) -> Spread:
        """Seconds over those of the base in the same round; below 1 is faster."""
        return ratio(self.seconds, self.base)


@dataclass(frozen=True, slots=True)
class NotTimed:
    """One way at one place, or all of them, and why there is no figure."""

    place: Place
    way: str
    reason: str


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """A run.

    Attributes:
        workloads: by name.
        ways: what each is, by name.
        dtypes: names.
        passes: names.
        repeats: rounds that were counted.
        threads: of torch and onnxruntime.
        seed: of the tensors.
        measured: in the order of running.
        not_measured: likewise.
        environment: versions and machine.
        command: of the command line.
        started: UTC, ISO 8601.
        duration_s: of the whole run.
    """

    workloads: Mapping[str, Workload]
    ways: Mapping[str, str]
    dtypes: tuple[str, ...]
    passes: tuple[Pass, ...]
    repeats: int
    threads: int
    seed: int
    measured: tuple[Timed, ...]
    not_measured: tuple[NotTimed, ...]
    environment: Mapping[str, Any]
    command: str
    started: str
    duration_s: float

    @property
    def bare(self) -> bool:
        """Whether there is no figure but the base's own, though there were others to measure."""
        measured = {row.way for row in self.measured}
        return not measured or (measured == {BASE} and len(self.ways) > 1)

    @property
    def places(self) -> list[Place]:
        """All of them, in the order of running."""
        return [Place(*found) for found in product(self.workloads, self.dtypes, self.passes)]


def to_json(record: BenchRecord) -> str:
    """The record as one JSON document, ASCII only, that ends with a newline."""
    return _json.document(
        {
            "schema_version": SCHEMA_VERSION,
            "environment": record.environment,
            "command": record.command,
            "started": record.started,
            "duration_s": record.duration_s,
            "base": BASE,
            "options": {
                "workloads": list(record.workloads),
                "ways": list(record.ways),
                "dtypes": record.dtypes,
                "passes": record.passes,
                "repeats": record.repeats,
                "threads": record.threads,
                "seed": record.seed,
            },
            "workloads": described(record.workloads),
            "ways": record.ways,
            "measured": [
                {
                    **_place(row.place),
                    "way": row.way,
                    "statistics": row.statistics,
                    "impl": row.impl,
                    "reason": row.reason,
                    "seconds": row.seconds,
                    "ms": asdict(row.ms),
                    "ratio": asdict(row.ratio),
                }
                for row in record.measured
            ],
            "not_measured": [
                {**_place(row.place), "way": row.way, "reason": row.reason} for row in record.not_measured
            ],
        }
    )


def described(workloads: Mapping[str, Workload]) -> dict[str, dict[str, int | bool]]:
    """Sizes by name.

    Example:
        >>> described({"one": Workload(1, 2, 2, 4, 8, 16)})["one"]["keys"]
        8
    """
    names = ("batch", "heads", "key_heads", "length", "keys", "width", "is_causal")
    return {key: {name: getattr(workload, name) for name in names} for key, workload in workloads.items()}


def _place(place: Place) -> dict[str, str]:
    return {"workload": place.workload, "dtype": place.dtype, "pass": place.kind}
