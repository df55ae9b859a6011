"""Compile the Triton kernels for GPUs that need not be there, in every configuration, and say what came out.

What is compiled is what the launchers of `sqrtdk.impl.gpu` launch: their calls are recorded, with tensors of a usual
call (rows and pointers in steps of 16 bytes), and compiled for a target by Triton's own specialisation. NVIDIA's
assembler and disassembler are those of Triton's wheel.

    python scripts/gpu_kernels.py                 all, one line each
    python scripts/gpu_kernels.py sm_90 128       the ones whose target or name has all of these words
    python scripts/gpu_kernels.py --write         also to docs/*/kernels.md, benchmarks/results/gpu-kernels.json
    python scripts/gpu_kernels.py --check         exit 1 where these say something else

Exits 1 where a requirement is not met: see `shortfalls`. Without a GPU; one core, a quarter of an hour for all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from gpu_code import SHARED_LIMITS, read
from sqrtdk.impl.gpu import gradients, launch
from sqrtdk.impl.gpu.wanted import BITS, bits_of

ROOT = Path(__file__).parents[1]
PAGES = {language: ROOT / "docs" / language / "kernels.md" for language in ("en", "zh")}
COLUMNS = {
    "en": "| kernel | tile, warps, stages | shared KiB | registers | spilled bytes | in hot loop | products | TMA |"
    " a logit | FMA, ADD, MUL / pairs / compare, select / exp |",
    "zh": "| 内核 | 分块、warp、级数 | 共享内存 KiB | 寄存器 | 溢出字节 | 热循环中 | 乘积 | TMA |"
    " 每个 logit | FMA、ADD、MUL / 成对 / 比较、选择 / exp |",
}
RECORD = ROOT / "benchmarks" / "results" / "gpu-kernels.json"
START, END = "<!-- compiled: start -->", "<!-- compiled: end -->"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
EVERYTHING = bits_of(BITS)  # all of AuxOutput
BATCH, HEADS, LENGTH = 2, 4, 256
HALF, OTHER_HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A call whose kernels are compiled."""

    name: str
    dtype: torch.dtype
    width: int
    statistics: int = 0
    causal: bool = False
    measure: bool = False
    rows: int | None = None  # of two query heads a key head, against many keys
    extras: bool = False
    table: bool = False  # of distances, which learns
    backward: bool = False

    def run(self) -> None:
        """Make the call; the launcher is recorded."""
        length = self.rows or LENGTH
        heads = 2 * HEADS if self.rows else HEADS
        query = torch.empty(BATCH, heads, length, self.width, dtype=self.dtype)
        key = torch.empty(BATCH, HEADS, 8 * LENGTH if self.rows else LENGTH, self.width, dtype=self.dtype)
        value = key[..., :0] if self.measure else key
        shape = (BATCH, heads, length, key.shape[2])
        row = torch.empty(BATCH, heads, length)
        bias = torch.empty(shape, dtype=self.dtype) if self.extras else None
        bias = torch.empty(1, heads, 1, length + key.shape[2] - 1) if self.table else bias
        visible = torch.empty(shape, dtype=torch.bool) if self.extras else None
        scale = row.unsqueeze(-1) if self.extras else None
        softcap = 30.0 if self.extras else 0.0
        above, below = 0 if self.causal else None, 128 if self.extras else None
        bounds = (scale, softcap, bias, self.table, visible)
        if self.backward:
            needs = (self.extras, self.extras or self.table)
            gradients.backward(query, query, key, value, row, row, None, 0.125, *bounds, above, below, *needs)
        else:
            sinks = row if self.extras else None
            launch.run(query, key, value, 0.125, *bounds, sinks, above, below, None, self.statistics)


# Where no tile keeps all of a row and a key in registers, twice as tf32x3 does: what was found to spill least.
WIDE_SINGLE = ("forward f32 256, causal, all statistics", "backward f32 256, causal")
SPILLING = tuple((target, case) for target in ("sm_80", "sm_90", "sm_100") for case in WIDE_SINGLE)

