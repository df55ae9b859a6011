"""benchmarks/cliffs.py: what is timed side by side computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sqrtdk
from benchmarks import cliffs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("kind", cliffs.KINDS)
def test_both_sides_compute_the_same_output_and_gradients(kind: str) -> None:
    torch.manual_seed(0)
    size = cliffs.Size(48, 4, torch.float32)
    case = cliffs.KINDS[kind](size)
    q, k, v = (torch.randn(1, size.heads, size.length, cliffs.DIM, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)

    def results(output: Tensor) -> tuple[Tensor, ...]:
        return output.detach(), *torch.autograd.grad(output, (q, k, v, *case.learned), gradient)

    ours = results(sqrtdk.attention(q, k, v, **case.ours))
    for mine, theirs in zip(ours, results((case.both or case.theirs)(q, k, v)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))


def test_a_cell_has_its_ratio_its_growth_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cliffs, "SECONDS", 0.0)
    monkeypatch.setattr(cliffs, "SHORTEST", 0.0)
    monkeypatch.setattr(cliffs, "HEADS", {64: 2, 512: 1})
    found = list(cliffs.cells(["documents"], [64, 512], ["float32"]))
    assert [(cell["length"], cell["heads"], cell["pass"], cell["rounds"]) for cell in found] == [
        (length, heads, name, 1) for length, heads in ((64, 2), (512, 1)) for name in cliffs.PASSES
    ]
    assert all(cell["growth"] is None for cell in found[:3])
    for before, cell in zip(found[:3], found[3:], strict=True):
        pairs = {64: 8 * 8 * 9 / 2 * 2, 512: 8 * 64 * 65 / 2}
        assert cell["growth"] == pytest.approx(cell["ms"] / pairs[512] / (before["ms"] / pairs[64]))
        assert cell["ratio"]["p10"] <= cell["ratio"]["median"] <= cell["ratio"]["p90"]


def test_the_memory_that_a_call_adds_is_counted() -> None:
    added = cliffs.added_mib(lambda: torch.ones(64, 2**20))
    assert 250 < added < 270
