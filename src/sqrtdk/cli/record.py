"""`sqrtdk record MODEL --output FILE` writes the tensors of every attention of a model to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.messages import Message
from sqrtdk.models.options import LoadOptions


def record_verb(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="cli.record.model")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="cli.record.output")],
    calls: Annotated[str, typer.Option(metavar="PATTERN", help="cli.record.calls")] = "*",
    rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="cli.record.rows", show_default="cli.defaults.all")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="LIST", help="cli.record.heads", show_default="cli.defaults.all")
    ] = None,
    projections: Annotated[bool, typer.Option("--projections", help="cli.record.projections")] = False,
    loading: Annotated[LoadOptions, options.LoadingFields(without=("static",))] = options.DEFAULT_LOADING,
    force: Annotated[bool, typer.Option("--force", help="cli.record.force")] = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run a model once, and write the tensors of every attention to a trace file.

    Args:
        model: Name or path of the model.
        output: The trace file.
        calls: Pattern of the attentions to record; "*" for all.
        rows: Largest number of rows to record; None for all.
        heads: List of the heads to record; None for all.
        projections: Whether to record the inputs and weights of the projections as well.
        loading: How to load the model, and the inputs that it runs on.
        force: Whether to replace an existing file.
        lang: Language of messages.
        show_traceback: Whether an error shows its traceback.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_writable(output, force)  # before torch is imported and the model runs
        from sqrtdk.cli.output import announce, tell_reader, working
        from sqrtdk.report.plain import plain

        with working(Message("progress.recording", model=model)):
            from sqrtdk.models.names import check_name

            check_name(model, loading.revision, announce)
            from sqrtdk.recording.cut import parse_heads
            from sqrtdk.recording.record import record_with

            recording = record_with(
                model,
                None,
                output,
                loading,
                calls=calls,
                rows=rows,
                heads=None if heads is None else parse_heads(heads),
                projections=projections,
                force=force,
                announce=tell_reader,
            )
        for note in recording.notes:
            tell_reader(Message("progress.note_sentence", note=note))
        tell_reader(Message("progress.trace_file", path=plain(str(output))))
