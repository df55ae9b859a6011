"""Reading a run: damage is named and counted, a stranger's folder is held to limits, and what is new is followed."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqrtdk.errors import RunFolderError
from sqrtdk.monitor import reading, tables
from sqrtdk.monitor.reading import Damage, GrowingRun, Run, follow, read_run
from tests.monitor.run_records import SETTINGS, parts, rows, steps, told, unsigned, whole, writer, written

LAST = 24  # parts of 5 steps
Change = Callable[[Path], object]


def _cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-20])


def _flip(part: Path) -> None:
    """One bit of a number: only the checksum tells."""
    content = bytearray(part.read_bytes())
    content[content.index(struct.pack("<d", 1 / 13))] ^= 1
    part.write_bytes(content)


def _link(part: Path) -> None:
    part.rename(part.with_suffix(".moved"))
    part.symlink_to(part.with_suffix(".moved"))
    part.with_suffix(".moved").rename(part.parents[1] / "moved")


def _pipe(part: Path) -> None:
    part.unlink()
    os.mkfifo(part)


def _folder(part: Path) -> None:
    part.unlink()
    part.mkdir()


def _large(part: Path) -> None:
    with part.open("r+b") as file:
        file.truncate(tables.MAX_PART_FILE_BYTES + 1)


def _table(change: Callable[[Any], Any], **options: Any) -> Change:
    """A file that holds a changed table."""

    def write(part: Path) -> None:
        pq.write_table(change(pq.read_table(part)), part, **options)

    return write


def _column(name: str, change: Callable[[Any], Any]) -> Change:
    """One column is changed, as Python values."""

    def replaced(table: Any) -> Any:
        at = table.column_names.index(name)
        field = table.schema.field(at)
        return table.set_column(at, field, pa.array(change(table.column(at).to_pylist()), field.type))

    return _table(replaced)


def _extension(table: Any) -> Any:
    """A type that pyarrow would look up by the name that the file gives."""
    uuid = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * table.num_rows, pa.binary(16)))
    return table.drop_columns(["loss"]).append_column("loss", uuid)


_MANY = tables.MAX_UNPACKED_PART_BYTES // tables.MAX_CELL_CHARACTERS + 1


def _much_text(part: Path) -> None:
    """A small file: its texts are one and the same."""
    row = {"table": "steps", **told(10), "how": "a" * tables.MAX_CELL_CHARACTERS}
    table = pa.Table.from_pylist([row], schema=tables._file_schema())
    pq.write_table(pa.concat_tables([table] * _MANY).combine_chunks(), part)
    assert part.stat().st_size < 2**20


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_cut, "it is damaged: it does not end as a Parquet file does"),
        (_flip, "it is damaged: OSError: "),
        (lambda part: part.write_bytes(b""), "it is damaged: it does not end as a Parquet file does"),
        (_large, f"it has {tables.MAX_PART_FILE_BYTES + 1} bytes; at most {tables.MAX_PART_FILE_BYTES} are read"),
        (_link, "it can't be read: Too many levels of symbolic links"),
        (_pipe, "it is no regular file"),
        (_folder, "it can't be read: Is a directory"),
        (_table(lambda table: table.drop_columns(["loss"])), "it has other columns than this version writes"),
        (_table(lambda table: table.select(table.column_names[::-1])), "it has other columns than this version writes"),
        (_table(_extension), "it has other columns than this version writes"),
        (_table(lambda table: table, compression="zstd"), "it is not packed with SNAPPY but with codec 6"),
        (_table(lambda table: table, row_group_size=7), "groups; at most 1048576 in 1"),
        (_table(lambda table: table.slice(0, 0)), "it has 0 rows in "),
        (_column("table", lambda names: ["heads", *names[1:-1], "tails"]), "it has rows of no table"),
        (_column("rows", lambda counts: [None, *counts[1:]]), "heads lack 'rows' in a row"),
        (_column("step", lambda numbers: [1, *numbers[1:]]), "the heads have step 1, which `steps` does not have"),
        (
            _column("step", lambda numbers: [number + 1 for number in numbers]),
            "it has the steps 11 to 15, which is not",
        ),
        (_column("how", lambda texts: ["a" * 10_001, *texts[1:]]), "it has a text of more than 10000 bytes"),
        (_much_text, f"it has more than {tables.MAX_UNPACKED_PART_BYTES} bytes of text"),
    ],
)
def test_a_damaged_part_is_named_and_the_rest_is_read(change: Change, reason: str, tmp_path: Path) -> None:
    written(tmp_path, LAST)
    name = unsigned(tmp_path / "parts" / parts(tmp_path)[2]).name
    change(tmp_path / "parts" / name)
    run = read_run(tmp_path)
    (damage,) = run.damaged
    assert (damage.name, damage.first_step, damage.last_step) == (name, 10, 14)
    assert reason in damage.reason
    assert steps(run) == [*range(10), *range(15, LAST + 1)]
    written(tmp_path, LAST + 5)
    assert steps(read_run(tmp_path)) == [*range(10), *range(15, LAST + 6)], "the run goes on beside it"
    assert read_run(tmp_path).damaged == (damage,)


def test_a_text_that_is_none(tmp_path: Path) -> None:
    """Bytes that are no UTF-8; the checksum of their page is right, as it is not checked on them."""
    written(tmp_path, 4)
    part = tmp_path / "parts" / parts(tmp_path)[0]
    table = pq.read_table(part)
    at = table.column_names.index("site")
    names = [None if name is None else b"layers\xff" for name in table.column(at).to_pylist()]
    broken = pa.Array.from_buffers(pa.string(), len(names), pa.array(names, pa.binary()).buffers())
    pq.write_table(table.set_column(at, "site", broken), part, store_schema=False)
    unsigned(part)
    (damage,) = read_run(tmp_path).damaged
    assert "it is damaged: ArrowInvalid: " in damage.reason


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    written(tmp_path, LAST)
    (tmp_path / "parts" / parts(tmp_path)[2]).unlink()
    run = read_run(tmp_path)
    assert run.damaged == (Damage("attempt-1.part-000002-000002", "it is not there", 10, 14),)
    assert steps(run) == [*range(10), *range(15, LAST + 1)]


@pytest.mark.parametrize(
    ("name", "told_name", "reason"),
    [
        ("notes\x1b[31m.txt", r"'notes\x1b[31m.txt'", "it is no part of a run"),
        ("attempt-9.part-000000-000000.steps-0-4.parquet", None, "run.json has no attempt 9"),
        ("attempt-1.part-000005-000005.steps-20-29.parquet", None, "it has steps of the part before"),
    ],
)
def test_a_file_that_is_none_of_the_parts(name: str, told_name: str | None, reason: str, tmp_path: Path) -> None:
    written(tmp_path, LAST)
    (tmp_path / "parts" / name).write_bytes(b"")
    (tmp_path / "parts" / ".attempt-1.part-000007.0123456789ab.tmp").write_bytes(b"PAR1")
    run = read_run(tmp_path)
    (damage,) = run.damaged
    assert (damage.name, damage.reason) == (told_name or name, reason)
    assert whole(run, LAST)


def test_steps_before_the_first_one_of_the_attempt(tmp_path: Path) -> None:
    with writer(tmp_path, first_step=10) as run:
        run.write(*rows(range(10, 15)))
    (part,) = parts(tmp_path)
    (tmp_path / "parts" / part).rename(tmp_path / "parts" / part.replace("10-14", "9-14"))
    (damage,) = read_run(tmp_path).damaged
    assert damage.reason == "it has steps before its attempt's first"


def test_more_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, LAST)
    monkeypatch.setattr(reading, "MAX_RUN_ROWS", 50)
    with pytest.raises(RunFolderError, match="has more than 50 rows") as raised:
        read_run(tmp_path)
    assert raised.value.hint == "Read some of it: first_step, last_step."
    assert steps(read_run(tmp_path, first_step=7, last_step=12)) == [7, 8, 9, 10, 11, 12]
    monkeypatch.setattr("sqrtdk.monitor.names.MAX_PARTS", 3)
    with pytest.raises(RunFolderError, match="has more than 3 parts"):
        read_run(tmp_path)


def test_what_is_no_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(RunFolderError, match=r"holds no run: there is no run\.json") as raised:
            read_run(path)
        assert raised.value.hint == "Is it the folder of a run? It holds run.json and parts/."
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RunFolderError, match="it can't be read: Is a directory"):
        read_run(tmp_path)


def test_parts_that_are_merged_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is gone when its turn comes: all are listed again."""
    monkeypatch.setattr("sqrtdk.monitor.folder.SMALL_PARTS_BEFORE_MERGE", 4)
    with writer(tmp_path) as run:
        for step in range(3):
            run.write(*rows([step]))
        real = reading.decode_part
        waiting = [3, 4, 5, 6]

        def late(content: bytes) -> Any:
            if waiting:
                run.write(*rows([waiting.pop(0)]))
            return real(content)

        monkeypatch.setattr(reading, "decode_part", late)
        there = read_run(tmp_path)
    assert waiting == [5, 6], "three were listed, one was read, and then the one that they had become"
    assert whole(there, 3)
    assert there.damaged == ()


