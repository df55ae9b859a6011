"""Nothing that a report says grows with the number of steps of a recurrence."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.report.json import to_json
from sqrtdk.tracing.trace import Trace


class Delta(nn.Module):
    """The gated delta rule as a loop: S = a S (1 - b k k^T) + b v k^T, o = S q."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        k = nn.functional.normalize(k, dim=-1)
        a, b = self.gates(x).sigmoid().mT.chunk(2, 1)
        state, out = torch.zeros(len(x), 2, 8, 8), []
        for t in range(x.shape[1]):
            decayed = state - b[:, :, t, None, None] * torch.einsum("bhij,bhj,bhk->bhik", state, k[:, :, t], k[:, :, t])
            state = a[:, :, t, None, None] * decayed + torch.einsum("bhi,bhj->bhij", v[:, :, t], k[:, :, t])
            out.append(torch.einsum("bhij,bhj->bhi", state, q[:, :, t]))
        return torch.stack(out, 1).flatten(2)


class Relaxed(nn.Module):
    """Logits that are changed once a token before their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.q(x) @ self.k(x).mT * 0.25
        for t in range(x.shape[1]):
            z = 0.9 * z + x[:, t, :1, None]
        out = z.softmax(-1) @ self.v(x)
        assert isinstance(out, Tensor)
        return out


class Hybrid(nn.Module):
    """A layer of the recurrence and a layer of attention, as hybrid models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.delta, self.attention = Delta(), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.delta(x)
        out = self.attention(x, x, x)[0]
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("kind", [pytest.param(Delta, marks=pytest.mark.full), Relaxed])
def test_formulas_have_one_size_for_any_number_of_steps(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, sizes = kind(), []
    for length in (36, 48, 96):
        with sqrtdk.trace(model, numeric=False) as run:
            model(torch.randn(2, length, 16))
        formulas = [entry.formula or "" for entry in (*run.calls, *run.not_measured, *run.not_attention)]
        assert max(map(len, formulas)) < 400
        sizes.append([re.sub(r"[\d.e+-]+", "0", formula) for formula in formulas])
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_report_has_one_size_for_any_number_of_steps() -> None:
    torch.manual_seed(0)
    model, sizes = Hybrid(), []
    for length in (12, 48):
        report = sqrtdk.check(model, inputs=(torch.randn(2, length, 16),), laws="none")
        lost = [finding.message for finding in report.findings if finding.rule == "unmeasured"]
        sizes.append((len(report.not_measured), [len(text) for text in lost], len(to_json(report))))
    assert sizes[0][:2] == sizes[1][:2]
    assert max(size for *_, size in sizes) < 1.02 * min(size for *_, size in sizes)  # numbers have a few more digits


class Chunked(nn.Module):
    """The delta rule in chunks: the inverse of a triangular matrix, written row by row, meets the values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(1, (-1, 12)) for part in (self.q, self.k, self.v))
        attn = -(k @ k.mT).tril(-1)
        for i in range(1, 12):
            attn[..., i, :i] = attn[..., i, :i] + (attn[..., i, :i, None] * attn[..., :i, :i]).sum(-2)
        written, state, out = (attn + torch.eye(12)) @ v, torch.zeros(len(x), 16, 16), []
        for t in range(q.shape[1]):
            new = written[:, t] - k[:, t] @ state
            out.append(q[:, t] @ state + (q[:, t] @ k[:, t].mT).tril() @ new)
            state = state + k[:, t].mT @ new
        return torch.cat(out, 1)


@pytest.mark.parametrize("formulas", [True, False])
def test_a_formula_is_read_once_a_line_at_most(formulas: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, read = sys.modules[Trace.__module__], []
    whole = vars(module)["lost_formula"]
    monkeypatch.setattr(module, "lost_formula", lambda seen: (read.append(seen), whole(seen))[1])
    model, numbers = Chunked(), []
    for length in (36, 96):
        read.clear()
        with Trace(model, formulas=formulas) as run:
            model(torch.randn(2, length, 16))
        assert len(read) == (len(run.not_measured) if formulas else 0)
        assert all((entry.formula is not None) is formulas for entry in run.not_measured)
        numbers.append(len(run.not_measured))
    assert numbers == [5, 5]
