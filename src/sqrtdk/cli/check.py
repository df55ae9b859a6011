"""`sqrtdk check [MODEL]`: audit every attention of a model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported

Attn = Literal["eager", "sdpa", "both"]
KvDtype = Literal["fp8_e4m3", "fp8_e5m2", "int8", "q8_0", "int4"]
FailOn = Literal["note", "warn", "unmeasured", "fail", "critical", "never"]
_OF_A_DIFF: dict[str, Literal["different", "unmeasured", "never"]] = {  # --fail-on of check -> of diff
    "fail": "different",
    "unmeasured": "unmeasured",
    "never": "never",
}


def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face id, a local directory, package.module:factory, a graph (.onnx, .pt2, .gguf), or "
            "the embedded model: demo, demo:unscaled, demo:twice, demo:inverted.",
        ),
    ] = "demo",
    static: Annotated[bool, typer.Option("--static", help="Build on the meta device: no weights, no figures.")] = False,
    attn: Annotated[
        Attn | None,
        typer.Option(
            help="Attention implementation to run; both lists the calls of eager, then those of sdpa.",
            show_default="the model's own",
        ),
    ] = None,
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
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Of a graph: judge it by what the attentions of MODEL do.", show_default="no model"
        ),
    ] = None,
    run_graph: Annotated[
        bool, typer.Option("--run", help="Of a graph: run it on the CPU; with --like, diff it with MODEL.")
    ] = False,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(
            "--kv-dtype", help="Forecast what a cache of k and v in this format would do.", show_default="no forecast"
        ),
    ] = None,
    kv_scale: Annotated[
        str | None,
        typer.Option(
            "--kv-scale",
            metavar="GRAIN",
            help="What shares a scale in that cache: tensor, head, token, channel; or a number, the scale of all.",
            show_default="the format's own",
        ),
    ] = None,
    kv_rows: Annotated[
        int | None,
        typer.Option("--kv-rows", min=1, metavar="N", help="Most rows of a call in that forecast.", show_default="256"),
    ] = None,
    json_: options.Json = False,
    output: options.Output = None,
    html: options.Html = None,
    sarif: options.Sarif = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    force: options.Force = False,
    fail_on: Annotated[FailOn, typer.Option(help="Least severity of a finding that gives exit code 1.")] = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Audit every attention of MODEL: its formula, its scale, and how healthy its logits are.

    Exit code 0: nothing found at --fail-on or above; 1: findings; 2: usage, configuration or input/output error.
    """
    if like is not None and run_graph:
        from sqrtdk.cli.diff import diff

        with reported(show_traceback):
            given = {
                "--static": static, "--attn": attn, "--text": text, "--batch": batch, "--seq-len": seq_len,
                "--device": device, "--dtype": dtype, "--revision": revision, "--device-map": device_map,
                "--offload-folder": offload_folder, "--laws": laws, "--kv-dtype": kv_dtype, "--kv-scale": kv_scale,
                "--kv-rows": kv_rows, "--sarif": sarif, "--junit": junit, "--markdown": markdown,
                f"--fail-on {fail_on}": fail_on not in _OF_A_DIFF,
            }  # fmt: skip
            options.refuse(given, "with --like and --run, which are sqrtdk diff", f"sqrtdk diff {like} {model} --help")
        diff(  # ends with typer.Exit, so the audit below does not run
            like, model, seed=seed, input_file=input_file, trust_remote_code=trust_remote_code, json_=json_,
            output=output, html=html, force=force, lang=lang, show_traceback=show_traceback,
            fail_on=_OF_A_DIFF[fail_on],
        )  # fmt: skip
    with reported(show_traceback):
        from sqrtdk import _files

        comment = options.file_or_stdout(markdown, json_ and output is None)
        _files.check_outputs((output, html, sarif, junit, comment), force)  # before torch is imported
        from sqrtdk.cli.output import announce, colors, print_text, say, width, working, written

        with working(f"Checking {model}"):
            from sqrtdk.models.names import check_name

            check_name(model, revision, announce)
            from sqrtdk.kv.request import asked, check_and_forecast
            from sqrtdk.models.options import LoadOptions
            from sqrtdk.report.html import to_html
            from sqrtdk.report.json import to_json
            from sqrtdk.report.junit import to_junit
            from sqrtdk.report.markdown import to_markdown
            from sqrtdk.report.sarif import to_sarif
            from sqrtdk.report.terminal import summary_line, to_text

            cache = asked(model, kv_dtype, kv_scale, kv_rows, static)
            loading = LoadOptions(
                static=static, attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device,
                dtype=dtype, seed=seed, revision=revision, trust_remote_code=trust_remote_code, device_map=device_map,
                offload_folder=offload_folder,
            )  # fmt: skip
            command = shlex.join(["sqrtdk", *sys.argv[1:]])
            report = check_and_forecast(
                model, loading, cache, laws=laws, fail_on=fail_on, command=command, like=like, run_graph=run_graph
            )
            language = options.language(lang)
            documents: tuple[tuple[Path | None, Callable[[], str], str], ...] = (
                (output, lambda: to_json(report), "JSON"),
                (html, lambda: to_html(report, lang), "HTML"),
                (sarif, lambda: to_sarif(report), "SARIF"),
                (junit, lambda: to_junit(report), "JUnit XML"),
                (comment, lambda: to_markdown(report, language), "Markdown"),
            )
            wanted = [(path, draw(), kind) for path, draw, kind in documents if path is not None]
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            written(kind, path)
        if (json_ and output is None) or markdown == options.STDOUT:
            print_text(to_markdown(report, language) if markdown == options.STDOUT else to_json(report))
            say(summary_line(report, language))
        else:
            print_text(to_text(report, width=width(), color=colors(), language=language))
        code = report.exit_code
    raise typer.Exit(code)
