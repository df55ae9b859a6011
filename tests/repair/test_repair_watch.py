"""QK-clip by the maxima of a watch, inside the loop: the maxima after it are the predicted ones, and nothing twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.repair import QKClip, qk_clip_
from sqrtdk.tracing.tape.stance import fast_path_off
from tests.monitor.watched_models import MODELS
from tests.repair.layouts import LAYOUTS, Layout
from tests.repair.modules import Attention, Latent, WithGain, randomised, states
from tests.repair.watched_clips import between, maxima, moved, rounding, silent, weights
from tests.tolerances import allowed


@pytest.fixture(autouse=True)
def _slow_path() -> Iterator[None]:
    with fast_path_off():
        yield


MANY_TOKENS = {"many tokens, gains": WithGain, "many tokens, latent": Latent}  # more than a sketch has


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*LAYOUTS, *MANY_TOKENS])
def test_the_maxima_of_the_next_step_are_the_predicted_ones(name: str) -> None:
    """From the first step on, whose sample alone has told which rows are a head's."""
    if name in LAYOUTS:
        layout = LAYOUTS[name]()
    else:
        layout = Layout(randomised(MANY_TOKENS[name]()), (torch.randn(3, 70, 32, dtype=torch.float64),))
    bound = rounding(layout)
    with silent(layout.model) as watch:
        layout.run()
        watch.step()
        before = maxima(watch)
        (record,) = qk_clip_(layout.model, watch, between(before), 0.3)
        layout.run()
        watch.step()
        after = maxima(watch)
    assert record.refused is None
    assert set((before > between(before)).nonzero().flatten().tolist()) <= set(record.clipped)
    assert record.partial == ()
    assert (after - record.predicted).abs().max() <= bound


def test_it_does_what_a_trace_does() -> None:
    layout, other = (LAYOUTS["grouped (Llama)"]() for _ in range(2))
    with sqrtdk.trace(other.model, keep=True) as run:
        other.run()
    with silent(layout.model) as watch:
        layout.run()
        watch.step()
        threshold = between(maxima(watch))
        (record,) = qk_clip_(layout.model, watch, threshold)
    (expected,) = qk_clip_(other.model, run, threshold)
    assert record.clipped
    assert torch.equal(record.gamma, expected.gamma)
    assert moved(layout.model, weights(other.model)) == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_that_trains_stays_at_the_threshold(name: str) -> None:
    """The last step does not learn; its clip changes what the second layer gets, but not what the first one does."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in ("q_proj", "k_proj", "c_attn")):
                parameter.mul_(12.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(61, (2, 7))
    with silent(model) as watch:
        for step in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.param_groups[0]["lr"] *= step < 2
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
            records = qk_clip_(model, watch, threshold=0.2)
            assert len(records) == 2
            assert step or all(record.clipped for record in records)
            assert all((record.predicted <= 0.2 * (1 + 1e-12)).all() for record in records)
        model(input_ids=ids)
        watch.step()
        bound = allowed(torch.float32, length=32, logit=0.0, magnitude=16 * 0.2)  # 16 features, and 16 inputs of each
        assert (maxima(watch) - records[0].predicted).abs().max() <= bound


def test_a_step_that_was_not_sampled_is_not_clipped() -> None:
    """Or a stale maximum would shrink the weights at each of them."""
    model, x = randomised(Attention()).train(), states()
    with silent(model, every=3) as watch:
        for step in range(1, 5):
            model(1.5**step * x)
            watch.step()
            before = weights(model)
            records = qk_clip_(model, watch, threshold=10.0)
            assert bool(records) == bool(moved(model, before)) == (step in (1, 3))


def test_a_second_clip_after_the_same_step_has_nothing_to_do_unless_it_asks_for_less() -> None:
    model, x = randomised(Attention()).train(), states()
    with silent(model) as watch:
        model(x)
        watch.step()
        (first,) = qk_clip_(model, watch, threshold=10.0)
        before = weights(model)
        (second,) = QKClip(model, threshold=10.0, stats=watch).step()
        assert moved(model, before) == []
        assert second.clipped == ()
        assert second.measured.tolist() == pytest.approx(first.predicted.tolist())
        (third,) = qk_clip_(model, watch, threshold=5.0)
        assert third.gamma[third.measured == 10.0].tolist() == [0.5] * int((third.measured == 10.0).sum())
        model(x)
        watch.step()
        assert maxima(watch).max() == pytest.approx(5.0)


def test_of_the_forward_passes_of_a_step_the_largest_maximum_counts() -> None:
    model, x = randomised(Attention()).train(), states()
    with silent(model) as watch:
        for factor in (1.0, 1.5, 0.5):
            model(factor * x).sum().backward()
        with watch.paused():
            model(9.0 * x)
        watch.step()
        (record,) = qk_clip_(model, watch, threshold=10.0)
        model(1.5 * x)
        watch.step()
        assert maxima(watch).max() == pytest.approx(10.0)
    assert record.measured.max() > 10.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_broken_make_no_weight_nan(value: float) -> None:
    """The others are clipped by, and the record says that they are not all."""
    model, x = randomised(Attention()).train(), states()
    broken = x.clone()
    broken[1, 2, 0] = value
    with silent(model) as watch:
        model(torch.full_like(x, value))
        watch.step()
        before = weights(model)
        (record,) = qk_clip_(model, watch, threshold=10.0)
        assert record.unusable == (0, 1, 2, 3)
        assert moved(model, before) == []
        model(broken)
        watch.step()
        (record,) = qk_clip_(model, watch, threshold=10.0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if record.usable.any():
        assert record.partial


@pytest.mark.parametrize("make", [Attention, WithGain, Latent])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_first_step_with_broken_numbers_does_not_keep_the_rest_from_being_clipped(make: Any, value: float) -> None:
    model, x = randomised(make()).train(), states()
    broken = x.clone()
    broken[0, 0, 0] = value
    with silent(model) as watch:
        found = []
        for batch in (broken, x):
            model(batch)
            watch.step()
            found += qk_clip_(model, watch, threshold=1.0)
    assert found[1].refused is None
    assert found[0].clipped or found[1].clipped
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


class Cross(Attention):
    """Its queries are of a text of their own."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        given = zip((self.q, self.k, self.v), (x, y, y), strict=True)
        q, k, v = (project(text).unflatten(-1, (-1, 8)).transpose(1, 2) for project, text in given)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_broken_numbers_in_rows_that_are_left_out_refuse_nothing_for_good() -> None:
    model, x = randomised(Cross()).train(), states()
    broken = x.clone()
    broken[:, 1:-1] = math.inf  # the first and the last of the rows are measured
    with silent(model, rows=2) as watch:
        for batch in (broken, x):
            model(batch, x)
            watch.step()
            (record,) = qk_clip_(model, watch, threshold=1.0)
    assert record.refused is None
    assert record.clipped


