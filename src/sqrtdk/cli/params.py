"""`sqrtdk params [TARGET]`: how many parameters attention has, a layer and in all."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


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
            if target is not None and "/" in target:  # any other name may be a preset
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
