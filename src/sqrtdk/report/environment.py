"""Draws the environment: lines and notes for the terminal, names and values for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqrtdk._language import Language
from sqrtdk.messages import Message, joined, named
from sqrtdk.report.console import TableColumn
from sqrtdk.report.printer import Printer, printed

_MOST_NOTES_PRINTED = 8  # an untrusted config may cause hundreds


def to_text(environment: dict[str, Any], *, width: int = 160, color: bool = False, language: Language = "en") -> str:
    """Return the versions and the machine as text, with a name and its value on each line.

    Args:
        environment: Result of `sqrtdk._environment.environment`.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
    """
    versions = environment["versions"].items()
    lines = {name: version or Message("terminal.machine.not_installed") for name, version in versions}
    columns = (TableColumn(""), TableColumn("", prose=True))
    rows = [(entry_name(name), text) for name, text in (lines | _machine(environment)).items()]
    return printed(lambda printer: printer.table(columns, rows), width, color, language)


def shown_environment(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each entry that has a value, as a page shows them.

    Args:
        environment: that of `sqrtdk._environment.environment`, or a flat table of names and values.

    Example:
        >>> [(name.said("zh"), value) for name, value in shown_environment({"device": "cpu", "dtype": ""})]
        [('设备', 'cpu')]
    """
    shown = environment
    if "versions" in environment:
        versions = [f"{name} {version}" for name, version in environment["versions"].items() if version]
        shown = {"versions": ", ".join(versions), **_machine(environment), "notes": environment.get("notes")}
    for name, value in shown.items():
        if value is not None and value != "" and value != []:
            yield entry_name(name), entry_value(value)


def premises(environment: Mapping[str, Any]) -> list[str]:
    """Return the notes on what sqrtdk decided for the user, each once: random weights, random ids, a cut length.

    Args:
        environment: Result of `sqrtdk._environment.environment`, with the notes under "notes".

    Example:
        >>> premises({"notes": ["random weights", "random weights"]}), premises({})
        (['random weights'], [])
    """
    notes = environment.get("notes") or ()
    return list(dict.fromkeys(note if isinstance(note, str) else str(note) for note in notes))


def print_premises(printer: Printer, notes: Sequence[str]) -> None:
    """Print the notes of `premises` above a report, because all figures of the report depend on them.

    Only the first few are printed, followed by the number of the others.
    """
    for note in notes[:_MOST_NOTES_PRINTED]:
        printer.paragraph(f"! {printer.said(note)}", style="yellow")
    printer.more(len(notes) - _MOST_NOTES_PRINTED)


def entry_name(name: str) -> str:
    """Return the label of an entry of the environment as a reader sees it.

    Example:
        >>> entry_name("python")
        'python'
    """
    return named("terminal.environment", name)


def entry_value(value: Any) -> str:
    """Return the value of an entry of the environment as text; the items of a list are joined to one sentence.

    Example:
        >>> entry_value(["a", "b"]), entry_value(4)
        ('a; b', '4')
    """
    if isinstance(value, list | tuple):
        return joined([entry_value(item) for item in value])
    return value if isinstance(value, Message) else named("terminal.value", str(value))


def _machine(environment: Mapping[str, Any]) -> dict[str, str]:
    kernel = environment["kernel"]
    return {
        "platform": environment["platform"],
        "CPU": _cpu(environment["cpu"], environment["cpus"], environment["threads"]),
        "GPU": ", ".join(environment["gpus"]) or Message("terminal.machine.no_gpu"),
        "compiler": kernel["compiler"] or Message("words.none"),
        "kernel": _library(Path(kernel["library"])) if kernel["loaded"] else _not_in_use(kernel["reason"]),
        "Triton": _triton(environment["triton"]),
    }


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
