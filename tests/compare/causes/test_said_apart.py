"""What the causes say: numbers that differ are shown so, and stages are those that a model has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import Cause, DiffReport
from sqrtdk.tracing.probe.tables import take_apart

WIDTH, HEADS, ROWS = 32, 2, 40
X = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
SIZE = WIDTH // HEADS
Core = Callable[["Attend", Tensor, Tensor, Tensor], Tensor]


class Attend(nn.Module):
    """Projections, and any core between them."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(self.core(self, 2 * q, 2 * k, v).transpose(1, 2).flatten(-2))


def angles(base: float, width: int = SIZE, moving: int | None = None) -> Tensor:
    frequencies = base ** (-torch.arange(0, width, 2).float() / width)
    if moving is not None:
        frequencies[moving:] = 0.0
    return torch.arange(ROWS)[:, None].float() * frequencies


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Channels i and i + R / 2 of the first R."""
    width = 2 * table.shape[-1]
    one, other = x[..., :width].chunk(2, -1)
    parts = (one * table.cos() - other * table.sin(), other * table.cos() + one * table.sin(), x[..., width:])
    return torch.cat(parts, -1)


def rotary(table: Tensor) -> Core:
    return lambda _, q, k, v: functional.scaled_dot_product_attention(turned(q, table), turned(k, table), v)


def eager(change: Callable[[Tensor], Tensor]) -> Core:
    return lambda _, q, k, v: change(q @ k.mT / 4).softmax(-1) @ v


def compared(a: Core, b: Core) -> DiffReport:
    return diff(Attend(a), Attend(b), X)


def causes(report: DiffReport) -> list[Cause]:
    return [cause for pair in report.pairs for cause in pair.causes]


def capped(cap: float) -> Core:
    return eager(lambda logits: cap * torch.tanh(logits / cap))


def with_sinks(sinks: list[float]) -> Core:
    def core(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT / 4
        column = torch.tensor(sinks)[None, :, None, None].expand(len(q), HEADS, ROWS, 1)
        return torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v

    return core


NEAR = [
    (rotary(angles(10000.0)), rotary(angles(10003.0)), "rope_base"),
    (capped(3.0), capped(3.0001), "softcap"),
    (eager(lambda logits: logits), eager(lambda logits: logits * 1.0002), "scale"),
    (with_sinks([1.0, 2.0]), with_sinks([1.0, 2.0004]), "sinks"),
    (rotary(1.0 * angles(10000.0)), rotary(angles(10000.0, moving=SIZE // 4)), "rope_partial"),
]


@pytest.mark.parametrize(("a", "b", "name"), NEAR, ids=[name for *_, name in NEAR])
def test_what_differs_is_shown_to_differ(a: Core, b: Core, name: str) -> None:
    (cause,) = causes(compared(a, b))
    assert cause.name == name
    assert cause.a != cause.b
    for joint in (" instead of ", " in place of "):
        new, _, old = cause.text.partition(joint)
        assert not old or not new.endswith(old.rstrip(")"))


def test_part_of_the_pairs_by_the_table_of_the_whole_head() -> None:
    """`cat(angles[:n], zeros)`: channels i and i + E / 2, with the exponents of the whole head."""
    partial, whole = rotary(angles(10000.0, SIZE // 2)), rotary(angles(10000.0, moving=SIZE // 4))
    (cause,) = causes(compared(partial, whole))
    assert cause.name == "rope_partial"
    assert cause.text == (
        "turns the first 4 of 8 pairs of all 16 channels of q and k (pairs c and c + 8 by base^(-2c/16)) "
        "instead of channels 0 to 7 of 16 (pairs c and c + 4 by base^(-2c/8))"
    )


def test_a_model_without_norms_has_no_stage_of_a_norm() -> None:
    """The pairs of one layout with the table of the other: no rotation, and no norm either."""

    def mixed(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        table = angles(10000.0).repeat_interleave(2, -1)
        q, k = (x * table.cos() + torch.cat([-x[..., 8:], x[..., :8]], -1) * table.sin() for x in (q, k))
        return functional.scaled_dot_product_attention(q, k, v)

    report = compared(rotary(angles(10000.0)), mixed)
    assert report.same is False
    assert not any(cause.stage.endswith("norm") for cause in causes(report))
    assert "query rotation" in {cause.stage for cause in causes(report)}
    stages = {stage.stage: stage.same for stage in report.pairs[0].stages}
    assert stages["query norm"] is not False
    assert stages["key norm"] is not False


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_a_mask_of_whole_numbers_that_is_added(dtype: torch.dtype) -> None:
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    hidden = torch.zeros(ROWS, ROWS).masked_fill(~mask, -torch.inf)
    report = compared(eager(lambda logits: logits + hidden), eager(lambda logits: logits + mask.to(dtype)))
    assert [pair.reason for pair in report.pairs] == [None]
    assert [cause.name for cause in causes(report)] == ["mask_offset", "bias"]


def test_far_positions_are_no_chance() -> None:
    """Some place among 100,000 has any two angles, and none has any eight."""
    table = torch.polar(torch.ones(1, 8, 2), torch.rand(1, 8, 2, generator=torch.Generator().manual_seed(4)) * 6)
    frequencies = torch.tensor([1.0, 0.01], dtype=torch.float64)
    found = take_apart(table, frequencies)
    assert found is None or found.span < 1000
    far = torch.arange(90_000.0, 90_008.0, dtype=torch.float64)
    laws = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    exact = take_apart(torch.polar(torch.ones(1, 8, 8, dtype=torch.float64), far[None, :, None] * laws))
    assert exact is not None
    assert torch.equal(exact.positions[0], far)


class Work(TorchDispatchMode):
    """Counts the entries of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.entries += result.numel() if isinstance(result, Tensor) else 0
        return result


def test_a_table_that_is_no_rotation_is_little_work() -> None:
    """80 rows of angles that follow no law: no row is looked for at 100,000 places."""
    draw = torch.Generator().manual_seed(5)
    table = torch.polar(torch.ones(2, ROWS, 4), torch.rand(2, ROWS, 4, generator=draw) * 6)
    with Work() as work:
        assert take_apart(table) is None
    assert work.entries < 1e6
