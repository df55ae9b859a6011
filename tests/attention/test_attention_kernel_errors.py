"""The compiled kernel's errors beside those of torch's kernels, and the memory that it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sqrtdk
from tests.attention.cases import CASES, Case, as_leaves
from tests.attention.judging import cotangents, expect
from tests.support.kernel_here import needs_kernel

pytestmark = needs_kernel


def worst(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [(a.double() - b).abs().max().item() if b.numel() else 0.0 for a, b in zip(found, wanted, strict=True)]


def output_and_gradients(run: Callable[..., Tensor], given: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    output = run(*given)
    return [output.detach(), *torch.autograd.grad(output, given, cotangent.to(output.dtype))]


SIZES = {  # B, H, Hkv, L, S, E, causal
    "4096": (1, 2, 2, 1024, 4096, 64, False),
    "wide": (1, 2, 2, 512, 1024, 128, False),
    "training": (2, 6, 6, 512, 512, 64, False),
    "causal": (1, 4, 4, 1024, 1024, 64, True),
    "grouped": (1, 8, 2, 512, 512, 128, True),
    "odd": (2, 3, 3, 333, 777, 40, False),
    "few": (1, 8, 8, 16, 8192, 128, False),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_errors_are_at_most_twice_those_of_torch(size: str, dtype: torch.dtype) -> None:
    batch, heads, kv, length, keys, dim, causal = SIZES[size]
    sizes = ((batch, heads, length, dim), (batch, kv, keys, dim), (batch, kv, keys, dim))
    given = [torch.randn(s).to(dtype).requires_grad_() for s in sizes]
    exact = [t.detach().double().requires_grad_() for t in given]
    cotangent = torch.randn(batch, heads, length, dim, dtype=torch.float64).to(dtype).double()
    options = {"is_causal": causal, "enable_gqa": heads != kv}
    wanted = output_and_gradients(lambda *t: sqrtdk.attention(*t, impl="dense", **options), exact, cotangent)
    ours = output_and_gradients(lambda *t: sqrtdk.attention(*t, impl="cpu", **options), given, cotangent)
    theirs = output_and_gradients(lambda *t: functional.scaled_dot_product_attention(*t, **options), given, cotangent)
    for name, mine, beside in zip(
        ("output", "dq", "dk", "dv"), worst(ours, wanted), worst(theirs, wanted), strict=True
    ):
        assert mine <= 2 * beside, f"{name}: {mine:.3g}, torch {beside:.3g}"


BOTH = [case for case in CASES if case.cpu_at_once and case.fused_can]


@pytest.mark.slow
@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.id)
def test_errors_over_the_battery_are_at_most_twice_those_of_torch(case: Case) -> None:
    """Results of a few numbers, where one of torch's may be exact by chance, may be off by a unit of the largest."""
    expected = expect(case)
    weights = cotangents(expected.answer, case.torch_dtype)["output"]
    moving = ["query", "key", "value"]

    def of(impl: str) -> list[Tensor]:
        leaves = as_leaves(case.leaves(), case.torch_dtype)
        output = sqrtdk.attention(**case.given(leaves), impl=impl)
        grads = torch.autograd.grad(output, [leaves[n] for n in moving], weights.to(output.dtype), allow_unused=True)
        zeros = (torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(moving, grads, strict=True))
        return [output.detach(), *zeros]

    wanted = [expected.answer.output.detach(), *(expected.gradients[name] for name in moving)]
    finite = [torch.nan_to_num(t) for t in wanted]
    largest = max((t.abs().max().item() for t in finite[1:] if t.numel()), default=0.0)
    eps = torch.finfo(case.torch_dtype).eps
    ours, theirs = (list(map(torch.nan_to_num, of(impl))) for impl in ("cpu", "fused"))
    for at, (mine, beside) in enumerate(zip(worst(ours, finite), worst(theirs, finite), strict=True)):
        magnitude = finite[0].abs().max().item() if at == 0 and finite[0].numel() else largest
        limit = max(2 * beside, eps * magnitude * (1 + expected.answer.size))
        assert mine <= limit, f"result {at}: {mine:.3g}, torch {beside:.3g}"


PEAK = """
import resource, sys, torch, sqrtdk
torch.set_num_threads(2)
length = int(sys.argv[1])
q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
sqrtdk.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], impl="cpu", return_aux=sqrtdk.AuxRequest.all())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.no_grad():
    out, aux = sqrtdk.attention(q, k, v, is_causal=True, impl="cpu", return_aux=sqrtdk.AuxRequest.all())
assert out.isfinite().all() and aux.entropy_nats.isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def added_mib(length: int) -> float:
    """What a call adds to the peak of a process that holds its inputs, MiB."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(length)], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
def test_memory_grows_with_the_length_and_131072_keys_fit() -> None:
    found = {length: added_mib(length) for length in (16384, 32768, 131072)}
    assert found[32768] < 2.5 * found[16384]
    assert found[131072] < 10 * found[16384]
    assert found[131072] < 4096
