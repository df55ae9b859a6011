"""Two processes that compute together, started once in a run: what each file of tests asks of two ranks, one by one.

A process takes seconds to import torch; the groups of the files follow one another in the same two.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attention import ring_ranks
from tests.laws import rank_runs
from tests.monitor import context_parallel, parts_of_rows, ranks_at_work
from tests.ranks import split_models
from tests.recording_files import recorded_ranks
from tests.repair import ranks as ranks_of_repair
from tests.support.once import made_once

PARTS = {  # each joins a group of its own, and writes into its folder
    "ring": ring_ranks.work_of,
    "rows": parts_of_rows.work_of,
    "whole": split_models.work_of,
    "context": context_parallel.work_of,
    "files": recorded_ranks.work_of,
    "repair": ranks_of_repair.work_of,
    "laws": rank_runs.quick_work,
    "monitor": ranks_at_work.work,  # the last: its last rank dies, and the other one leaves
}


def every_part(rank: int, size: int, folder: Path) -> None:
    """All parts, in this rank."""
    for name, part in PARTS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        part(rank, size, folder / name)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a folder for each part."""
    return made_once(
        tmp_path_factory, "two-ranks", lambda folder: ranks_at_work.run(every_part, ranks_of_repair.RANKS, folder)
    )
