"""`sqrtdk lab` lists, runs and reports claims about sqrt(d_k) as experiments, and runs sweeps."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.verbs import group_of, register


def list_claims(
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """List every claim of the register: its id, who says it, and what it says."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width
        from sqrtdk.report import lab

        print_text(
            lab.register_json() if json_ else lab.register_text(options.language(lang), width=width(), color=colors())
        )


def show(
    claim: Annotated[str, typer.Argument(metavar="ID", help="A claim of `sqrtdk lab list`.")],
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Show a claim: statement, formula, method, control, parameters, and what counts as true."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width
        from sqrtdk.errors import InvalidValueError
        from sqrtdk.lab.register import SEE_ALL, find
        from sqrtdk.report import lab

        if claim == "all":
            raise InvalidValueError("one claim can be shown; got 'all'", hint=SEE_ALL)
        (chosen,) = find([claim])
        text = (
            lab.claim_json(chosen)
            if json_
            else lab.claim_text(chosen, options.language(lang), width=width(), color=colors())
        )
        print_text(text)


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
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
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

        find(claims)  # an unknown id is refused before anything runs
        folder = output or Path("sqrtdk-lab") / f"{'quick' if quick else 'full'}-seed{seed}"
        with working("Starting") as progress:
            from sqrtdk import _extras
            from sqrtdk.lab.runner import run as run_claims
            from sqrtdk.report.plots import write_plots

            _extras.load("matplotlib.figure")  # fail on a missing matplotlib now, not after an hour of experiments
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


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `sqrtdk lab run` wrote.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.", show_default="report.html in DIR")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page if it exists.")] = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Make one self-contained page of the records: the register with its verdicts, then each claim.

    English and Simplified Chinese; it opens without a network.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import listed, tell, working, written

        target = output or folder / "report.html"
        from sqrtdk.lab.runner import not_run, records

        with working(f"Reading {folder}"):
            recorded = records(folder)
            missing = not_run(recorded)
            _files.check_writable(target, force)
            from sqrtdk.report.lab_page import to_html

            page = to_html(recorded, missing, lang)
        _files.write_text(target, page, force)
        if missing:
            tell(f"Not run, {len(missing)} of {len(missing) + len(recorded)} claims: {listed(missing)}")
        written("HTML", target)


def sweep(
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of the results; one that holds a part of them is gone on.")
    ],
    d_k: Annotated[str, typer.Option("--d-k", metavar="LIST", help="Head dimensions, as 16,64,256.")] = "16,64,256",
    keys: Annotated[str, typer.Option(metavar="LIST", help="Keys a row sees.")] = "16,256",
    scale: Annotated[
        str, typer.Option(metavar="LIST", help="Scale rules: sqrt_dk, none, dk, log_n, fixed=0.1, temperature=2, ...")
    ] = "sqrt_dk,none",
    distribution: Annotated[
        str,
        typer.Option(metavar="LIST", help="Of the components: normal, uniform, rademacher, student_t, sparse."),
    ] = "normal",
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Seeds, one cell each.")] = 3,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="The first seed.")] = 0,
    rows: Annotated[int, typer.Option(metavar="N", help="Rows of a cell.")] = 512,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Where cells are computed: local, pool, ray.")] = "local",
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
    force: Annotated[bool, typer.Option("--force", help="Begin anew, whatever the directory holds.")] = False,
    json_: options.Json = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Measure logits and weights of random rows over a grid, and compare them with the theory.

    Every combination of the lists is a cell. The same command goes on where an interrupted one stopped, and gives the
    same table with every engine. Numbers of another version of sqrtdk or torch are neither gone on with nor shown.

    Exit code 0: the table is whole; 2: usage, configuration or input/output error; 130: interrupted.
    """
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, counting, print_text, tell, width
        from sqrtdk.report.plain import plain

        with counting("Cells") as progress:
            from sqrtdk import _json
            from sqrtdk.lab.sweep import Grid, summary, whole_numbers, words
            from sqrtdk.lab.sweep import sweep as run
            from sqrtdk.report.sweep import to_text

            grid = Grid(
                d_k=whole_numbers(d_k, "d_k"),
                keys=whole_numbers(keys, "keys"),
                scale=words(scale, "scale"),
                distribution=words(distribution, "distribution"),
                seeds=range(seed, seed + seeds),
                rows=rows,
            )
            command = shlex.join(["sqrtdk", *sys.argv[1:]])
            try:
                swept = run(grid, output, engine, workers, ray_address, progress, force, command)
            except KeyboardInterrupt:
                tell(f"What ended is kept in {plain(str(output))}; the same command goes on with the rest.")
                raise
            document = summary(swept)
        print_text(
            _json.document(document)
            if json_
            else to_text(document, width=width(), color=colors(), language=options.language(lang))
        )


lab = group_of("lab", "Claims about sqrt(d_k) as experiments: a control, intervals and a verdict each.")
register(lab, list_claims, "list")
for _verb in (show, run, report, sweep):
    register(lab, _verb)
