"""The gradients of q and k of a sampled step against those that autograd keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sqrtdk.monitor.watch import Watch
from tests.monitor.projected_models import (
    OWN,
    SIZE,
    Block,
    Model,
    kept,
    watched,
    wrong,
)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("kind", ["separate", "fused", "conv1d", "gqa", *OWN])
def test_gradients_are_those_of_autograd(kind: str, reentrant: bool | None) -> None:
    """Of one batch, and of several of a later step; what was computed again is counted once."""
    model = Model(kind, reentrant)
    batches = [torch.randn(n, 5, SIZE, requires_grad=True) for n in (2, 3)]  # re-entrant: an input with a gradient
    with Watch(model, every=1) as health:
        model(batches[0]).backward()
        health.step()
        for batch in batches:
            model(batch).backward()
        health.step()
    assert [sample.not_measured for sample in health.samples] == [(), ()]
    for sample, of_step in zip(health.samples, (batches[:1], batches), strict=True):
        assert [call.index for call in sample.calls] == [0, 0]
        for call, gradients in zip(sample.calls, kept(model, of_step), strict=True):
            assert call.columns["rows"][0] == 5.0 * sum(map(len, of_step))
            assert wrong(call, gradients) == []


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["separate", "MultiheadAttention"])
def test_a_model_that_is_computed_again_as_a_whole(kind: str, reentrant: bool) -> None:
    model, x = Model(kind), torch.randn(2, 5, SIZE, requires_grad=True)
    with Watch(model, every=1) as health:
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).backward()
            health.step()
    sample = health.samples[1]
    assert sample.not_measured == ()
    for call, gradients in zip(sample.calls, kept(model, [x]), strict=True):
        assert call.columns["rows"][0] == 10.0
        assert wrong(call, gradients) == []


def one_block_twice(model: Model) -> None:
    model.blocks[1] = model.blocks[0]


def two_blocks_of_one_weight(model: Model) -> None:
    for one, other in zip(model.blocks[0].projections, model.blocks[1].projections, strict=True):
        other.weight, other.bias = one.weight, one.bias


def keys_of_the_weight_of_queries(model: Model) -> None:
    for block in model.blocks:
        block.projections[1].weight = block.projections[0].weight


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("share", [one_block_twice, two_blocks_of_one_weight, keys_of_the_weight_of_queries])
def test_calls_that_share_a_weight_have_gradients_of_their_own(
    share: Callable[[Model], None], reentrant: bool | None
) -> None:
    model = Model("separate", reentrant)
    share(model)
    apart = Model("separate")
    apart.blocks = nn.ModuleList(copy.deepcopy(block) for block in model.blocks)
    batches = [torch.randn(n, 5, SIZE, requires_grad=True) for n in (2, 3)]
    with Watch(model, every=1) as health:
        for _ in range(2):
            for batch in batches:
                model(batch).backward()
            health.step()
    unknown = share is one_block_twice and reentrant  # which of its calls a checkpoint computes again
    assert [bool(sample.not_measured) for sample in health.samples] == [bool(unknown), False]
    for sample in health.samples:
        for call, gradients in zip(sample.calls, kept(apart, batches), strict=True):
            if unknown:
                assert "query_grad_max" not in call.columns
            else:
                assert wrong(call, gradients) == []


def test_rows_bounds_the_rows_of_gradients_too() -> None:
    model, x = Model("separate"), torch.randn(2, 9, SIZE)
    calls = watched(model, [x], rows=3)
    chosen = [i + 9 * batch for batch in range(2) for i in (0, 4, 8)]
    for call, gradients in zip(calls, kept(model, [x]), strict=True):
        assert wrong(call, {name: rows[:, chosen] for name, rows in gradients.items()}) == []


@pytest.mark.parametrize("told", [True, False])
def test_a_loss_scale_that_is_told_is_taken_out(told: bool) -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, scaler=scaler if told else None) as health:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update(2.0)  # the scale of the step is what it was before
        health.step()
    for call, gradients in zip(health.samples[0].calls, kept(model, [x]), strict=True):
        assert wrong(call, gradients if told else {name: 1024.0 * rows for name, rows in gradients.items()}) == []


def test_under_autocast_gradients_are_of_what_the_projection_returned() -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        calls = watched(model, [x])
        wanted = kept(model, [x])
    for call, gradients in zip(calls, wanted, strict=True):
        assert wrong(call, gradients) == []


def test_without_a_backward_pass_there_are_none() -> None:
    model = Model("separate")
    with Watch(model, every=1) as health:
        with torch.no_grad():
            model(torch.randn(1, 3, SIZE))
        health.step()
    columns = health.samples[0].calls[0].columns
    assert {name for name in columns if "grad" in name} == {"query_grad_nonfinite", "key_grad_nonfinite"}
    assert all(math.isnan(value) for name in columns if "grad" in name for value in columns[name])


def test_a_projection_that_is_called_by_itself_does_not_count() -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    with Watch(model, every=1) as health:
        model(x).backward()
        model.blocks[0].projections[0](10 * x).square().sum().backward()
        health.step()
    assert wrong(health.samples[0].calls[0], kept(model, [x])[0]) == []


def test_an_attention_that_comes_later_has_gradients_from_its_next_step_on() -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    second = model.blocks.pop(1)
    with Watch(model, every=1) as health:
        for step in range(3):
            if step == 1:
                model.blocks.append(second)
            model(x).backward()
            health.step()
    assert [len(sample.calls) for sample in health.samples] == [1, 2, 2]
    assert wrong(health.samples[2].calls[1], kept(model, [x])[1]) == []


class Turns(nn.Module):
    """One of two attentions a forward pass, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block("separate") for _ in range(2))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[self.passes % 2]
        self.passes += 1
        return block(x).square().mean()


def test_attentions_that_take_turns_within_a_step_all_have_gradients() -> None:
    model = Turns()
    with Watch(model, every=1) as health:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(2, 5, SIZE)).backward()
            health.step()
    assert [call.site for call in health.samples[2].calls] == ["blocks.0", "blocks.1"]
    assert all(max(call.columns["query_grad_max"]) > 0 for call in health.samples[2].calls)
