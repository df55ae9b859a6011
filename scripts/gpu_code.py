"""Figures of a compiled Triton kernel, from the machine code: registers, spills, loops, what stands in the hot one.

NVIDIA's code is read by the cuobjdump of Triton's wheel, AMD's is text. The hot loop is the innermost one with matrix
products in it that has the fewest instructions a product: blocks that need no mask.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# That of sm_80 is what sm_86, sm_89 and sm_120 have, which its configurations serve as well; sm_80 itself has 163 KiB.
SHARED_LIMITS = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
LOCAL = ("LDL", "STL", "scratch_load", "scratch_store", "buffer_load_lds_spill")
# Matrix products by target: where they are looked for, and the instruction.
PRODUCTS = {
    "wgmma": ("ptx", r"^\s*wgmma\.mma_async"),
    "tcgen05": ("ptx", r"^\s*(?:@\S+ )?tcgen05\.mma"),
    "mma": ("ptx", r"^\s*mma\.sync"),
    "mfma": ("amdgcn", r"^\s*v_mfma"),
}
TENSOR_LOADS = r"cp\.async\.bulk\.tensor\.\S*shared::c\S*\.global"
IN_CODE = ("HGMMA", "HMMA", "UTCHMMA", "v_mfma")
COUNTED = ("FFMA", "FADD", "FMUL", "MUFU", "FMNMX", "FSEL", "FSETP", "F2FP")
OF_TWO = ("FFMA2", "FADD2", "FMUL2")  # two numbers at once, from sm_100 on; FMNMX3 takes the larger of three


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions by name, of one warp."""

    counts: Counter[str]

    @property
    def products(self) -> int:
        """Instructions that are matrix products."""
        return sum(self.counts[name] for name in IN_CODE)

    @property
    def local(self) -> int:
        """Loads and stores of spilled registers."""
        return sum(self.counts[name] for name in LOCAL)


def read(target: str, compiled: Any, log: str, logits: float) -> dict[str, Any]:
    """The figures; `log` is that of ptxas, `logits` how many a thread has in one turn of the loop (0: no loop)."""
    products = {
        name: len(re.findall(pattern, compiled.asm[kind], re.MULTILINE))
        for name, (kind, pattern) in PRODUCTS.items()
        if kind in compiled.asm
    }
    own = _nvidia(compiled, log) if target.startswith("sm_") else _amd(compiled)
    loops: list[Loop] = own.pop("loops")
    figures = {"shared": compiled.metadata.shared, **own, "products": {k: n for k, n in products.items() if n}}
    figures["tensor_loads"] = len(re.findall(TENSOR_LOADS, compiled.asm.get("ptx", "")))
    heavy = [loop for loop in loops if loop.products]
    if logits and heavy:
        hot = min(heavy, key=lambda loop: loop.counts.total() / loop.products)
        figures["hot_loop_local"] = hot.local
        figures["instructions_a_logit"] = round(hot.counts.total() / logits, 1)
        figures["a_logit"] = {
            name: round(n / logits, 2) for name in (*COUNTED, *OF_TWO, "FMNMX3") if (n := hot.counts[name])
        }
    return figures


def _nvidia(compiled: Any, log: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = _run("cuobjdump", "-sass", file.name)
        usage = _run("cuobjdump", "-res-usage", file.name)
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers, usage
    assert spilled, log
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", code)]
    spans = []
    for at, text in lines:
        back = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if back and int(back[1], 16) < at:
            spans.append((int(back[1], 16), at))
    names = [(at, _operation(text)) for at, text in lines]
    return {
        "registers": int(registers[1]),
        "spilled": int(spilled[1]) + int(spilled[2]),
        "loops": [Loop(Counter(name for at, name in names if a <= at <= b)) for a, b in _innermost(spans)],
    }


def _amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]
    body = [line.strip() for line in text.splitlines()]
    labels = {line.split(":")[0]: i for i, line in enumerate(body) if re.match(r"\.LBB\w+:", line)}
    spans = []
    for i, line in enumerate(body):
        branch = re.match(r"s_c?branch\S*\s+(\.LBB\w+)", line)
        if branch and labels.get(branch[1], i) < i:
            spans.append((labels[branch[1]], i))
    names = [(i, re.sub(r"^(v_mfma|scratch_load|scratch_store)\w*", r"\1", line.split()[0])) for i, line in
             enumerate(body) if re.match(r"[sv]_|ds_|buffer_|global_|scratch_", line)]  # fmt: skip
    found = {name: int(number) for name, number in re.findall(r"\.(\w+_count|private_\w+_size):\s+(\d+)", text)}
    return {
        "registers": found["vgpr_count"],
        "spilled": 4 * found["vgpr_spill_count"],
        "loops": [Loop(Counter(name for at, name in names if a <= at <= b)) for a, b in _innermost(spans)],
    }


def _operation(text: str) -> str:
    """The name of a SASS instruction, without its predicate and modifiers."""
    return re.sub(r"^@\S+\s+", "", text.strip()).split()[0].split(".")[0]


def _innermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]


def _run(tool: str, *args: str) -> str:
    return subprocess.run([str(TOOLS / tool), *args], capture_output=True, text=True, check=True).stdout
