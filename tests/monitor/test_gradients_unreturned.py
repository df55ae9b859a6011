"""The gradients of q and k that no module returns, against those that autograd keeps; what is told where none come."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk.monitor.watch import Watch
from tests.monitor.projected_models import (
    HEADS,
    SIZE,
    WIDTH,
    Model,
    Multiplied,
    kept,
    wrong,
)


class Summed(nn.Module):
    """q is the sum of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.key = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.one(x) + self.two(x)) @ self.key(x).mT * 0.25).softmax(-1) @ x


def test_what_no_one_projection_gives_is_told_once() -> None:
    model = Summed()
    with Watch(model, every=1) as health:
        for _ in range(2):
            model(torch.randn(1, 3, SIZE)).sum().backward()
            health.step()
    first, second = health.samples
    assert any("no gradients of query: " in reason for reason in first.not_measured)
    assert second.not_measured == ()
    assert "key_grad_max" in second.calls[0].columns
    assert "query_grad_max" not in second.calls[0].columns


def test_gradients_that_do_not_come_are_told_once() -> None:
    model = Model("matrix")
    model.blocks[0].matrices[0].requires_grad_(False)
    with Watch(model, every=1) as health:
        for _ in range(2):
            model(torch.randn(1, 3, SIZE)).backward()
            health.step()
    first, second = health.samples
    assert first.not_measured == tuple(
        f"blocks.0: no gradients of {name} came; is it frozen?" for name in ("key", "query")
    )
    assert second.not_measured == ()
    assert "query_grad_max" in second.calls[1].columns


@pytest.mark.parametrize("kind", ["MultiheadAttention", "matrix"])
def test_a_backward_pass_in_a_thread_of_its_own(kind: str) -> None:
    """As that of an accelerator is."""
    model, x = Model(kind, reentrant=True), torch.randn(2, 5, SIZE, requires_grad=True)
    with Watch(model, every=1) as health:
        for _ in range(2):
            thread = threading.Thread(target=model(x).backward)
            thread.start()
            thread.join()
            health.step()
    for call, gradients in zip(health.samples[1].calls, kept(model, [x]), strict=True):
        assert wrong(call, gradients) == []


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_weights_under_autocast(reentrant: bool | None) -> None:
    model, x = Model("MultiheadAttention", reentrant), torch.randn(2, 5, SIZE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with Watch(model, every=1) as health:
            for _ in range(2):
                model(x).backward()
                health.step()
        wanted = kept(model, [x])
    for sample in health.samples:
        for call, gradients in zip(sample.calls, wanted, strict=True):
            assert wrong(call, gradients, torch.bfloat16) == []


def test_queries_and_keys_of_unlike_inputs_share_one_weight() -> None:
    layer, x, y = nn.MultiheadAttention(SIZE, HEADS, batch_first=True), torch.randn(2, 5, SIZE), torch.randn(2, 7, SIZE)
    with Watch(layer, every=1) as health:
        for _ in range(2):
            layer(x, y, y, need_weights=False)[0].square().mean().backward()
            health.step()
    q, k, v = (
        F.linear(each, weight, bias).detach().requires_grad_()
        for each, weight, bias in zip(
            (x, y, y), layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True
        )
    )
    heads = (each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in (q, k, v))
    layer.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)).square().mean().backward()
    wanted = {
        name: each.grad.double().unflatten(-1, (HEADS, WIDTH)).square().mean(-1).sqrt().flatten(0, 1).T
        for name, each in (("query", q), ("key", k))
    }
    assert wrong(health.samples[1].calls[0], wanted) == []


def test_rows_bounds_the_rows_of_gradients_that_no_module_returns() -> None:
    model, x = Model("matrix"), torch.randn(2, 9, SIZE)
    with Watch(model, every=1, rows=3) as health:
        for _ in range(2):
            model(x).backward()
            health.step()
    chosen = torch.linspace(0, 17, 6).round().long()
    for call, gradients in zip(health.samples[1].calls, kept(model, [x]), strict=True):
        assert wrong(call, {name: rows[:, chosen] for name, rows in gradients.items()}) == []


def test_gradients_of_what_is_written_over_afterwards_are_of_what_was_there() -> None:
    class Scaled(Multiplied):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (x @ each for each in self.matrices)
            q.mul_(2.0)
            q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
            return (x + self.out(attended.transpose(1, 2).flatten(2))).square().mean()

    model, x = Scaled(separate=True), torch.randn(2, 5, SIZE)
    with Watch(model, every=1) as health:
        for _ in range(2):
            model(x).backward()
            health.step()
    plain = Model("matrices")
    plain.blocks = nn.ModuleList([model])
    assert wrong(health.samples[1].calls[0], kept(plain, [x])[0]) == []
