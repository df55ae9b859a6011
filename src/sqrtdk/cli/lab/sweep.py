"""`sqrtdk lab sweep`: what a scale does, over a grid."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


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
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes of the engine.", show_default="one a CPU")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A Ray cluster.", show_default="one is started here")
    ] = None,
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
