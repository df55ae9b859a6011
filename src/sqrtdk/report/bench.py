"""What `sqrtdk bench` measured, for the terminal; and what it can measure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from sqrtdk import _json
from sqrtdk._language import Language
from sqrtdk.bench.record import BenchRecord, Timed, described
from sqrtdk.bench.ways import BASE, Way
from sqrtdk.bench.workloads import Workload
from sqrtdk.report.console import Cell, Column, drawn, paragraph, print_table
from sqrtdk.report.plain import plain
from sqrtdk.report.said import TITLES, said

_COLUMNS = (Column(""),) * 4


def to_text(record: BenchRecord, *, width: int = 100, color: bool = False, language: Language = "en") -> str:
    """A table for every workload, dtype and pass: milliseconds, and ratios to the base of the same round."""

    def draw(console: Console) -> None:
        machine = record.environment
        kernel = machine["kernel"]
        state = "loaded" if kernel["loaded"] else f"not used: {kernel['reason']}"
        rounds = "1 round" if record.repeats == 1 else f"{record.repeats} rounds"
        lines = (
            f"{plain(machine['cpu'])}, {record.threads} of {machine['cpus']} CPUs, "
            f"torch {machine['versions']['torch']}; compiled kernel {plain(state)}",
            f"median [10th .. 90th percentile] of {rounds}; ratios are to {BASE} in the same round, below 1 is faster",
        )
        for line in lines:
            paragraph(console, said(line, language))
        console.print()
        for place in record.places:
            shape = record.workloads[place.workload].text
            title = Text.assemble((place.workload, "bold cyan"), f"  {shape}, {place.dtype}, {place.kind}")
            paragraph(console, title)
            rows = [_cells(row) for row in record.measured if row.place == place]
            if rows:
                print_table(console, _COLUMNS, rows, indent=2, language=language)
            for missed in record.not_measured:
                if missed.place == place:
                    lost = said(f"not measured: {missed.way}: {plain(missed.reason)}", language)
                    paragraph(console, Text(lost, style="dim"), 2)
            console.print()
        missed_ways = sum(len(record.ways) if missed.way == "all" else 1 for missed in record.not_measured)
        total = f"{len(record.measured)} measured, {missed_ways} not; {record.duration_s:.0f} s"
        console.print(Text(said(total, language), style="dim"))

    return drawn(draw, width, color)


def names_text(
    workloads: Mapping[str, Workload],
    ways: Mapping[str, Way],
    gpu: str,
    *,
    width: int = 100,
    color: bool = False,
    language: Language = "en",
) -> str:
    """What can be measured; and what `gpu_record.sentence` says of GPUs."""

    def draw(console: Console) -> None:
        for title, rows in (
            ("workloads", workloads),
            ("ways", ways),
        ):
            console.print(said(title, language, TITLES), style="bold")
            cells = [(Text(name, style="cyan"), said(row.text, language)) for name, row in rows.items()]
            print_table(console, (Column(""), Column("", prose=True)), cells, indent=2, language=language)
        console.print(said("the Triton kernel", language, TITLES), style="bold")
        paragraph(console, said(gpu, language), 2)

    return drawn(draw, width, color)


def names_json(workloads: Mapping[str, Workload], ways: Mapping[str, Way], gpu: str) -> str:
    """The same as one JSON document."""
    return _json.document(
        {
            "workloads": described(workloads),
            "ways": {name: {"text": way.text, "statistics": way.statistics} for name, way in ways.items()},
            "gpu": gpu,
        }
    )


def _cells(row: Timed) -> tuple[Cell, ...]:
    """Way, milliseconds, ratio, and what ran where the way does not say it."""
    ratio = row.ratio
    style = "green" if ratio.p90 < 1 else "red" if ratio.p10 > 1 else ""
    shown = Text("1") if row.way == BASE else Text(f"x {ratio.text(2)}", style=style)
    ran = f"on {row.impl}" if row.impl is not None and row.impl not in row.way else ""
    return Text(row.way, style="cyan"), f"{row.ms.text(2)} ms", shown, Text(ran, style="dim")