def test_of_sampled_rows_it_says_so() -> None:
    model, x = randomised(Attention()).train(), states()
    with silent(model, rows=2) as watch:
        model(x)
        watch.step()
        (record,) = qk_clip_(model, watch, threshold=1.0)
        model(x)
        watch.step()
        assert (maxima(watch) - record.predicted).abs().max() < 1e-12
    assert record.partial == (0, 1, 2, 3)
    with sqrtdk.trace(model) as run:
        model(x)
    assert run.calls[0].stats is not None
    assert max(run.calls[0].stats.max_logit) > 1.01


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Attention(), Attention()

    def forward(self, x: Tensor, which: str = "one") -> Tensor:
        return self.get_submodule(which)(x)


def test_an_attention_that_appears_later_says_that_it_is_not_known_yet() -> None:
    model, x = randomised(Two()).train(), states()
    with silent(model) as watch:
        model(x)
        watch.step()
        assert [record.site for record in qk_clip_(model, watch, threshold=10.0)] == ["one"]
        model(x, "two")
        watch.step()
        one, two = qk_clip_(model, watch, threshold=10.0)
        assert (one.clipped, two.clipped) == ((), ())
        assert one.refused is None
        assert "at the next sampled step" in str(two.refused)
        model(x, "two")
        watch.step()
        one, two = qk_clip_(model, watch, threshold=10.0)
    assert two.refused is None
    assert two.clipped
    assert one.clipped == ()


