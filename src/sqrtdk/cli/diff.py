"""`sqrtdk diff A B` says where two implementations of one model differ, and why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sqrtdk._language import Choice, Language
from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.server import FOR_A_COMPARISON, NO_SERVER, ServerOptions, server_of
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.models.names import is_address
from sqrtdk.models.options import ATTN, LoadOptions

if TYPE_CHECKING:
    from sqrtdk.answers.server import Server

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
    backward: Annotated[bool, typer.Option("--backward", help="cli.diff.backward")] = False,
    json_: options.Json = False,
    output: options.Output = None,
    html: options.Html = None,
    force: options.Force = False,
    answers: Annotated[bool, typer.Option("--answers", help="cli.diff.answers")] = False,
    server: Annotated[ServerOptions, options.Fields(NO_SERVER, FOR_A_COMPARISON)] = NO_SERVER,
    fail_on: Annotated[FailOn, typer.Option(help="cli.diff.fail_on")] = "different",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run two models on the same inputs, print or write where they differ, and end with the exit code.

    Args:
        a: Name or path of the first model, or a file: a trace (.safetensors), .onnx, .pt2 or .gguf.
        b: Name or path of the second one, likewise.
        loading: How to load both, and the inputs that they run on.
        of_a: Options of the first model alone, as "option=value".
        of_b: Options of the second model alone, likewise.
        kv_scale: The scale of a quantised cache that one of the models keeps; None if it is to be found.
        mapping: JSON file that maps sites of the first model to those of the second; None if they are guessed.
        backward: Whether to compare the gradients too.
        json_: Whether to print JSON.
        output: File to write JSON to.
        html: File of the page; None for no page.
        force: Whether to replace existing files.
        answers: Whether B only answers: a function of token ids, or an ONNX file that onnxruntime runs. The address of
            a server always does.
        server: How a server is asked, where B is an address.
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
        from sqrtdk.cli.output import colors, print_text, say_written, width, working, write_stderr

        with working(Message("progress.comparing", a=a, b=b)):
            command = shlex.join(["sqrtdk", *sys.argv[1:]])
            if not is_address(b):
                options.refuse_ignored(server.by_option, Message("errors.options.without_server"), "sqrtdk diff --help")
            if answers or is_address(b):
                where = Message("errors.options.of_answers")
                options.refuse_ignored({"--backward": backward}, where, "sqrtdk diff --help")
                drawn = _of_answers(a, server_of(b, server) if is_address(b) else b, loading, fail_on, command)
            else:
                drawn = _of_two(a, b, loading, (own_a, own_b), mapping, kv_scale, backward, fail_on, command)
            documents: tuple[tuple[Path | None, Callable[[], str], str], ...]
            documents = ((output, drawn.json, "JSON"), (html, lambda: drawn.html(lang), "HTML"))
            wanted = [(path, draw(), kind) for path, draw, kind in documents if path is not None]
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            say_written(kind, path)
        language = options.language_of_choice(lang)
        if json_ and output is None:
            print_text(drawn.json())
            write_stderr(drawn.summary(language))
        else:
            print_text(drawn.text(width(), colors(), language))
        code = drawn.exit_code
    raise typer.Exit(code)


@dataclass(frozen=True)
class _Drawn:
    """A report, and how it is drawn.

    Attributes:
        exit_code: Its exit code.
        json: Returns the document.
        html: Returns the page, in a language.
        text: Returns the text of the terminal: width in columns, whether in colours, language.
        summary: Returns its last line.
    """

    exit_code: int
    json: Callable[[], str]
    html: Callable[[Choice], str]
    text: Callable[[int, bool, Language], str]
    summary: Callable[[Language], str]


def _of_two(
    a: str,
    b: str,
    loading: LoadOptions,
    own: tuple[dict[str, str], dict[str, str]],
    mapping: Path | None,
    kv_scale: float | None,
    backward: bool,
    fail_on: FailOn,
    command: str,
) -> _Drawn:
    """Compare two models that run here."""
    from sqrtdk.cli.output import announce
    from sqrtdk.models.names import check_name

    for model, options_of_one in ((a, own[0]), (b, own[1])):
        if not model.lower().endswith(_FILES):
            check_name(model, options_of_one.get("revision") or loading.revision, announce)
    from sqrtdk.compare.diff import diff_with
    from sqrtdk.compare.sides import options_of_sides
    from sqrtdk.report.diff.html import to_html
    from sqrtdk.report.diff.json import to_json
    from sqrtdk.report.diff.terminal import diff_summary_line, to_text

    each = {name: (own[0].get(name), own[1].get(name)) for name in OF_A_SIDE}
    options_a, options_b = options_of_sides(loading, **each)
    report = diff_with(
        a, b, None, options_a, options_b, mapping=mapping, kv_scale=kv_scale, backward=backward, fail_on=fail_on,
        command=command,
    )  # fmt: skip
    return _Drawn(
        report.exit_code,
        lambda: to_json(report),
        lambda lang: to_html(report, lang),
        lambda width, color, language: to_text(report, width=width, color=color, language=language),
        lambda language: diff_summary_line(report, language),
    )


def _of_answers(a: str, b: Server | str, loading: LoadOptions, fail_on: FailOn, command: str) -> _Drawn:
    """Compare a model with a side that only answers."""
    from sqrtdk.answers.compare import diff_answers
    from sqrtdk.cli.output import announce
    from sqrtdk.models.names import check_name
    from sqrtdk.report.answers.html import to_html
    from sqrtdk.report.answers.json import to_json
    from sqrtdk.report.answers.terminal import answers_summary_line, to_text

    check_name(a, loading.revision, announce)
    report = diff_answers(a, b, options=loading, fail_on=fail_on, command=command)
    return _Drawn(
        report.exit_code,
        lambda: to_json(report),
        lambda lang: to_html(report, lang),
        lambda width, color, language: to_text(report, width=width, color=color, language=language),
        lambda language: answers_summary_line(report, language),
    )


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
