"""The law of samples where code reads a fixed sample of the batch: x[0], x[:1], x[-1]; in modules and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.laws import ask
from sqrtdk.messages import Message
from tests.support.optional import optional

LENGTH, WIDTH = 5, 16
Change = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """One attention of two heads, with a change of what it gives."""

    def __init__(self, change: Change = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.change = nn.Embedding(40, WIDTH), change
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.change(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MIXED: dict[str, Change] = {
    "the first to all": lambda y: y + y[:1].mean(1, keepdim=True),
    "the last to all": lambda y: y + y[-1:].mean(1, keepdim=True),
    "the first in place of all": lambda y: y[:1].expand(len(y), -1, -1).clone(),
    "the one before": lambda y: y + y.roll(1, 0).mean(1, keepdim=True),
}
DROPPED: dict[str, tuple[Change, int]] = {
    "x[0]": (lambda y: y[0], 1), "x[:1]": (lambda y: y[:1], 1), "x[-1]": (lambda y: y[-1], -1),
}  # fmt: skip


def ids(batch: int) -> Tensor:
    return torch.randint(1, 40, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("how", MIXED)
def test_a_sample_that_reaches_others_is_found_wherever_it_stands(how: str, batch: int) -> None:
    (answer,) = ask(Net(MIXED[how]), ids(batch), "samples").answers
    assert answer.state == BROKEN


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_independent_samples_keep_it(batch: int) -> None:
    (answer,) = ask(Net(), ids(batch), "samples").answers
    assert (answer.state, answer.reason) == (KEPT, "")


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("how", DROPPED)
def test_a_batch_with_the_outputs_of_one_sample_is_said_to_have_those(how: str, batch: int) -> None:
    """It is a fault of a batch that was given; a model of one sequence that is given one may well read x[0]."""
    change, place = DROPPED[how]
    of = 3 if batch == 1 else batch
    text = Message("laws.samples.dropped", batch=of, number=place % (of + 1))
    report = ask(Net(change), ids(batch), "samples")
    (answer,) = report.answers
    if batch == 1:
        assert (answer.state, answer.reason) == (NOT_ASKED, text)
    else:
        (finding,) = report.findings
        assert (answer.state, finding.severity, finding.message) == (BROKEN, "warn", text)


def test_one_entry_for_all_samples_is_no_sample_s() -> None:
    (answer,) = ask(Net(lambda y: y.mean(0)), ids(2), "samples").answers
    assert (answer.state, answer.reason) == (NOT_ASKED, "no output has one entry a sample")


def test_a_graph_that_reads_a_fixed_sample(tmp_path: Path) -> None:
    onnx = optional("onnx")
    make, array = onnx.helper.make_node, onnx.numpy_helper.from_array
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4
    nodes = [
        make("MatMul", ["x", "w"], ["q"]), make("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
        make("MatMul", ["q", "k"], ["z"]), make("Softmax", ["z"], ["p"], axis=-1), make("MatMul", ["p", "x"], ["o"]),
        make("Gather", ["o", "first"], ["y"], axis=0),
    ]  # fmt: skip
    sides = [onnx.helper.make_tensor_value_info("x", 1, ["batch", LENGTH, WIDTH]), onnx.ValueInfoProto(name="y")]
    constants = [array(weight, "w"), array(np.array([0]), "first")]
    graph = onnx.helper.make_graph(nodes, "graph", sides[:1], sides[1:], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    x = torch.randn(3, LENGTH, WIDTH)
    report = ask(str(tmp_path / "m.onnx"), {"x": x}, "samples")
    assert [finding.message for finding in report.findings] == [Message("laws.samples.dropped", batch=3, number=1)]
