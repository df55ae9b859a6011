"""`diff` of a model and its quantised copy: the rounding is named in one sentence, and mistakes in it are found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sqrtdk import diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.weights.grids import CODES, PER_ROW, Grid, sharing_by
from sqrtdk.compare.weights.recognised import grid_of
from sqrtdk.compare.weights.records import KnownChanges

WIDTH, GROUP = 64, 32
IDS = {"input_ids": torch.arange(12)[None]}
PLANTED = "model.layers.1.self_attn.q_proj.weight"
OTHER = "model.layers.1.self_attn.k_proj.weight"
Round = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def base() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).eval()


def affine(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of 4 bits, zero points and scales, group by group."""
    groups = weight.reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    return ((groups / scales).round() + zeros).clamp(0, 15), zeros, scales


def zero_points(weight: Tensor) -> Tensor:
    codes, zeros, scales = affine(weight)
    return ((codes - zeros) * scales).view(weight.shape)


def symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.reshape(-1, GROUP)
    scales = groups.abs().amax(1, keepdim=True) / 7
    return (groups / scales).round(), scales


def nf4(weight: Tensor) -> Tensor:
    table, groups = torch.tensor(CODES["nf4"]), weight.reshape(-1, 64)
    most = groups.abs().amax(1, keepdim=True)
    return (table[((groups / most)[..., None] - table).abs().argmin(-1)] * most).view(weight.shape)


def fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax() / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def to(grid: Grid) -> Round:
    return lambda weight: grid.rounded(weight, torch.float16)


INT8_ROWS, Q4_0 = to(Grid("int8", PER_ROW)), to(Grid("int4", sharing_by(32), "signed scales"))
ROUNDINGS: dict[str, Round] = {
    "int8, a scale a row": INT8_ROWS,
    "int8, a scale a tensor": lambda x: (x / (x.abs().amax() / 127)).round() * (x.abs().amax() / 127),
    "int8, groups of 32": to(Grid("int8", sharing_by(32))),
    "int4, groups of 32": to(Grid("int4", sharing_by(32))),
    "int4, groups of 32, signed scales": Q4_0,
    "int4, groups of 32, zero points": zero_points,
    "int4, groups of 32 along the outputs": to(Grid("int4", sharing_by(32, down=True))),
    "nf4, a scale a row": nf4,
    "fp8 e4m3, a scale a tensor": fp8,
}


def quantised(base: Any, rounding: Round, planted: Round | None = None) -> Any:
    model = copy.deepcopy(base)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_proj" in name:
                p.copy_((planted if planted is not None and name == PLANTED else rounding)(p))
    return model


def known(report: DiffReport) -> KnownChanges:
    assert report.weights is not None
    assert report.weights.known is not None
    return report.weights.known


def said(report: DiffReport) -> str:
    return " ".join(map(str, report.paragraphs))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_is_named_once_with_its_layers_and_what_it_costs(base: Any, name: str) -> None:
    report = diff(base, quantised(base, ROUNDINGS[name]), IDS)
    (change,) = known(report).changes
    assert (change.kind, len(change.weights), known(report).faults) == (name, 14, ())
    assert (report.same, report.exit_code) == (True, 0)
    assert said(report).count("are A's rounded to") == 1
    assert "of 2 layers are A's rounded to" in said(report)
    assert "The first difference" not in said(report)
    costs = [cost for _, cost in change.costs]
    assert len(costs) == 7
    assert costs == sorted(costs, reverse=True)
    assert 0 < costs[0] <= 2 * (known(report).cost or 0)


def test_the_costs_are_those_of_a_run_with_one_kind_of_weight_rounded(base: Any) -> None:
    report = diff(base, quantised(base, zero_points), IDS)
    role, cost = known(report).changes[0].costs[0]
    model = copy.deepcopy(base)
    for name, p in model.named_parameters():
        if name.replace(".0.", ".#.").replace(".1.", ".#.") == role:
            p.data = zero_points(p.data)
    with torch.no_grad():
        one, other = base(**IDS).logits, model(**IDS).logits
    assert cost == pytest.approx(float((other - one).norm() / one.norm()), rel=1e-3)


