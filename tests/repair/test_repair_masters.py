"""Copies of the weights that an optimizer holds are scaled with them, and nothing else that it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sqrtdk
from sqrtdk.errors import UnsupportedError
from sqrtdk.repair import ClipRecord, qk_clip_
from tests.repair.modules import Attention, randomised, states


class MasterSGD(torch.optim.Optimizer):
    """Momentum SGD of bfloat16 weights that keeps float32 copies in its state."""

    def __init__(self, parameters: Any, key: str = "master_param") -> None:
        super().__init__(parameters, {})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault(self.key, parameter.float())
                state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.float32))
                if parameter.grad is not None:
                    state["momentum"].mul_(0.9).add_(parameter.grad.float())
                    state[self.key].sub_(1e-3 * state["momentum"])
                    parameter.copy_(state[self.key])


def _model() -> nn.Module:
    model = randomised(Attention())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()  # its momentum is zero in the first step, as it is
    return model.to(torch.bfloat16)


def _clip(model: nn.Module, optimizer: Any) -> ClipRecord:
    x = states().bfloat16()
    with sqrtdk.trace(model, keep=True) as run:
        output = model(x)
    output.sum().backward()
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        each.step()
        each.zero_grad()
    (record,) = qk_clip_(model, run, threshold=20.0, optimizer=optimizer)
    assert 0 < len(record.clipped) < 4
    return record


@pytest.mark.parametrize("key", ["master_param", "fp32"])
def test_copies_in_the_state_are_scaled_and_moments_are_not(key: str) -> None:
    model = _model()
    optimizer = MasterSGD(model.parameters(), key)
    optimizer.step()
    moments: dict[str, Any] = {}
    optimizer.register_step_post_hook(
        lambda *_: moments.update({n: (p.clone(), *(v.clone() for v in optimizer.state[p].values())) for n, p in named})
    )
    named = list(model.named_parameters())
    record = _clip(model, optimizer)
    factor = record.gamma.sqrt().float().repeat_interleave(8)
    for name, parameter in named:
        weight, master, momentum = moments[name]
        scaled = name[0] in "qk"
        by = (factor[:, None] if parameter.ndim == 2 else factor) if scaled else torch.ones(())
        state = optimizer.state[parameter]
        assert torch.equal(state[key], master * by), name
        assert torch.equal(state["momentum"], momentum), name
        assert torch.equal(parameter, state[key].bfloat16()), name
        assert torch.equal(parameter, weight) is (not scaled or not bool(weight.any())), name


def test_parameters_of_the_optimizer_that_are_copies_of_the_models() -> None:
    model = _model()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.0)
    with torch.no_grad():
        masters[2].mul_(1 + 1e-4)  # k.weight: what bfloat16 does not hold
    record = _clip(model, optimizer)
    factor = record.gamma.sqrt().float().repeat_interleave(8)
    for (name, parameter), master in zip(model.named_parameters(), masters, strict=True):
        assert torch.equal(parameter, master.detach().bfloat16())
        if name == "k.weight":
            assert (factor != 1).any()
            assert not torch.equal(master.detach(), parameter.float())  # finer than the weight, as before


def test_rows_that_stochastic_rounding_left_at_another_value_keep_it() -> None:
    model = _model()
    optimizer = MasterSGD(model.parameters())
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():  # to the neighbour above, which stochastic rounding may choose
            parameter.copy_(
                torch.where(parameter > 0, parameter.view(torch.int16) + 1, parameter.view(torch.int16)).view(
                    torch.bfloat16
                )
            )
    x = states().bfloat16()
    with sqrtdk.trace(model, keep=True) as run:
        model(x)
    before = model.q.weight.detach().clone()
    (record,) = qk_clip_(model, run, threshold=20.0, optimizer=optimizer)
    still = (record.gamma == 1).repeat_interleave(8)
    assert torch.equal(model.q.weight[still], before[still])
    assert still.any()
    assert not still.all()
    assert not torch.equal(model.q.weight[~still], before[~still])
    assert torch.equal(model.q.weight[~still], optimizer.state[model.q.weight]["master_param"][~still].bfloat16())


def test_several_optimizers() -> None:
    model = _model()
    halves = [[p for n, p in model.named_parameters() if (n[0] == "q") is one] for one in (True, False)]
    optimizers = [MasterSGD(half) for half in halves]
    for optimizer in optimizers:
        optimizer.step()
    _clip(model, optimizers)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            assert torch.equal(parameter, state["master_param"].bfloat16())


def test_plain_optimizers_hold_no_copies() -> None:
    """Adam's moments have the shape of the weights, and stay."""
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    held: dict[Any, Any] = {}
    optimizer.register_step_post_hook(
        lambda *_: held.update({p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()})
    )
    _clip(model, optimizer)
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(entry, held[parameter][key]) for key, entry in state.items())


def test_masters_that_are_no_copies_are_refused_before_anything_is_scaled() -> None:
    model = _model()
    flat = nn.Parameter(torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()]))
    x = states().bfloat16()
    with sqrtdk.trace(model, keep=True) as run:
        model(x)
    before = model.q.weight.clone()
    with pytest.raises(UnsupportedError, match="has a copy among the 1 parameters of the optimizer"):
        qk_clip_(model, run, threshold=1.0, optimizer=torch.optim.SGD([flat], lr=0.1))
    assert torch.equal(before, model.q.weight)
