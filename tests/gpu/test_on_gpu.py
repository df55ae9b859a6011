"""What is shown on a GPU by `make gpu`; where a test needs no GPU's memory or kernels it also runs here, smaller."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest, scales
from tests.attention.cases import FEW_CASES, Case
from tests.attention.judging import expect, judge_at_once
from tests.attention.plain import plain
from tests.gpu.gpu_here import ALL, DTYPES, LARGE, ON_GPU, Sizes, in_both, on, qkv, results, weights_of
from tests.tolerances import complaint, gradient_complaints, half_complaint

pytestmark = pytest.mark.filterwarnings("default")  # those of torch's code for GPUs are no errors of ours


# the battery


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize("case", FEW_CASES, ids=lambda case: case.id)
def test_cases_agree_with_the_oracle(case: Case) -> None:
    """In the interpreter test_attention_battery runs them."""
    wrong = judge_at_once(case, "triton", expect(case))
    assert not wrong, "\n".join(wrong)


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
        parts = zip((output, lse, aux["entropy_nats"]), weights, strict=True)
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
        request = AuxRequest(lse=True, entropy_nats=True)
        options = {"enable_gqa": True, "is_causal": True, "return_aux": request, "impl": impl}
        output, aux = sqrtdk.attention(*given, **extras, **options)
        weight = torch.randn(output.shape).to(dtype).to(kind)
        total = (output * weight).sum() + aux.lse.sum() + aux.entropy_nats.sum()
        leaves = [*given, *extras.values()]
        names = ("query", "key", "value", *extras)
        return dict(zip(names, torch.autograd.grad(total, leaves), strict=True))

    mine, theirs = gradients(torch.float32, "triton"), gradients(torch.float64, "dense")
    rows = sizes.batch * sizes.heads * sizes.length
    wrong = gradient_complaints(mine, theirs, torch.float32, length=sizes.keys, logit=12.0, rows=rows)
    assert not wrong, wrong


# torch.compile


@pytest.mark.full
@on("dtype", [("float32",), ("bfloat16",)], [("bfloat16",)])
def test_a_compiled_model_gives_what_an_eager_one_does(dtype: str, kind: str) -> None:
    sizes = Sizes(1, 4, 2, 200, 200, 64, 64)
    given = qkv(sizes if kind == "cuda" else sizes.small, DTYPES[dtype], kind)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        request = AuxRequest(lse=True, entropy_nats=True)
        options = {"is_causal": True, "enable_gqa": True, "softcap": 20.0, "impl": "triton", "return_aux": request}
        output, aux = sqrtdk.attention(2.0 * q, k, v, **options)
        return output.relu(), aux.lse, aux.entropy_nats

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


# the same numbers every time, and what "auto" takes


@pytest.mark.full
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
