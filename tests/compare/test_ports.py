"""The small models do what their description says, and what is planted in them moves the output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from tests.compare.ports.built import build, inputs, port_of
from tests.compare.ports.config import BASES, Port
from tests.compare.ports.pairs import Case
from tests.compare.ports.planted import HARMLESS, PLANTED, cases, cross_section
from tests.compare.ports.planting import Planting, case_name
from tests.compare.ports.reference import reference
from tests.compare.ports.styles import STYLES
from tests.support.kernel_here import unable
from tests.tolerances import HALF, LARGEST, complaint

MOVES = 1000  # roundings of float32 by which whatever is planted moves the output
HERE = tuple(style for style in STYLES if style != "cpu" or unable() is None)
LOGIT = 250.0  # more than any logit, of a cache whose scale is missing
CAUSES = (
    "scale softcap softcap_order bias_scaled mask_offset mask_alignment window padding mask_magnitude bias "
    "rope_missing rope_base rope_layout rope_partial positions length_factor qk_norm qk_norm_order qk_norm_eps "
    "qk_norm_axis sinks group_order head_order kv_scale rounding dropout projection_bias weights input unknown"
)


def attended(model: nn.Module, tokens: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What came into the attention of every layer, and weights . v, (B, L, H * E)."""
    came: list[Tensor] = []
    gone: list[Tensor] = []
    for layer in model.blocks():
        layer.attn.register_forward_pre_hook(lambda module, args: came.append(args[0]))
        layer.attn.o_proj.register_forward_pre_hook(lambda module, args: gone.append(args[0]))
    model(**tokens)
    return came, gone


def is_described(port: Port, layer: int, came: Tensor, gone: Tensor, tokens: dict[str, Tensor]) -> None:
    expected = reference(port, layer, came, tokens.get("attention_mask")).flatten(2)
    narrow = port.softmax_in or port.weights_in
    if narrow is not None:  # a weight at the edge between two numbers may become either
        gap = (gone - expected).abs().max() / expected.abs().max()
        assert gap <= torch.finfo(narrow).eps
        return
    length = port.width + came.shape[1] + port.memory
    assert complaint(gone, expected, torch.float64, length=length, logit=LOGIT) is None


def as_described(cause: str, planting: Planting, base: str) -> None:
    """Both sides are what `Port` says, and differ where and as much as they must."""
    case = Case(base, ((cause, planting),))
    tokens = inputs(base, **case.common)
    port, other = case.ports()
    a = attended(build(base, common=case.common, dtype=torch.float64), tokens)
    b = attended(build(base, common=case.common, only=planting.only, dtype=torch.float64, **case.changes), tokens)
    at = planting.first
    for one, (came, gone) in ((port, a), (other, b)):
        is_described(one, at, came[at], gone[at], tokens)
    for layer in range(at):
        assert torch.equal(a[1][layer], b[1][layer])
    assert torch.equal(a[0][at], b[0][at]) is (cause != "input")
    roundings = MOVES if cause != "input" else MOVES / 10  # of what comes in no share is explained
    least = roundings * torch.finfo(torch.float32).eps * a[1][at].abs().max()
    assert (a[1][at] - b[1][at]).abs().max() > least


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_base_is_its_description(base: str, layer: int) -> None:
    tokens = inputs(base)
    came, gone = attended(build(base, dtype=torch.float64), tokens)
    is_described(port_of(base), layer, came[layer], gone[layer], tokens)


def named(every: Iterable[tuple[str, Planting, str]]) -> list[Any]:
    return [pytest.param(*case, id=case_name(*case)) for case in every]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("cause", "planting", "base"), named(cross_section()))
def test_what_is_planted_is_as_described_and_moves_the_output(cause: str, planting: Planting, base: str) -> None:
    as_described(cause, planting, base)


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "planting", "base"), named(cases()))
def test_every_planting_is_as_described_and_moves_the_output(cause: str, planting: Planting, base: str) -> None:
    as_described(cause, planting, base)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("cause", "planting", "base"), named(("harmless", one, base) for one in HARMLESS for base in one.bases)
)
def test_what_is_harmless_leaves_the_output(cause: str, planting: Planting, base: str) -> None:
    common = planting.shared(base)
    tokens = inputs(base, **common)
    _, a = attended(build(base, common=common, dtype=torch.float64), tokens)
    _, b = attended(build(base, common=common, dtype=torch.float64, **planting.changes(base)), tokens)
    length = port_of(base).width + a[0].shape[1]
    # of a cap c far above the logits z, z^3 / 3 c^2 is left
    cap = planting.changes(base).get("softcap")
    if cap is not None:
        assert (a[0] - b[0]).abs().max() <= LOGIT * a[0].abs().max() * (20.0**3 / (3 * cap**2))
        return
    assert complaint(b[0], a[0], torch.float64, length=length, logit=LOGIT) is None


def test_every_cause_has_variants_and_fits_bases() -> None:
    assert tuple(PLANTED) == tuple(CAUSES.split())
    for cause, plantings in PLANTED.items():
        assert len(plantings) >= 2, cause
        assert len({planting.name for planting in plantings}) == len(plantings)
        assert min(len(planting.bases) for planting in plantings) >= 2, cause


@pytest.mark.sampled(1)
@pytest.mark.parametrize("base", BASES)
def test_every_style_computes_the_same_in_float32(base: str) -> None:
    tokens = inputs(base)
    _, exact = attended(build(base, dtype=torch.float64), tokens)
    for style in HERE:
        _, gone = attended(build(base, style=style), tokens)
        said = complaint(gone[0], exact[0], torch.float32, length=port_of(base).width, logit=20.0)
        assert said is None, f"{style}: {said}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("base", BASES)
def test_every_style_computes_the_same_in_half(base: str, dtype: torch.dtype) -> None:
    tokens = inputs(base)
    _, exact = attended(build(base, dtype=torch.float64), tokens)

    def error(style: str) -> float:
        _, gone = attended(build(base, style=style, dtype=dtype), tokens)
        return float((gone[0].double() - exact[0]).abs().max())

    plain = error("eager") + torch.finfo(dtype).eps * float(exact[0].abs().max())
    assert all(error(style) <= LARGEST * plain for style in HERE)


@pytest.mark.parametrize("base", BASES)
def test_the_trace_reads_every_base(base: str) -> None:
    model = build(base)
    with sqrtdk.trace(model) as run:
        model(**inputs(base))
    assert [call.site for call in run.calls] == [f"layers.{layer}.attn" for layer in range(3)]
    for call in run.calls:
        assert call.scale.effective == pytest.approx(BASES[base].factor, rel=1e-6)
        assert call.scale.agree
        assert not call.unknown
        assert call.stats is not None
        assert 1 < max(call.stats.std_logit) < 3  # an attention that is not flat
    assert not run.not_measured


def test_layers_without_what_is_planted_are_the_same() -> None:
    a, b = (build("eager", only=(1,), scale=scale) for scale in (None, 1.0))
    assert a.layers[0].attn.port == b.layers[0].attn.port
    assert replace(a.layers[1].attn.port, scale=1.0) == b.layers[1].attn.port
