"""Recurrences: what a cell gave is q or k as it enters the product, and a way of any length is followed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from tests.attentions.asked import ROOT, WIDTH, B, E, H, L, attend


class Loop(nn.Module):
    """A cell, position after position."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH)
        states = [state, state] if isinstance(self.cell, nn.LSTMCell) else state
        given = []
        for row in x.unbind(1):
            states = self.cell(row, states)
            given.append(states[0] if isinstance(self.cell, nn.LSTMCell) else states)
        return torch.stack(given, 1)


class Gated(nn.Module):
    """A cell that somebody wrote: h + z * (candidate - h)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, row: Tensor, state: Tensor) -> Tensor:
        both = torch.cat([row, state], -1)
        gate = self.gate(both).sigmoid()
        return (1 - gate) * state + gate * self.candidate(both).tanh()


CELLS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "rnn": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True),
    "gru of both directions": lambda: nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True),
    "grucell": lambda: Loop(nn.GRUCell(WIDTH, WIDTH)),
    "lstmcell": lambda: Loop(nn.LSTMCell(WIDTH, WIDTH)),
    "rnncell": lambda: Loop(nn.RNNCell(WIDTH, WIDTH)),
    "written": lambda: Loop(Gated()),
}


class Between(nn.Module):
    """Attention with a recurrence between the projection and the product."""

    def __init__(self, make: Callable[[], nn.Module], on: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.of_q, self.of_k = (make() if side in on else nn.Identity() for side in "qk")
        self.met: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            given[0] if isinstance(given, tuple) else given
            for given in (self.of_q(self.q(x)), self.of_k(self.k(x)), self.v(x))
        )
        q, k, v = self.met = [part.unflatten(-1, (H, E)).transpose(1, 2) for part in (q, k, v)]
        return attend(q, k, v)


@pytest.mark.parametrize("on", ["q", "k", "qk"])
@pytest.mark.parametrize("name", CELLS)
def test_what_a_cell_gave_enters_the_product(name: str, on: str) -> None:
    model = Between(CELLS[name], on)
    with torch.no_grad(), sqrtdk.trace(model) as run:
        output = model(torch.randn(B, L, WIDTH))
    (call,) = run.calls
    assert (call.unknown, call.formula, call.scale.agree) == ((), "softmax(0.3536 * q.k)", True)
    q, k, v = (part.double() for part in model.met)
    assert call.scale.effective is not None
    torch.testing.assert_close((q @ k.mT * call.scale.effective).softmax(-1) @ v, output.double(), rtol=1e-4, atol=1e-5)
    told = [stage.detail for stage in call.stages if stage.where in on and stage.name in ("projection", "input")]
    assert told == [name.split()[0] if name != "written" else "add"] * len(on)


@pytest.mark.full
def test_a_way_of_any_length_is_followed() -> None:
    """1200 operations: more than Python calls go into one another."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, E) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            for _ in range(400):
                q = (q * 2.0).flip(-1) * 0.5
            return attend(q, self.k(x), self.v(x))

    model = Deep()
    with sqrtdk.trace(model) as run:
        model(torch.randn(B, L, WIDTH))
    (call,) = run.calls
    assert run.not_measured == ()
    assert call.scale.effective == pytest.approx(ROOT)


def test_a_recurrence_of_rows_written_in_place_ends() -> None:
    """Delta rule: each row of the matrix is made of all rows before it (transformers' kimi_linear)."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            rows = -(q @ k.mT).tril(-1)
            for i in range(1, x.shape[1]):
                row, before = rows[:, i, :i].clone(), rows[:, :i, :i].clone()
                rows[:, i, :i] = row + (row[..., None] * before).sum(-2)
            return rows @ v

    model = Rows()
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(torch.randn(1, 64, WIDTH))
    assert [missed.reason for missed in run.not_measured if "failed" in missed.reason] == []
    assert len(run.not_measured) == 1
