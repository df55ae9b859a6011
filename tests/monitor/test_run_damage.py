"""Damage of every kind to the folder of a run: it is named, and no parser meets bytes that were not written."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sqrtdk.errors import RunFolderError
from sqrtdk.monitor import reading
from sqrtdk.monitor.footer import SNAPPY, codecs
from sqrtdk.monitor.reading import Damage, follow, read_run
from sqrtdk.store.manifest import read_manifest
from tests.monitor.run_records import parts, rows, steps, unsigned, whole, writer, written
from tests.support.paths import with_tests
from tests.support.program import called

LAST = 24  # parts of 5 steps


def _flipped(content: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


def test_any_bit_of_a_part_is_seen_before_the_part_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, LAST)
    name = parts(tmp_path)[1]
    part = tmp_path / "parts" / name
    content = part.read_bytes()
    parsed: list[bytes] = []
    real = reading.decode_part
    monkeypatch.setattr(reading, "decode_part", lambda some: parsed.append(some) or real(some))
    places = random.Random(3)
    for at in (0, 4, len(content) - 9, len(content) - 1, *places.sample(range(len(content)), 20)):
        changed = _flipped(content, at, places.randrange(8))
        part.write_bytes(changed)
        run = read_run(tmp_path)
        assert changed not in parsed
        (damage,) = run.damaged
        assert (damage.name, damage.first_step, damage.last_step) == (name, 5, 9)
        assert damage.reason.startswith("it is damaged: its bytes have the checksum ")
        assert steps(run) == [*range(5), *range(10, LAST + 1)]
    part.write_bytes(content)
    assert whole(read_run(tmp_path), LAST)


_FLIPS = """
import random, sys
from pathlib import Path
from sqrtdk.errors import RunFolderError
from sqrtdk.monitor.tables import decode_part
path, count = Path(sys.argv[1]), int(sys.argv[2])
content = path.read_bytes()
footer = int.from_bytes(content[-8:-4], "little")
good, places, refused, unseen = decode_part(content), random.Random(5), 0, 0
for number in range(count):
    at = places.randrange(len(content) - footer - 8 if number % 4 else 0, len(content))
    changed = bytearray(content)
    changed[at] ^= 1 << places.randrange(8)
    try:
        there = decode_part(bytes(changed))
        unseen += any(not getattr(there, name).equals(getattr(good, name)) for name in ("heads", "steps", "alarms"))
    except RunFolderError:
        refused += 1
