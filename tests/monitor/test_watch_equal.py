"""A watched training is the unwatched one bit for bit, in whatever way it trains: losses, weights, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk.monitor.watch import Watch
from tests.monitor.watched_models import IDS, MODELS, module_state

BATCHES = 2
pytestmark = [  # of the compiler, and of transformers
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def again(reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = MODELS["gpt2"]()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return make


# Each with dropout; gpt2 of 0.1 on embeddings, weights of the attention and residuals.
WAYS: dict[str, tuple[Callable[[], nn.Module], torch.dtype | None]] = {
    **{name: (make, None) for name, make in MODELS.items()},
    "checkpointed": (again(reentrant=False), None),
    "checkpointed, re-entrant": (again(reentrant=True), None),
    "bfloat16": (MODELS["gpt2"], torch.bfloat16),
    "float16 and a scaler": (MODELS["gpt2"], torch.float16),
    "compiled": (lambda: torch.compile(MODELS["gpt2"](), backend="aot_eager"), None),
}


def trained(
    model: nn.Module, steps: int, dtype: torch.dtype | None, health: Watch | None, scaler: Any
) -> dict[str, Any]:
    """Losses, weights, state of the generator and scale at the end; each step takes two batches."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    losses: list[float] = []
    with health or nullcontext():
        for _ in range(steps):
            for _ in range(BATCHES):
                ids = torch.randint(max(IDS.values()) + 1, 61, (2, 7))
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = model(input_ids=ids, labels=ids).loss / BATCHES
                scaler.scale(loss).backward()
                losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if health is not None:
                health.step(loss)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    return {"losses": losses, "weights": weights, "random": torch.get_rng_state(), "scale": scaler.get_scale()}


def _marks(way: str, steps: int, every: int) -> Any:
    long = (steps > 12) + (every == 1) + (way == "compiled")
    return () if not long else pytest.mark.full if long == 1 else pytest.mark.slow


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("way", "steps", "every"),
    [pytest.param(way, *run, marks=_marks(way, *run)) for way in WAYS for run in ((12, 5), (50, 5), (50, 1))],
)
def test_losses_weights_and_random_numbers_are_bit_equal(way: str, steps: int, every: int) -> None:
    make, dtype = WAYS[way]
    # a scale that overflows float16 at first, so that steps are skipped
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled="scaler" in way) for _ in range(2)]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make().train())
    state = module_state(models[0])
    health = Watch(models[0], every=every, on_alarm="raise", scaler=scalers[0] if "scaler" in way else None)
    watched = trained(models[0], steps, dtype, health, scalers[0])
    plain = trained(models[1], steps, dtype, None, scalers[1])
    assert watched["losses"] == plain["losses"]
    assert len(set(plain["losses"])) > steps  # it trains
    assert list(watched["weights"]) == list(plain["weights"])
    assert all(torch.equal(weight, plain["weights"][name]) for name, weight in watched["weights"].items())
    assert torch.equal(watched["random"], plain["random"])
    assert watched["scale"] == plain["scale"] < 2.0**24 if "scaler" in way else watched["scale"] == 1.0
    assert way == "compiled" or module_state(models[0]) == state
    assert [sample.step for sample in health.samples] == sorted({1, *range(every, steps + 1, every)})
    assert [sample.loss for sample in health.samples] == [
        plain["losses"][BATCHES * sample.step - 1] for sample in health.samples
    ]
    for sample in health.samples:
        assert sample.how == ("eager" if way == "compiled" else "as is")
        assert len(sample.calls) == 2
        for call in sample.calls:
            assert call.reason is None
            assert call.scale_ratio == pytest.approx(1.0, rel=1e-6 if dtype is None else 1e-2)
            assert call.columns["rows"] == [2.0 * 7 * BATCHES] * 2
            if way != "encoder" and "scaler" not in way:  # a module of functions; gradients that overflow at first
                assert all(value > 0 for value in call.columns["query_grad_max"])
