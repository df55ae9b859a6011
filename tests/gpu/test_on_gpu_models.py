"""check, trace and measure on a GPU, run by `make gpu`; smaller in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import sqrtdk
from tests.gpu.gpu_here import ALL, DTYPES, Sizes, in_both, on, qkv
from tests.tolerances import complaint

pytestmark = pytest.mark.filterwarnings("default")  # those of torch's code for GPUs are no errors of ours


@in_both
@pytest.mark.parametrize(("model", "code"), [("demo", 0), ("demo:unscaled", 1)])
def test_an_audit_says_the_same_as_on_a_cpu(model: str, code: int, kind: str) -> None:
    there, here = (sqrtdk.check(model, device=device) for device in (kind, "cpu"))
    assert there.exit_code == here.exit_code == code
    for mine, theirs in zip(there.calls, here.calls, strict=True):
        assert mine.call.device.startswith(kind)
        assert (mine.verdict, mine.mistake, mine.call.formula) == (theirs.verdict, theirs.mistake, theirs.call.formula)
        assert mine.call.scale.numeric == pytest.approx(theirs.call.scale.numeric, rel=0.01)
        assert mine.call.stats.entropy_nats == pytest.approx(theirs.call.stats.entropy_nats, rel=0.02, abs=0.01)
    assert {f.rule for f in there.findings} == {f.rule for f in here.findings}


class Net(nn.Module):
    """One attention of two heads, by whatever `attend` does."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(64, 384), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return self.attend(q * 0.5, k, v)


KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
}


def traced(attend: Callable[..., Tensor], kind: str, dtype: torch.dtype) -> Any:
    """The one call of a net, whose output is the same with and without the trace."""
    net, x = Net(attend).to(kind, dtype), torch.randn(2, 40, 64).to(kind, dtype)
    with torch.no_grad():
        before = net(x)
        with sqrtdk.trace(net) as run:
            after = net(x)
    assert torch.equal(before, after)
    (call,) = run.calls
    return call


@on("name, causal", product(KERNELS, [False, True]), [("flash", False), ("flash", True)])
def test_torch_s_kernels_are_read(name: str, causal: bool, kind: str) -> None:
    backend, operator = KERNELS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    call = traced(attend, kind, torch.bfloat16)
    assert call.op == f"aten.{operator}" + ("_for_cpu" if kind == "cpu" else "")
    assert call.formula == "softmax(0.0625 * q.k" + (" + causal)" if causal else ")")
    assert call.scale.ratio == pytest.approx(0.5)
    assert call.scale.numeric == pytest.approx(0.0625, rel=0.01)
    assert len(call.stats.entropy_nats) == 2
    assert all(entropy > 0 for entropy in call.stats.entropy_nats)


@in_both
def test_our_own_kernel_is_read(kind: str) -> None:
    attend = partial(sqrtdk.attention, is_causal=True, softcap=30.0, impl="triton")
    call = traced(attend, kind, torch.float32)
    assert call.op == "sqrtdk_gpu.forward"
    assert call.scale.ratio == pytest.approx(0.5)
    assert call.softcap == pytest.approx(30.0)
    assert (call.query_len, call.key_len, call.head_dim, call.mask.kind) == (40, 40, 64, "causal")


class Seen(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.name()))
        return func(*args, **(kwargs or {}))


MEASURED = ("keys", "max_logit", "min_logit", "mean", "lse", "entropy_nats", "collision", "peak")


@on("dtype, rows", product(DTYPES, [None, 16]), [("float32", None), ("bfloat16", 16)])
def test_measure_gives_what_float64_gives(dtype: str, rows: int | None, kind: str) -> None:
    sizes = Sizes(2, 4, 2, 700, 900, 128, 128)
    q, k, _ = (t.detach() for t in qkv(sizes if kind == "cuda" else sizes.small, DTYPES[dtype], kind))
    options = {"causal_lower_right": True, "enable_gqa": True, "softcap": 10.0}
    with Seen() as seen:
        found = sqrtdk.measure(q, k, rows=rows, **options)
    assert ("sqrtdk_gpu::forward" in seen.names) is (kind == "cuda")
    wide = k.double()
    _, wanted = sqrtdk.attention(q.double(), wide, wide, impl="dense", return_aux=ALL, **options)
    length = q.shape[-2]
    at = torch.linspace(0, length - 1, rows or length).round().long().to(kind)
    for name in MEASURED:
        mine, true = getattr(found, name), getattr(wanted, name)[..., at]
        text = complaint(mine, true, torch.float32, length=k.shape[-2], logit=12.0, magnitude=1.0)
        assert text is None, f"{name}: {text}"
