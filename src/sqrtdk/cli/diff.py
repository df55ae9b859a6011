"""`sqrtdk diff A B` says where two implementations of one model differ, and why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.models.options import ATTN, LoadOptions

FailOn = Literal["different", "unmeasured", "never"]

_NOT_OF_TWO = ("static", "device_map", "offload_folder")  # loading options that a comparison does not have
OF_A_SIDE = ("attn", "dtype", "device", "revision")  # options that a side may have of its own
_FILES = (".safetensors", ".onnx", ".pt2")  # endings of sides that are files, not model names


def diff_verb(
    a: Annotated[str, typer.Argument(metavar="A", help="cli.diff.a")],
    b: Annotated[str, typer.Argument(metavar="B", help="cli.diff.b")],
    loading: Annotated[LoadOptions, options.LoadingFields(without=_NOT_OF_TWO)] = options.DEFAULT_LOADING,
    of_a: Annotated[
        list[str] | None,
        typer.Option("--a", metavar="OPTION=VALUE", help="cli.diff.of_a", show_default="cli.defaults.as_both"),
    ] = None,
    of_b: Annotated[
        list[str] | None,
        typer.Option("--b", metavar="OPTION=VALUE", help="cli.diff.of_b", show_default="cli.defaults.as_both"),
    ] = None,
    kv_scale: Annotated[
        float | None,
        typer.Option("--kv-scale", metavar="NUMBER", help="cli.diff.kv_scale", show_default="cli.defaults.found"),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option("--map", metavar="FILE", help="cli.diff.map", show_default="cli.defaults.guessed"),
    ] = None,
    json_: options.Json = False,
    output: options.Output = None,
    html: options.Html = None,
    force: options.Force = False,
    fail_on: Annotated[FailOn, typer.Option(help="cli.diff.fail_on")] = "different",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run two models on the same inputs, print or write where they differ, and end with the exit code.

    Args:
        a: Name or path of the first model, or a file: a trace (.safetensors), .onnx or .pt2.
        b: Name or path of the second one, likewise.
        loading: How to load both, and the inputs that they run on.
        of_a: Options of the first model alone, as "option=value".
        of_b: Options of the second model alone, likewise.
        kv_scale: The scale of a quantised cache that one of the models keeps; None if it is to be found.
        mapping: JSON file that maps sites of the first model to those of the second; None if they are guessed.
        json_: Whether to print JSON.
        output: File to write JSON to.
        html: File of the page; None for no page.
        force: Whether to replace existing files.
        fail_on: What gives the exit code 1.
        lang: Language of the report.
        show_traceback: Whether an error shows its traceback.

    Raises:
        typer.Exit: Always at the end, with the exit code.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        own_a, own_b = options_of_side("--a", of_a), options_of_side("--b", of_b)
        _files.check_outputs((output, html), force)  # before torch is imported and the models run
        from sqrtdk.cli.output import announce, colors, print_text, say_written, width, working, write_stderr

        with working(Message("progress.comparing", a=a, b=b)):
            from sqrtdk.models.names import check_name

            for model, own in ((a, own_a.get("revision")), (b, own_b.get("revision"))):
                if not model.lower().endswith(_FILES):
                    check_name(model, own or loading.revision, announce)
            from sqrtdk.compare.diff import diff_with
            from sqrtdk.compare.sides import options_of_sides
            from sqrtdk.report.diff.html import to_html
            from sqrtdk.report.diff.json import to_json
            from sqrtdk.report.diff.terminal import diff_summary_line, to_text

            options_a, options_b = options_of_sides(
                loading, **{name: (own_a.get(name), own_b.get(name)) for name in OF_A_SIDE}
            )
            command = shlex.join(["sqrtdk", *sys.argv[1:]])
            report = diff_with(
                a, b, None, options_a, options_b, mapping=mapping, kv_scale=kv_scale, fail_on=fail_on, command=command
            )
            documents: tuple[tuple[Path | None, Callable[[], str], str], ...]
            documents = ((output, lambda: to_json(report), "JSON"), (html, lambda: to_html(report, lang), "HTML"))
            wanted = [(path, draw(), kind) for path, draw, kind in documents if path is not None]
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            say_written(kind, path)
        if json_ and output is None:
            print_text(to_json(report))
            write_stderr(diff_summary_line(report, options.language_of_choice(lang)))
        else:
            print_text(to_text(report, width=width(), color=colors(), language=options.language_of_choice(lang)))
        code = report.exit_code
    raise typer.Exit(code)


def options_of_side(option: str, written: Sequence[str] | None) -> dict[str, str]:
    """Return the options of one side by name.

    Args:
        option: "--a" or "--b", for the error.
        written: its values on the command line.

    Raises:
        InvalidValueError: A value is not OPTION=VALUE, the side has no such option, or has it twice.

    Example:
        >>> options_of_side("--b", ["attn=eager", "dtype=bf16"])
        {'attn': 'eager', 'dtype': 'bf16'}
    """
    own: dict[str, str] = {}
    for text in written or ():
        name, _, value = text.partition("=")
        if name not in OF_A_SIDE or not value or name in own or (name == "attn" and value not in ATTN):
            hint = Message("errors.hint.of_side", option=option, attn="|".join(ATTN))
            called = next((known for known in OF_A_SIDE if known in name), name)
            if called != name and value:  # attn_implementation=eager, torch_dtype=bfloat16: Hugging Face's names
                hint = Message("errors.hint.of_side_called", written=f"{option} {called}={value}")
            id = "errors.options.of_side_twice" if name in own else "errors.options.of_side"
            raise InvalidValueError(Message(id, option=option, text=text), hint=hint)
        own[name] = value
    return own
