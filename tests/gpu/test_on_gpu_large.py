"""Memory of long calls, and numbers beyond 32 bits of offset; run by `make gpu`, smaller in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from tests.attention.plain import plain
from tests.gpu.gpu_here import ALL, MIB, Sizes, on, only_gpu, qkv
from tests.tolerances import complaint, half_complaint

pytestmark = pytest.mark.filterwarnings("default")  # those of torch's code for GPUs are no errors of ours


def peak(call: Callable[[], object]) -> int:
    """Bytes that a call holds at most beside what was there."""
    call()  # what is compiled, and what the allocator keeps
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    torch.cuda.synchronize()
    del found
    return torch.cuda.max_memory_allocated() - before


@only_gpu
@pytest.mark.parametrize("training", [False, True])
def test_memory_grows_with_rows_and_keys_and_not_with_their_product(training: bool, kind: str) -> None:
    peaks = []
    for length in (4096, 8192, 16384):
        given = qkv(Sizes(1, 8, 8, length, length, 64, 64), torch.bfloat16, kind)

        def forward(given: list[Tensor] = given) -> object:
            with torch.no_grad():
                return sqrtdk.attention(*given, is_causal=True, impl="triton", return_aux=ALL)

        def both(given: list[Tensor] = given) -> object:
            output, aux = sqrtdk.attention(*given, is_causal=True, impl="triton", return_aux=ALL)
            return torch.autograd.grad(output.float().sum() + aux.entropy_nats.sum() + aux.lse.sum(), given)

        peaks.append(peak(both if training else forward))
    numbers = 8 * 16384 * 64  # of one of query, key and value
    assert peaks[2] <= 2.1 * peaks[1] <= 2.1 * 2.1 * peaks[0]
    assert peaks[2] <= (10 if training else 2) * 4 * numbers + 32 * MIB  # in float32; the weights would be 4 GiB


@on("n, causal", [(131072, False), (131072, True)], [(150, True)])
def test_131072_keys_give_what_float64_gives(n: int, causal: bool, kind: str) -> None:
    """Rows spread over all of them, by the dense formula."""
    q, k, v = (t.detach() for t in qkv(Sizes(1, 1, 1, n, n, 64, 64), torch.bfloat16, kind))
    output, aux = sqrtdk.attention(q, k, v, is_causal=causal, impl="triton", return_aux=ALL)
    rows = torch.linspace(0, n - 1, 33).round().long().to(kind)
    mask = torch.arange(n, device=kind) <= rows[:, None] if causal else None
    stats = same_as_dense(output[:, :, rows], q[:, :, rows], k, v, mask)
    for name in ALL.wanted:
        text = complaint(getattr(aux, name)[..., rows], getattr(stats, name), torch.float32, length=n, logit=8.0)
        assert text is None, f"{name}: {text}"


def same_as_dense(output: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    """The statistics of the dense formula in float64; the output is no further from it than the plain one's, twice."""
    with torch.no_grad():
        wanted, stats = sqrtdk.attention(q.double(), k.double(), v.double(), mask, impl="dense", return_aux=ALL)
        with torch.device(q.device):
            beside = [plain(q, k, v, scale=q.shape[-1] ** -0.5, attn_mask=mask)[0]]
    text = half_complaint(output, wanted, beside, torch.bfloat16)
    assert text is None, text
    return stats


def room(kind: str, gib: float) -> None:
    if kind == "cuda" and torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"it needs {gib} GiB of GPU memory")


@on("length, keys", [(36000, 65536)], [(40, 70)])  # 2.4e9 pairs
def test_a_mask_beyond_32_bits_of_offset_is_read_where_it_lies(length: int, keys: int, kind: str) -> None:
    room(kind, 8)
    q, k, v = (t.detach() for t in qkv(Sizes(1, 1, 1, length, keys, 32, 32), torch.bfloat16, kind))
    mask = torch.zeros(length, keys, dtype=torch.bool, device=kind)
    mask[:, ::7] = True
    mask[-1] = False
    mask[-1, 5] = True
    output, aux = sqrtdk.attention(q, k, v, mask, impl="triton", return_aux=ALL)
    assert torch.equal(output[0, 0, -1], v[0, 0, 5])
    assert aux.keys[0, 0, -1] == 1
    assert (aux.keys[0, 0, :-1] == len(range(0, keys, 7))).all()


@on("heads, keys", [(136, 131072)], [(3, 64)])  # 2.3e9 numbers of 128 each
def test_keys_beyond_32_bits_of_offset_are_read_where_they_lie(heads: int, keys: int, kind: str) -> None:
    room(kind, 16)
    k = torch.zeros(1, heads, keys, 128, dtype=torch.bfloat16, device=kind)
    k[0, -1] = torch.randn(keys, 128, dtype=torch.bfloat16, device=kind)
    q = torch.randn(1, heads, 2, 128, dtype=torch.bfloat16, device=kind)
    output = sqrtdk.attention(q, k, k, impl="triton")
    assert not output[:, :-1].any()
    same_as_dense(output[:, -1:], *(t[:, -1:] for t in (q, k, k)))
