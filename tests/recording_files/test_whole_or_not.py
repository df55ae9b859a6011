"""A trace file is there whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sqrtdk._files import write_parts
from sqrtdk.errors import InvalidValueError, OutputError, TraceFileError
from sqrtdk.recording import write, write_trace_file
from sqrtdk.tracing.tensors import CallTensors, Term, Vector


def call(values: torch.Tensor, site: str = "a", **fields: object) -> CallTensors:
    vector = Vector(values)
    return CallTensors(site, 0, vector, vector, vector, values, None, **fields)  # type: ignore[arg-type]


VALUES = torch.zeros(1, 1, 4, 4)


def in_a_process(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    begin = "import os, signal, resource\nfrom sqrtdk._files import write_parts\n"
    return subprocess.run(
        [sys.executable, "-c", begin + code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("before", [None, "old"])
def test_a_killed_writer_leaves_what_was_there(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "run"
    if before:
        path.write_text(before)
    code = """
def parts():
    yield bytes(100)
    os.kill(os.getpid(), signal.SIGKILL)
    yield bytes(100)
write_parts("run", parts(), force=True)
"""
    assert in_a_process(tmp_path, code).returncode == -signal.SIGKILL
    assert (path.read_text() if path.exists() else None) == before


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
write_parts("run", (bytes(600) for _ in range(9)))
"""
    done = in_a_process(tmp_path, code)
    assert "OutputError: cannot write run: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("handled", [False, True])
def test_a_signal_between_parts_ends_the_writing(tmp_path: Path, handled: bool) -> None:
    written = []

    def parts() -> Iterator[bytes]:
        for number in range(3):
            written.append(number)
            yield bytes(10)
            if number == 1:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, (lambda *_: None) if handled else signal.default_int_handler)
        with pytest.raises(OutputError if handled else KeyboardInterrupt):
            write_parts(tmp_path / "run", parts())
    finally:
        signal.signal(signal.SIGINT, before)
    assert written == [0, 1, 2]  # the third was asked for, and not written
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("old")
    with pytest.raises(OutputError, match="exists"):
        write_trace_file(path, [call(VALUES)])
    assert path.read_text() == "old"
    write_trace_file(path, [call(VALUES)], force=True)
    assert path.stat().st_size > 100


def test_the_size_is_announced_before_and_checked_against_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    said: list[str] = []

    def announce(text: str) -> None:
        assert list(tmp_path.iterdir()) == []
        said.append(text)

    recording = write_trace_file(path, [call(torch.zeros(1, 1, 500, 500))], announce=announce)
    assert said == ["run: 1 call, 1 MB"]
    assert recording.bytes == path.stat().st_size
    path.unlink()
    usage = type("Usage", (), {"free": recording.bytes - 1})
    monkeypatch.setattr(write.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match="1 MB are free"):
        write_trace_file(path, [call(torch.zeros(1, 1, 500, 500))])
    assert list(tmp_path.iterdir()) == []


BAD = {
    "unlike shapes": (call(VALUES, lse=torch.zeros(3)), TraceFileError, "(B, Hq, L)"),
    "complex": (call(VALUES.to(torch.complex64)), InvalidValueError, "complex64"),
    "meta": (call(VALUES.to("meta")), InvalidValueError, "meta"),
    "sparse": (call(VALUES.to_sparse()), InvalidValueError, "sparse"),
    "long site": (call(VALUES, "a" * 501), TraceFileError, "501"),
    "dtype": (call(VALUES, dtype="int3"), TraceFileError, "int3"),
    "kept of floats": (call(VALUES, kept=VALUES), InvalidValueError, "a mask of torch.float32"),
    "kept on meta": (call(VALUES, kept=VALUES.bool().to("meta")), InvalidValueError, "meta"),
    "kept of another shape": (call(VALUES, kept=VALUES[..., :2].bool()), TraceFileError, "does not broadcast"),
    "no index": (dataclasses.replace(call(VALUES), index=-1), TraceFileError, "expected int >= 0"),
    "a term of another name": (
        dataclasses.replace(call(VALUES), terms=(Term("skale", 1.0),)),
        TraceFileError,
        "'skale'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, name: str) -> None:
    bad, error, message = BAD[name]
    with pytest.raises(error) as caught:
        write_trace_file(tmp_path / "run", [call(VALUES, "b"), bad])
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_two_calls_of_one_site_and_index(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="two calls are 'a', index 0"):
        write_trace_file(tmp_path / "run", [call(VALUES), call(VALUES)])


def test_views_and_gradients_are_written_as_they_are_seen(tmp_path: Path) -> None:
    from sqrtdk.recording import read_trace_file

    values = torch.randn(4, 3, 2, 5, requires_grad=True).permute(2, 1, 3, 0)
    term = Term("bias", torch.randn(1, 1, 1, 1).expand(2, 3, 5, 5))
    vector = Vector(values)
    made = CallTensors("a", 0, vector, vector, vector, values, (term,))
    write_trace_file(tmp_path / "run", [made])
    (read,) = read_trace_file(tmp_path / "run").calls
    assert torch.equal(read.query.values, values)
    assert not read.query.values.requires_grad
    assert read.terms is not None
    assert torch.equal(read.terms[0].value, term.value)  # type: ignore[arg-type]
