"""Options that several verbs share, each with its name, type and help text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk._language import Choice, Language, chosen
from sqrtdk.errors import InvalidValueError

STDOUT = "-"

TextFile = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="Text to tokenise and run on.", show_default="a built-in text"),
]
InputFile = Annotated[
    Path | None,
    typer.Option("--input", metavar="FILE", help="Inputs by name, as .safetensors.", show_default="made for the model"),
]
Attn = Annotated[
    Literal["eager", "sdpa"] | None,
    typer.Option("--attn", help="Attention implementation to run.", show_default="the model's own"),
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Sequences a batch.", show_default="1")]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", min=1, metavar="N", help="Tokens a sequence.", show_default="128, if the model takes it"),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Where to run: cpu, cuda, cuda:1, mps.", show_default="cpu"),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Run in this dtype: float32 (fp32), bfloat16 (bf16), float16 (fp16) or float64 (fp64).",
        show_default="the model's own",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of everything random.")]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="NAME", help="Branch, tag or commit of a Hugging Face model.", show_default="main"
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="Spread a large model through accelerate, e.g. auto.",
        show_default="one device",
    ),
]
OffloadFolder = Annotated[
    Path | None,
    typer.Option(
        "--offload-folder", metavar="DIR", help="Where weights that do not fit in memory go.", show_default="nowhere"
    ),
]
Laws = Annotated[
    str | None,
    typer.Option(
        "--laws",
        metavar="NAMES",
        help="Laws to ask: all, none, or names joined by commas, as causal,padding.",
        show_default="all",
    ),
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
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="Processes of the engine.", show_default="one a CPU"),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="HOST:PORT", help="A Ray cluster.", show_default="one is started here"),
]


def _speak(lang: Choice) -> Choice:
    """Set the language of messages on stderr; this callback of `--lang` runs before the verb."""
    from sqrtdk.cli.output import speak

    speak(language(lang))
    return lang


Lang = Annotated[
    Choice,
    typer.Option(
        "--lang",
        callback=_speak,
        help="Language of what people read; auto: that of LC_ALL, LC_MESSAGES or LANG.",
    ),
]
ShowTraceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]


def language(lang: Choice) -> Language:
    """Return the language that `--lang` stands for in this environment."""
    return chosen(lang, os.environ)


def refuse(given: Mapping[str, object], where: str, instead: str) -> None:
    """Refuse options that would be ignored silently.

    Args:
        given: option -> value; None and False mean that it was not given.
        where: phrase for the situation in which they are ignored: "with --static".
        instead: a command that lists the options which apply.

    Raises:
        InvalidValueError: an option was given.
    """
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        raise InvalidValueError(
            f"{', '.join(names)} given {where}", hint=f"Leave {'it' if len(names) == 1 else 'them'} out; see {instead}."
        )


def file_or_stdout(name: str | None, taken: bool) -> Path | None:
    """Return the file that an option names; None if it names stdout or is not given.

    Args:
        name: the option's value.
        taken: whether stdout already receives another document.

    Raises:
        InvalidValueError: two documents would be on stdout.
    """
    if name == STDOUT and taken:
        raise InvalidValueError(
            "--json and --markdown - both print on stdout, which takes one document",
            hint="Give --output FILE to the JSON, or a file to --markdown.",
        )
    return None if name is None or name == STDOUT else Path(name)
