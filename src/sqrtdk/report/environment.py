"""Draws the environment as lines for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqrtdk._language import Language
from sqrtdk.messages import Message, named, said
from sqrtdk.report.console import TableColumn, console_text, print_table
from sqrtdk.report.plain import plain


def to_text(environment: dict[str, Any], *, width: int = 160, color: bool = False, language: Language = "en") -> str:
    """Draw the result of `sqrtdk._environment.environment`, one name and value a line."""
    versions, kernel, triton = (environment[name] for name in ("versions", "kernel", "triton"))
    lines = {name: version or Message("terminal.machine.not_installed") for name, version in versions.items()}
    lines |= {
        "platform": environment["platform"],
        "CPU": _cpu(environment["cpu"], environment["cpus"], environment["threads"]),
        "GPU": ", ".join(environment["gpus"]) or Message("terminal.machine.no_gpu"),
        "compiler": kernel["compiler"] or Message("words.none"),
        "kernel": _library(Path(kernel["library"])) if kernel["loaded"] else _not_in_use(kernel["reason"]),
        "Triton": _triton(triton),
    }
    rows = [
        (said(named("terminal.environment", name), language), plain(said(text, language)))
        for name, text in lines.items()
    ]
    columns = (TableColumn(""), TableColumn("", prose=True))
    return console_text(lambda console: print_table(console, columns, rows, language=language), width, color)


def _cpu(name: str, cores: int | None, threads: int) -> str:
    if cores is None:
        return Message("terminal.machine.cpu_unknown", cpu=name, threads=threads)
    return Message("terminal.machine.cpu", cpu=name, cores=cores, threads=threads)


def _library(path: Path) -> str:
    # the name first: a whole path is too long for a line
    return Message("terminal.machine.library", library=path.name, folder=str(path.parent))


def _not_in_use(reason: str) -> str:
    return Message("terminal.machine.not_in_use", reason=reason)


def _triton(triton: dict[str, Any]) -> str:
    if not triton["available"]:
        use = _not_in_use(triton["reason"])
    else:
        use = Message(f"terminal.machine.{'interpreted' if triton['interpreted'] else 'on_gpus'}")
    version = triton["version"]
    return Message("terminal.machine.version", version=version, use=use) if version else use
