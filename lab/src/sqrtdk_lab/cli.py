"""`sqrtdk lab` lists, runs and reports claims about sqrt(d_k) as experiments; `sqrtdk app` serves the explorer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.verbs import group_of, register_verb
from sqrtdk.messages import Message, joined

if TYPE_CHECKING:
    from sqrtdk.extending import Choice


def list_claims(
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Print the register of claims."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width
        from sqrtdk_lab.report import terminal

        print_text(
            terminal.register_json()
            if json_
            else terminal.register_text(options.language_of_choice(lang), width=width(), color=colors())
        )


def show_claim(
    claim: Annotated[str, typer.Argument(metavar="ID", help="cli.lab.claim")],
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Print a claim and how it is measured."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width
        from sqrtdk.errors import InvalidValueError
        from sqrtdk_lab.register import SEE_ALL, find_claims
        from sqrtdk_lab.report import terminal

        if claim == "all":
            raise InvalidValueError(Message("errors.lab.one_claim"), hint=Message(SEE_ALL))
        (chosen,) = find_claims([claim])
        text = (
            terminal.claim_json(chosen)
            if json_
            else terminal.claim_text(chosen, options.language_of_choice(lang), width=width(), color=colors())
        )
        print_text(text)


REPORT = "report.html"  # name of the page of the records in their directory
Engine = Literal["local", "pool", "ray"]


def run(
    claims: Annotated[list[str], typer.Argument(metavar="ID...", help="cli.lab.claims")],
    quick: Annotated[bool, typer.Option("--quick", help="cli.lab.quick")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="cli.options.seed")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="cli.lab.records", show_default="sqrtdk-lab/{quick,full}-seedN"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="cli.lab.anew")] = False,
    engine: Annotated[Engine, typer.Option(help="cli.lab.engine")] = "pool",
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run the experiments of claims, print what came out, and make the page of the directory's records."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width, working
        from sqrtdk_lab.register import find_claims
        from sqrtdk_lab.report import terminal

        find_claims(claims)  # an unknown id is refused before anything runs
        folder = output or Path("sqrtdk-lab") / f"{'quick' if quick else 'full'}-seed{seed}"
        with working(Message("progress.starting")) as progress:
            from sqrtdk.extending import load_extra, write_text
            from sqrtdk_lab.report.plots import write_plots
            from sqrtdk_lab.runner import run as run_claims

            # What draws the plots and the page fails now if it is missing, not after an hour of experiments.
            for module in ("matplotlib.figure", "latex2mathml.converter"):
                load_extra(module)
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
            report = folder / REPORT
            progress(Message("progress.writing", path=str(report)))
            ran = [done.record.id for done in finished]
            write_text(report, _page(folder, lang, drawn_in=folder, ran=ran)[0], force=True)
        if json_:
            print_text(terminal.verdicts_json(finished, report))
        else:
            language = options.language_of_choice(lang)
            print_text(terminal.verdicts_text(finished, folder, report, language, width=width(), color=colors()))
        answered = (
            done.record.sound and done.record.decided and done.record.outcome.verdict.answer != "undecided"
            for done in finished
        )
        code = 0 if all(answered) else 1
    raise typer.Exit(code)


def _page(folder: Path, lang: Choice, drawn_in: Path | None = None, ran: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return the page of a directory's records, and the claims that have none; see `to_html` for the options."""
    from sqrtdk_lab.report.page import to_html
    from sqrtdk_lab.runner import claims_without_record, records

    recorded = records(folder)
    missing = claims_without_record(recorded)
    return to_html(recorded, missing, lang, drawn_in, ran), missing


