"""A test of the logits against a number far below all that are seen, on the exponentials of blocks, is a mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.laws.processes.formula import ranks_formula
from sqrtdk.tracing.trace import Trace

LENGTH, BLOCK = 12, 4
Guard = Callable[[Tensor, Tensor], Tensor]  # (exp(z - m), z) -> what is summed

GUARDS: dict[str, Guard] = {
    "times a test": lambda e, z: e * (z > -1e29),
    "times its number": lambda e, z: e * (z > -1e29).to(e.dtype),
    "times no less": lambda e, z: e * (z >= -1e20),
    "where": lambda e, z: torch.where(z > -1e29, e, 0.0),
    "where with zeros": lambda e, z: torch.where(z > -1e29, e, torch.zeros_like(e)),
    "where hidden": lambda e, z: torch.where(z <= -1e29, torch.zeros_like(e), e),
    "filled": lambda e, z: e.masked_fill(z < -1e29, 0.0),
}
OTHERS: dict[str, Guard] = {
    "a threshold among the logits": lambda e, z: e * (z > 0.0),
    "where with another number": lambda e, z: torch.where(z > -1e29, e, 1e-3),
    "a test of something else": lambda e, z: e * (z * 2.0 > -1e29),
}


class Blocks(nn.Module):
    """Rows see earlier keys, and the first two rows none."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.arange(LENGTH)
        hidden = (rows[:, None] < rows) | (rows[:, None] < 2)
        largest = q.new_full((*q.shape[:3], 1), -1e30)
        total, out = torch.zeros_like(largest), torch.zeros_like(q)
        for first in range(0, LENGTH, BLOCK):
            keys = slice(first, first + BLOCK)
            z = (q @ k[:, :, keys].mT * 0.25).masked_fill(hidden[:, keys], -1e30)
            new = torch.maximum(largest, z.amax(-1, keepdim=True))
            e, by = self.guard(torch.exp(z - new), z), torch.exp(largest - new)
            total, out, largest = total * by + e.sum(-1, keepdim=True), out * by + e @ v[:, :, keys], new
        return out / total.clamp(min=1e-20)


def _traced(guard: Guard) -> Trace:
    q, k, v = torch.randn(3, 2, 2, LENGTH, 16)
    module = Blocks(guard)
    with Trace(module, keep=True, stats=False) as trace:
        module(q, k, v)
    return trace


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_against_hidden_logits_is_read_as_their_mask(name: str) -> None:
    trace = _traced(GUARDS[name])
    (call,), (tensors,) = trace.calls, trace.tensors
    assert call.unknown == ()
    assert call.formula.startswith("softmax(0.25 * q.k + causal")
    formula = ranks_formula(tensors)
    assert formula is not None
    torch.testing.assert_close(formula.output().float(), tensors.output)


@pytest.mark.parametrize("name", OTHERS)
def test_another_change_of_the_exponentials_stays_unknown(name: str) -> None:
    trace = _traced(OTHERS[name])
    assert all(call.unknown for call in trace.calls)
    assert all(ranks_formula(call) is None for call in trace.tensors)
    assert all("on the weights" in str(call.missing) for call in trace.tensors)
