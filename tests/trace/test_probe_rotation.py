"""Rotations, recovered from values before and after them, and what their tables say."""

import pytest
import torch
from torch import Tensor

from sqrtdk.tracing.probe.rotation import Rotation, RotationFit, fit_rotation
from sqrtdk.tracing.probe.tables import LOOSE_FREQUENCY_TOLERANCE, Law, frequencies, law_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def angles(positions: Tensor, width: int, base: float) -> Tensor:
    """(B, L, R / 2) of positions (B, L)."""
    return positions.double()[..., None] * base ** (-torch.arange(0, width, 2).double() / width)


def turn(x: Tensor, angle: Tensor, layout: str, first: int = 0, amplitude: float = 1.0) -> Tensor:
    """As models do: tables in the dtype of x, every product rounded."""
    cos, sin = ((amplitude * f(angle))[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    width, y = 2 * angle.shape[-1], x.clone()
    part = x[..., first : first + width]
    if layout == "half":
        a, b = part.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = part[..., ::2], part[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    y[..., first : first + width] = turned
    return y


def recover(x: Tensor, y: Tensor) -> RotationFit:
    fit = fit_rotation(x, y)
    assert fit is not None
    return fit


def law_loosely(rotation: Rotation) -> Law | None:
    return law_of(frequencies(rotation.table), rotation.table.shape[1], LOOSE_FREQUENCY_TOLERANCE)


def row(length: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + length)[None]


def table(angle: Tensor, layout: str = "half") -> Rotation:
    return Rotation(torch.polar(torch.ones_like(angle), angle), layout)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("batch", "heads", "length", "features", "first", "width"),
    [(2, 4, 16, 8, 0, 8), (1, 2, 40, 64, 0, 64), (1, 2, 40, 64, 0, 16), (2, 3, 24, 32, 16, 16), (1, 1, 12, 64, 0, 64)],
)
def test_layout_width_and_table_are_recovered(
    batch: int, heads: int, length: int, features: int, first: int, width: int, layout: str, dtype: torch.dtype
) -> None:
    x, angle = torch.randn(batch, heads, length, features).to(dtype), angles(row(length), width, 1e4)
    fit = recover(x, turn(x, angle, layout, first))
    rotation = fit.rotation
    assert (rotation.layout, rotation.first, rotation.width) == (layout, first, width)
    assert fit.amplitude is not None
    assert abs(fit.amplitude - 1.0) < torch.finfo(dtype).eps
    assert rotation.table.shape == (1, length, width // 2)
    law = law_loosely(rotation)
    assert law is not None
    assert abs(law.base / 1e4 - 1.0) < (1e-4 if dtype == torch.float32 else 0.05)
    assert abs(law.factor - 1.0) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_amplitude_and_interpolation(layout: str, dtype: torch.dtype) -> None:
    x, angle = torch.randn(2, 4, 32, 16).to(dtype), angles(row(32), 16, 500.0) / 4
    fit = recover(x, turn(x, angle, layout, amplitude=1.25))
    assert fit.amplitude is not None
    assert abs(fit.amplitude / 1.25 - 1.0) < torch.finfo(dtype).eps
    law = law_loosely(fit.rotation)
    assert law is not None
    assert abs(law.factor - 0.25) < 0.25 * 1e-2
    assert abs(law.base / 500.0 - 1.0) < 0.02


def test_an_amplitude_of_each_pair_is_left_in_the_table() -> None:
    x, angle = torch.randn(2, 4, 16, 8), angles(row(16), 8, 100.0)
    decay = torch.linspace(0.5, 1.5, 4)
    y = turn(x, angle, "half")
    y = (y.unflatten(-1, (2, 4)) * decay).flatten(-2)
    fit = recover(x, y)
    assert fit.amplitude is None
    torch.testing.assert_close(fit.rotation.table.abs()[0, 3], decay.double(), rtol=1e-5, atol=0.0)


def test_two_channels_have_one_layout() -> None:
    x = torch.randn(1, 2, 10, 2)
    assert recover(x, turn(x, angles(row(10), 2, 1e4), "interleaved")).rotation.layout == "half"


def test_what_does_not_turn_is_none() -> None:
    x = torch.randn(2, 4, 16, 8)
    assert fit_rotation(x, x) is None
    assert fit_rotation(x, torch.randn_like(x)) is None
    assert fit_rotation(x, x * 1.5 + 0.1) is None
    assert fit_rotation(x[:, :, :1], turn(x[:, :, :1], angles(row(1), 8, 1e4), "half")) is None  # position 0


def test_batches_of_positions_of_their_own() -> None:
    positions = torch.stack([torch.arange(16), torch.arange(16) - 5])
    x, angle = torch.randn(2, 4, 16, 8), angles(positions, 8, 100.0)
    rotation = recover(x, turn(x, angle, "half")).rotation
    assert rotation.table.shape[0] == 2
    torch.testing.assert_close(rotation.table, table(angle).table, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layout", "spread"), [("half", "interleaved"), ("interleaved", "half")])
@pytest.mark.parametrize("width", [16, 12])
def test_a_table_that_is_laid_out_for_the_other_layout(layout: str, spread: str, width: int) -> None:
    """`x * cos + rotate_half(x) * sin` with `angles.repeat_interleave(2, -1)`: lengths change."""
    x, angle = torch.randn(2, 4, 24, 16), angles(row(24), width, 1e4)
    over = {"half": torch.cat([angle, angle], -1), "interleaved": angle.repeat_interleave(2, -1)}[spread][:, None]
    turning, rest = x[..., :width], x[..., width:]
    if layout == "half":
        beside = torch.cat([-turning[..., width // 2 :], turning[..., : width // 2]], -1)
    else:
        beside = torch.stack([-turning[..., 1::2], turning[..., ::2]], -1).flatten(-2)
    y = torch.cat([turning * over.cos() + beside * over.sin(), rest], -1)
    rotation = recover(x, y.float()).rotation
    assert (rotation.layout, rotation.spread, rotation.width) == (layout, spread, width)
    torch.testing.assert_close(rotation.table, table(angle).table, rtol=0, atol=1e-5)
    assert fit_rotation(x[:1, :1], y[:1, :1].float()) is None  # too few numbers to tell


def test_frequencies_that_are_not_geometric_have_no_base() -> None:
    steps = torch.tensor([1.0, 0.9, 0.1, 0.09]).double()
    assert law_loosely(_linear(steps)) is None
    torch.testing.assert_close(frequencies(_linear(steps).table), steps, rtol=1e-9, atol=0.0)


def test_rows_of_padding_are_no_step() -> None:
    """Most rows stand at position 0, `positions.clamp(min=0)`, and the others go on by one."""
    angle = angles((row(64) - 40).clamp(min=0), 8, 100.0)
    torch.testing.assert_close(frequencies(table(angle).table), angles(row(1, 1), 8, 100.0)[0, 0], rtol=1e-9, atol=0.0)


def _linear(steps: Tensor) -> Rotation:
    return table((torch.arange(64).double()[:, None] * steps)[None])
