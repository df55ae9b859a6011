"""Verbs that build models without weights: `sqrtdk configs FILE...` and `sqrtdk params [TARGET]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import fail, reported
from sqrtdk.cli.process import FAILED


def configs(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Configs of transformers, under any name.")],
    fail_on: Annotated[
        Literal["note", "warn", "unmeasured", "fail", "critical", "never"],
        typer.Option(help="Least severity of a finding that gives exit code 1."),
    ] = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Build each FILE's model on the meta device, without weights or network, and judge its scales.

    A FILE that names no model_type is no model's config, and is left out, aloud. Exit code 0: nothing found at
    --fail-on or above; 1: findings; 2: a FILE can't be read or built. All are looked at.
    """
    codes = {0}
    with reported(show_traceback):
        from sqrtdk._check import check_with
        from sqrtdk.cli.output import PIPE_WIDTH, colors, print_text, tell, width
        from sqrtdk.errors import SqrtdkError
        from sqrtdk.messages import word
        from sqrtdk.models.config import read_config_dict
        from sqrtdk.models.options import LoadOptions
        from sqrtdk.report.console import line
        from sqrtdk.report.plain import plain
        from sqrtdk.report.terminal import summary_line, to_text

        language = options.language(lang)
        for file in files:
            try:
                if "model_type" not in read_config_dict(file):
                    tell(f"{plain(str(file))}: not checked, it names no model_type")
                    continue
                report = check_with(str(file), None, LoadOptions(static=True), fail_on=fail_on)
            except SqrtdkError as error:
                tell(f"{plain(str(file))}: not checked")
                fail(error, show_traceback)
                codes.add(FAILED)
                continue
            quiet = not report.exit_code and not report.unjudged
            told = plain(str(file)) + word("words.mark.colon", language) + summary_line(report, language)
            wide = len(told.encode()) if width() == PIPE_WIDTH else width()  # unwrapped in a log
            print_text(line(told, wide) if quiet else to_text(report, width=width(), color=colors(), language=language))
            codes.add(report.exit_code)
    raise typer.Exit(max(codes))  # the worst file decides


def params(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A preset, a directory with config.json, a Hugging Face id, package.module:factory, or demo.",
            show_default="all presets",
        ),
    ] = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the factory.")] = 0,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Count the parameters of every attention of TARGET, a layer and in all; models are built without weights.

    Exit code 0: counted; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import announce, colors, print_text, width, working, written
        from sqrtdk.report.params import to_text

        _files.check_outputs((output,), force)
        with working(f"Counting {target or 'presets'}"):
            if target is not None and "/" in target:  # a name without a slash may be a preset
                from sqrtdk.models.names import check_name

                check_name(target, revision, announce)
            from sqrtdk.models.parameters import count_parameters

            document = count_parameters(target, revision=revision, trust_remote_code=trust_remote_code, seed=seed)
        text = json.dumps(document, indent=2, ensure_ascii=True) + "\n"
        if output is not None:
            _files.write_text(output, text, force)
            written("JSON", output)
        if json_ and output is None:
            print_text(text)
        else:
            print_text(to_text(document, width=width(), color=colors(), language=options.language(lang)))
