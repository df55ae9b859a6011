"""`sqrtdk lab run ID...`: measure claims and judge them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported

Engine = Literal["local", "pool", "ray"]


def run(
    claims: Annotated[list[str], typer.Argument(metavar="ID...", help="Claims of `sqrtdk lab list`, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples and steps; the verdicts are the same.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of everything random.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of the records and plots.", show_default="sqrtdk-lab/{quick,full}-seedN"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure anew and replace what is there.")] = False,
    engine: Annotated[Engine, typer.Option(help="What trains the models of the training claims.")] = "pool",
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes of the engine.", show_default="one a CPU")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A Ray cluster.", show_default="one is started here")
    ] = None,
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run the experiments of claims; write a record and the plots of each, and print the verdicts.

    A record that is there from a run of the same settings is reused, so an interrupted run goes on where it stopped.

    Exit code 0: every claim has its verdict; 1: a claim or its control is undecided, or a part of one is, or the
    control gave the same verdict as the claim, which then says nothing; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width, working
        from sqrtdk.lab.register import find
        from sqrtdk.report import lab

        find(claims)
        folder = output or Path("sqrtdk-lab") / f"{'quick' if quick else 'full'}-seed{seed}"
        with working("Starting") as progress:
            from sqrtdk import _extras
            from sqrtdk.lab.runner import run as run_claims
            from sqrtdk.report.plots import write_plots

            _extras.load("matplotlib.figure")  # missing, it shall be missed before an hour of experiments
            running = run_claims(
                claims,
                quick=quick,
                seed=seed,
                output=folder,
                force=force,
                engine=engine,
                workers=workers,
                ray_address=ray_address,
                command=shlex.join(["sqrtdk", *sys.argv[1:]]),
                progress=progress,
                draw=write_plots,
            )
            finished = list(running)
        if json_:
            print_text(lab.verdicts_json(finished))
        else:
            print_text(lab.verdicts_text(finished, folder, options.language(lang), width=width(), color=colors()))
        answered = (
            done.record.sound and done.record.decided and done.record.outcome.verdict.answer != "undecided"
            for done in finished
        )
        code = 0 if all(answered) else 1
    raise typer.Exit(code)
