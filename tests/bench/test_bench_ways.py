"""Every way computes what it is said to compute, on shapes of every kind."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from peers import dense_statistics, operator
from sqrtdk import AuxRequest, attention
from sqrtdk.impl.kernel.load import loaded
from tests.support.kernel_here import unable
from tests.tolerances import complaint
from ways import BASE, WAYS, DisagreementError, compare, prepared
from workloads import DTYPES, WORKLOADS, Case, Workload

SHAPES = {
    "plain": Workload(2, 3, 3, 40, 40, 16),
    "causal": Workload(1, 2, 2, 33, 33, 32, is_causal=True),
    "gqa": Workload(2, 4, 2, 24, 24, 16),
    "gqa-causal": Workload(1, 4, 2, 24, 24, 16, is_causal=True),
    "decode": Workload(1, 4, 4, 1, 64, 32),
    "gqa-decode": Workload(2, 4, 2, 1, 64, 32),
}
COMPILED = {"flex"}  # each shape costs seconds
NO_KERNEL = unable()
NO_ONNX = find_spec("onnxruntime") is None or find_spec("onnx") is None


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [False, True])
def test_ways_agree_with_torch(shape: str, dtype: str, training: bool) -> None:
    case = Case.of(SHAPES[shape], DTYPES[dtype], training)
    ready, refused = prepared(case, {name: way for name, way in WAYS.items() if name not in COMPILED})
    allowed = {"onnxruntime"} if training or dtype == "bfloat16" or NO_ONNX else set()
    allowed |= {"fused-stats"} if training else set()
    allowed |= {"cpu", "cpu-stats"} if NO_KERNEL else set()
    assert set(refused) == allowed
    assert all(refused.values())
    for work in ready.values():  # again, as a round does
        found = work()
        assert len(found) == (4 if training else 1)
        assert not any(tensor.requires_grad for tensor in found)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_flex_is_compiled_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # code that another program compiled, with other settings, must not be found
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case, ways = Case.of(SHAPES["gqa-causal"], torch.float32), {name: WAYS[name] for name in (BASE, "flex")}
    if (
        torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):  # what torch 2.13 compiles for it is wrong, and nothing times it
        with pytest.raises(DisagreementError, match="flex and sdpa differ"):
            prepared(case, ways)
        return
    ready, refused = prepared(case, ways)
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":  # its kernels for CPUs are of vectors
        assert refused.keys() == {"flex"}
        return
    assert refused == {}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ready["flex"]()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0  # a round compiles nothing


def test_flex_says_that_it_has_no_gradient() -> None:
    _, refused = prepared(Case.of(SHAPES["plain"], torch.float32, True), {name: WAYS[name] for name in (BASE, "flex")})
    assert "does not support backward on CPU" in refused["flex"]


@pytest.mark.skipif(NO_ONNX, reason="onnxruntime or onnx is not installed")
def test_a_missing_onnxruntime_is_a_reason_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    case, ways = Case.of(SHAPES["plain"], torch.float32), {name: WAYS[name] for name in (BASE, "onnxruntime")}
    for module in ("onnxruntime", "onnx"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module, None)
            _, refused = prepared(case, ways)
            assert refused["onnxruntime"].startswith(f"{module} can't be imported")
            assert "pip install 'sqrtdk[onnx]'" in refused["onnxruntime"]


def test_operators_of_onnxruntime_by_what_they_take() -> None:
    kinds = {name: operator(shape, torch.float32) for name, shape in SHAPES.items()}
    assert kinds == {
        "plain": "MultiHeadAttention",
        "causal": "GroupQueryAttention",
        "gqa": "GroupQueryAttention",
        "gqa-causal": "GroupQueryAttention",
        "decode": "Attention",
        "gqa-decode": "Attention",
    }
    assert operator(SHAPES["plain"], torch.float16) == "Attention"


@pytest.mark.parametrize("name", ["eager", "eager-stats"])
def test_the_formula_is_not_written_out_where_it_would_not_fit(name: str) -> None:
    case = Case.of(WORKLOADS["long-causal"], torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"it would hold 2147483648 weights"):
        WAYS[name].make(case)


@pytest.mark.parametrize("shape", ["plain", "causal"])
def test_statistics_of_the_formula_are_those_of_attention(shape: str) -> None:
    case = Case.of(SHAPES[shape], torch.float32)
    load = case.workload
    hidden = torch.ones(load.length, load.keys, dtype=torch.bool).triu(1) if load.is_causal else None
    z = case.query @ case.key.mT / math.sqrt(load.width)
    z = z if hidden is None else z.masked_fill(hidden, -math.inf)
    output, *found = dense_statistics(z, case.value, hidden)
    wide = (tensor.double() for tensor in case.inputs)
    expected, aux = attention(*wide, is_causal=load.is_causal, return_aux=AuxRequest.all(), impl="dense")
    keys = max(load.keys, load.width)
    size = aux.max_logit.abs().max().item() + 1.0
    assert complaint(output, expected, torch.float32, length=keys, logit=size, magnitude=1.0) is None
    names = ["lse", "max_logit", "min_logit", "mean", "variance", "entropy_nats", "collision", "peak", "jacobian_norm"]
    for name, value in zip(names, found, strict=True):
        text = complaint(value, getattr(aux, name), torch.float32, length=keys, logit=size, magnitude=1.0)
        assert text is None, f"{name}: {text}"


def test_what_auto_chose_is_known_and_others_code_has_no_choice() -> None:
    case = Case.of(SHAPES["plain"], torch.float32)
    choice = WAYS["auto-stats"].choice(case)
    assert choice is not None
    assert choice.impl == ("cpu" if loaded() else "fused")
    assert WAYS["tiled-stats"].choice(case).impl == "tiled"  # type: ignore[union-attr]
    assert WAYS["eager"].choice(case) is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", ["plain", "causal"])
def test_a_wrong_scale_or_mask_is_seen_in_every_dtype(shape: str, dtype: torch.dtype) -> None:
    case = Case.of(SHAPES[shape], dtype)
    causal = case.workload.is_causal
    expected = torch.nn.functional.scaled_dot_product_attention(*case.inputs, is_causal=causal)
    compare("same", [expected], [expected], case)
    for wrong in ({"is_causal": not causal}, {"is_causal": causal, "scale": 1.05 * case.workload.width**-0.5}):
        found = torch.nn.functional.scaled_dot_product_attention(*case.inputs, **wrong)
        with pytest.raises(DisagreementError, match="wrong and sdpa differ by"):
            compare("wrong", [found], [expected], case)


def test_tensors_are_those_of_the_seed_in_every_dtype() -> None:
    one, same, other = (Case.of(SHAPES["gqa"], torch.float32, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.inputs, same.inputs, strict=True))
    assert not torch.equal(one.query, other.query)
    half = Case.of(SHAPES["gqa"], torch.bfloat16, seed=1)
    assert torch.equal(half.key, one.key.bfloat16())
    assert one.query.shape == one.cotangent.shape == (2, 4, 24, 16)
    assert one.key.shape == one.value.shape == (2, 2, 24, 16)
