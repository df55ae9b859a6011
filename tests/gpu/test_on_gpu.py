"""What is shown on a GPU by `make gpu`; where a test needs no GPU's memory or kernels it also runs here, smaller.

"cpu" is Triton's interpreter: the same functions at small sizes, so that they are right when they first meet a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import FEW_CASES, Case
from judging import expect, judge_at_once
from plain import plain
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import sqrtdk
from sqrtdk import AuxRequest, scales
from tolerances import complaint, gradient_complaints, half_complaint
from triton_here import unable

pytestmark = pytest.mark.filterwarnings("default")  # those of torch's code for GPUs are no errors of ours
ALL = AuxRequest.all()
ON_GPU = torch.cuda.is_available() and torch.version.cuda is not None
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="torch sees no NVIDIA GPU")]
interpreted = pytest.mark.skipif(ON_GPU or unable() is not None, reason=f"no interpreter: {unable()}, or a GPU")


def on(names: str, there: Iterable[tuple[Any, ...]], here: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """The values of a test on a GPU, and the fewer of it in the interpreter, where a call takes long."""
    values = [pytest.param(*row, "cuda", marks=on_gpu) for row in there]
    values += [pytest.param(*row, "cpu", marks=interpreted) for row in here]
    return pytest.mark.parametrize(f"{names}, kind" if names else ("kind",), values)


only_gpu = on("", [()], [])
in_both = on("", [()], [()])
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """B, Hq, H, L, S, E, Ev."""

    batch: int
    heads: int
    key_heads: int
    length: int
    keys: int
    width: int
    value_width: int

    @property
    def small(self) -> Sizes:
        """For the interpreter: a tile and a half."""
        return Sizes(1, self.heads, self.key_heads, min(self.length, 24), min(self.keys, 40), 16, 16)


def qkv(sizes: Sizes, dtype: torch.dtype, kind: str) -> list[Tensor]:
    """On the device, the same numbers on each."""
    s = sizes
    shapes = ((s.heads, s.length, s.width), (s.key_heads, s.keys, s.width), (s.key_heads, s.keys, s.value_width))
    return [torch.randn(s.batch, *shape).to(dtype).to(kind).requires_grad_() for shape in shapes]


def results(given: list[Tensor], impl: str, cotangents: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """Output, statistics, and the gradients of output, lse and entropy together, by name."""
    sizes = {"enable_gqa": given[0].shape[1] != given[1].shape[1]}
    output, aux = sqrtdk.attention(*given, impl=impl, return_aux=ALL, **sizes, **options)
    total = sum(
        (torch.where(t.isneginf(), 0.0, t).double() * weight).sum()
        for t, weight in zip((output, aux.lse, aux.entropy), cotangents, strict=True)
    )
    gradients = torch.autograd.grad(total, given)
    found = {"output": output} | {name: getattr(aux, name) for name in ALL.wanted}
    named = zip(("d query", "d key", "d value"), gradients, strict=True)
    return {name: t.detach() for name, t in found.items()} | dict(named)


def weights_of(given: list[Tensor]) -> list[Tensor]:
    """Cotangents of output, lse and entropy."""
    q, _, v = given
    rows = q.shape[:-1]
    return [torch.randn(*shape, dtype=torch.float64).to(q.device) for shape in ((*rows, v.shape[-1]), rows, rows)]


# the battery


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize("case", FEW_CASES, ids=lambda case: case.id)
def test_cases_agree_with_the_oracle(case: Case) -> None:
    """In the interpreter test_attention_battery runs them."""
    wrong = judge_at_once(case, "triton", expect(case))
    assert not wrong, "\n".join(wrong)


LARGE = {
    "128": Sizes(2, 4, 4, 300, 700, 128, 128),
    "64-grouped": Sizes(1, 8, 2, 513, 513, 64, 64),
    "256": Sizes(1, 2, 2, 190, 333, 256, 256),
    "96-48": Sizes(1, 2, 1, 257, 600, 96, 48),
    "80": Sizes(1, 2, 2, 200, 200, 80, 80),
    "16": Sizes(1, 2, 2, 1030, 1030, 16, 16),
    "one-query": Sizes(2, 8, 1, 1, 9000, 128, 128),
    "four-queries": Sizes(1, 8, 8, 4, 9000, 64, 64),
}
OPTIONS: dict[str, Callable[[Sizes, str], dict[str, Any]]] = {
    "plain": lambda s, kind: {},
    "causal": lambda s, kind: {"causal_lower_right": True},
    "window-softcap": lambda s, kind: {"window": (100, 20), "causal_lower_right": True, "softcap": 3.0},
    "mask-bias": lambda s, kind: {
        "attn_mask": (torch.rand(s.batch, 1, s.length, s.keys) < 0.8).to(kind),
        "bias": torch.randn(s.heads, 1, s.keys).to(kind),
    },
}


# bfloat16 everywhere, the others by turns
FITTING = [
    row
    for i, row in enumerate(product(LARGE, OPTIONS, DTYPES))
    if row[2] == "bfloat16" or (i // 3 + i // 12) % 2 == (row[2] == "float16")
]


@on(
    "name, options, dtype",
    FITTING,
    [("64-grouped", "causal", "float32"), ("96-48", "mask-bias", "bfloat16"), ("96-48", "plain", "float16")],
)
def test_sizes_of_models_agree_with_float64(name: str, options: str, dtype: str, kind: str) -> None:
    """Against the dense formula in float64 on the same device; half types no worse than the plain one beside it."""
    sizes = LARGE[name] if kind == "cuda" else LARGE[name].small
    given = qkv(sizes, DTYPES[dtype], kind)
    chosen, weights = OPTIONS[options](sizes, kind), weights_of(given)
    found = results(given, "triton", weights, **chosen)
    exact = [t.detach().double().requires_grad_() for t in given]
    wide = {key: t.double() if key == "bias" else t for key, t in chosen.items()}
    wanted = results(exact, "dense", weights, **wide)
    half = DTYPES[dtype] != torch.float32
    beside = plain_results(given, chosen, weights) if half else {}
    logit = math.sqrt(sizes.width) + 4.0 * (options == "mask-bias")  # of its terms: the products are sums of as many
    largest = max(wanted[name].abs().max().item() for name in wanted if name.startswith("d "))
    wrong = {}
    for name, value in found.items():
        floor = largest if name.startswith("d ") else 0.0
        if half and name in beside:
            wrong[name] = half_complaint(value, wanted[name], beside[name], DTYPES[dtype], floor=floor)
            continue
        length, uses = max(sizes.keys, sizes.length), sizes.heads // sizes.key_heads
        magnitude = max(floor, 1.0 + (logit if name == "variance" else 0.0))
        wrong[name] = complaint(
            value, wanted[name], torch.float32, length=length, logit=logit, magnitude=magnitude, uses=uses
        )
    assert not any(wrong.values()), {name: text for name, text in wrong.items() if text}


def plain_results(given: list[Tensor], options: dict[str, Any], weights: list[Tensor]) -> dict[str, list[Tensor]]:
    """Output and gradients of the plain formula, each of its operations rounded, in two ways of writing it."""
    found: dict[str, list[Tensor]] = {}
    for scale_first in (False, True):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        own = {name: t.to(given[0].dtype) if name == "bias" else t for name, t in options.items()}
        with torch.device(given[0].device):
            output, aux = plain(*leaves, scale=given[0].shape[-1] ** -0.5, scale_first=scale_first, **own)
        lse = torch.where(aux["lse"].isneginf(), 0.0, aux["lse"])
        parts = zip((output, lse, aux["entropy"]), weights, strict=True)
        gradients = torch.autograd.grad(sum((t.double() * weight).sum() for t, weight in parts), leaves)
        named = {"output": output.detach()} | dict(zip(("d query", "d key", "d value"), gradients, strict=True))
        for name, t in named.items():
            found.setdefault(name, []).append(t)
    return found


@in_both
def test_learned_scales_sinks_and_biases_have_their_gradients(kind: str) -> None:
    sizes = Sizes(1, 2, 1, 70, 150, 64, 64)  # no larger, or a gradient off by 1.001 could not be told
    sizes = sizes if kind == "cuda" else sizes.small

    def gradients(dtype: torch.dtype, impl: str) -> dict[str, Tensor]:
        torch.manual_seed(1)
        given = qkv(sizes, dtype, kind)
        extras = {
            "scale": (0.05 + 0.1 * torch.rand(sizes.heads, 1, 1)).to(dtype).to(kind).requires_grad_(),
            "bias": torch.randn(1, sizes.heads, sizes.length, sizes.keys).to(dtype).to(kind).requires_grad_(),
            "sinks": torch.randn(sizes.heads).to(dtype).to(kind).requires_grad_(),
        }
        request = AuxRequest(lse=True, entropy=True)
        options = {"enable_gqa": True, "is_causal": True, "return_aux": request, "impl": impl}
        output, aux = sqrtdk.attention(*given, **extras, **options)
        weight = torch.randn(output.shape).to(dtype).to(kind)
        total = (output * weight).sum() + aux.lse.sum() + aux.entropy.sum()
        leaves = [*given, *extras.values()]
        names = ("query", "key", "value", *extras)
        return dict(zip(names, torch.autograd.grad(total, leaves), strict=True))

    mine, theirs = gradients(torch.float32, "triton"), gradients(torch.float64, "dense")
    rows = sizes.batch * sizes.heads * sizes.length
    wrong = gradient_complaints(mine, theirs, torch.float32, length=sizes.keys, logit=12.0, rows=rows)
    assert not wrong, wrong


# torch.compile


@on("dtype", [("float32",), ("bfloat16",)], [("bfloat16",)])
def test_a_compiled_model_gives_what_an_eager_one_does(dtype: str, kind: str) -> None:
    sizes = Sizes(1, 4, 2, 200, 200, 64, 64)
    given = qkv(sizes if kind == "cuda" else sizes.small, DTYPES[dtype], kind)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        request = AuxRequest(lse=True, entropy=True)
        options = {"is_causal": True, "enable_gqa": True, "softcap": 20.0, "impl": "triton", "return_aux": request}
        output, aux = sqrtdk.attention(2.0 * q, k, v, **options)
        return output.relu(), aux.lse, aux.entropy

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if kind == "cuda" else "aot_eager")
    pair = []
    for call in (attend, compiled):
        found = call(*given)
        gradients = torch.autograd.grad(sum(t.float().sum() for t in found), given)
        pair.append([t.detach() for t in (*found, *gradients)])
    for mine, theirs in zip(*pair, strict=True):
        eps = torch.finfo(mine.dtype).eps
        assert (mine.float() - theirs.float()).abs().max() <= 8.0 * eps * theirs.float().abs().max()


# memory


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
            return torch.autograd.grad(output.float().sum() + aux.entropy.sum() + aux.lse.sum(), given)

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
    assert aux.count[0, 0, -1] == 1
    assert (aux.count[0, 0, :-1] == len(range(0, keys, 7))).all()


@on("heads, keys", [(136, 131072)], [(3, 64)])  # 2.3e9 numbers of 128 each
def test_keys_beyond_32_bits_of_offset_are_read_where_they_lie(heads: int, keys: int, kind: str) -> None:
    room(kind, 16)
    k = torch.zeros(1, heads, keys, 128, dtype=torch.bfloat16, device=kind)
    k[0, -1] = torch.randn(keys, 128, dtype=torch.bfloat16, device=kind)
    q = torch.randn(1, heads, 2, 128, dtype=torch.bfloat16, device=kind)
    output = sqrtdk.attention(q, k, k, impl="triton")
    assert not output[:, :-1].any()
    same_as_dense(output[:, -1:], *(t[:, -1:] for t in (q, k, k)))


# check, trace, measure


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


MEASURED = {"n": "count", "max": "max_scores", "min": "min_scores", "mean": "mean", "lse": "lse"}
MEASURED |= {"entropy_nats": "entropy", "collision": "collision", "peak": "peak"}


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
    for name, same in MEASURED.items():
        mine, true = getattr(found, name), getattr(wanted, same)[..., at]
        text = complaint(mine, true, torch.float32, length=k.shape[-2], logit=12.0, magnitude=1.0)
        assert text is None, f"{name}: {text}"


# the same numbers every time, and what "auto" takes


@on("name, dtype", product(["64-grouped", "one-query", "128"], DTYPES), [("64-grouped", "bfloat16")])
def test_runs_are_bit_equal(name: str, dtype: str, kind: str) -> None:
    given = qkv(LARGE[name] if kind == "cuda" else LARGE[name].small, DTYPES[dtype], kind)
    weights = weights_of(given)
    first = results(given, "triton", weights, causal_lower_right=True)
    for _ in range(10 if kind == "cuda" else 1):
        again = results(given, "triton", weights, causal_lower_right=True)
        assert [key for key in first if not torch.equal(first[key], again[key])] == []


@in_both
def test_auto_takes_the_kernel_where_an_extra_is_asked_for(kind: str) -> None:
    q = torch.randn(1, 2, 128, 64, device=kind)
    learned = scales.learned(2).to(kind)
    mask = torch.ones(128, 128, dtype=torch.bool, device=kind)
    assert sqrtdk.explain(q, q, q).impl == "fused"
    assert sqrtdk.explain(q, q, q, mask, is_causal=False).impl == "fused"
    extras = ({"return_aux": ALL}, {"softcap": 10.0}, {"scale": learned}, {"sinks": torch.zeros(2, device=kind)})
    taken = [sqrtdk.explain(q, q, q, **extra).impl for extra in extras]
    assert taken == ["triton"] * 4 if kind == "cuda" else "triton" not in taken
    output = sqrtdk.attention(q, q, q, softcap=10.0)
    wanted = sqrtdk.attention(q.double(), q.double(), q.double(), softcap=10.0, impl="dense")
    assert complaint(output, wanted, torch.float32, length=128, logit=12.0) is None