def report_records(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="cli.lab.folder")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="cli.options.page", show_default="cli.defaults.report_in_dir")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="cli.lab.force_page")] = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Make one page of the records."""
    with reported(show_traceback):
        from sqrtdk.cli.output import say_written, tell_reader, working
        from sqrtdk.extending import check_writable, write_text
        from sqrtdk_lab.register import CLAIMS

        target = output or folder / REPORT
        replace = force or output is None  # `lab run` wrote the page of the directory, and would write it again
        with working(Message("progress.reading", run=str(folder))):
            if output is not None:  # before the work; a directory without records is told by the records
                check_writable(target, replace)
            page, missing = _page(folder, lang)
        write_text(target, page, replace)
        if missing:
            names = joined(missing, "comma")
            tell_reader(Message("progress.not_run", count=len(missing), all=len(CLAIMS), claims=names))
        say_written("HTML", target)


def run_sweep(
    output: Annotated[Path, typer.Option(metavar="DIR", help="cli.lab.results")],
    d_k: Annotated[str, typer.Option("--d-k", metavar="LIST", help="cli.lab.d_k")] = "16,64,256",
    keys: Annotated[str, typer.Option(metavar="LIST", help="cli.lab.keys")] = "16,256",
    scale: Annotated[str, typer.Option(metavar="LIST", help="cli.lab.scale")] = "sqrt_dk,none",
    distribution: Annotated[
        str,
        typer.Option(metavar="LIST", help="cli.lab.distribution"),
    ] = "normal",
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="cli.lab.seeds")] = 3,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="cli.lab.seed")] = 0,
    rows: Annotated[int, typer.Option(metavar="N", help="cli.lab.rows")] = 512,
    engine: Annotated[str, typer.Option(metavar="NAME", help="cli.lab.cells")] = "local",
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
    force: Annotated[bool, typer.Option("--force", help="cli.lab.begin_anew")] = False,
    json_: options.Json = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Measure random rows over a grid, and print the table."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, counting, print_text, tell_reader, width
        from sqrtdk.report.plain import plain

        with counting(Message("progress.cells")) as progress:
            from sqrtdk.extending import json_document
            from sqrtdk_lab.report.sweep import to_text
            from sqrtdk_lab.sweep import Grid, summary, whole_numbers, words
            from sqrtdk_lab.sweep import sweep as run

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
                tell_reader(Message("progress.kept", path=plain(str(output))))
                raise
            document = summary(swept)
        print_text(
            json_document(document)
            if json_
            else to_text(document, width=width(), color=colors(), language=options.language_of_choice(lang))
        )


PORT = 7860  # where the explorer listens if no port is given


def app(
    port: Annotated[int | None, typer.Option(metavar="N", help="cli.app.port", show_default=str(PORT))] = None,
    show: Annotated[bool, typer.Option("--open", help="cli.app.open")] = False,
    static: Annotated[Path | None, typer.Option("--static", metavar="FILE", help="cli.app.static")] = None,
    force: options.Force = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Serve the explorer until Ctrl-C, or write it as a file."""
    with reported(show_traceback):
        if static is None:
            where = Message("errors.options.without_option", option="--static")
            options.refuse_ignored({"--force": force}, where, "sqrtdk app --help")
            _serve_explorer(PORT if port is None else port, lang, show)
        else:
            where = Message("errors.options.with_option", option="--static")
            options.refuse_ignored({"--port": port}, where, "sqrtdk app --help")
            _write_explorer(static, force, lang)
            if show:
                _browse(static.resolve().as_uri())


def _write_explorer(file: Path, force: bool, lang: Choice) -> None:
    from sqrtdk.cli.output import say_written
    from sqrtdk.extending import check_writable, write_text

    check_writable(file, force)
    from sqrtdk_lab.app.static import explorer_page

    write_text(file, explorer_page(lang), force)
    say_written("HTML", file)


def _serve_explorer(port: int, lang: Choice, show: bool) -> None:
    from sqrtdk.cli.output import tell_reader
    from sqrtdk_lab.app.serve import serve

    path = language_path(lang)

    def ready(address: str) -> None:
        tell_reader(Message("progress.explorer", address=f"{address}{path}"))
        if show:
            _browse(f"{address}{path}")

    serve(port, ready)


def language_path(lang: Choice) -> str:
    """Return the path of the explorer in a language; "" leaves the choice to the reader's browser."""
    language = options.language_of_choice(lang)
    return "" if lang == "auto" and language == "en" else f"{language}/"


def _browse(address: str) -> None:
    import webbrowser

    webbrowser.open(address)


EXAMPLES: dict[str, dict[str, str]] = {
    "sqrtdk": {},
    "app": {
        "sqrtdk app --open": "",
        "sqrtdk app --port 0": "cli.examples.port",
        "sqrtdk app --static explorer.html": "cli.examples.static_page",
    },
    "lab": {"sqrtdk lab list": "", "sqrtdk lab show grad-norm": "", "sqrtdk lab run grad-norm --quick": ""},
    "lab list": {"sqrtdk lab list": ""},
    "lab show": {"sqrtdk lab show grad-norm": ""},
    "lab run": {"sqrtdk lab run grad-norm --quick": "", "sqrtdk lab run all --output my-lab": ""},
    "lab report": {"sqrtdk lab report my-lab": ""},
    "lab sweep": {"sqrtdk lab sweep --output my-sweep --d-k 16,64 --scale sqrt_dk,none": ""},
}
lab = group_of("lab", EXAMPLES)
for name, verb in (
    ("list", list_claims), ("show", show_claim), ("run", run), ("report", report_records), ("sweep", run_sweep),
):  # fmt: skip
    register_verb(lab, verb, name, EXAMPLES)
program = group_of("sqrtdk", EXAMPLES)  # what the entry points name
program.add_typer(lab)
register_verb(program, app, examples=EXAMPLES)
