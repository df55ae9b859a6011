import os
import signal
import stat
import threading
import unicodedata
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


LONG = "n" * 90  # longer than what temporary names keep
ALIKE = [("A.html", "a.html"), (f"{LONG}A", f"{LONG}a"), ("caf\u00e9", "cafe\u0301"), ("STRASSE", "stra\u00dfe")]


@pytest.mark.parametrize("names", ALIKE, ids=["case", "long", "accent", "letters"])
def test_the_folder_says_whether_two_spellings_are_one_file(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in names]
    _files.check_outputs(paths)

    def fold(path: Path) -> str:
        return unicodedata.normalize("NFC", path.name).casefold()

    def there(path: Path) -> bool:  # as in a folder that ignores case and how accents are written
        return fold(path) in map(fold, path.parent.iterdir())

    monkeypatch.setattr(Path, "exists", there)
    with pytest.raises(OutputError, match="two reports"):
        _files.check_outputs(paths)
    _files.check_outputs([tmp_path / "A.html", tmp_path / "a.json"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_two_names_lead_to_is_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(OutputError, match="two reports"):
        _files.check_outputs([tmp_path / "folder" / "a", tmp_path / "link" / "a"])


def test_a_lone_surrogate_does_not_stop_a_report(tmp_path: Path) -> None:
    _files.write_text(tmp_path / "x", "\ud800")
    assert (tmp_path / "x").read_text() == r"\ud800"


def test_a_file_system_without_hard_links_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        _files.write_text(tmp_path / "report.json", "text")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("target", ["/dev/null", "/proc/self/fd/1", "directory"])
def test_a_link_to_no_file_is_refused_even_with_force(tmp_path: Path, target: str) -> None:
    (tmp_path / "directory").mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(OutputError, match="not a regular file"):
        _files.write_text(link, "text", force=True)
    assert os.readlink(link) == target


def test_a_link_to_a_file_is_replaced_with_force(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "link").symlink_to("file")
    _files.write_text(tmp_path / "link", "mine", force=True)
    assert (tmp_path / "file").read_text() == "theirs"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_waits_for_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    path = tmp_path / "report.json"
    real = os.fsync

    def interrupted(descriptor: int) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _files.write_text(path, "whole")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert path.read_text() == "whole"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_thread_writes_as_well(tmp_path: Path) -> None:
    thread = threading.Thread(target=_files.write_text, args=(tmp_path / "x", "text"))
    thread.start()
    thread.join()
    assert (tmp_path / "x").read_text() == "text"


def test_a_long_name_of_many_bytes(tmp_path: Path) -> None:
    name = "\N{GRINNING FACE}" * 60  # 240 bytes; 255 is the limit of most file systems
    _files.write_text(tmp_path / name, "text")
    assert os.listdir(tmp_path) == [name]
