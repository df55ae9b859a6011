"""`assert_gradients` on attention kernels of other packages, as they are released, on a CPU.

    python benchmarks/public_kernels.py --json benchmarks/results/public_kernels.json
    python benchmarks/public_kernels.py liger ring      # those whose name holds one of these, printed alone

The packages go into out/public-kernels (SQRTDK_PUBLIC_KERNELS names another folder), without their dependencies, which
ask for CUDA builds; what they import stands beside them. Each kernel runs in a process of its own, with random q, k and
v, in float32 and in bfloat16.

Triton kernels run in Triton's interpreter. Three things of it are made good for kernels that were written for a GPU: it
has no driver, which kernels ask for their target; its autotuner can't measure, so the first configuration runs; and it
multiplies matrices of bfloat16 as the integers that hold their bits, so they are cast to float32 before. A kernel that
computes in bfloat16 beside its products of matrices is asked in float16.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("SQRTDK_PUBLIC_KERNELS", ROOT / "out" / "public-kernels"))
SECONDS = 1800  # for one kernel in one dtype

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PublicKernel:
    """A kernel and the formula that its package states for it.

    Attributes:
        package: On the package index, with its version.
        name: The function, and what is special about the call.
        load: Imports the package and returns a function of q, k and v, all (B, H, L, E).
        formula: Keywords of `assert_gradients`; sinks "learned" stands for a random tensor that needs a gradient.
        sizes: (B, Hq, H, L, E) of the tensors.
        triton: Whether it needs Triton's interpreter.
        dtypes: In which it is asked.
        grid: Whether other lengths are tried; not of a kernel that reads and writes past the end of its tensors then.
    """

    package: str
    name: str
    load: Callable[[Any], Attention]
    formula: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int, int, int, int] = (2, 4, 4, 40, 16)
    triton: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    grid: bool = True


def turned(x: Tensor) -> Tensor:
    """(B, H, L, E) as (B, L, H, E), and back."""
    return x.transpose(1, 2)


def named(module: str, name: str) -> Any:
    """A name of a module of one of the packages."""
    return getattr(importlib.import_module(module), name)


def fla(sinks: Tensor | None, window: int | None = None) -> Attention:
    """Flash attention of flash-linear-attention."""
    attend = named("fla.ops.attn", "parallel_attn")
    return lambda q, k, v: turned(attend(turned(q), turned(k), turned(v), window_size=window, sink_bias=sinks))


def ring(_: Any, **options: Any) -> Attention:
    """Ring attention on one rank; its key head i serves the query heads i, i + H, i + 2 H."""
    attend = named("ring_attention_pytorch.ring_flash_attention", "ring_flash_attn")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        mixed = q.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
        out = turned(attend(turned(mixed), turned(k), turned(v), bucket_size=16, ring_size=1, **options))
        return out.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)

    return call


def memory_efficient(_: Any, *, causal: bool) -> Attention:
    """Flash attention in plain PyTorch, with a backward pass of its own."""
    attend = named("memory_efficient_attention_pytorch.flash_attention", "FlashAttentionFunction")
    return lambda q, k, v: attend.apply(q, k, v, None, causal, 16, 16)


def liger(_: Any, dilation: int = 1) -> Attention:
    """Neighbourhood attention: three keys to each side, or every `dilation`-th."""
    attend = named("liger_kernel.ops.fused_neighborhood_attention", "LigerFusedNeighborhoodAttentionFunction")
    return lambda q, k, v: attend.apply(q, k, v, 7, dilation)


def custom_mask(_: Any, mask: Tensor | None = None) -> Attention:
    """FlashAttention-2 with a mask of any shape; it takes gradients that are contiguous alone."""
    attend = named("fa2_custom_mask", "flash_attention_custom_mask")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = None if mask is None else mask.expand(*q.shape[:2], *mask.shape[-2:]).contiguous()
        return Contiguous.apply(attend(q.contiguous(), k.contiguous(), v.contiguous(), whole, q.shape[-1] ** -0.5))

    return call


class Contiguous(torch.autograd.Function):
    """The identity; its gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The tensor itself."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient in a memory of its own."""
        return gradient.contiguous()