def test_a_first_clip_long_after_the_first_step_looks_at_every_pass_of_the_next() -> None:
    """What the first step had told is of other weights, and is not kept."""
    model, x = randomised(Two()).train(), states()
    found: list[list[str | None]] = []
    clipped: list[bool] = []
    with silent(model) as watch:
        for step in range(6):
            for which in ("one", "two"):
                model(x, which)
            watch.step()
            if step == 2:
                assert watch.sketches() == {}
            if step > 2:
                records = qk_clip_(model, watch, threshold=10.0)
                found.append([record.refused for record in records])
                clipped.append(any(record.clipped for record in records))
    assert all("at the next sampled step" in str(reason) for reason in found[0])
    assert found[1:] == [[None, None]] * 2
    assert clipped[:2] == [False, True]


@pytest.mark.parametrize("wrap", ["whole", "part", "root passed"])
def test_a_compiled_model(wrap: str) -> None:
    inner = randomised(Two()).train()
    model: Any = inner
    if wrap == "part":
        inner.one = torch.compile(inner.one, backend="eager")
    else:
        model = torch.compile(inner, backend="eager")
    x = states()
    with silent(model) as watch:
        model(x)
        watch.step()
        (record,) = qk_clip_(inner if wrap == "root passed" else model, watch, threshold=10.0)
        model(x)
        watch.step()
        assert (maxima(watch) - record.predicted).abs().max() < 1e-12
    torch._dynamo.reset()
    assert record.clipped


@pytest.mark.parametrize(
    "name", ["one gain for all heads (Qwen3)", "1 + gain (Gemma 3)", "gains by head, one norm (OLMo 2)"]
)
def test_gains_as_they_are_at_first_may_have_moved_before_the_first_clip(name: str) -> None:
    """Gains of ones leave no mark on the values; the optimizer has moved them when their rows are looked for."""
    layout = LAYOUTS[name]()
    gains = [weight for key, weight in layout.model.named_parameters() if "q_norm" in key or "k_norm" in key]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), silent(layout.model) as watch:
        for gain in gains:
            gain.fill_(0.0 if "Gemma" in name else 1.0)
        layout.run()
        for gain in gains:
            gain.add_(0.01 * torch.randn(gain.shape, generator=generator, dtype=torch.float64))
        watch.step()
        (record,) = qk_clip_(layout.model, watch, threshold=0.1)
    assert record.refused is None
    assert record.clipped


def test_gains_that_move_between_clips_do_not_matter() -> None:
    layout = LAYOUTS["one gain for all heads (Qwen3)"]()
    with silent(layout.model) as watch:
        for _ in range(2):
            layout.run()
            watch.step()
            (record,) = qk_clip_(layout.model, watch, threshold=2.0)
            assert record.refused is None
            with torch.no_grad():
                for name, parameter in layout.model.named_parameters():
                    if "q_norm" in name:
                        parameter.mul_(3.0)
    assert record.clipped


def test_losses_with_a_watch_and_no_clip_above_are_those_without() -> None:
    def losses(clip: bool) -> list[float]:
        torch.manual_seed(0)
        model = MODELS["gpt2"]().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        with silent(model, every=2) as watch:
            for _ in range(6):
                ids = torch.randint(61, (2, 7))
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.step(loss)
                if clip:
                    qk_clip_(model, watch)
                found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_wrong_use() -> None:
    model, x = randomised(Attention()).train(), states()
    watch = silent(model)
    with pytest.raises(InvalidValueError, match="inside the block"):
        qk_clip_(model, watch)
    with watch:
        assert qk_clip_(model, watch) == ()
        model(x)
        assert qk_clip_(model, watch) == ()
        watch.step()
        with pytest.raises(InvalidValueError, match="of another Attention, which has 0 of its 6 parameters"):
            qk_clip_(Attention(), watch)
        with pytest.raises(InvalidTypeError, match=r"model is an nn\.Module; got int"):
            qk_clip_(3, watch)  # type: ignore[arg-type]
        with pytest.raises(InvalidValueError, match="a watch has merged its own"):
            qk_clip_(model, watch, group=3)  # type: ignore[arg-type]
    assert watch.sketches() == {}
    with pytest.raises(InvalidValueError, match="inside the block"):
        qk_clip_(model, watch)


def test_a_hook_of_an_optimizer_comes_before_the_end_of_a_step() -> None:
    model = randomised(Attention()).train()
    with silent(model) as watch, pytest.raises(InvalidValueError, match=r"once watch\.step\(\) has ended it"):
        QKClip(model, stats=watch).attach(torch.optim.SGD(model.parameters(), lr=0.1))