print(refused, unseen)
"""


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.full)])
def test_flips_in_a_part_without_a_checksum_end_no_process(count: int, tmp_path: Path) -> None:
    """Nearly each is refused, or changes no number: of the 70,000 bits of a footer, 4 change some unseen."""
    written(tmp_path, 9, every=10)
    part = unsigned(tmp_path / "parts" / parts(tmp_path)[0])
    command = [sys.executable, "-c", _FLIPS, str(part), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=with_tests())
    assert done.returncode == 0, done.stderr
    refused, unseen = map(int, done.stdout.split())
    assert refused > count / 2
    assert unseen <= count / 1000


def test_a_codec_that_parquet_does_not_have(tmp_path: Path) -> None:
    """Pyarrow ends the process where it is asked for its name."""
    written(tmp_path, LAST)
    part = unsigned(tmp_path / "parts" / parts(tmp_path)[2])
    content = part.read_bytes()
    assert set(codecs(content)) == {SNAPPY}
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8]
    changed = 0
    for at in range(length):  # zigzag: SNAPPY is 2, and -2, which is no codec, 3
        if footer[at] == 2 * SNAPPY:
            other = footer[:at] + b"\x03" + footer[at + 1 :]
            part.write_bytes(content[: -8 - length] + other + content[-8:])
            try:
                changed += -2 in codecs(part.read_bytes())
            except RunFolderError:
                continue
            if changed:
                break
    assert changed
    done = called("watch", "show", tmp_path)
    assert done.returncode == 1, "a part that can't be read is not fine"
    assert "it is not packed with SNAPPY but with codec -2 of Parquet" in " ".join(done.stdout.split())
    assert part.name in done.stdout
    assert called("watch", "show", tmp_path, "--verify").returncode == 2


def test_any_bit_of_run_json(tmp_path: Path) -> None:
    """It is refused, or says the same: a space is another space."""
    written(tmp_path, LAST)
    path = tmp_path / "run.json"
    content, good = path.read_bytes(), read_manifest(tmp_path)
    for at in range(len(content)):
        path.write_bytes(_flipped(content, at, at % 8))
        refused: RunFolderError | None = None
        try:
            assert read_manifest(tmp_path) == good, at
        except RunFolderError as error:
            refused = error
        assert refused is None or (str(path) in str(refused) and refused.hint)
    path.write_bytes(content)
    assert whole(read_run(tmp_path), LAST)


@pytest.mark.parametrize("gone", [[4], [3, 4], [0, 1, 2, 3, 4]])
def test_parts_that_are_lost_at_the_end_are_missed(gone: list[int], tmp_path: Path) -> None:
    written(tmp_path, LAST)
    for name in [parts(tmp_path)[number] for number in gone]:
        (tmp_path / "parts" / name).unlink()
    run = read_run(tmp_path)
    named = f"attempt-1.part-{gone[0]:06}-000004"
    assert run.damaged == (Damage(named, "it is not there", 5 * gone[0], LAST),)
    assert steps(run) == list(range(5 * gone[0]))
    done = called("watch", "show", tmp_path, "--verify")
    assert done.returncode == 2
    assert f"part {named} can't be read (steps {5 * gone[0]} to {LAST}): it is not there" in done.stderr
    with writer(tmp_path) as again:  # the training went on to the last step that was recorded
        assert (again.attempt, again.first_step) == (2, LAST + 1)
        again.write(*rows(range(LAST + 1, LAST + 3), 2))
    run = read_run(tmp_path)
    assert (run.damaged, run.gaps) == ((Damage(named, "it is not there", 5 * gone[0], LAST),), ())
    with writer(tmp_path, first_step=5 * gone[0]) as again:  # what is recorded once more is missed no longer
        again.write(*rows(range(5 * gone[0], LAST + 1), 3))
    assert read_run(tmp_path).damaged == ()


def test_a_folder_of_parts_that_is_gone(tmp_path: Path) -> None:
    written(tmp_path, LAST)
    shutil.rmtree(tmp_path / "parts")
    (damage,) = read_run(tmp_path).damaged
    assert (damage.name, damage.first_step, damage.last_step) == ("attempt-1.part-000000-000004", 0, LAST)


def test_a_run_of_an_older_version_counts_nothing_and_is_read(tmp_path: Path) -> None:
    written(tmp_path, LAST)
    for name in parts(tmp_path):
        unsigned(tmp_path / "parts" / name)
    path = tmp_path / "run.json"
    there = json.loads(path.read_text())
    del there["checksum"]
    for attempt in there["attempts"]:
        del attempt["parts"], attempt["last_step"]
    path.write_text(json.dumps(there))
    run = read_run(tmp_path)
    assert whole(run, LAST)
    assert run.damaged == ()
    written(tmp_path, LAST + 5)
    assert read_run(tmp_path).last_step == LAST + 5
    assert "parts" not in json.loads(path.read_text())["attempts"][0]
    done = called("watch", "show", tmp_path, "--verify")
    assert done.returncode == 0
    assert "verified: 6 parts, every one is there and read whole; 5 of them have no checksum" in done.stdout


def test_a_live_run_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is written while a reader has listed the others is not missed, though run.json counts it by then."""
    with writer(tmp_path) as run:
        run.write(*rows(range(5)))
        real = reading.list_parts

        def late(folder: Path) -> object:
            listing = real(folder)
            if run.parts == 1:
                run.write(*rows(range(5, 8)))
            return listing

        monkeypatch.setattr(reading, "list_parts", late)
        news = follow(tmp_path, every_s=0.01)
        first = next(news)
        assert (steps(first), first.damaged) == (list(range(5)), ())
        second = next(news)
        assert (steps(second), second.damaged) == ([5, 6, 7], ())
