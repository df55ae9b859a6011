"""`sqrtdk params [TARGET]` counts the parameters of attention, in models that are built without weights."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.messages import Message
from sqrtdk.models.options import LoadOptions

FactorySeed = Annotated[int, typer.Option("--seed", metavar="N", help="cli.params.seed")]


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
    """Count the parameters of every attention of a model, a config or a preset, and print or write them.

    Args:
        target: The model, the config or the name of a preset; None for all presets.
        loading: Revision, seed, and whether to trust remote code.
        json_: Whether to print JSON.
        output: File to write JSON to.
        force: Whether to replace an existing file.
        lang: Language of the tables.
        show_traceback: Whether an error shows its traceback.
    """
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
