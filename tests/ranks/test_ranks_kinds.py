"""Every kind of parallelism over two and four ranks, and two kinds at once: check, watch, law and record say one model.

`python -m tests.ranks.kinds 4` prints the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import kind_models, kinds

APART = "not put together: no shard of samples or layers"
CASES = [(size, name) for size in (2, 4) for name in kind_models.kinds(size)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), CASES)
def test_a_kind_of_parallelism_is_one_model(tmp_path: Path, size: int, name: str) -> None:
    (row,) = kinds.run(size, tmp_path, (name,)).values()
    record = APART if name in kind_models.NOT_JOINED else "same"
    assert row == {"check": "as one process", "watch": "as one process", "law": "kept", "record": record}


@pytest.mark.full
def test_a_ring_of_two_ranks_is_recorded_with_its_own_keys(tmp_path: Path) -> None:
    """Also in the zigzag order, whose masks are bounds of places."""
    kinds.run_records(2, tmp_path, ("ring", "zigzag"))
    assert [kinds.files(tmp_path, name, 2) for name in ("ring", "zigzag")] == ["same", "same"]
