"""Plant each error of the tests' tables in a copy of the package, and run a tier's tests until one fails.

The tables: `tests/attention/mutants.py`, `tests/attention/kernel_mutants.py`, `tests/gpu/gpu_mutants.py` and
`tests/trace/mutants.py`. Each error begins with the files that most likely find it; what these leave over goes to the
other folders of tests that use the place. Tests that plant errors themselves are left out. A test is run in a fork of
this process, which has torch behind it and nothing of the package. One line an error, a record of all in
out/planted/TIER.jsonl: errors that stand in it are not planted again. Two processes share the work with `--part 1/2`
and `--part 2/2`.

Run: python scripts/planted.py, or with words that names of errors have: python scripts/planted.py --tier full sink
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tiers import TIERS

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "out" / "planted"
SECONDS = 3600  # after which the tests of one error are taken for hung
PLANTING = ("attention/test_attention_mutants.py", "attention/test_attention_kernel_mutants.py",
            "attention/test_attention_planted.py", "attention/test_attention_kernel_sanitized.py",
            "gpu/test_gpu_mutants.py", "gpu/test_make_gpu.py", "gpu/test_gpu_kernels.py")  # fmt: skip

BATTERY = "attention/test_attention_battery.py"
SMALL = tuple(f"attention/test_attention_{name}.py" for name in ("edges", "precision", "laws", "hidden", "measure"))
STAGES: dict[str, tuple[tuple[str, ...], ...]] = {  # files and folders below tests/, `-k` and what follows it
    "attention": ((BATTERY, *SMALL, "-k", "not triton"), ("attention", "stats"), ("nn", "scores", "gpu"), ("kv",)),
    "kernel": ((BATTERY, "attention/test_attention_kernel.py", "-k", "not triton"), ("attention",), ("nn", "bench")),
    "gpu": (("gpu",), (BATTERY, "-k", "triton"), ("bench",)),
    "trace": (("trace/test_trace_effects.py", "trace/test_trace_golden.py"), ("trace",), ("audit",)),
}  # fmt: skip


def errors() -> Iterator[tuple[str, str, Any, tuple[tuple[str, ...], ...]]]:
    """Table, name, error, and the stages of its tests."""
    tables = {
        "attention": "tests.attention.mutants",
        "kernel": "tests.attention.kernel_mutants",
        "trace": "tests.trace.mutants",
    }
    for table, module in tables.items():
        for name, planted in importlib.import_module(module).MUTANTS.items():
            yield table, name, planted, STAGES[table]
    for name, (planted, (file, chosen)) in importlib.import_module("tests.gpu.gpu_mutants").MUTANTS.items():
        yield "gpu", name, planted, ((f"gpu/{file}", "-k", chosen), *STAGES["gpu"])


def found_by(planted: Any, stages: tuple[tuple[str, ...], ...], tier: str) -> str | None:
    """The first test that fails, or how the run of the tests ended; None if all pass."""
    from tests.attention.planted_copy import planted_copy

    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        package = Path(folder)
        planted_copy(planted, package)
        built = planted.file.endswith(".h")
        if built:  # half the time of a build: what is planted is planted, however it is optimised
            flags = package / "sqrtdk/impl/kernel/libraries.py"
            flags.write_text(flags.read_text().replace('"-O3"', '"-O1"'))
        for stage in stages:
            progress = package / "progress"
            progress.write_text("")
            child = os.fork()
            if child == 0:
                try:
                    os._exit(run(package, stage, TIERS[tier], progress, built))
                except BaseException:
                    traceback.print_exc()
                os._exit(71)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            last = (progress.read_text().splitlines() or ["collection"])[-1]
            if code < 0:
                return f"{last}: {signal.Signals(-code).name}"
            if code in (1, 2):
                return last
            if code not in (0, 5):  # no test failed, or there is none
                raise RuntimeError(f"pytest ended with {code}:\n{(package / 'output').read_text()[-2000:]}")
    return None


def run(package: Path, stage: tuple[str, ...], chosen: str, progress: Path, built: bool) -> int:
    """Run pytest in this process on the package in that folder; its exit code."""
    import pytest

    signal.alarm(SECONDS)
    os.setsid()
    output = os.open(package / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (package, ROOT)))
    if built:
        os.environ["SQRTDK_CACHE"] = str(package / "cache")
    for name in [name for name in sys.modules if name.split(".")[0] in ("sqrtdk", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, str(package))
    places, rest = (stage[: stage.index("-k")], stage[stage.index("-k") :]) if "-k" in stage else (stage, ())
    ignored = [f"--ignore=tests/{name}" for name in PLANTING]
    arguments = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", chosen, *ignored, *rest]
    code = int(
        pytest.main([*arguments, *(f"tests/{place}" for place in places)], plugins=[Progress(package, progress)])
    )
    sys.stdout.flush()
    return code


class Progress:
    """A plugin that writes down which test runs, and that it runs on the package with the error."""

    def __init__(self, package: Path, progress: Path) -> None:
        self.package, self.progress = package, progress

    def write(self, text: str) -> None:
        """Add a line."""
        with self.progress.open("a") as file:
            print(text, file=file)

    def pytest_collectreport(self, report: Any) -> None:
        """Name what can't be imported."""
        if report.failed:
            self.write(f"{report.nodeid} (import)")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Name the test, which may end the process."""
        import sqrtdk

        if not Path(sqrtdk.__file__).is_relative_to(self.package):
            os._exit(70)
        self.write(nodeid)


def recorded(records: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The record so far."""
    lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
    return {(row["table"], row["name"]): row for row in map(json.loads, lines)}