def scales_of(weight: Tensor, base: Any) -> Tensor:
    return (symmetric(weight)[0] * symmetric(base.get_parameter(OTHER).detach())[1]).view(weight.shape)


def other_axis(weight: Tensor) -> Tensor:
    codes, scales = symmetric(weight)
    return (codes * scales.view(weight.shape[0], -1).mT.reshape(-1, 1)).view(weight.shape)


def shifted(weight: Tensor) -> Tensor:
    codes, scales = symmetric(weight)
    return (torch.where(codes < 0, codes + 8, codes - 8) * scales).view(weight.shape)


SYMMETRIC: Round = lambda x: (symmetric(x)[0] * symmetric(x)[1]).view(x.shape)  # noqa: E731
MISTAKES: dict[str, tuple[Round, Callable[[Tensor, Any], Tensor], str]] = {
    "zero_point": (zero_points, lambda x, _: (affine(x)[0] * affine(x)[2]).view(x.shape), "leaves out the zero points"),
    "zero_point of 8": (
        zero_points, lambda x, _: ((affine(x)[0] - 8) * affine(x)[2]).view(x.shape), "leaves out the zero points"
    ),
    "factor": (SYMMETRIC, lambda x, _: 1.1 * SYMMETRIC(x), "A's rounded and multiplied by 1.1"),
    "scales": (SYMMETRIC, scales_of, f"has those of `{OTHER.removesuffix('.weight')}`"),
    "axis": (SYMMETRIC, lambda x, _: other_axis(x), "along the other axis"),
    "order": (SYMMETRIC, lambda x, _: SYMMETRIC(x).view(WIDTH, -1, 2).flip(-1).reshape(x.shape), "in another order"),
    "signs": (
        SYMMETRIC,
        lambda x, _: shifted(x),
        "wrong sign convention",
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_one_module_is_told_from_the_rounding_of_the_others(base: Any, name: str) -> None:
    rounding, wrong, words = MISTAKES[name]
    report = diff(base, quantised(base, rounding, lambda x: wrong(x, base)), IDS)
    (fault,) = known(report).faults
    assert (fault.name, fault.weights) == (f"rounding_{name.split(' ')[0]}", (PLANTED,))
    assert not report.same
    assert words in said(report)
    assert "are A's rounded to int4" in said(report)
    assert "The first difference" not in said(report)


def test_other_differences_are_found_beside_the_rounding(base: Any) -> None:
    model = quantised(base, Q4_0)
    model.model.layers[1].self_attn.scaling *= 2
    model.model.norm.weight.data *= 1.5
    report = diff(base, model, IDS)
    assert not report.same
    assert any(cause.name == "scale" for pair in report.pairs for cause in pair.causes)
    assert [cause.name for cause in report.module_causes] == ["weights_scaled"]


def test_a_weight_that_is_no_rounding_stays_a_difference(base: Any) -> None:
    report = diff(base, quantised(base, Q4_0, lambda x: torch.randn_like(x) * x.std()), IDS)
    assert PLANTED not in known(report).changes[0].weights
    assert not report.same


def test_plain_and_half_precision_numbers_are_on_no_grid() -> None:
    x = torch.randn(64, 96)
    assert [grid_of(y) for y in (x, x.bfloat16().float(), x.half().float(), x + 3, x.abs())] == [None] * 5
    assert grid_of(nn.Linear(64, 64).weight.detach()) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_grid_is_seen_through_the_dtype_of_its_products(dtype: torch.dtype) -> None:
    x = torch.randn(64, 96)
    for rounded, name in ((INT8_ROWS(x), "int8, a scale a row"), (Q4_0(x), "int4, groups of 32, signed scales")):
        grid = grid_of(rounded.to(dtype).float())
        assert grid is not None
        assert grid.name == name
