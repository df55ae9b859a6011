"""Features of the trace that were built apart, in one model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sqrtdk import trace
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each

B, L, D, H, E = 2, 12, 32, 4, 8
ROOT = E**-0.5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
over_devices = each("device", ["cpu", "meta"])


class Net(nn.Module):
    """Heads of projections of their own, around a computation that is given."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def run(attend: Attend, device: str = "cpu") -> Trace:
    torch.manual_seed(0)
    with torch.device(device):
        model, x = Net(attend), torch.randn(B, L, D)
        with trace(model) as traced:
            model(x)
    return traced


def read(attend: Attend, device: str = "cpu") -> AttentionCall:
    (call,) = run(attend, device).calls
    return call


FILLED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "full": lambda z, s: z * torch.full((), s, device=z.device),
    "full of one": lambda z, s: z / torch.full((1,), 1 / s, device=z.device),
    "new_full": lambda z, s: z * z.new_full((), s),
    "ones": lambda z, s: z * (torch.ones(1, device=z.device) * s),
    "moved": lambda z, s: z / torch.sqrt(torch.tensor([s**-2], device="cpu")).to(z.device),
    "three operands": lambda z, s: torch.einsum("bhij,->bhij", z, torch.full((), s, device=z.device)),
}


@over_devices
@each("scale", [ROOT, 1.0, ROOT**2])
@pytest.mark.parametrize("name", FILLED)
def test_a_factor_that_the_code_fills_in_is_a_number_without_data_too(name: str, scale: float, device: str) -> None:
    call = read(lambda q, k, v: FILLED[name](q @ k.mT, scale).softmax(-1) @ v, device)
    assert math.isclose(call.scale.effective or 0, scale, rel_tol=1e-6)
    assert call.unknown == ()


def by_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.zeros(B, H, L, L, device=q.device)
    for e in range(E):
        logits = torch.addcmul(logits, q[..., e : e + 1], k[..., e].unsqueeze(-2))
    return (logits * ROOT).softmax(-1) @ v


@over_devices
def test_pairs_that_are_summed_in_a_loop_are_no_router(device: str) -> None:
    assert read(by_features, device).unknown == ("unknown(addcmul)",)


@over_devices
def test_one_product_a_key_is_read_without_failing(device: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.stack([(q * k[:, :, j : j + 1]).sum(-1) for j in range(L)], -1) * ROOT
        return logits.softmax(-1) @ v

    traced = run(attend, device)
    assert traced.not_measured == ()
    assert [(call.unknown, call.scale.effective) for call in traced.calls] == [(("stack",), None)]


def rolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A window of three keys, by rotating k and v along the positions."""
    steps = (-1, 0, 1)
    weights = (torch.stack([(q * k.roll(i, 2)).sum(-1) for i in steps], -1) * ROOT).softmax(-1)
    return weights[..., :1] * v.roll(-1, 2) + weights[..., 1:2] * v + weights[..., 2:] * v.roll(1, 2)


@over_devices
def test_a_window_by_rotating_the_keys_is_not_silent(device: str) -> None:
    assert [entry.code for entry in run(rolled, device).not_attention] == ["lost_sight"]


@each("gain, learned", [(2.0, True), (1.0, False)])
def test_a_gain_a_channel_that_is_still_one_number_is_learned_once_it_moved(gain: float, learned: bool) -> None:
    vector = nn.Parameter(torch.full((E,), gain))
    call = read(lambda q, k, v: ((q * vector) @ k.mT * ROOT).softmax(-1) @ v)
    assert math.isclose(call.scale.effective or 0, ROOT * gain, rel_tol=1e-6)
    assert any(factor.learned for factor in call.scale.factors) is learned


OTHER_SUMS: dict[str, tuple[Attend, str]] = {
    "its own cube": (
        lambda q, k, v: ((z := q @ k.mT * ROOT) + z**3).softmax(-1) @ v,
        "a sum with a function of the logits",
    ),
    "features in two parts": (
        lambda q, k, v: ((q[..., :4] @ k[..., :4].mT + q[..., 4:] @ k[..., 4:].mT) * ROOT).softmax(-1) @ v,
        "a sum with another product of q and k",
    ),
}


@over_devices
@pytest.mark.parametrize("name", OTHER_SUMS)
def test_what_is_no_bias_is_not_called_one(name: str, device: str) -> None:
    attend, unknown = OTHER_SUMS[name]
    call = read(attend, device)
    assert (call.unknown, call.scale.effective, call.bias) == ((unknown,), None, None)


@over_devices
def test_a_sum_that_one_more_joins_has_no_bias(device: str) -> None:
    """exp(z) / (1 + sum exp(z)), stable: the larger of 0 and the maximum is taken off."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT * ROOT
        top = z.amax(-1, keepdim=True).clamp(min=0)
        e = (z - top).exp()
        return e / (e.sum(-1, keepdim=True) + (-top).exp()) @ v

    assert read(attend, device).formula == "softmax(0.3536 * q.k + sinks)"


class Edges(nn.Module):
    """Attention over the edges of a graph, with rotary positions."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.scale = scale

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        q, k, v = (part(x).view(-1, H, E) for part in (self.q, self.k, self.v))
        angle = torch.outer(torch.arange(len(x)).float(), 100.0 ** -(torch.arange(0, E, 2) / E)).repeat(1, 2)[:, None]
        q, k = (z * angle.cos() + torch.cat((-z[..., 4:], z[..., :4]), -1) * angle.sin() for z in (q, k))
        power = ((q[target] * k[source]).sum(-1) * self.scale).exp()
        total = torch.zeros(len(x), H).index_add(0, target, power)
        weights = power / total[target]
        return torch.zeros(len(x), H, E).index_add(0, target, weights[..., None] * v[source])


@over_devices
@each("scale", [ROOT, 1.0, ROOT**2])
def test_rotated_edges_are_read_by_their_factors(scale: float, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        source, target = torch.arange(L).repeat(3), torch.cat([(torch.arange(L) + i) % L for i in range(3)])
        model = Edges(scale)
        with trace(model) as traced:
            model(torch.randn(L, D), source, target)
    (call,) = traced.calls
    assert (call.formula.count("rope"), call.scale.agree) == (2, None)
    assert math.isclose(call.scale.effective or 0, scale, rel_tol=1e-6)