def test_a_listing_that_misses_what_is_renamed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system's listing of a directory may lack a part that goes as well as the one that it goes into."""
    written(tmp_path, LAST)
    passes = [set(), set(parts(tmp_path))]
    monkeypatch.setattr("sqrtdk.monitor.names._names", lambda folder: passes.pop())
    assert whole(read_run(tmp_path), LAST)


def test_following_a_run(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.write(*rows(range(5)))
        news = follow(tmp_path, every_s=0.01)
        assert whole(next(news), 4)
        run.write(*rows(range(5, 10)))
        run.write(*rows(range(10, 12)))
        new = next(news)
        assert whole(new, 11, first=5)
        assert new.replaces_from is None
        run.write(*rows(range(12, 15)))
        spoilt = parts(tmp_path)[3]
        assert spoilt.startswith("attempt-1.part-000003-000003.steps-12-14.sum-")
        _cut(tmp_path / "parts" / spoilt)
        new = next(news)
        assert [damage.name for damage in new.damaged] == [spoilt]
        assert steps(new) == []
        run.write(*rows([15]))
        new = next(news)
        assert (steps(new), new.damaged) == ([15], ())
    with writer(tmp_path, first_step=8, settings={**SETTINGS, "rows": 64}) as run:
        run.write(*rows(range(8, 10)))
        new = next(news)
        assert (steps(new), new.replaces_from, new.settings["rows"]) == ([8, 9], 8, 64)
        run.write(*rows(range(10, 11)))
        assert (steps(new := next(news)), new.replaces_from) == ([10], None)


def test_following_a_run_whose_parts_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk.monitor.folder.SMALL_PARTS_BEFORE_MERGE", 4)
    with writer(tmp_path) as run:
        run.write(*rows([0]))
        news = follow(tmp_path, every_s=0.01)
        assert steps(next(news)) == [0]
        for step in range(1, 30):
            run.write(*rows([step]))
            if step % 7 == 0:
                assert whole(next(news), step, first=step - 6)


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the parts that are decoded by readers from now on."""
    sizes: list[int] = []
    real = reading.decode_part

    def decode(content: bytes) -> Any:
        sizes.append(len(content))
        return real(content)

    monkeypatch.setattr(reading, "decode_part", decode)
    return sizes


def _same(one: Run, other: Run) -> bool:
    tables = (("heads", "steps", "alarms"), ("damaged", "gaps", "attempts"))
    return all(getattr(one, name).equals(getattr(other, name)) for name in tables[0]) and all(
        getattr(one, name) == getattr(other, name) for name in tables[1]
    )


def test_a_growing_run_is_read_once_and_is_what_a_reader_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over merged parts, steps that a later attempt replaces, gaps, a damaged part and a part that is no part."""
    monkeypatch.setattr("sqrtdk.monitor.folder.SMALL_PARTS_BEFORE_MERGE", 4)
    sizes = _counted(monkeypatch)
    growing = GrowingRun(tmp_path)
    wrote = 0

    def look() -> Run:
        before = len(sizes)
        run = growing.read()
        assert run is not None
        assert growing.read() is None
        assert (growing.writer, growing.over) == ("writing", False)
        assert len(sizes) - before <= 1, "the part that was written since"
        assert _same(run, read_run(tmp_path))
        return run

    for first, last in ((None, 13), (8, 12), (20, 26)):
        with writer(tmp_path, first_step=first) as run:
            look()
            for step in range(run.first_step, last):
                run.write(*rows([step], run.attempt))
                wrote += 1
                if step == 22:
                    _cut(tmp_path / "parts" / max(parts(tmp_path)))
                    (tmp_path / "parts" / "stranger").write_bytes(b"")
                names = [damage.name for damage in look().damaged]
                assert ("'stranger'" in names) == (step >= 22)
    assert wrote > 20


def test_a_growing_run_is_over_when_two_reads_find_no_writer(tmp_path: Path) -> None:
    written(tmp_path, 4)
    growing = GrowingRun(tmp_path)
    assert whole(growing.read(), 4)
    assert not growing.over
    with writer(tmp_path, first_step=None) as run:  # it is resumed
        growing.read()
        assert (growing.writer, growing.over) == ("writing", False)
        run.write(*rows([run.first_step], run.attempt))
    assert growing.read() is not None, "what was written before the end"
    assert not growing.over
    assert growing.read() is None
    assert (growing.writer, growing.over) == ("ended", True)
