import os
import stat
from pathlib import Path

import pytest

from sqrtdk import _files
from sqrtdk.errors import OutputError


def test_writes_all_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    _files.write_text(path, "√ text\n")
    assert path.read_bytes() == "√ text\n".encode()
    assert os.listdir(tmp_path) == ["report.html"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("act", [_files.write_text, lambda path, _: _files.check_writable(path)])
def test_never_overwrites(tmp_path: Path, act) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "report.json"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists") as caught:
        act(path, "new")
    assert "--force" in caught.value.hint
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["report.json"]


def test_force_replaces(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old and longer")
    _files.write_text(path, "new", force=True)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_name_taken_in_the_meantime_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    real = os.fsync

    def slow(descriptor: int) -> None:
        real(descriptor)
        path.write_text("theirs")

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(OutputError, match="exists"):
        _files.write_text(path, "mine")
    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_full_disk_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        _files.write_text(path, "new", force=True)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "report.json"
    _files.write_text(path, "text")
    assert path.read_text() == "text"
    with pytest.raises(OutputError, match="exists"):
        _files.write_text(path, "again")
    assert os.listdir(tmp_path) == ["report.json"]


def test_directory_missing_or_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no directory"):
        _files.check_writable(tmp_path / "absent" / "x.html")
    with pytest.raises(OutputError, match="is a directory"):
        _files.check_writable(tmp_path, force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        _files.check_writable(tmp_path / "file" / "x.html")
    with pytest.raises(OutputError):
        _files.check_writable(tmp_path / ("n" * 300))


def test_devices_are_refused_even_with_force() -> None:
    with pytest.raises(OutputError, match="not a regular file"):
        _files.check_writable(os.devnull, force=True)


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists"):
        _files.check_writable(tmp_path / "link")


def test_two_reports_need_two_files(tmp_path: Path) -> None:
    _files.check_outputs((tmp_path / "a", None, tmp_path / "b", None))
    with pytest.raises(OutputError, match="two reports"):
        _files.check_outputs((tmp_path / "a", tmp_path / "." / "a"))


def test_a_lone_surrogate_does_not_stop_a_report(tmp_path: Path) -> None:
    _files.write_text(tmp_path / "x", "\ud800")
    assert (tmp_path / "x").read_text() == r"\ud800"
