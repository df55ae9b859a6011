"""What the golden records are of: groups of cases, each of which says its record."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sqrtdk
from sqrtdk._check import check
from sqrtdk.models.inputs import make_inputs
from sqrtdk.tracing import Trace
from tests.attentions import cases, compiled, planted
from tests.attentions.stand_in_kernels import registered
from tests.hf import families
from tests.trace import golden_tests, golden_written, test_trace_kernels, test_trace_varlen
from tests.trace import kept as law
from tests.trace.golden_tests import File
from tests.trace.told import counted, described, judged, notes, ran, told, without_empty

Case = Callable[[], dict[str, Any]]


# -- styles, planted mistakes, families, our own kernel ----------------------------------------------------------------


def _family(name: str, attn: str) -> dict[str, Any]:
    return judged(check(families.build(families.FAMILIES[name](), attn), static=True, seq_len=24, batch=2))


def _planted(style: str, mistake: str | None) -> dict[str, Any]:
    model, inputs = planted.planted(style, mistake)
    return judged(check(model, inputs=inputs))


def _kernel(name: str) -> dict[str, Any]:
    one = compiled.CASES[name]
    return told(compiled.traced(one.model("cpu"), *one.inputs()))


# -- what is kept ------------------------------------------------------------------------------------------------------


def _kept(run: Trace) -> dict[str, Any]:
    """What was kept of every call, and whether it gives the output."""
    calls = [described(call) for call in run.tensors]
    for call, said in zip(run.tensors, calls, strict=True):
        if call.missing is None:
            said["computed"] = law.unlike(call) == []
    return {"calls": counted(calls)}


def _kept_style(name: str) -> dict[str, Any]:
    made = cases.CASES[name]()
    with sqrtdk.trace(made.model, keep=True) as run:
        made.run()
    return _kept(run)


def _kept_family(name: str, attn: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = families.build(families.FAMILIES[name](), attn).eval()
    inputs, _ = make_inputs(model, model.config, batch=2, seq_len=24)
    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(**inputs)
    return _kept(run)


# -- exported graphs ---------------------------------------------------------------------------------------------------

# One of each way into a graph: what a family brings (rotations, biases, convolutions, windows), and both file kinds.
FAMILIES = [("llama", ".onnx"), ("t5", ".pt2"), ("deepseek_v2", ".pt2"), ("swinv2", ".pt2"), ("xlnet", ".onnx")]
MISTAKEN = [("rope", None, ".onnx"), ("gqa", "twice", ".onnx"), ("qk_norm", "missing", ".pt2"), ("eager", None, ".pt2")]
RUN = [("gemma2", "eager", False), ("gpt2", "sdpa", False), ("bert", "eager", False), ("qwen3", "sdpa", True)]


def _audited(path: Path) -> dict[str, Any]:
    report = check(str(path))
    return without_empty(judged(report) | {"notes": notes(report)})


def _exported_family(name: str, kind: str) -> dict[str, Any]:
    from tests.graphs import modules

    with tempfile.TemporaryDirectory() as folder:
        model, inputs = modules.family(name, Path(folder))
        return _audited(modules.exported(model, inputs, Path(folder) / f"m{kind}", name))


def _exported_mistake(style: str, mistake: str | None, kind: str) -> dict[str, Any]:
    from tests.graphs import modules

    with tempfile.TemporaryDirectory() as folder:
        model, inputs = modules.mistaken(style, mistake, Path(folder))
        return _audited(modules.exported(model, inputs, Path(folder) / f"m{kind}"))


def _run_graph(family: str, attn: str, dynamo: bool) -> dict[str, Any]:
    """Audit and run, by one exporter or the other."""
    from sqrtdk.graphs import read_onnx
    from tests.graphs import exports

    with tempfile.TemporaryDirectory() as folder:
        path, given = Path(folder) / "m.onnx", exports.inputs(family)
        exports.export(exports.build(family, attn), given, path, dynamo=dynamo)
        return {"audit": _audited(path), "run": ran(read_onnx(path, given))}


GRAPH_FILES = (
    File(
        "tests.graphs.test_graph_check",
        silent=(
            "test_nothing_is_run",
            "test_a_config_that_leads_elsewhere_is_refused",
            "test_options_that_a_graph_has_settled",
        ),
    ),
    File("tests.graphs.test_graph_check_exporters", silent=("test_what_is_missing_is_named",)),
    File("tests.graphs.test_graph_check_families"),
    File("tests.graphs.test_graph_check_masks", silent=("test_the_same_of_the_module_itself",)),
    File("tests.graphs.test_graph_operators"),
    File(
        "tests.graphs.test_graph_files",
        only=(
            "test_a_graph_by_hand",
            "test_terms_of_the_logits",
            "test_what_was_not_followed_is_told",
            "test_a_softmax_of_one_projection_is_no_attention",
            "test_a_softmax_in_a_branch_is_no_attention",
            "test_functions_are_written_out",
        ),
    ),
    File("tests.graphs.test_graph_quantised", only=("test_what_the_quantiser_writes",)),
    File("tests.graphs.test_graph_guards", only=("test_a_program_of_free_sizes_is_read",)),
)

# -- all of them -------------------------------------------------------------------------------------------------------

# Group -> case -> what says it.
GROUPS: dict[str, dict[str, Case]] = {
    "styles": {name: lambda name=name: told(cases.traced(name)[1]) for name in cases.CASES},
    "planted": {
        f"{style} {mistake or 'healthy'}": lambda style=style, mistake=mistake: _planted(style, mistake)
        for style in planted.STYLES
        for mistake in (None, *planted.PLANTED)
    },
    "families": {f"{name} {attn}": lambda name=name, attn=attn: _family(name, attn) for name, attn in families.CASES},
    "kernel": {name: lambda name=name: _kernel(name) for name in compiled.CASES},
    "written": golden_written.CASES,
    "packed": golden_tests.cases(
        File("tests.trace.test_trace_varlen", within=test_trace_varlen.operators),
        File("tests.trace.test_trace_flash", silent=("test_every_operator_has_a_row",), within=registered),
        File("tests.trace.test_trace_kernels", within=test_trace_kernels.rows),
        File("tests.trace.test_trace_nested"),
    ),
    "unread": golden_tests.cases(
        File("tests.trace.test_trace_lost"),
        File("tests.trace.test_trace_missed", silent=("test_anything_but_a_module_is_refused",)),
        File("tests.trace.test_trace_limits"),
        File("tests.trace.test_trace_page", only=("test_the_examples_run",)),
    ),
    "kept": {
        **{name: lambda name=name: _kept_style(name) for name in cases.CASES},
        **{f"{name} {attn}": lambda name=name, attn=attn: _kept_family(name, attn) for name, attn in families.CASES},
    },
    "graphs": {
        **{" ".join(row): lambda row=row: _exported_family(*row) for row in FAMILIES},
        **{f"{row[0]} {row[1] or 'healthy'} {row[2]}": lambda row=row: _exported_mistake(*row) for row in MISTAKEN},
        **{
            f"{row[0]} {row[1]} by the {'newer' if row[2] else 'older'} exporter": lambda row=row: _run_graph(*row)
            for row in RUN
        },
        **golden_tests.cases(*GRAPH_FILES),
    },
}