def jvp(_: Any, *, causal: bool) -> Attention:
    """Flash attention with forward-mode derivatives."""
    attend = named("jvp_flash_attention.jvp_attention", "attention")
    return lambda q, k, v: attend(q, k, v, None, causal=causal)


def x_transformers(_: Any, **options: Any) -> Attention:
    """Attention of x-transformers, by autograd."""
    attend = named("x_transformers.attend", "Attend")(**options)
    return lambda q, k, v: attend(q, k, v)[0]


def local(_: Any, **options: Any) -> Attention:
    """Local attention in blocks, by autograd."""
    return named("local_attention", "LocalAttention")(autopad=True, exact_windowsize=True, **options)


def pascal(_: Any) -> Attention:
    """Tiled attention for GPUs without a fused kernel, by autograd."""
    attend = named("pascal_attn.functional", "tiled_attention")
    return lambda q, k, v: turned(attend(q, k, v, tile_size=16))


CAUSAL = {"is_causal": True}
TRIANGLE = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
PADDED = torch.ones(1, 1, 256, 256, dtype=torch.bool)
PADDED[..., 200:] = False
HALF = ("float32", "float16")
TILES = (1, 2, 2, 256, 64)
MEMORY_EFFICIENT = "memory-efficient-attention-pytorch==0.1.6"
RING = "ring-attention-pytorch==0.5.20"
FLA = "fla-core==0.6.0"
LIGER = "liger-kernel==0.8.5"
CUSTOM_MASK = "flashattention2-custom-mask==0.1.1"
JVP = "jvp-flash-attention==0.14.0"

KERNELS = (
    PublicKernel(MEMORY_EFFICIENT, "FlashAttentionFunction", lambda s: memory_efficient(s, causal=False)),
    PublicKernel(
        MEMORY_EFFICIENT, "FlashAttentionFunction, causal", lambda s: memory_efficient(s, causal=True), CAUSAL
    ),
    PublicKernel(RING, "ring_flash_attn, causal", lambda s: ring(s, causal=True), CAUSAL, (2, 4, 2, 40, 16)),
    PublicKernel(
        RING, "ring_flash_attn, softclamp", lambda s: ring(s, softclamp_qk_sim=True, softclamp_value=2.0),
        {"softcap": 2.0}, (2, 4, 2, 40, 16),
    ),
    PublicKernel(FLA, "parallel_attn", fla, CAUSAL, (2, 2, 1, 40, 16), triton=True),
    PublicKernel(
        FLA, "parallel_attn, window", lambda s: fla(s, 9), {**CAUSAL, "window": 9}, (1, 2, 1, 70, 16), triton=True
    ),
    PublicKernel(
        FLA, "parallel_attn, sinks", fla, {**CAUSAL, "sinks": "learned"}, (2, 2, 1, 40, 16), triton=True
    ),
    PublicKernel(
        LIGER, "fused neighborhood attention", liger, {"window": (3, 3)}, (2, 2, 2, 40, 16), triton=True, dtypes=HALF
    ),
    PublicKernel(
        CUSTOM_MASK, "flash_attention_custom_mask, no mask", custom_mask, {}, TILES, triton=True, dtypes=HALF,
        grid=False,
    ),
    PublicKernel(
        CUSTOM_MASK, "flash_attention_custom_mask, causal mask", lambda s: custom_mask(s, TRIANGLE),
        {"attn_mask": TRIANGLE}, TILES, triton=True, dtypes=HALF, grid=False,
    ),
    PublicKernel(
        CUSTOM_MASK, "flash_attention_custom_mask, padding", lambda s: custom_mask(s, PADDED),
        {"attn_mask": PADDED}, TILES, triton=True, dtypes=HALF, grid=False,
    ),
    PublicKernel(JVP, "attention", lambda s: jvp(s, causal=False), {}, (2, 2, 2, 64, 32), triton=True),
    PublicKernel(JVP, "attention, causal", lambda s: jvp(s, causal=True), CAUSAL, (2, 2, 2, 64, 32), triton=True),
    PublicKernel("x-transformers==2.31.10", "Attend, causal", lambda s: x_transformers(s, causal=True), CAUSAL),
    PublicKernel(
        "x-transformers==2.31.10", "Attend, softclamp",
        lambda s: x_transformers(s, softclamp_logits=True, logit_softclamp_value=2.0), {"softcap": 2.0},
    ),
    PublicKernel(
        "local-attention==1.11.2", "LocalAttention, causal", lambda s: local(s, window_size=8, causal=True),
        {**CAUSAL, "window": 9},
    ),
    PublicKernel("pascal-attn==0.1.0", "tiled_attention", pascal, {}, (2, 4, 2, 40, 16)),
)  # fmt: skip
# What the packages import, beside those that `make test` installs.
IMPORTED = ("hyper-connections==0.4.11", "rotary-embedding-torch==0.9.1", "einx==0.4.3", "loguru==0.7.3")


