"""`sqrtdk diff A B` says where two implementations of one model differ, and why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported

Attn = Literal["eager", "sdpa"]
FailOn = Literal["different", "unmeasured", "never"]

_FILES = (".safetensors", ".onnx", ".pt2")  # endings of sides that are files, not model names
_SIDE = (
    "A Hugging Face id, a local directory, package.module:factory, demo, or a file: trace (.safetensors), .onnx, .pt2."
)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other side, the same way.")],
    attn: options.Attn = None,
    attn_a: Annotated[
        Attn | None,
        typer.Option("--attn-a", help="Of A alone.", show_default="as --attn"),
    ] = None,
    attn_b: Annotated[
        Attn | None,
        typer.Option("--attn-b", help="Of B alone.", show_default="as --attn"),
    ] = None,
    dtype: options.Dtype = None,
    dtype_a: Annotated[
        str | None,
        typer.Option("--dtype-a", metavar="DTYPE", help="Of A alone.", show_default="as --dtype"),
    ] = None,
    dtype_b: Annotated[
        str | None,
        typer.Option("--dtype-b", metavar="DTYPE", help="Of B alone.", show_default="as --dtype"),
    ] = None,
    device: options.Device = None,
    device_a: Annotated[
        str | None,
        typer.Option("--device-a", metavar="DEVICE", help="Of A alone.", show_default="as --device"),
    ] = None,
    device_b: Annotated[
        str | None,
        typer.Option("--device-b", metavar="DEVICE", help="Of B alone.", show_default="as --device"),
    ] = None,
    revision: options.Revision = None,
    revision_a: Annotated[
        str | None,
        typer.Option("--revision-a", metavar="NAME", help="Of A alone.", show_default="as --revision"),
    ] = None,
    revision_b: Annotated[
        str | None,
        typer.Option("--revision-b", metavar="NAME", help="Of B alone.", show_default="as --revision"),
    ] = None,
    text: options.TextFile = None,
    input_file: options.InputFile = None,
    batch: options.Batch = None,
    seq_len: options.SeqLen = None,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_scale: Annotated[
        float | None,
        typer.Option(
            "--kv-scale",
            metavar="NUMBER",
            help="The one scale of a quantised cache that a side keeps of k and v.",
            show_default="found in the numbers",
        ),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            help="JSON object: site of A -> site of B, for what can't be guessed.",
            show_default="guessed",
        ),
    ] = None,
    json_: options.Json = False,
    output: options.Output = None,
    html: options.Html = None,
    force: options.Force = False,
    fail_on: Annotated[
        FailOn, typer.Option(help="What gives exit code 1: a difference; that, or what could not be judged; nothing.")
    ] = "different",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run A and B on the same inputs, and say of every attention whether it differs, where first, and why.

    Exit code 0: the same within rounding; 1: they differ; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_outputs((output, html), force)  # before torch is imported and the models run
        from sqrtdk.cli.output import announce, colors, print_text, say, width, working, written

        with working(f"Comparing {a} and {b}"):
            from sqrtdk.models.names import check_name

            for model, own in ((a, revision_a), (b, revision_b)):
                if not model.lower().endswith(_FILES):
                    check_name(model, own or revision, announce)
            from sqrtdk.compare.diff import diff_with
            from sqrtdk.compare.sides import options_of_sides
            from sqrtdk.models.options import LoadOptions
            from sqrtdk.report.diff import summary_line, to_text
            from sqrtdk.report.diff_html import to_html
            from sqrtdk.report.diff_json import to_json

            both = LoadOptions(
                attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len,
                device=device, dtype=dtype, seed=seed, revision=revision, trust_remote_code=trust_remote_code,
            )  # fmt: skip
            loading = options_of_sides(
                both, attn=(attn_a, attn_b), dtype=(dtype_a, dtype_b), device=(device_a, device_b),
                revision=(revision_a, revision_b),
            )  # fmt: skip
            command = shlex.join(["sqrtdk", *sys.argv[1:]])
            report = diff_with(
                a, b, None, *loading, mapping=mapping, kv_scale=kv_scale, fail_on=fail_on, command=command
            )
            documents: tuple[tuple[Path | None, Callable[[], str], str], ...]
            documents = ((output, lambda: to_json(report), "JSON"), (html, lambda: to_html(report, lang), "HTML"))
            wanted = [(path, draw(), kind) for path, draw, kind in documents if path is not None]
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            written(kind, path)
        if json_ and output is None:
            print_text(to_json(report))
            say(summary_line(report, options.language(lang)))
        else:
            print_text(to_text(report, width=width(), color=colors(), language=options.language(lang)))
        code = report.exit_code
    raise typer.Exit(code)
