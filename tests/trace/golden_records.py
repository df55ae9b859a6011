"""Golden records: what trace, audit and kept tensors say of every group of `golden_cases`.

A record is written without what differs from CPU to CPU (statistics, sizes, the fitted slope) and without what is as
by default; numbers that a model's code holds are compared to a thousandth. A change of the trace that changes none of
these lines changed nothing that it says; one that is meant to is seen in the diff of the files:

    python -m tests.trace.golden_records                 writes tests/trace/golden/*.json anew
    python -m tests.trace.golden_records styles kept     writes those groups
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

HOME = Path(__file__).parent / "golden"


def stored(group: str, home: Path = HOME) -> dict[str, Any]:
    """The golden records of a group."""
    text = (home / f"{group}.json").read_text(encoding="utf-8")
    records: dict[str, Any] = json.loads(text)
    return records


def record(group: str, name: str) -> Any:
    """What is said of a case now, from one seed."""
    from tests.trace.golden_cases import GROUPS

    torch.manual_seed(0)
    # opt_einsum, where it is installed, may multiply a scale with k first: the records have it on q
    with warnings.catch_warnings(), torch.backends.opt_einsum.flags(enabled=False):
        warnings.simplefilter("ignore")
        return json.loads(json.dumps(GROUPS[group][name]()))


def main(groups: list[str], home: Path = HOME) -> None:
    """Write the records anew."""
    from sqrtdk.laws import table
    from tests.trace.golden_cases import GROUPS

    table.DEFAULT = "none"
    for group in groups or GROUPS:
        before = time.process_time()
        lines = [f"{json.dumps(name)}: {json.dumps(record(group, name))}" for name in GROUPS[group]]
        (home / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"{group}: {len(lines)} cases, {time.process_time() - before:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
