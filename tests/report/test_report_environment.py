"""What `sqrtdk env` says where it could not tell."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk import _environment
from sqrtdk.impl.kernel import libraries
from sqrtdk.messages import Message, said
from sqrtdk.report.environment import shown_environment, to_text


def test_a_library_that_does_not_tell_its_version_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "without_a_record.py").touch()
    (tmp_path / "with_an_empty_one-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert _environment._version("without_a_record") == "unknown"
    assert _environment._version("with_an_empty_one") == "unknown"
    assert _environment._version("no_such_library") is None


def test_the_versions_are_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    found = _environment.environment()["versions"]
    assert (found["sqrtdk"], found["torch"]) == (sqrtdk.__version__, torch.__version__)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there and can be used")
def test_a_gpu_that_can_t_be_used_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as a driver counts that then fails
    (named,) = _environment.environment()["gpus"]
    assert named.startswith("device 0, which torch can't use: ")


def test_what_is_not_known_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = _environment.environment() | {"cpus": None, "gpus": []}
    assert "an unknown number of logical cores" in to_text(found)
    assert "GPU           none that torch can use" in to_text(found)
    names = [line.split()[0] for line in to_text(found, language="zh").splitlines() if line[0] != " "]
    assert {"torch", "onnx", "平台", "CPU", "编译器", "内核"} <= set(names)
    assert not {"platform", "compiler", "kernel"} & set(names)
    monkeypatch.setattr(libraries, "_features", frozenset)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    assert libraries.unsupported() == "what the CPU can do is not known: /proc/cpuinfo does not tell"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert libraries.unsupported() == "it is for x86-64 and aarch64; this is riscv64"


@pytest.mark.parametrize(
    ("version", "interpreted", "reason", "text"),
    [
        ("3.7.1", False, None, "3.7.1, in use on GPUs"),
        ("3.7.1", True, None, "3.7.1, interpreted, on CPUs: slow"),
        ("3.7.1", False, "torch sees no GPU", "3.7.1, not in use: torch sees no GPU"),
        (None, False, "Triton is not installed", "not in use: Triton is not installed"),
    ],
)
def test_what_is_said_of_triton(version: str | None, interpreted: bool, reason: str | None, text: str) -> None:
    triton = {"version": version, "available": reason is None, "interpreted": interpreted, "reason": reason}
    lines = to_text(_environment.environment() | {"triton": triton}).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("Triton ")] == [text]


def test_the_name_of_a_library_stays_whole() -> None:
    name = f"attention-avx512_bf16-{'1' * 16}-{'2' * 16}.so"
    kernel = {"loaded": True, "library": f"/home/someone/.cache/sqrtdk/{name}", "reason": None, "compiler": None}
    lines = to_text(_environment.environment() | {"kernel": kernel}, width=80).splitlines()
    assert sum(f"in use: {name}" in line for line in lines) == 1, lines


def test_a_page_names_the_entries_of_every_run_in_words() -> None:
    audited = sqrtdk.check("demo", seq_len=8).environment | {"notes": [Message("rules.gguf.not_seen"), "h.0"]}
    for environment in (_environment.environment(), audited):
        in_chinese = {said(name, "zh"): said(value, "zh") for name, value in shown_environment(environment)}
        assert not {"platform", "device", "system", "kernel", "threads", "notes"} & set(in_chinese)
        assert not {"True", "False", "None", "none", "[]"} & {
            word for text in in_chinese.values() for word in text.split()
        }
    assert dict(shown_environment(audited))["notes"].said("zh").endswith("；h.0")
    assert [*shown_environment({"attn": "", "notes": [], "cpu": None})] == []
