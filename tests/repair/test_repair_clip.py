"""QK-clip on every layout: what is measured after it is what it predicted, and nothing else moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sqrtdk
from sqrtdk.repair import ClipRecord, clip_, plan_of, qk_clip_
from sqrtdk.tracing import Trace
from sqrtdk.tracing.tape.stance import fast_path_off
from tests.repair.layouts import LAYOUTS, Layout, terms
from tests.repair.modules import Latent, WithGain, randomised
from tests.tolerances import allowed

BALANCES = (0.5, 0.0, 1.0)


@pytest.fixture(autouse=True)
def _slow_path() -> Iterator[None]:
    with fast_path_off():
        yield


def traced(layout: Layout) -> Trace:
    with sqrtdk.trace(layout.model, keep=True) as run:
        layout.run()
    assert len(run.calls) == 1
    return run


def maxima(run: Trace) -> Tensor:
    stats = run.calls[0].stats
    assert stats is not None
    return torch.tensor(stats.max_logit, dtype=torch.float64)


def between_heads(values: Tensor) -> float:
    """A threshold that about half of the heads are above."""
    low, high = values.sort().values[[1, 2]].tolist()
    return math.sqrt(low * high)


def assert_as_predicted(record: ClipRecord, layout: Layout, run: Trace) -> None:
    """`run` is of the weights before: no logit is larger than theirs."""
    bound = allowed(
        layout.dtype, length=64, logit=0.0, magnitude=terms(run.tensors[0])
    )  # 32 features, and 32 of their inputs
    assert (maxima(traced(layout)) - record.predicted).abs().max() <= bound


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_maxima_are_the_predicted_ones_and_only_the_rows_of_clipped_heads_move(name: str) -> None:
    """By what is theirs: q by gamma^balance, k by gamma^(1 - balance), the q that meets a shared key by gamma."""
    layout = LAYOUTS[name]()
    run = traced(layout)
    (plan,) = plan_of(layout.model, run)
    maxima_before, threshold = maxima(run), between_heads(maxima(run))
    before = {name: parameter.clone() for name, parameter in layout.model.named_parameters()}
    (record,) = qk_clip_(layout.model, run, threshold, 0.3)
    assert record.refused is None
    assert len(record.clipped) > 0
    assert set((maxima_before > threshold).nonzero().flatten().tolist()) <= set(record.clipped)
    assert record.predicted.max() <= threshold * (1 + 1e-12)
    assert (record.predicted[record.gamma == 1] == maxima_before[record.gamma == 1]).all()
    expected = {name: torch.ones_like(parameter) for name, parameter in before.items()}
    powers = {"q": 0.3, "k": 0.7, "whole": 1.0}
    for rows in plan.rows:
        factor = expected[rows.name]
        for head in range(plan.heads):
            by = (record.gamma[head] ** powers[rows.side]).to(factor.dtype)
            at = rows.index[head]
            (factor.view(-1) if rows.axis is None else factor.movedim(rows.axis, 0))[at] = by
    offsets = {rows.name: rows.offset for rows in plan.rows}
    for name, parameter in layout.model.named_parameters():
        still = expected[name] == 1
        assert torch.equal(parameter[still], before[name][still]), name
        offset = offsets.get(name, 0.0)
        torch.testing.assert_close(parameter + offset, (before[name] + offset) * expected[name])
    assert {name for name, factor in expected.items() if (factor != 1).any()} == {rows.name for rows in plan.rows}
    assert_as_predicted(record, layout, run)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(
    "name", ["grouped (Llama)", "latent (DeepSeek-V3)", "1 + gain (Gemma 3)", "transposed (GPT-2)"]
)
def test_any_balance_gives_the_same_maxima(name: str, balance: float) -> None:
    layout = LAYOUTS[name]()
    run = traced(layout)
    (record,) = qk_clip_(layout.model, run, between_heads(maxima(run)), balance)
    assert record.clipped
    assert_as_predicted(record, layout, run)


def test_heads_at_or_below_the_threshold_keep_every_bit() -> None:
    layout = LAYOUTS["separate"]()
    run = traced(layout)
    before = {name: parameter.clone() for name, parameter in layout.model.named_parameters()}
    (record,) = qk_clip_(layout.model, run, threshold=float(maxima(run).max()))
    assert record.clipped == ()
    assert all(torch.equal(parameter, before[name]) for name, parameter in layout.model.named_parameters())


def test_a_second_clip_by_one_trace_has_nothing_to_do_unless_it_asks_for_less() -> None:
    layout = LAYOUTS["separate"]()
    run = traced(layout)
    threshold = 0.8 * float(maxima(run).min())
    qk_clip_(layout.model, run, threshold)
    once = {name: parameter.clone() for name, parameter in layout.model.named_parameters()}
    (again,) = qk_clip_(layout.model, run, threshold)
    assert again.clipped == ()
    assert all(torch.equal(parameter, once[name]) for name, parameter in layout.model.named_parameters())
    (less,) = qk_clip_(layout.model, run, 0.5 * threshold)
    assert_as_predicted(less, layout, run)
    assert less.predicted.max() <= 0.5 * threshold * (1 + 1e-12)


def test_a_group_is_scaled_by_its_largest_maximum() -> None:
    layout = LAYOUTS["grouped (Llama)"]()
    run = traced(layout)
    before = maxima(run)
    threshold = float(before.min()) / 2
    (record,) = qk_clip_(layout.model, run, threshold)
    groups = before.view(2, 2).amax(1)
    assert record.gamma.tolist() == (threshold / groups).repeat_interleave(2).tolist()
    assert record.predicted.view(2, 2).amax(1).tolist() == pytest.approx([threshold] * 2)
    assert len(record.shared) == 1
    assert "4 heads share 2" in record.shared[0]


def test_with_q_alone_no_head_of_a_group_is_scaled_for_another() -> None:
    layout = LAYOUTS["grouped (Llama)"]()
    run = traced(layout)
    before, weight = maxima(run), layout.model.layers[0].self_attn.q_proj.weight.clone()
    threshold = float(before.max()) * (1 - 1e-6)
    (record,) = qk_clip_(layout.model, run, threshold, balance=1.0)
    largest = int(before.argmax())
    assert record.clipped == (largest,)
    assert record.shared == ()
    moved = (layout.model.layers[0].self_attn.q_proj.weight != weight).any(1).view(4, -1).any(1)
    assert moved.nonzero().flatten().tolist() == [largest]
    assert_as_predicted(record, layout, run)


def test_heads_that_share_a_gain_are_scaled_by_the_largest_maximum_of_all() -> None:
    layout = LAYOUTS["one gain for all heads (Qwen3)"]()
    run = traced(layout)
    before = maxima(run)
    (record,) = qk_clip_(layout.model, run, between_heads(before))
    assert record.gamma.unique().tolist() == pytest.approx([between_heads(before) / float(before.max())])
    assert "q_norm.weight: 4 heads share 1" in record.shared[0]


@pytest.mark.parametrize("name", ["one gain for all heads (Qwen3)", "1 + gain (Gemma 3)"])
def test_gains_as_they_are_at_first_are_told_apart_by_their_names(name: str) -> None:
    layout = LAYOUTS[name]()
    with torch.no_grad():
        for key, parameter in layout.model.named_parameters():
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(0.0 if "Gemma" in name else 1.0)
    (plan,) = plan_of(layout.model, traced(layout))
    assert {rows.side: rows.name.split(".")[-2] for rows in plan.rows} == {"q": "q_norm", "k": "k_norm"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5.0, 0.0])
def test_a_maximum_that_is_no_ground_for_clipping_changes_nothing(value: float) -> None:
    layout = LAYOUTS["separate"]()
    plans = plan_of(layout.model, traced(layout))
    before = {name: parameter.clone() for name, parameter in layout.model.named_parameters()}
    (record,) = clip_(layout.model, plans, [torch.full((4,), value)], threshold=1e-3)
    assert record.gamma.tolist() == [1.0] * 4
    assert record.clipped == ()
    assert record.unusable == (() if math.isfinite(value) else (0, 1, 2, 3))
    assert all(torch.equal(parameter, before[name]) for name, parameter in layout.model.named_parameters())


@pytest.mark.parametrize("make", [WithGain, Latent])
def test_of_many_tokens_some_tell_what_is_whose(make: Callable[[], nn.Module]) -> None:
    layout = Layout(randomised(make()), (torch.randn(3, 70, 32, dtype=torch.float64),))
    run = traced(layout)
    (record,) = qk_clip_(layout.model, run, between_heads(maxima(run)))
    assert record.clipped
    assert_as_predicted(record, layout, run)


def test_one_bad_head_does_not_keep_the_others_from_being_clipped() -> None:
    layout = LAYOUTS["separate"]()
    plans = plan_of(layout.model, traced(layout))
    (record,) = clip_(layout.model, plans, [torch.tensor([math.nan, 50.0, 7.0, math.inf])], threshold=10.0)
    assert record.gamma.tolist() == [1.0, 0.2, 1.0, 1.0]
    assert record.unusable == (0, 3)
    (record,) = clip_(layout.model, plans, [None], threshold=10.0)
    assert record.clipped == ()
    assert record.unusable == (0, 1, 2, 3)


def test_a_maximum_at_the_softcap_says_nothing_of_the_product() -> None:
    layout = LAYOUTS["softcap (Gemma 2)"]()
    plans = plan_of(layout.model, traced(layout))
    (record,) = clip_(layout.model, plans, [torch.tensor([50.0, 60.0, 49.0, 3.0])], threshold=10.0)
    assert record.unusable == (0, 1)
    assert record.gamma[:2].tolist() == [1.0] * 2
    assert record.gamma[2:].tolist() == pytest.approx([math.atanh(0.2) / math.atanh(0.98)] * 2)  # of one key head
    (record,) = clip_(layout.model, plans, [torch.full((4,), 49.0)], threshold=50.0)
    assert record.clipped == ()


def test_plans_and_maxima_of_any_object_serve() -> None:
    """As those of a monitor, merged over ranks by it."""
    layout = LAYOUTS["fused by head (GPT-NeoX)"]()
    run = traced(layout)

    class Monitor:
        plans = plan_of(layout.model, run)
        maxima = (maxima(run),)

    (record,) = qk_clip_(layout.model, Monitor(), between_heads(maxima(run)))
    assert record.clipped
    assert_as_predicted(record, layout, run)


def test_the_plan_serves_after_the_weights_have_moved() -> None:
    """A trace of the forward, clipped by after the optimizer's step, as QK-clip is used."""
    layout = LAYOUTS["transposed (GPT-2)"]()
    run = traced(layout)
    with torch.no_grad():
        for parameter in layout.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    plans, fresh = plan_of(layout.model, run), plan_of(layout.model, traced(layout))
    for one, other in zip(plans[0].rows, fresh[0].rows, strict=True):
        assert (one.name, one.side, one.axis) == (other.name, other.side, other.axis)
        assert torch.equal(one.index, other.index)


def test_a_clip_waits_for_no_device() -> None:
    """Numbers that Python asks for, and shapes that depend on them, make a device wait."""

    class Waits(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    layout = LAYOUTS["latent (DeepSeek-V3)"]()
    plans = plan_of(layout.model, traced(layout))
    with Waits() as seen:
        clip_(layout.model, plans, [torch.full((4,), 1e3)])
    assert any("mul_" in name for name in seen.names)
    assert not [name for name in seen.names if "local_scalar" in name or "nonzero" in name or "equal" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lesser_dtypes(dtype: torch.dtype) -> None:
    """Each weight is multiplied and rounded once, which costs a logit eps times the sum of its terms."""
    layout = LAYOUTS["grouped (Llama)"]()
    layout.model.to(dtype)
    run = traced(layout)
    (record,) = qk_clip_(layout.model, run, between_heads(maxima(run)))
    assert record.clipped
    assert_as_predicted(record, replace(layout, dtype=dtype), run)
