"""What `sqrtdk bench` measured, for the terminal; and what it can measure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sqrtdk import _json
from sqrtdk.bench.record import BenchRecord, Timed, described
from sqrtdk.bench.ways import BASE, Way
from sqrtdk.bench.workloads import Workload
from sqrtdk.report.console import drawn
from sqrtdk.report.plain import plain


def to_text(record: BenchRecord, *, width: int = 100, color: bool = False) -> str:
    """A table for every workload, dtype and pass: milliseconds, and ratios to the base of the same round."""

    def draw(console: Console) -> None:
        machine = record.environment
        kernel = machine["kernel"]
        state = "loaded" if kernel["loaded"] else f"not used: {kernel['reason']}"
        rounds = "1 round" if record.repeats == 1 else f"{record.repeats} rounds"
        console.print(
            f"{plain(machine['cpu'])}, {record.threads} of {machine['cpus']} CPUs, "
            f"torch {machine['versions']['torch']}; compiled kernel {plain(state)}"
        )
        console.print(
            f"median [10th .. 90th percentile] of {rounds}; ratios are to {BASE} in the same round, below 1 is faster\n"
        )
        for place in record.places:
            shape = record.workloads[place.workload].text
            place_of = Text(f"  {shape}, {place.dtype}, {place.kind}")
            console.print(Text(place.workload, style="bold cyan"), place_of, sep="")
            rows = [row for row in record.measured if row.place == place]
            if rows:
                console.print(Padding(_table(rows), (0, 0, 0, 2)))
            for missed in record.not_measured:
                if missed.place == place:
                    line = Text(f"not measured: {missed.way}: {plain(missed.reason)}", style="dim")
                    console.print(Padding(line, (0, 0, 0, 2)))
            console.print()
        missed_ways = sum(len(record.ways) if missed.way == "all" else 1 for missed in record.not_measured)
        console.print(f"{len(record.measured)} measured, {missed_ways} not; {record.duration_s:.0f} s", style="dim")

    return drawn(draw, width, color)


def names_text(
    workloads: Mapping[str, Workload], ways: Mapping[str, Way], gpu: str, *, width: int = 100, color: bool = False
) -> str:
    """What can be measured; and what `gpu_record.sentence` says of GPUs."""

    def draw(console: Console) -> None:
        for title, rows in (
            ("workloads", workloads),
            ("ways", ways),
        ):
            console.print(title, style="bold")
            table = _grid(2)
            for name, row in rows.items():
                table.add_row(Text(name, style="cyan"), row.text)
            console.print(Padding(table, (0, 0, 0, 2)))
        console.print("the Triton kernel", style="bold")
        console.print(Padding(Text(gpu), (0, 0, 0, 2)))

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


def _table(rows: list[Timed]) -> Table:
    table = _grid(4)
    for row in rows:
        ratio = row.ratio
        style = "green" if ratio.p90 < 1 else "red" if ratio.p10 > 1 else ""
        shown = Text("1") if row.way == BASE else Text(f"x {ratio.text(2)}", style=style)
        ran = f"on {row.impl}" if row.impl is not None and row.impl not in row.way else ""
        table.add_row(Text(row.way, style="cyan"), f"{row.ms.text(2)} ms", shown, Text(ran, style="dim"))
    return table


def _grid(columns: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table
