"""Verbs that build models without weights: `sqrtdk configs FILE...` and `sqrtdk params [TARGET]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import fail, reported
from sqrtdk.cli.process import EXIT_FAILED
from sqrtdk.messages import Message
from sqrtdk.models.options import LoadOptions

FactorySeed = Annotated[int, typer.Option("--seed", metavar="N", help="cli.params.seed")]


def configs(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="cli.configs.files")],
    fail_on: options.FailOn = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Judge the scales of each config's model, and end with the exit code of the worst."""
    codes = {0}
    with reported(show_traceback):
        from sqrtdk._check import check_with
        from sqrtdk.cli.output import PIPE_WIDTH, colors, print_text, tell_reader, width
        from sqrtdk.errors import SqrtdkError
        from sqrtdk.messages import word
        from sqrtdk.models.config import read_config_dict
        from sqrtdk.report.console import line
        from sqrtdk.report.plain import plain
        from sqrtdk.report.terminal import summary_line, to_text

        language = options.language_of_choice(lang)
        for file in files:
            try:
                if "model_type" not in read_config_dict(file):
                    tell_reader(Message("progress.no_model_type", file=plain(str(file))))
                    continue
                report = check_with(str(file), None, LoadOptions(static=True), fail_on=fail_on)
            except SqrtdkError as error:
                tell_reader(Message("progress.not_checked", file=plain(str(file))))
                fail(error, show_traceback)
                codes.add(EXIT_FAILED)
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
        typer.Argument(metavar="TARGET", help="cli.params.target", show_default="cli.defaults.presets"),
    ] = None,
    loading: Annotated[
        LoadOptions,
        options.LoadingFields(only=("revision", "trust_remote_code", "seed"), instead={"seed": FactorySeed}),
    ] = options.DEFAULT_LOADING,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Count the parameters of every attention of a target."""
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import announce, colors, print_text, say_written, width, working
        from sqrtdk.report.params import to_text

        _files.check_outputs((output,), force)
        with working(Message("progress.counting", model=target or Message("progress.presets"))):
            if target is not None and "/" in target:  # a name without a slash may be a preset
                from sqrtdk.models.names import check_name

                check_name(target, loading.revision, announce)
            from sqrtdk.models.parameters import count_parameters

            document = count_parameters(
                target, revision=loading.revision, trust_remote_code=loading.trust_remote_code, seed=loading.seed
            )
        text = json.dumps(document, indent=2, ensure_ascii=True) + "\n"
        if output is not None:
            _files.write_text(output, text, force)
            say_written("JSON", output)
        if json_ and output is None:
            print_text(text)
        else:
            print_text(to_text(document, width=width(), color=colors(), language=options.language_of_choice(lang)))
