"""The child process that runs the model alone, as rank 0 sees it: started, asked, given runs, and ended in time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sqrtdk.laws.processes.runs import RunRecord
from sqrtdk.laws.subject import NotAsked
from sqrtdk.messages import Message, fields, recorded

# A child that knew them would join the ranks.
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
                "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")  # fmt: skip
_GRACE_S = 3.0  # seconds that a child has to end by itself
_MOST_LAST_WORDS = 200  # characters of what a child that failed said last


class ChildProcess:
    """The child of one law; use `child_process`.

    Args:
        process: The child.
        folder: The directory through which tensors go.
        errors: The file that holds what it prints.
        seconds: Time that it has for each step.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path, errors: Path, seconds: float) -> None:
        self._process, self._folder, self._errors, self._seconds = process, folder, errors, seconds

    def wanted(self) -> dict[str, Any]:
        """Return {"run": what the ranks shall run} or {"answer": the answer}, once the child says so.

        Raises:
            NotAsked: It ended, or it takes too long.
        """
        out = self._process.stdout
        assert out is not None
        said: queue.Queue[str] = queue.Queue()  # `select` takes no pipe on Windows
        threading.Thread(target=lambda: said.put(out.readline()), daemon=True).start()
        try:
            line = said.get(timeout=self._seconds).strip()
        except queue.Empty:
            raise NotAsked(Message("laws.ranks.child_late", seconds=f"{self._seconds:g}")) from None
        if line == "answer":
            return {"answer": json.loads((self._folder / "answer.json").read_text(encoding="utf-8"))}
        if line == "wanted":
            return {"run": torch.load(self._folder / "wanted.pt", weights_only=True)}
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise NotAsked(Message("laws.ranks.child_ended", text=(lines[-1] if lines else "-")[:_MOST_LAST_WORDS]))

    def give(self, records: Sequence[RunRecord]) -> None:
        """Give the child the runs that it wanted."""
        torch.save(list(records), self._folder / "runs.pt")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `wanted` says why it ended
            self._process.stdin.write("runs\n")
            self._process.stdin.flush()


@contextlib.contextmanager
def child_process(start: Mapping[str, Any], seconds: float) -> Iterator[ChildProcess]:
    """Start the child in a group of its own, without the variables of torchrun; it has ended after the block.

    Args:
        start: What the child needs: see `sqrtdk.laws.processes.alone.answer_of`.
        seconds: Time that it has for each step.
    """
    variables = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    variables = {name: value for name, value in variables.items() if not name.startswith("TORCHELASTIC_")}
    # "" stands for the current directory, which the child shares.
    variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryDirectory(prefix="sqrtdk-ranks-") as made:
        folder = Path(made)
        torch.save(dict(start), folder / "start.pt")
        errors = folder / "stderr"
        with errors.open("w", encoding="utf-8") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "sqrtdk.laws.processes.alone", made], env=variables, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
            )  # fmt: skip
        try:
            yield ChildProcess(process, folder, errors, seconds)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    if process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:  # now that it has ended, no thread still waits for a line
        process.stdout.close()


def sent(sentence: str) -> dict[str, Any]:
    """Return a sentence as JSON holds it; `read_sentence` reads it."""
    return {"text": str(sentence), **fields(sentence)}


def read_sentence(record: Mapping[str, Any]) -> str:
    """Return the sentence of `sent`."""
    return recorded(record["text"], record["message_id"], record["values"])
