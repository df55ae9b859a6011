"""`sqrtdk record MODEL --output FILE` writes the tensors of every attention of a model to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


def record(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face id, a local directory, package.module:factory, or the embedded model: demo.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The trace file to write, as .safetensors.")],
    calls: Annotated[
        str, typer.Option(metavar="PATTERN", help="Sites to record, as a pattern of the shell: 'layers.0.*'.")
    ] = "*",
    rows: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Keep the first N query rows of each call; keys stay.", show_default="all"
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Query heads to keep, with the key heads they read: 0,3 or 0-7.",
            show_default="all",
        ),
    ] = None,
    projections: Annotated[
        bool, typer.Option("--projections", help="Write the projections' weights, and what they were given, as well.")
    ] = False,
    attn: options.Attn = None,
    text: options.TextFile = None,
    input_file: options.InputFile = None,
    batch: options.Batch = None,
    seq_len: options.SeqLen = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device_map: options.DeviceMap = None,
    offload_folder: options.OffloadFolder = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run MODEL once and write a trace file: q, k, v, output, masks and formula of every attention, with the inputs.

    The file is safetensors; docs/en/trace-file.md describes it, with a writer for other engines. Its size is told
    before it is written. Exit code 0: written; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_writable(output, force)  # before torch is imported and the model runs
        from sqrtdk.cli.output import announce, tell, working
        from sqrtdk.report.plain import plain

        with working(f"Recording {model}"):
            from sqrtdk.models.names import check_name

            check_name(model, revision, announce)
            from sqrtdk.models.options import LoadOptions
            from sqrtdk.recording.cut import parse_heads
            from sqrtdk.recording.record import record_with

            loading = LoadOptions(
                attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device, dtype=dtype,
                seed=seed, revision=revision, trust_remote_code=trust_remote_code, device_map=device_map,
                offload_folder=offload_folder,
            )  # fmt: skip
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
                announce=tell,
            )
        for note in recording.notes:
            tell(f"Note: {note}.")
        tell(f"Trace file: {plain(str(output))}")
