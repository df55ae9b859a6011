"""What rounding allows, against what rounding does: every way to compute an attention, beside float64."""

import math
import subprocess
import sys
import warnings
from collections import defaultdict

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.compare.inside import compute
from sqrtdk.compare.inside.program import Affine, Formula, NormStep, PathStep, Rotation, VectorPath
from sqrtdk.compare.rounding.attention import output_allowed
from sqrtdk.compare.rounding.precision import Precision, rounding_unit
from sqrtdk.compare.rounding.vectors import VectorErrors, errors_along, projection_errors
from tests.compare.rounding_ways import Attended, draw, ways
from tests.support.kernel_here import unable
from tests.support.paths import with_tests

EXACT = Precision(torch.float64)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Ratios = dict[tuple[str, str], list[float]]


def ratios_of(count: int, dtype: torch.dtype, *, small: bool, kernel: bool) -> tuple[Ratios, list[str]]:
    """Of allowed to real error, by dtype and way; and what was beyond it, or not finite."""
    ratios: Ratios = defaultdict(list)
    wrong: list[str] = []
    for _ in range(count):
        call = draw(dtype, small)
        _judge(call, kernel, ratios, wrong)
    return ratios, wrong


def _judge(call: Attended, kernel: bool, ratios: Ratios, wrong: list[str]) -> None:
    expected, _ = compute.compute_output(call.query, call.key, call.value, call.formula)
    limits: dict[tuple[Precision, int], Tensor] = {}
    nothing = [VectorErrors.none(x) for x in (call.query, call.key, call.value)]
    offs = [VectorErrors.none(x).plus(rounding_unit(x.dtype) * x.double().abs()) for x in (call.query, call.key)]
    for name, attend, *side in ways(call, kernel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # flex runs without being compiled
            output = attend(call).double()
        precision, folds = key = tuple(side)
        if key not in limits:
            off = [*offs[:folds], *nothing[folds:]] if folds else []
            limits[key] = output_allowed(call.query, call.key, call.value, call.formula, (EXACT, precision), off)
        ratio = float(((output - expected).abs() / limits[key]).nan_to_num(nan=math.inf).max())
        ratios[str(call.query.dtype), name].append(1.0 / ratio if ratio else math.inf)
        if ratio > 1.0:
            shapes = (*call.query.shape, *call.key.shape[1:3])
            wrong.append(f"{call.query.dtype} {name} {call.kind} {shapes}: {ratio:.3g} times what is allowed")


def _table(ratios: Ratios) -> str:
    """Least, tenth, median and ninetieth percentile of allowed / real."""
    lines = []
    for (dtype, name), all_of_it in sorted(ratios.items()):
        its = torch.tensor([r for r in all_of_it if math.isfinite(r)])
        quantiles = its.quantile(torch.tensor([0.0, 0.1, 0.5, 0.9]))
        lines.append(f"{dtype:15} {name:20} n={len(all_of_it):4} " + " ".join(f"{q:6.2f}" for q in quantiles))
    return "\n".join(lines)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_stays_within_what_is_allowed(dtype: torch.dtype) -> None:
    ratios, wrong = ratios_of(5, dtype, small=True, kernel=unable() is None)
    assert not wrong
    assert {name for _, name in ratios} >= {"eager", "q scaled", "q and k scaled", "flex"}
    assert all(min(r) < 20 for r in ratios.values()), _table(ratios)  # and it says something


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["native", "avx2", "default"])
def test_thousands_of_attentions_on_kernels_of_each_instruction_set(capability: str) -> None:
    """In a process of its own: the instruction set is chosen once."""
    environment = with_tests()
    if capability != "native":
        isa = {"avx2": "AVX2", "default": "SSE41"}[capability]
        environment |= {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa}
    run = subprocess.run([sys.executable, __file__, "200", capability], env=environment, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_wrong_scale_is_beyond_it_in_every_dtype() -> None:
    for dtype, factor in ((torch.float32, 1.00001), (torch.float16, 1.05), (torch.bfloat16, 1.2)):
        q, k, v = (torch.randn(2, 4, 64, 32).to(dtype) for _ in range(3))
        output = functional.scaled_dot_product_attention(q, k, v, scale=factor * 32**-0.5)
        side, formula = Precision(dtype, logit_steps=2), Formula(32**-0.5)
        expected, _ = compute.compute_output(q, k, v, formula)
        assert bool(((output.double() - expected).abs() > output_allowed(q, k, v, formula, (EXACT, side))).any()), dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_projections(dtype: torch.dtype) -> None:
    for entering in (8, 100, 1024):
        x, weight = torch.randn(2, 20, entering).to(dtype) + 1, torch.randn(64, entering).to(dtype)
        bias = torch.randn(64).to(dtype)
        affine = Affine("q", weight.view(4, 16, entering), bias.view(4, 16), torch.arange(64).view(4, 16))
        its = functional.linear(x, weight, bias).view(2, 20, 4, 16).transpose(1, 2).double()
        allowed = projection_errors(affine, x, (EXACT, Precision(dtype)))[1].bound
        ratio = (its - compute.project_input(affine, x)).abs() / allowed
        assert 0.05 < float(ratio.max()) <= 1.0
        wrong = compute.project_input(affine, x * (1 + 100 * torch.finfo(dtype).eps))
        assert float(((wrong - compute.project_input(affine, x)).abs() / allowed).max()) > 1.0


def allowed_of(step: PathStep, x: Tensor, dtype: torch.dtype) -> Tensor:
    return errors_along(VectorPath(steps=(step,)), x, VectorErrors.none(x), (EXACT, Precision(dtype)))[1].bound


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_norms_by_torch_and_by_hand(kind: str, dtype: torch.dtype) -> None:
    for features, offset in ((8, 0.0), (128, 0.0), (64, 3.0)):
        x = (torch.randn(2, 4, 50, features) + offset).to(dtype)
        gain, shift = (torch.randn(features).to(dtype) for _ in range(2))
        norm = NormStep(kind, gain[None], shift[None] if kind == "layer" else None, eps=0.0 if kind == "l2" else 1e-5)
        if kind == "rms":
            by_torch = functional.rms_norm(x, (features,), gain, 1e-5)
            by_hand = x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * gain
        elif kind == "layer":
            by_torch = functional.layer_norm(x, (features,), gain, shift, 1e-5)
            middle = x - x.mean(-1, keepdim=True)
            by_hand = middle / (middle.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + shift
        else:
            by_torch = functional.normalize(x, dim=-1) * gain
            by_hand = x / x.pow(2).sum(-1, keepdim=True).sqrt() * gain
        expected, allowed = compute.apply_norm(norm, x), allowed_of(norm, x, dtype)
        for its in (by_torch, by_hand):
            ratio = float(((its.double() - expected).abs() / allowed).max())
            assert 0.02 < ratio <= 1.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_whose_angles_are_of_float32(layout: str, dtype: torch.dtype) -> None:
    steps = 10000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    for count in (40, 4000):
        x, positions = torch.randn(2, 1, count, 32).to(dtype), torch.arange(count)
        exact = positions.double()[:, None] * steps
        rotation = Rotation(torch.polar(torch.ones_like(exact), exact)[None], layout)
        angle = positions.float()[:, None] * (1.0 / 10000.0 ** (torch.arange(0, 32, 2).float() / 32))
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        a, b = x.chunk(2, -1) if layout == "half" else (x[..., ::2], x[..., 1::2])
        parts = (a * cos - b * sin, b * cos + a * sin)
        its = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
        allowed = allowed_of(rotation, x, dtype)
        ratio = float(((its.double() - compute.apply_rotation(rotation, x)).abs() / allowed).max())
        assert 0.02 < ratio <= 1.0


def test_a_softmax_in_half_is_allowed_to_fall_on_the_next_number() -> None:
    q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
    output = (q @ k.mT * 0.5).half().softmax(-1).float() @ v
    half = Precision(logits_dtype=torch.float16, weights_dtype=torch.float16)
    formula, side = Formula(0.5, logits_dtype="float16", weights_dtype="float16"), half
    expected, _ = compute.compute_output(q, k, v, formula)
    allowed = output_allowed(q, k, v, formula, (EXACT, side))
    assert bool(((output.double() - expected).abs() <= allowed).all())
    plain = Formula(0.5)
    assert bool(
        (
            (output.double() - compute.compute_output(q, k, v, plain)[0]).abs()
            > output_allowed(q, k, v, plain, (EXACT, side))
        ).any()
    )


def test_the_memory_is_chunked_as_that_of_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    formula = Formula(0.3, visible=torch.ones(40, 40).tril().bool())
    whole = output_allowed(q, k, v, formula, (Precision(), Precision()))
    monkeypatch.setattr(compute.chunks, "__defaults__", (2 * 40 * 7,))
    torch.testing.assert_close(output_allowed(q, k, v, formula, (Precision(), Precision())), whole)


def test_both_sides_add_up() -> None:
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    one, two = Precision(), Precision(torch.bfloat16)
    both, single = (output_allowed(q, k, v, Formula(0.3), pair) for pair in ((one, two), (EXACT, two)))
    alone = output_allowed(q, k, v, Formula(0.3), (one, EXACT))
    torch.testing.assert_close(both, single + alone, rtol=1e-7, atol=0.0)


if __name__ == "__main__":
    complaints: list[str] = []
    for number, each in enumerate(DTYPES):
        torch.manual_seed(number + 10 * len(sys.argv[2]))
        its_ratios, its_wrong = ratios_of(int(sys.argv[1]), each, small=False, kernel=sys.argv[2] == "native")
        print(_table(its_ratios), flush=True)
        complaints += its_wrong
    print("\n".join(complaints))
    sys.exit(bool(complaints))
