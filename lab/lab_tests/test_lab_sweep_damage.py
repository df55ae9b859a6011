"""Directories of sweeps that were damaged or changed: computed work is never deleted, nor mixed with other work."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lab_tests.small_sweep import SMALL, edit, interrupted, names
from sqrtdk.errors import OutputError
from sqrtdk_lab.report.sweep import to_text
from sqrtdk_lab.sweep import _store, summary, sweep


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table of SMALL, from an uninterrupted run in this process."""
    return sweep(SMALL, tmp_path_factory.mktemp("whole")).results.read_bytes()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    """One bit of a figure: only the checksum tells."""
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<d", pq.read_table(path)["peak"][0].as_py()))] ^= 1
    path.write_bytes(data)


def garble(path: Path) -> None:
    """The name of a column is no text any more."""
    path.write_bytes(path.read_bytes().replace(b"jacobian_norm_se", b"jacobian_norm_s\xf3"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, garble, empty])
def test_a_damaged_part_is_kept_aside_and_computed_again(
    damage: Any, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path, 5, monkeypatch)
    part = tmp_path / "part-00002.parquet"
    damage(part)
    data = part.read_bytes()
    done = sweep(SMALL, tmp_path)
    assert done.damaged == ("part-00002.parquet.damaged",)
    assert (tmp_path / done.damaged[0]).read_bytes() == data
    assert "damaged, its cells computed again: part-00002.parquet.damaged\n" in to_text(summary(done))
    assert (done.computed, done.reused) == (12, 4)
    assert done.results.read_bytes() == whole


def test_a_damaged_table_is_kept_aside_and_computed_again(tmp_path: Path, whole: bytes) -> None:
    for name in ("results.parquet.damaged", "results.parquet.damaged-2"):
        flip(sweep(SMALL, tmp_path).results)
        done = sweep(SMALL, tmp_path)
        assert (done.damaged, done.computed) == ((name,), 16)
        assert (tmp_path / name).stat().st_size == len(whole)
        assert done.results.read_bytes() == whole


def fewer_columns(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["peak"]), path)


def more_columns(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.append_column("lse", table.column("peak")), path)


def other_order(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.select(table.column_names[::-1]), path)


def other_cells(path: Path) -> None:
    table = pq.read_table(path)
    seeds = pa.array([7] * table.num_rows)
    pq.write_table(table.set_column(table.column_names.index("seed"), table.schema.field("seed"), seeds), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fewer_columns, "has other columns than this version writes: peak$"),
        (more_columns, "has other columns than this version writes: lse$"),
        (other_order, "has columns in another order$"),
        (other_cells, "holds cells of another grid: 7 is not in this one$"),
    ],
)
@pytest.mark.parametrize("name", ["part-00002.parquet", "results.parquet"])
def test_a_whole_file_that_does_not_fit_is_left_alone(
    change: Any, message: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "results.parquet":
        sweep(SMALL, tmp_path)
    else:
        interrupted(tmp_path, 5, monkeypatch)
    change(tmp_path / name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OutputError, match=f"(?m){message}") as raised:
        sweep(SMALL, tmp_path)
    assert "--force" in raised.value.hint
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_disk_that_cannot_be_read_is_no_damage(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    results = sweep(SMALL, tmp_path).results

    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        with pytest.raises(OutputError, match=r"cannot read .*results\.parquet: OSError: .*Input/output error"):
            sweep(SMALL, tmp_path)
    assert results.read_bytes() == whole
    assert names(tmp_path) == ["manifest.json", "results.parquet"]


def test_damage_after_the_look_at_what_is_there_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_store, "_PART_EVERY_S", 0.0)
    with pytest.raises(OutputError, match=r"part-00000\.parquet is damaged"):
        sweep(SMALL, tmp_path, progress=lambda done, _: cut(tmp_path / "part-00000.parquet") if done == 9 else None)
    assert len(list(tmp_path.glob("part-*.parquet"))) == 16
    done = sweep(SMALL, tmp_path)
    flip(done.results)
    with pytest.raises(OutputError, match=r"results\.parquet is damaged"):
        summary(done)


def test_cells_that_vanish_are_not_passed_over(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "_PART_EVERY_S", 0.0)

    def lose(done: int, total: int) -> None:
        if done == 9:
            (tmp_path / "part-00004.parquet").unlink()

    with pytest.raises(OutputError, match="holds 15 of 16 cells") as raised:
        sweep(SMALL, tmp_path, progress=lose)
    assert "the same command" in raised.value.hint
    done = sweep(SMALL, tmp_path)
    assert (done.computed, done.reused) == (1, 15)
    assert done.results.read_bytes() == whole


@pytest.mark.parametrize("rows", [slice(15), [0, 0, *range(2, 16)], [*range(16), 15]])
def test_a_summary_of_a_table_that_lost_a_row_is_refused(rows: Any, tmp_path: Path, whole: bytes) -> None:
    done = sweep(SMALL, tmp_path)
    table = pq.read_table(done.results)
    pq.write_table(table.take(list(range(16))[rows] if isinstance(rows, slice) else rows), done.results)
    with pytest.raises(OutputError, match="rows that are not the 16 cells of its grid"):
        summary(done)
    assert sweep(SMALL, tmp_path).results.read_bytes() == whole


@pytest.mark.parametrize("count", [4, 16])
def test_numbers_of_other_versions_are_neither_mixed_nor_reused(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path, count, monkeypatch)
    if count == 16:
        sweep(SMALL, tmp_path)
    old = _store.versions()
    for name in set(old) & {"sqrtdk", "code", "torch"}:
        edit(tmp_path, versions=old | {name: "2.0.0", "python": "3.0"})
        before = names(tmp_path)
        with pytest.raises(OutputError, match=rf"(?m)which may differ: {name} 2\.0\.0, now [^;]*$") as raised:
            sweep(SMALL, tmp_path)
        assert "--force" in raised.value.hint
        assert names(tmp_path) == before
    edit(tmp_path, versions=old | {"python": "3.0"})
    assert sweep(SMALL, tmp_path).reused == count


def test_versions_are_looked_at_before_the_tables(tmp_path: Path, whole: bytes) -> None:
    results = sweep(SMALL, tmp_path).results
    edit(tmp_path, versions=_store.versions() | {"sqrtdk": "9.0"})
    more_columns(results)
    data = results.read_bytes()
    with pytest.raises(OutputError, match=r"sqrtdk 9\.0, now"):
        sweep(SMALL, tmp_path)
    assert results.read_bytes() == data
    assert sweep(SMALL, tmp_path, force=True).results.read_bytes() == whole


def test_other_versions_that_left_no_numbers_are_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, 0, monkeypatch)
    edit(tmp_path, versions={"torch": "2.0.0"})
    assert sweep(SMALL, tmp_path).computed == 16
    assert json.loads((tmp_path / "manifest.json").read_text())["versions"] == _store.versions()
