"""`sqrtdk record`: streams, files, exit codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sqrtdk import cli
from sqrtdk.errors import ModelError
from sqrtdk.models.options import LoadOptions
from sqrtdk.recording import read_trace_file


def record(*arguments: str) -> Result:
    """Run the verb in this process, streams apart."""
    return CliRunner().invoke(cli._app, ["record", *arguments])


def test_a_recording_is_announced_written_and_named(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    done = record("demo", "--output", str(path), "--seq-len", "8")
    assert (done.exit_code, done.stdout) == (0, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("run.safetensors: 3 calls, ")
    assert second == f"Trace file: {path}"
    assert [call.site for call in read_trace_file(path).calls] == [f"blocks.{n}.attention" for n in range(3)]


def test_files_that_exist_stay_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("old")
    done = record("no/such-model", "--output", str(path))
    assert done.exit_code == 2
    assert "exists and is not overwritten" in done.stderr
    assert path.read_text() == "old"
    assert record("demo", "--output", str(path), "--seq-len", "8", "--force").exit_code == 0
    assert len(read_trace_file(path).calls) == 3


def test_less_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    options = ["--calls", "blocks.[12].*", "--rows", "2", "--heads", "1", "--projections"]
    assert record("demo", "--output", str(path), "--seq-len", "8", *options).exit_code == 0
    calls = read_trace_file(path).calls
    assert [call.query.values.shape for call in calls] == [(1, 1, 2, 64)] * 2
    assert calls[0].query.projection is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "x"], "are no numbers"),
        (["--calls", "z"], "no attention ran at 'z'"),
        (["--rows", "0"], "--rows"),
        (["--attn", "flash"], "--attn"),
    ],
)
def test_errors_have_exit_code_2_and_leave_no_file(tmp_path: Path, options: list[str], message: str) -> None:
    done = record("demo", "--output", str(tmp_path / "run"), "--seq-len", "8", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_output_is_needed() -> None:
    assert record("demo").exit_code == 2


def test_every_option_of_loading_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LoadOptions(
        attn="eager", text=Path("t"), input_file=Path("i"), batch=2, seq_len=3, device="meta", dtype="bf16", seed=5,
        revision="r", trust_remote_code=True, device_map="auto", offload_folder=Path("o"), base=Path("b"),
    )  # fmt: skip
    options = dataclasses.asdict(expected)
    del options["static"]
    assert all(
        options[field.name] != field.default for field in dataclasses.fields(LoadOptions) if field.name in options
    )
    arrived = []

    def stop(model: str, inputs: None, path: Path, options: LoadOptions, **others: Any) -> None:
        arrived.append((options, others["calls"], others["rows"], others["heads"], others["projections"]))
        raise ModelError("enough")

    monkeypatch.setattr("sqrtdk.recording.record.record_with", stop)
    words = ["--output", str(tmp_path / "a"), "--calls", "c", "--rows", "3", "--heads", "0,2-3", "--projections"]
    for name, value in options.items():
        flag = "--input" if name == "input_file" else "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    assert record("demo", *words).exit_code == 2
    from sqrtdk.recording.record import record as by_name

    with pytest.raises(ModelError, match="enough"):
        by_name("demo", None, tmp_path / "a", calls="c", rows=3, heads=[0, 2, 3], projections=True, **options)
    assert arrived == [(expected, "c", 3, [0, 2, 3], True)] * 2
