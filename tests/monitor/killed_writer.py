"""Writers that are killed with SIGKILL, as a script: each is a fork of this process, which has loaded all it needs.

    python killed_writer.py points FOLDER STRIDE  one folder a kill: before every STRIDEth call that changes the disk
    python killed_writer.py sizes FOLDER SIZE ... one folder a kill: within the write by which a file grows beyond that
    python killed_writer.py random FOLDER N SEED  one folder, N writers one after the other, killed at random moments

It prints one JSON document: what each writer had said before it died.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute
import pyarrow.parquet

from sqrtdk.monitor import folder as run_folder
from tests.monitor.run_records import rows, writer

PART = 3  # steps a part
MOST = 4  # parts that are merged: often enough to be met
POINTS = 4  # parts of a writer that is killed at a point; the last one is merged with the others
MOMENT_S = 0.02  # longer than a part takes
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.truncate", "os.link"}

assert pyarrow.compute
assert pyarrow.parquet


def write(folder: Path, most: int | None, say: int) -> None:
    """Write parts, and say after each that it is written."""
    with writer(folder) as run:
        os.write(say, b"%d\n" % run.first_step)
        for at in range(10**6 if most is None else most):
            start = run.first_step + PART * at
            run.write(*rows(range(start, start + PART), run.attempt))
            os.write(say, b"%d\n" % run.last_step)


def die_at(point: int, folder: Path) -> None:
    """Kill this process before its call number `point` that changes the disk: a name, or bytes that must last."""
    passed = 0

    def count() -> None:
        nonlocal passed
        passed += 1
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            ours = isinstance(path, str | Path) and str(path).startswith(str(folder))
            if ours and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                count()
        elif event in _CHANGES:
            count()

    os.fsync = lambda descriptor: count()  # no power is cut here
    sys.addaudithook(audit)


def die_beyond(size: int) -> None:
    """Let the system kill this process where a file grows beyond some bytes, which are there then."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def fork(folder: Path, most: int | None, prepare: Callable[[], None] | None = None) -> tuple[int, int]:
    """A writer: its process, and the pipe that it says into."""
    listen, say = os.pipe()
    if process := os.fork():
        os.close(say)
        return process, listen
    try:
        os.close(listen)
        run_folder.SMALL_PARTS_BEFORE_MERGE = MOST
        if prepare is not None:
            prepare()
        write(folder, most, say)
        os._exit(0)
    finally:
        os._exit(1)


def heard(process: int, listen: int, kill_after: tuple[int, float] | None = None) -> dict[str, Any]:
    """What it said, and how it ended: killed so many seconds after it had said so much, if that is given."""
    said: list[int] = []
    with open(listen, encoding="utf-8") as pipe:
        if kill_after is not None:
            said += [int(pipe.readline()) for _ in range(kill_after[0])]
            time.sleep(kill_after[1])
            os.kill(process, signal.SIGKILL)
        said += [int(line) for line in pipe]
    return {"said": said, "status": os.waitpid(process, 0)[1]}


def points(folder: Path, stride: int) -> list[dict[str, Any]]:
    ends = []
    for point in range(1, 10**4, stride):
        where = folder / str(point)
        ends.append({"folder": str(where), **heard(*fork(where, POINTS, partial(die_at, point, where)))})
        if ends[-1]["status"] != signal.SIGKILL:
            break
    return ends


def sizes(folder: Path, *limits: int) -> list[dict[str, Any]]:
    ends = []
    for size in limits:
        where = folder / str(size)
        ends.append({"folder": str(where), **heard(*fork(where, POINTS, partial(die_beyond, size)))})
    return ends


def at_random(folder: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    moments = random.Random(seed)
    moment = [(moments.randrange(2 * MOST), moments.uniform(0, MOMENT_S)) for _ in range(kills)]
    return [heard(*fork(folder, None), each) for each in moment]


if __name__ == "__main__":
    mode, where, *numbers = sys.argv[1:]
    modes = {"points": points, "sizes": sizes, "random": at_random}
    print(json.dumps(modes[mode](Path(where), *map(int, numbers))))
