"""A call of `sqrtdk.attention` that runs in blocks of rows is one attention, whatever its score."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.impl import rows
from tests.tolerances import allowed

LENGTH = 96
WEIGHTS = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1))


def apart(q: Tensor, k: Tensor) -> Tensor:
    """A score that no reader follows: the largest difference of any feature."""
    return -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().amax(-1)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 20.0, "impl": "tiled"}, "softmax(20 * tanh(0.3536 * q.k / 20) + causal)"),
    "bias": ({"bias": "alibi", "impl": "tiled"}, "softmax(0.3536 * q.k + alibi + causal)"),
    "window": ({"window": (8, 0), "impl": "tiled", "sinks": 0.5}, "softmax(0.3536 * q.k + window + sinks)"),
    "mask_mod": ({"mask_mod": lambda b, h, i, j: i - j < 9, "impl": "tiled"}, "softmax(0.3536 * q.k + window)"),
    "score_mod": ({"score_mod": lambda s, b, h, i, j: s - 0.1 * (i - j)}, "softmax(0.3536 * q.k + alibi + causal)"),
    "weights": ({"return_weights": True}, "softmax(0.3536 * q.k + causal)"),
    "distance": ({"score": "distance", "scale": 0.1}, "softmax(-0.1 * |q - k|^2 + causal)"),
    "additive": (
        {"score": sqrtdk.scores.additive(WEIGHTS[0, 0], WEIGHTS[1], WEIGHTS[2])},
        "softmax(additive(q, k) + causal)",
    ),
    "function": ({"score": apart}, "softmax(-1 * unknown(sub)(q, k) + causal)"),
}


class Layer(nn.Module):
    def __init__(self, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.options, self.recompute = options, recompute

    def attend(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.k, self.v))
        out = sqrtdk.attention(q, k, v, is_causal=True, enable_gqa=True, **self.options)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.attend, x, use_reentrant=False) if self.recompute else self.attend(x)
        assert isinstance(out, Tensor)
        return out


@pytest.fixture(autouse=True)
def _blocks_of_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BLOCK_PAIRS", 2**12)  # a block of 5 rows, or of less than one


@pytest.mark.parametrize("name", CALLS)
def test_blocks_of_rows_are_one_call_with_the_statistics_of_all(name: str) -> None:
    options, formula = CALLS[name]
    layer, x = Layer(**options), torch.randn(2, LENGTH, 16)
    plain = layer(x)
    with sqrtdk.trace(layer, keep=True) as run:
        traced = layer(x)
    assert torch.equal(plain, traced)
    (call,) = run.calls
    assert (call.formula, call.query_len, call.key_len, call.heads, call.kv_heads) == (formula, LENGTH, LENGTH, 4, 2)
    assert run.not_measured == ()
    assert run.not_attention == ()
    assert call.stats is not None
    assert call.mask is not None
    assert (call.mask.blind_rows, call.mask.masked_weight) == (0, 0.0)
    # the oracle: the statistics that the op itself returns in float64
    q, k, v = (each.double() for each in _operands(layer, x))
    exact = {key: value for key, value in options.items() if key not in ("impl", "return_weights")}
    if name == "additive":
        exact["score"] = sqrtdk.scores.additive(*(w.double() for w in (WEIGHTS[0, 0], WEIGHTS[1], WEIGHTS[2])))
    exact.pop("sinks", None)  # statistics are those of the keys
    _, aux = sqrtdk.attention(q, k, v, is_causal=True, enable_gqa=True, return_aux=True, impl="dense", **exact)
    wanted = aux.entropy_nats.mean((0, 2)).tolist()
    assert call.stats.entropy_nats == pytest.approx(
        wanted, abs=allowed(torch.float32, length=LENGTH, logit=8.0, magnitude=8.0)
    )
    if call.score == "dot":
        assert run.tensors[0].missing is None


def _operands(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = layer.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (layer.k, layer.v))
    return q.detach(), k.detach(), v.detach()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["softcap", "distance", "score_mod"])
def test_check_and_watch_count_one_call_and_change_no_gradient(name: str, recompute: bool) -> None:
    layer, x = Layer(recompute, **CALLS[name][0]), torch.randn(2, LENGTH, 16)
    layer(x).sum().backward()
    wanted = [None if p.grad is None else p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with sqrtdk.watch(layer, every=1, on_alarm=lambda alarm: None) as watch:
        loss = layer(x).sum()
        loss.backward()
        watch.step(loss)
    (sample,) = watch.samples
    (seen,) = sample.calls
    assert math.isfinite(seen.columns["entropy_nats"][0])
    assert all(torch.equal(p.grad, g) for p, g in zip(layer.parameters(), wanted, strict=True) if g is not None)
    if not recompute:
        report = sqrtdk.check(layer, inputs=(x,))
        assert [judged.call.formula for judged in report.calls] == [CALLS[name][1]]


@pytest.mark.full
def test_without_data_the_call_is_one_too() -> None:
    with torch.device("meta"):
        layer, x = Layer(score="distance"), torch.randn(2, 3000, 16)
    with sqrtdk.trace(layer) as run:
        layer(x)
    (call,) = run.calls
    assert (call.formula, call.query_len) == ("softmax(-1 * |q - k|^2 + causal)", 3000)


def test_dropout_draws_the_same_numbers_under_a_trace() -> None:
    layer, x = Layer(score="distance", dropout_p=0.3), torch.randn(2, LENGTH, 16)
    torch.manual_seed(3)
    plain = layer(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with sqrtdk.trace(layer) as run, sqrtdk.trace(layer) as second:
        traced = layer(x)
    assert torch.equal(plain, traced)
    assert torch.equal(after, torch.get_rng_state())
    assert [call.dropout for call in (*run.calls, *second.calls)] == [0.3, 0.3]


class Tempered(nn.Module):
    """softmax(f(t) * q k) v with a learned t."""

    def __init__(self, scaled: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.log_t = nn.Parameter(torch.full(shape, 1.2))
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = self.scaled(q @ k.mT, self.log_t).softmax(-1) @ v
        assert isinstance(out, Tensor)
        return out


TEMPERED = {
    "exp(-log_t)": lambda z, t: z * torch.exp(-t),
    "exp(-log_t) ": lambda z, t: z / t.exp(),
    "exp(log_t)": lambda z, t: z * t.exp().clamp(max=100.0),
    "softplus(log_t)": lambda z, t: z * nn.functional.softplus(t),
    "1/log_t": lambda z, t: z / t,
    "log_t": lambda z, t: z * t,
    "2 * exp(-log_t)": lambda z, t: z * (2 * torch.exp(-t)),
    "1/sqrt(log_t)": lambda z, t: z / t.sqrt(),
}


@pytest.mark.parametrize("written", TEMPERED)
@pytest.mark.parametrize("shape", [(), (2, 1, 1)])
def test_a_learned_temperature_is_written_with_its_function(written: str, shape: tuple[int, ...]) -> None:
    model = Tempered(TEMPERED[written], shape)
    with sqrtdk.trace(nn.ModuleDict({"attn": model})) as run:
        model(torch.randn(2, 6, 16))
    head = "[h]" if shape else ""
    assert run.calls[0].formula == f"softmax({written.strip()}{head} * q.k)"
