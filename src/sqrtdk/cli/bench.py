"""`sqrtdk bench`: attention against its peers, in pairs."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported

Passes = Literal["forward", "training", "both"]


def bench(
    workload: Annotated[
        str, typer.Option(metavar="LIST", help="Shapes of --list with commas between them, or all.")
    ] = "training,long-64,gqa,decode",
    way: Annotated[
        str, typer.Option(metavar="LIST", help="Ways of --list, or all; sdpa, which ratios are to, always runs.")
    ] = "cpu,cpu-stats,auto-stats,flex,eager,onnxruntime",
    dtype: Annotated[
        str, typer.Option(metavar="LIST", help="float32 (fp32), bfloat16 (bf16), float16 (fp16).")
    ] = "float32,bfloat16",
    passes: Annotated[
        Passes, typer.Option("--pass", help="Forward, or training, which is forward and backward.")
    ] = "both",
    repeats: Annotated[int, typer.Option(metavar="N", help="Rounds that are counted.")] = 5,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Threads of torch and onnxruntime.", show_default="torch's own number"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the tensors.")] = 0,
    list_: Annotated[bool, typer.Option("--list", help="Show what can be measured, and measure nothing.")] = False,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Time attention against torch, FlexAttention, the plain formula and onnxruntime, on this machine's CPU.

    Every round runs all ways once, in turn, and ratios are taken within the round. A way runs only after its output,
    and in training its gradients, agreed with torch's; what can't run is listed with the reason.

    Exit code 0: measured; 1: nothing was, or nothing but sdpa; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import colors, counting, print_text, width, written

        _files.check_outputs((output,), force)
        with counting("Rounds") as progress:
            from sqrtdk.bench import gpu_record
            from sqrtdk.bench.choose import chosen
            from sqrtdk.bench.record import PASSES, to_json
            from sqrtdk.bench.runner import run
            from sqrtdk.bench.ways import WAYS
            from sqrtdk.bench.workloads import DTYPES, WORKLOADS
            from sqrtdk.models.config import DTYPE_NAMES
            from sqrtdk.report import bench as report

            workloads = chosen(workload, WORKLOADS, "workload")
            ways = chosen(way, WAYS, "way")
            dtypes = chosen(dtype, DTYPES, "dtype", DTYPE_NAMES)
            record = None
            if not list_:
                record = run(
                    workloads,
                    ways,
                    dtypes=list(dtypes),
                    passes=PASSES if passes == "both" else (passes,),
                    repeats=repeats,
                    threads=threads,
                    seed=seed,
                    command=shlex.join(["sqrtdk", *sys.argv[1:]]),
                    progress=progress,
                )
        if record is None:
            gpu = gpu_record.sentence(gpu_record.read())
            json = report.names_json(WORKLOADS, WAYS, gpu)
            text = report.names_text(
                WORKLOADS, WAYS, gpu, width=width(), color=colors(), language=options.language(lang)
            )
        else:
            json, text = (
                to_json(record),
                report.to_text(record, width=width(), color=colors(), language=options.language(lang)),
            )
        if output is not None:
            _files.write_text(output, json, force)
            written("JSON", output)
        print_text(json if json_ and output is None else text)
    if record is not None and record.bare:
        raise typer.Exit(1)
