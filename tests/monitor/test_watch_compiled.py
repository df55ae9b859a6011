"""A watch of a compiled model: the other steps run what they compiled once, and a sample says that it ran eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

from sqrtdk.monitor.schedule import When
from sqrtdk.monitor.watch import Watch
from tests.monitor.watched_models import Attend

STEPS = 12
# of torch's own doing within the compiler, where a warning that is an error ends a run
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Layer(Attend):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


Loss = Callable[[Tensor], Tensor]


def loss_of(model: Callable[[Tensor], Tensor]) -> Loss:
    return lambda x: model(x).square().mean()


def plain(model: Model) -> tuple[Loss, nn.Module]:
    return loss_of(model), model


def outer(model: Model) -> tuple[Loss, nn.Module]:
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    return loss_of(compiled), compiled


def inner(model: Model) -> tuple[Loss, nn.Module]:
    return outer(model)[0], model


def in_place(model: Model) -> tuple[Loss, nn.Module]:
    model.compile(fullgraph=True, backend="aot_eager")
    return loss_of(model), model


def layers(model: Model) -> tuple[Loss, nn.Module]:
    for i, layer in enumerate(list(model.layers)):
        model.layers[i] = torch.compile(layer, fullgraph=True, backend="aot_eager")
    return loss_of(model), model


def loss_function(model: Model) -> tuple[Loss, nn.Module]:
    return torch.compile(loss_of(model), fullgraph=True, backend="aot_eager"), model


WAYS = {way.__name__: way for way in (outer, inner, in_place, layers, loss_function)}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train(loss_of_batch: Loss, parameters: Any, health: Watch | None) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    with health or nullcontext():
        for _ in range(STEPS):
            loss = loss_of_batch(torch.randn(2, 5, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if health is not None:
                health.step(loss)
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("way", "every"),
    [
        pytest.param(way, every, marks=[] if every == 5 or way == "outer" else pytest.mark.slow)
        for way in WAYS
        for every in (1, 5, 100)
    ],
)
def test_no_break_no_second_graph_and_the_sample_says_eager(way: str, every: int) -> None:
    model = Model()
    loss_of_batch, watched = WAYS[way](copy.deepcopy(model))
    health = Watch(watched, every=every)
    losses = train(loss_of_batch, watched.parameters(), health)
    assert losses == train(loss_of(model), model.parameters(), None)  # aot_eager runs the same kernels
    assert dict(counters["graph_break"]) == {}
    # the second of two layers has an input with a gradient, which is a graph of its own
    assert counters["stats"]["unique_graphs"] == (0 if every == 1 else 2 if way == "layers" else 1)
    assert [sample.step for sample in health.samples] == sorted({1, *range(every, STEPS + 1, every)})
    for sample in health.samples:
        assert sample.how == "eager"
        assert [call.site for call in sample.calls] == ["layers.0", "layers.1"]
        assert all(min(call.columns["query_grad_max"]) > 0 for call in sample.calls)


def test_a_model_that_is_not_compiled_runs_as_it_is_although_others_are() -> None:
    torch.compile(nn.Linear(8, 8), backend="eager")(torch.randn(1, 8))
    loss_of_batch, model = plain(Model())
    health = Watch(model, every=5)
    train(loss_of_batch, model.parameters(), health)
    assert {sample.how for sample in health.samples} == {"as is"}


@pytest.mark.full
def test_a_training_step_that_is_compiled_as_a_whole() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with Watch(model, every=3) as health:
        for _ in range(7):
            health.step(train_step(torch.randn(2, 5, 8)))
    assert [(sample.step, sample.how, len(sample.calls)) for sample in health.samples] == [
        (1, "eager", 2),
        (3, "eager", 2),
        (6, "eager", 2),
    ]


def test_what_is_compiled_within_the_first_sampled_step() -> None:
    model = Model()
    with Watch(model, every=100) as health:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(4):
            compiled(torch.randn(2, 5, 8)).sum().backward()
            health.step()
    assert health.samples[0].how == "eager"
    assert counters["stats"]["unique_graphs"] == 1


def test_an_evaluation_in_a_pause_is_compiled() -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with Watch(compiled, every=1) as health:
        with health.paused():
            compiled(torch.randn(2, 5, 8))
        assert counters["stats"]["unique_graphs"] == 1
        compiled(torch.randn(2, 4, 8))
        health.step()
    assert health.samples[0].calls[0].columns["rows"] == [8.0, 8.0]
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_and_inner_module_are_one_model() -> None:
    model = Model()
    with (
        Watch(model),
        pytest.raises(Exception, match="one watch at a time"),
        Watch(torch.compile(model, backend="eager")),
    ):
        pass


def test_the_stance_of_the_caller_is_there_again() -> None:
    model = Model()
    with torch.compiler.set_stance("fail_on_recompile"), Watch(model, every=When(lambda step: False)) as health:
        model(torch.randn(1, 3, 8))
        assert eval_frame._stance.stance == "force_eager"
        for _ in range(2):
            health.step()
        assert eval_frame._stance.stance == "fail_on_recompile"
    assert eval_frame._stance.stance == "default"
