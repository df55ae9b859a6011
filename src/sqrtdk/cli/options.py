"""Options that several verbs take, each with its name, its kind and its help in one place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.errors import InvalidValueError

STDOUT = "-"

TextFile = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Text to tokenise and run on.")]
InputFile = Annotated[Path | None, typer.Option("--input", metavar="FILE", help="Inputs by name, as .safetensors.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Sequences a batch.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens a sequence.")]
Device = Annotated[str | None, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1, mps; cpu if unset.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Run in this dtype: float32 (fp32), bfloat16 (bf16), float16 (fp16) or float64 (fp64)."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hugging Face model.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
]
DeviceMap = Annotated[
    str | None, typer.Option("--device-map", help="Spread a large model through accelerate, e.g. auto.")
]
OffloadFolder = Annotated[
    Path | None,
    typer.Option("--offload-folder", metavar="DIR", help="Where weights that do not fit in memory go."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write the JSON document to FILE instead of stdout."),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML report.")]
Sarif = Annotated[
    Path | None, typer.Option("--sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0, for code scanning.")
]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML: one test case an attention.")
]
Markdown = Annotated[
    str | None,
    typer.Option("--markdown", metavar="FILE", help="Write a comment for a pull request; - prints it on stdout."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace report files that exist.")]
ShowTraceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]


def refuse(given: Mapping[str, object], where: str, instead: str) -> None:
    """Refuse options that would be passed over in silence.

    Args:
        given: options, and what was given for them; None and False are not given.
        where: what passes over them.
        instead: a command that tells what is taken there.

    Raises:
        InvalidValueError: one was given.
    """
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        raise InvalidValueError(
            f"{', '.join(names)} given {where}", hint=f"Leave {'it' if len(names) == 1 else 'them'} out; see {instead}."
        )


def file_or_stdout(name: str | None, taken: bool) -> Path | None:
    """The file that an option names; None where it names none, or stdout.

    Args:
        name: what was given.
        taken: whether another document goes to stdout.

    Raises:
        InvalidValueError: two documents would be on stdout.
    """
    if name == STDOUT and taken:
        raise InvalidValueError(
            "--json and --markdown - both print on stdout, which takes one document",
            hint="Give --output FILE to the JSON, or a file to --markdown.",
        )
    return None if name is None or name == STDOUT else Path(name)