def summary(records: Path, names: set[tuple[str, str]]) -> int:
    """Print counts a table, and what nothing finds; the exit code."""
    rows = [row for key, row in recorded(records).items() if key in names]
    for table in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == table]
        print(f"{table}: {sum(row['found'] is not None for row in own)} of {len(own)} found")
    missed = [f"{row['table']}: {row['name']}" for row in rows if row["found"] is None]
    print(
        f"all: {len(rows) - len(missed)} of {len(rows)} found", *(f"  not found: {name}" for name in missed), sep="\n"
    )
    return bool(missed)


def main() -> int:
    """Plant what the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="of names of tables and errors; all where none is named")
    parser.add_argument("--tier", choices=("test", "full"), default="test")
    parser.add_argument("--part", default="1/1", help="which of how many parts, 1/2 and 2/2")
    options = parser.parse_args()
    if (numbers := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", options.part)) is None:
        parser.error(f"--part is as 1/2, the first of two; got {options.part!r}")
    part, parts = map(int, numbers.groups())
    if part > parts:
        parser.error(f"--part {options.part}: there are {parts} parts")
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for module in ("torch", "pytest", "triton", "scipy.stats"):  # a fork has them already
        importlib.import_module(module)
    RECORDS.mkdir(parents=True, exist_ok=True)
    records = RECORDS / f"{options.tier}.jsonl"
    chosen = [
        row for row in errors() if not options.words or any(word in f"{row[0]}: {row[1]}" for word in options.words)
    ]
    if not chosen:
        parser.error(f"no error has {' or '.join(map(repr, options.words))} in its name")
    for table, name, planted, stages in chosen[part - 1 :: parts]:
        if (table, name) in recorded(records):
            continue
        begun = time.monotonic()
        found = found_by(planted, stages, options.tier)
        row = {"table": table, "name": name, "found": found, "seconds": round(time.monotonic() - begun, 1)}
        with records.open("a") as file:
            print(json.dumps(row), file=file)
        print(f"{table}: {name}: {f'found by {found}' if found else 'not found'}", flush=True)
    return summary(records, {row[:2] for row in chosen})


if __name__ == "__main__":
    sys.exit(main())
