"""A watched training is the unwatched one bit for bit, in whatever way it trains: losses, weights, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk.monitor.watch import Watch
from tests.monitor.watched_models import IDS, MODELS

STEPS, BATCHES = 50, 2
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


def gpt2() -> nn.Module:
    """With dropout of 0.1 on embeddings, weights of the attention and residuals."""
    torch.manual_seed(0)
    return MODELS["gpt2"]().train()


def again(reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return make


def compiled(backend: str) -> Callable[[], nn.Module]:
    return lambda: torch.compile(gpt2(), backend=backend)


WAYS: dict[str, tuple[Callable[[], nn.Module], torch.dtype | None]] = {
    "checkpointed": (again(reentrant=False), None),
    "checkpointed, re-entrant": (again(reentrant=True), None),
    "bfloat16": (gpt2, torch.bfloat16),
    "float16 and a scaler": (gpt2, torch.float16),
    "compiled": (compiled("aot_eager"), None),
}


def trained(model: nn.Module, dtype: torch.dtype | None, health: Watch | None, scaler: Any) -> dict[str, Any]:
    """Losses, weights, state of the generator and scale at the end; each step takes two batches."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    with health or nullcontext():
        for _ in range(STEPS):
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


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == "compiled" else ()) for way in WAYS]
)
def test_50_steps(way: str) -> None:
    make, dtype = WAYS[way]
    # a scale that overflows float16 at first, so that steps are skipped
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled="scaler" in way) for _ in range(2)]
    model = make()
    health = Watch(model, every=5, on_alarm="raise", scaler=scalers[0] if "scaler" in way else None)
    watched, plain = trained(model, dtype, health, scalers[0]), trained(make(), dtype, None, scalers[1])
    assert watched["losses"] == plain["losses"]
    assert len(set(plain["losses"])) > STEPS  # it trains
    assert list(watched["weights"]) == list(plain["weights"])
    assert all(torch.equal(weight, plain["weights"][name]) for name, weight in watched["weights"].items())
    assert torch.equal(watched["random"], plain["random"])
    assert watched["scale"] == plain["scale"] < 2.0**24 if "scaler" in way else watched["scale"] == 1.0
    assert [sample.step for sample in health.samples] == [1, *range(5, STEPS + 1, 5)]
    for sample in health.samples:
        assert [call.columns["rows"] for call in sample.calls] == [[2 * 7 * BATCHES] * 2] * 2
        assert sample.how == ("eager" if way == "compiled" else "as is")
