"""Draws the environment as lines for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqrtdk._language import Language
from sqrtdk.report.console import Column, drawn, print_table
from sqrtdk.report.plain import plain
from sqrtdk.report.said import said
from sqrtdk.report.terminal_words import ENVIRONMENT, named


def to_text(environment: dict[str, Any], *, width: int = 160, color: bool = False, language: Language = "en") -> str:
    """Draw the result of `sqrtdk._environment.environment`, one name and value a line."""
    versions, kernel, triton = (environment[name] for name in ("versions", "kernel", "triton"))
    lines = {name: version or "not installed" for name, version in versions.items()}
    cores = environment["cpus"] or "an unknown number of"
    lines |= {
        "platform": environment["platform"],
        "CPU": f"{environment['cpu']}, {cores} logical cores, {environment['threads']} threads of torch",
        "GPU": ", ".join(environment["gpus"]) or "none that torch can use",
        "compiler": kernel["compiler"] or "none",
        "kernel": _library(Path(kernel["library"])) if kernel["loaded"] else f"not in use: {kernel['reason']}",
        "Triton": ", ".join(filter(None, (triton["version"], _use_of(triton)))),
    }
    rows = [(named(ENVIRONMENT, name, language), plain(said(text, language))) for name, text in lines.items()]
    columns = (Column(""), Column("", prose=True))
    return drawn(lambda console: print_table(console, columns, rows, language=language), width, color)


def _library(path: Path) -> str:
    return f"in use: {path.name} in {path.parent}"  # the name first: a whole path is too long for a line


def _use_of(triton: dict[str, Any]) -> str:
    if not triton["available"]:
        return f"not in use: {triton['reason']}"
    return "interpreted, on CPUs: slow" if triton["interpreted"] else "in use on GPUs"
