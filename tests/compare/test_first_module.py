"""The walk over modules runs where attentions can't be compared: other counts, other shapes, a recurrence."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk import diff
from sqrtdk.compare.align import once_a_site
from sqrtdk.compare.records import DiffReport, Unpaired
from sqrtdk.errors import InvalidValueError
from sqrtdk.report.diff.json import to_json
from tests.compare.decoders import without_lines

WIDTH = 16


class Attend(nn.Module):
    """Causal attention; `times` as often as a port may run it."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.qkv, self.out, self.times = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x


class Recurrence(nn.Module):
    """A delta rule, written one step after the other; its state is float32 whatever the model's dtype is."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.qkv, self.out, self.decay = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), decay

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k = functional.normalize(k, dim=-1)
        state, outputs = torch.zeros(len(x), WIDTH, WIDTH), []
        for t in range(x.shape[1]):
            old = torch.einsum("bij,bj->bi", state, k[:, t])
            state = self.decay * state + torch.einsum("bi,bj->bij", v[:, t] - old, k[:, t])
            outputs.append(torch.einsum("bij,bj->bi", state, q[:, t]))
        return x + self.out(torch.stack(outputs, 1))


class Stretch(nn.Module):
    """Appends rows, as padding to a multiple does."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.scale = rows, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x * self.scale, (0, 0, 0, self.rows))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, WIDTH), nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def seeded(*makers: tuple[type[nn.Module], object]) -> Model:
    torch.manual_seed(3)
    return Model(*(kind(value) for kind, value in makers)).eval()


def recurrent(length: int) -> DiffReport:
    models = [seeded((Recurrence, decay), (Attend, 1)) for decay in (0.9, 0.8)]
    return diff(*models, torch.arange(length)[None])


def test_a_recurrence_that_differs_is_named() -> None:
    report = recurrent(12)
    assert report.first_module is not None
    assert report.first_module.a == "blocks.0"
    assert "`decay` is 0.9 in A, 0.8 in B" in without_lines(report.outputs_from)


@pytest.mark.full
def test_the_report_of_a_recurrence_does_not_grow_with_its_steps() -> None:
    short, long = (json.loads(to_json(recurrent(length))) for length in (12, 36))
    for name in ("pairs", "unpaired_a", "unpaired_b"):
        assert len(short[name]) == len(long[name])
    assert len(json.dumps(long)) < 1.2 * len(json.dumps(short))


def test_what_was_not_read_is_listed_once_a_site() -> None:
    """Each step of a recurrence is a product of its own, and its formula holds that of the step before."""
    steps = [Unpaired("blocks.0", 0, "data * (" * length + "q.k" + ")" * length, "no softmax") for length in (3, 1, 2)]
    (one, other) = once_a_site([*steps, Unpaired("blocks.1", 0, None, "no softmax")])
    assert (one.site, one.formula, other.site) == ("blocks.0", "data * (q.k)", "blocks.1")


def test_other_counts_of_calls_name_the_first_module() -> None:
    models = [seeded((Attend, 1), (Attend, times)) for times in (1, 2)]
    with pytest.raises(InvalidValueError, match="A runs 2 attentions, B 3") as caught:
        diff(*models, torch.arange(10)[None])
    assert "The first difference is in `blocks.1`" in str(caught.value.hint)


def test_other_shapes_name_the_first_module() -> None:
    models = [seeded((Attend, 1), (Stretch, rows), (Attend, 1)) for rows in (2, 6)]
    report = diff(*models, torch.arange(10)[None])
    assert report.first_module is not None
    assert report.first_module.a == "blocks.1"
    models = [seeded((Stretch, rows), (Attend, 1)) for rows in (2, 6)]
    with pytest.raises(InvalidValueError) as caught:
        diff(*models, torch.arange(10)[None])
    assert "The first difference is in `blocks.0`" in str(caught.value.hint)