def install() -> None:
    """Install what is not there."""
    wanted = "\n".join([*sorted({kernel.package for kernel in KERNELS}), *IMPORTED])
    stamp = FOLDER / ".packages"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(FOLDER), *wanted.split()], check=True)
    stamp.write_text(wanted, encoding="utf-8")


def interpret() -> None:
    """Make the interpreter good for kernels that were written for a GPU."""
    import numpy as np
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, interpreter

    target = GPUTarget("cpu", 0, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))  # type: ignore[arg-type]
    tune = triton.autotune
    triton.autotune = lambda configs, key, **options: tune(configs[:1], key)
    multiply = interpreter.InterpreterBuilder.create_dot

    def values(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, *map(values, (a, b)), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def ask(kernel: PublicKernel, dtype: str) -> dict[str, Any]:
    """Cases, those that are right, and what is said of the others."""
    from sqrtdk.testing import assert_gradients

    if kernel.triton:
        interpret()
    generator = torch.Generator().manual_seed(0)
    batch, query_heads, heads, length, width = kernel.sizes
    shapes = ((batch, query_heads, length, width), *2 * ((batch, heads, length, width),))
    q, k, v = (torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes)
    formula = dict(kernel.formula)
    sinks = torch.randn(query_heads, generator=generator, requires_grad=True) if "sinks" in formula else None
    formula |= {} if sinks is None else {"sinks": sinks}
    function = kernel.load(sinks)
    begun = time.process_time()
    try:
        report = assert_gradients(function, q, k, v, grid=kernel.grid, **formula)
        refused = sum(bool(case.refused) for case in report.cases)
        found: dict[str, Any] = {"cases": len(report.cases), "wrong": 0, "refused": refused, "said": []}
    except AssertionError as error:
        head, *lines = str(error).splitlines()
        wrong, cases, refused = (int(word) for word in re.findall(r"\d+", head.partition("wrong in ")[2] + ", 0")[:3])
        found = {"cases": cases, "wrong": wrong, "refused": refused, "said": [line.strip() for line in lines]}
    return {**found, "cpu_s": round(time.process_time() - begun, 1)}


def ask_apart(number: int, dtype: str) -> dict[str, Any]:
    """`ask` in a process of its own."""
    paths = [str(ROOT / "src"), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", __file__, "--one", str(number), dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"cases": 0, "wrong": 0, "refused": 0, "said": [f"no answer after {SECONDS} s"]}
    if done.returncode:
        return {
            "cases": 0,
            "wrong": 0,
            "refused": 0,
            "said": [(done.stderr.strip().splitlines() or [str(done.returncode)])[-1]],
        }
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Ask each kernel in each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of packages and functions; all by default")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(ask(KERNELS[int(options.one[0])], options.one[1])))
        return
    install()
    rows = []
    for number, kernel in enumerate(KERNELS):
        if options.names and not any(name in f"{kernel.package} {kernel.name}" for name in options.names):
            continue
        for dtype in kernel.dtypes:
            found = ask_apart(number, dtype)
            rows.append({"package": kernel.package, "name": kernel.name, "dtype": dtype, **found})
            asked = found["cases"] - found["refused"]
            right = f"{asked - found['wrong']} of {asked} right, {found['refused']} refused"
            print(f"{kernel.package:42} {kernel.name:42} {dtype:9} {right}", *found["said"], sep="\n    ", flush=True)
    if options.json:
        about = {"date": str(date.today()), "torch": torch.__version__, "triton": version("triton")}
        options.json.write_text(json.dumps({**about, "kernels": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