# Every configuration of the tables is in one of them; what differs only in what it needs less of is left out: float32
# without statistics, sinks, the other causal half of the table where it is the same.
CASES = (
    Case("forward bf16 64, causal", HALF, 64, causal=True),
    Case("forward bf16 64, causal, all statistics", HALF, 64, EVERYTHING, causal=True),
    Case("backward bf16 64, causal", HALF, 64, causal=True, backward=True),
    Case("forward bf16 128, causal", HALF, 128, causal=True),
    Case("forward bf16 128, causal, all statistics", HALF, 128, EVERYTHING, causal=True),
    Case("forward f16 128, causal, all statistics", OTHER_HALF, 128, EVERYTHING, causal=True),
    Case("backward bf16 128, causal", HALF, 128, causal=True, backward=True),
    Case("backward f16 128, causal", OTHER_HALF, 128, causal=True, backward=True),
    Case("forward bf16 256, causal", HALF, 256, causal=True),
    Case("forward bf16 256, causal, all statistics", HALF, 256, EVERYTHING, causal=True),
    Case("backward bf16 256, causal", HALF, 256, causal=True, backward=True),
    Case("measure bf16 128, all statistics", HALF, 128, EVERYTHING, measure=True),
    Case("decode bf16 128, all statistics", HALF, 128, EVERYTHING, rows=1),
    Case("64 rows bf16 128, all statistics", HALF, 128, EVERYTHING, rows=64),
    Case("64 rows bf16 256, all statistics", HALF, 256, EVERYTHING, rows=64),
    Case("extras bf16 128, causal, all statistics", HALF, 128, EVERYTHING, causal=True, extras=True),
    Case("extras bf16 256, causal, all statistics", HALF, 256, EVERYTHING, causal=True, extras=True),
    Case("backward bf16 128, causal, extras", HALF, 128, causal=True, extras=True, backward=True),
    Case("backward bf16 256, causal, extras", HALF, 256, causal=True, extras=True, backward=True),
    Case("backward bf16 128, causal, distances", HALF, 128, causal=True, table=True, backward=True),
    Case("forward f32 64, causal, all statistics", SINGLE, 64, EVERYTHING, causal=True),
    Case("backward f32 64, causal", SINGLE, 64, causal=True, backward=True),
    Case("forward f32 128, causal", SINGLE, 128, causal=True),
    Case("forward f32 128, causal, all statistics", SINGLE, 128, EVERYTHING, causal=True),
    Case("backward f32 128, causal", SINGLE, 128, causal=True, backward=True),
    Case("forward f32 256, causal, all statistics", SINGLE, 256, EVERYTHING, causal=True),
    Case("backward f32 256, causal", SINGLE, 256, causal=True, backward=True),
)


@contextlib.contextmanager
def recorded(target: str) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Launches as they would be made on that target, and not made."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launches.append((kernel, args, constants))

    stand_ins: dict[str, Callable[..., Any]] = {
        "launch": note,
        "target_of": lambda tensor: target,
        "processors": lambda kind, index: 16,
    }
    kept = [(module, name, getattr(module, name)) for module in (launch, gradients) for name in stand_ins
            if hasattr(module, name)]  # fmt: skip
    for module, name, _ in kept:
        setattr(module, name, stand_ins[name])
    try:
        yield launches
    finally:
        for module, name, own in kept:
            setattr(module, name, own)


