"""`sqrtdk baseline` keeps what a model's attentions do in a file for review; a later run fails on changes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.verbs import group_of, register

if TYPE_CHECKING:
    from sqrtdk.audit.records import CheckReport
    from sqrtdk.models.options import LoadOptions

baseline = group_of(
    "baseline", "Keep what a model's attentions do in a file, and fail a later run only on what changed."
)
FILE = "sqrtdk-baseline.json"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="As for sqrtdk check.")]
BaselineFile = Annotated[Path, typer.Argument(metavar="FILE", help="The baseline.")]
Static = Annotated[bool, typer.Option("--static", help="Build on the meta device: no weights, no figures.")]
FailOn = Literal["note", "warn", "unmeasured", "fail", "critical", "never"]


def write(
    model: Model,
    file: BaselineFile = Path(FILE),
    static: Static = False,
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
    laws: options.Laws = None,
    force: options.Force = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run MODEL and write what its attentions do to FILE: a line for each, with formula, ratio, verdict and findings.

    What is wrong now is written down as well, and does not fail later. Exit code 0: written; 2: not.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_writable(file, force)  # before torch is imported and the model runs
        from sqrtdk.audit.baseline import ledger
        from sqrtdk.cli.output import say, written
        from sqrtdk.models.options import LoadOptions
        from sqrtdk.report.baseline import ledger_line, to_file

        loading = LoadOptions(
            static=static, attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device,
            dtype=dtype, seed=seed, revision=revision, trust_remote_code=trust_remote_code, device_map=device_map,
            offload_folder=offload_folder,
        )  # fmt: skip
        kept = ledger(_checked(model, loading, laws, "never"))
        _files.write_text(file, to_file(kept), force)
        written("baseline", file)
        say(ledger_line(kept, options.language(lang)))


def check(
    model: Model,
    file: BaselineFile = Path(FILE),
    static: Static = False,
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
    laws: options.Laws = None,
    json_: options.Json = False,
    output: options.Output = None,
    sarif: options.Sarif = None,
    markdown: options.Markdown = None,
    force: options.Force = False,
    fail_on: Annotated[
        FailOn,
        typer.Option(help="Least severity of a new finding that fails. A changed attention fails too, but with never."),
    ] = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run MODEL and say what its attentions do otherwise than FILE says.

    Fails on an attention that was added, is gone, or has another formula, ratio or verdict, and on a finding at
    --fail-on that FILE has not. --sarif holds all findings, those that FILE knows too. Exit code 0: nothing fails; 1:
    something does; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        comment = options.file_or_stdout(markdown, json_ and output is None)
        _files.check_outputs((output, sarif, comment), force)  # before torch is imported and the model runs
        from sqrtdk.audit.baseline import compare, read
        from sqrtdk.cli.output import colors, print_text, say, width, written
        from sqrtdk.models.options import LoadOptions
        from sqrtdk.report.baseline import summary_line, to_json, to_markdown, to_text
        from sqrtdk.report.sarif import to_sarif

        before = read(file)
        loading = LoadOptions(
            static=static, attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device,
            dtype=dtype, seed=seed, revision=revision, trust_remote_code=trust_remote_code, device_map=device_map,
            offload_folder=offload_folder,
        )  # fmt: skip
        report = _checked(model, loading, laws, fail_on)
        comparison = compare(before, report, str(file))
        language = options.language(lang)
        wanted = [(output, to_json(comparison), "JSON")] if output is not None else []
        wanted += [(comment, to_markdown(comparison, language), "Markdown")] if comment is not None else []
        wanted += [(sarif, to_sarif(report), "SARIF")] if sarif is not None else []
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            written(kind, path)
        if (json_ and output is None) or markdown == options.STDOUT:
            print_text(to_markdown(comparison, language) if markdown == options.STDOUT else to_json(comparison))
            say(summary_line(comparison, language))
        else:
            print_text(to_text(comparison, width=width(), color=colors(), language=language))
        code = comparison.exit_code
    raise typer.Exit(code)


register(baseline, write)
register(baseline, check)


def _checked(model: str, loading: LoadOptions, laws: str | None, fail_on: str) -> CheckReport:
    from sqrtdk.cli.output import announce, working

    with working(f"Checking {model}"):
        from sqrtdk.models.names import check_name

        check_name(model, loading.revision, announce)
        from sqrtdk._check import check_with

        command = shlex.join(["sqrtdk", *sys.argv[1:]])
        return check_with(model, None, loading, laws=laws, fail_on=fail_on, command=command)