def compiled(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], target: str) -> tuple[Any, str]:
    """(the kernel for `target`, the log of ptxas): what `kernel[grid](*args, **constants)` would compile there."""
    backend = make_backend(TARGETS[target])
    options = constants | {"enable_fp_fusion": launch.FP_FUSION}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*args, **options)
    chosen, signature, constexprs, attributes = kernel._pack_args(backend, options, bound, specialization, rest)
    source = ASTSource(kernel, signature, constexprs, attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        result = triton.compile(source, target=TARGETS[target], options=chosen.__dict__)
    return result, log.getvalue()


def measured(case: Case, target: str) -> Iterator[dict[str, Any]]:
    """One record a kernel of the case."""
    with recorded(target) as launches:
        case.run()
    for kernel, args, constants in launches:
        result, log = compiled(kernel, args, constants, target)
        tile = constants["BLOCK_M"] * constants.get("BLOCK_N", 0)
        threads = constants["num_warps"] * TARGETS[target].warp_size
        yield {
            "target": target,
            "case": case.name,
            "kernel": kernel.__name__,
            "tile": f"{constants['BLOCK_M']}x{constants.get('BLOCK_N', '-')}",
            "warps": constants["num_warps"],
            "stages": constants["num_stages"],
            "descriptors": constants.get("DESCRIPTORS", False),
            "half": case.dtype != SINGLE,
            **read(target, result, log, tile / threads),
        }


def shortfalls(record: dict[str, Any]) -> list[str]:
    """Which requirements a kernel misses."""
    found = []
    limit = SHARED_LIMITS[record["target"]]
    if record["shared"] > limit:
        found.append(f"{record['shared']} bytes of shared memory; {limit} are the limit")
    if record.get("hot_loop_local") and (record["target"], record["case"]) not in SPILLING:
        found.append(f"{record['hot_loop_local']} loads and stores of spilled registers in the hot loop")
    multiplies = record["kernel"] != "combine" and not record["case"].startswith("decode")  # wgmma takes 64 rows
    if record["target"] == "sm_90" and record["half"] and multiplies:
        if "wgmma" not in record["products"] or "mma" in record["products"]:
            found.append(f"products are {record['products']}, not wgmma")
        if record["descriptors"] and not record["tensor_loads"]:
            found.append("no TMA load, though descriptors are on")
    return found


def line(record: dict[str, Any]) -> str:
    """A row of the table."""
    products = " ".join(f"{n} {name}" for name, n in record["products"].items())
    counts = record.get("a_logit", {})
    multiply = sum(counts.get(name, 0) for name in ("FFMA", "FADD", "FMUL"))
    pairs = sum(counts.get(name, 0) for name in ("FFMA2", "FADD2", "FMUL2"))
    compare = sum(counts.get(name, 0) for name in ("FMNMX", "FMNMX3", "FSEL", "FSETP"))
    mix = f"{multiply:.1f} / {pairs:.1f} / {compare:.1f} / {counts.get('MUFU', 0):.1f}" if counts else ""
    cells = (
        f"{record['case']}: {record['kernel']}",
        f"{record['tile']}, {record['warps']}w, {record['stages']}s",
        f"{record['shared'] / 1024:.0f}",
        record["registers"],
        record["spilled"],
        record.get("hot_loop_local", ""),
        products,
        record["tensor_loads"] or "",
        record.get("instructions_a_logit", ""),
        mix,
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def page(records: list[dict[str, Any]], language: str) -> str:
    """The generated part of docs/LANGUAGE/kernels.md."""
    lines = [START, "", f"Triton {triton.__version__}{'。' if language == 'zh' else '.'}"]
    for target in TARGETS:
        lines += [
            f"\n### {target}\n",
            COLUMNS[language],
            "|---|---|---|---|---|---|---|---|---|---|",
            *(line(record) for record in records if record["target"] == target),
        ]
    return "\n".join([*lines, "", END])


def merged(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These records and, of what was not compiled now, those that are written down; none of a case that is no more."""

    def of(record: dict[str, Any]) -> tuple[str, str]:
        return record["target"], record["case"]

    before = json.loads(RECORD.read_text(encoding="utf-8"))["kernels"] if RECORD.exists() else []
    again = {of(record) for record in records}
    all_of_them = [record for record in before if of(record) not in again] + records
    order = [(target, case.name) for target in TARGETS for case in CASES]
    known = [record for record in all_of_them if of(record) in order]
    return sorted(known, key=lambda record: order.index(of(record)))


def record_text(records: list[dict[str, Any]]) -> str:
    """The JSON, one kernel a line."""
    kernels = ",\n".join(json.dumps(record) for record in records)
    return f'{{"triton": "{triton.__version__}", "kernels": [\n{kernels}\n]}}\n'


def files(records: list[dict[str, Any]]) -> dict[Path, str]:
    """Pages and record as they should be, with these records."""
    everything = merged(records)
    texts = {RECORD: record_text(everything)}
    for language, path in PAGES.items():
        written = path.read_text(encoding="utf-8")
        before, after = written[: written.index(START)], written[written.index(END) + len(END) :]
        texts[path] = before + page(everything, language) + after
    return texts


def write(records: list[dict[str, Any]]) -> None:
    """Put these records into pages and record."""
    for path, text in files(records).items():
        path.write_text(text, encoding="utf-8")


def agrees(records: list[dict[str, Any]]) -> bool:
    """Whether pages and record hold these records already."""
    return all(path.read_text(encoding="utf-8") == text for path, text in files(records).items())


def chosen(target: str, name: str, words: list[str], exact: bool) -> bool:
    """Whether the words of the command line ask for this case."""
    if exact:
        return words == [target, name]
    return all(word == target or word in name for word in words)


def main() -> int:
    """Compile, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only what has all of these in its target or name")
    parser.add_argument("--exact", action="store_true", help="the words are a target and the whole of a name")
    parser.add_argument("--write", action="store_true", help="write pages and record")
    parser.add_argument("--check", action="store_true", help="compare pages and record with what comes out")
    parser.add_argument("--json", action="store_true", help="records to stdout, as JSON lines")
    options = parser.parse_args()
    records, failed = [], 0
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for target in TARGETS:
            for case in CASES:
                if not chosen(target, case.name, options.words, options.exact):
                    continue
                for record in measured(case, target):
                    records.append(record)
                    missed = shortfalls(record)
                    failed += bool(missed)
                    said = json.dumps(record | {"missed": missed}) if options.json else f"{target} {line(record)}"
                    print(said, *([] if options.json else missed), flush=True)
                if options.write:
                    write(records)
    if options.check and not agrees(records):
        print("docs/*/kernels.md or benchmarks/results/gpu-kernels.json say something else: run with --write")
        failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
