"""What is seen inside a test: the verdicts of `check`, nothing changed, and why a test could not have failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.modules import module as torch_module

from sqrtdk import check
from sqrtdk.testing import observe
from sqrtdk.testing.observe import Observation
from tests.attentions.planted import PLANTED, WIDTH, planted

SCALE = 0.3  # not the default of 16 dimensions


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    table = torch.cat((angle, angle), -1)
    left, right = x.chunk(2, -1)
    return x * table.cos() + torch.cat((-right, left), -1) * table.sin()


def eager(q: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
    return mask(q @ q.mT * SCALE).softmax(-1) @ q


def roped(q: Tensor, positions: Tensor) -> Tensor:
    turned = rotated(q, positions)
    return sdpa(turned, turned, q, scale=SCALE)


ONES = torch.ones(6, 6, dtype=torch.bool)
WEAK = {
    "default scale": (lambda q: sdpa(q, q, q), "scale 0.25 = 1/sqrt(16)"),
    "the default's number": (lambda q: sdpa(q, q, q, scale=0.25), "scale 0.25 = 1/sqrt(16)"),
    "one key": (lambda q: sdpa(q, q[:, :, :1], q[:, :, :1], scale=SCALE), "one key only"),
    "row 0 of a causal mask": (lambda q: sdpa(q[:, :, :1], q, q, is_causal=True, scale=SCALE), "position 0 only"),
    "rotation at 0": (lambda q: roped(q, torch.zeros(6)), "position 0 only: the rotation"),
    "bool mask": (lambda q: sdpa(q, q, q, attn_mask=ONES, scale=SCALE), "a mask that hides nothing"),
    "float mask": (lambda q: sdpa(q, q, q, attn_mask=torch.zeros(6, 6), scale=SCALE), "a mask that hides nothing"),
    "added": (lambda q: eager(q, lambda z: z + torch.zeros(6, 6)), "a mask that hides nothing"),
    "filled": (lambda q: eager(q, lambda z: z.masked_fill(~ONES, -1e9)), "a mask that hides nothing"),
    "where": (lambda q: eager(q, lambda z: torch.where(ONES, z, -1e9)), "a mask that hides nothing"),
    "no attention": (lambda q: q + q, "no attention was seen"),
}
SHARP = {
    "another scale": lambda q: sdpa(q, q, q, scale=SCALE),
    "causal": lambda q: sdpa(q, q, q, is_causal=True, scale=SCALE),
    "rotation": lambda q: roped(q, torch.arange(6)),
    "one of two with the default": lambda q: (sdpa(q, q, q), sdpa(q, q, q, scale=SCALE)),
    "one of two masks open": lambda q: (
        sdpa(q, q, q, attn_mask=ONES, scale=SCALE), sdpa(q, q, q, attn_mask=ONES.tril(), scale=SCALE),
    ),
    "a bias that is learned": lambda q: eager(q, lambda z: z + torch.zeros(6, 6, requires_grad=True)),
}  # fmt: skip


def seen(run: Callable[[Tensor], object]) -> observe.AuditedTest:
    q = torch.randn(1, 2, 6, 16)
    with Observation() as observation:
        run(q)
    return observation.audit()


@pytest.mark.parametrize("name", WEAK)
def test_what_could_not_have_failed_is_said(name: str) -> None:
    run, said = WEAK[name]
    weak = seen(run).weak
    assert len(weak) == 1
    assert weak[0].startswith(said)


@pytest.mark.parametrize("name", SHARP)
def test_what_could_have_failed_is_left_alone(name: str) -> None:
    assert seen(SHARP[name]).weak == ()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mistake", [None, *(name for name in PLANTED if name not in ("cosine", "length_factor"))])
def test_the_verdicts_are_those_of_check(mistake: str | None) -> None:
    model, inputs = planted("rope", mistake)
    with Observation() as observation:
        model(*inputs)
    audit, report = observation.audit(), check(model, inputs)
    assert [(c.call.formula, c.verdict, c.mistake) for c in audit.calls] == [
        (c.call.formula, c.verdict, c.mistake) for c in report.calls
    ]
    assert [c.call.site for c in audit.calls] == [f"Stack.{c.call.site}" for c in report.calls]


def test_nothing_changes() -> None:
    model, inputs = planted("rope", None)
    hooks = len(torch_module._global_forward_pre_hooks), len(torch_module._global_forward_hooks)
    torch.manual_seed(3)
    before, drawn = model(*inputs), torch.rand(4)
    torch.manual_seed(3)
    with Observation() as observation:
        during, same = model(*inputs), torch.rand(4)
    assert torch.equal(before, during)
    assert torch.equal(drawn, same)
    random = torch.get_rng_state()
    observation.audit()
    assert torch.equal(random, torch.get_rng_state())
    assert hooks == (len(torch_module._global_forward_pre_hooks), len(torch_module._global_forward_hooks))


def test_a_test_that_raises_leaves_nothing_behind() -> None:
    def broken() -> None:
        with Observation() as observation:
            seen_before.append(observation)
            sdpa(*[torch.randn(1, 2, 6, 16)] * 3)
            raise ValueError("of the test")

    seen_before: list[Observation] = []
    with pytest.raises(ValueError, match="of the test"):
        broken()
    assert len(seen_before[0].audit().calls) == 1
    assert not torch_module._global_forward_pre_hooks


def test_two_models_of_one_class_are_told_apart() -> None:
    audit_sites = []
    with Observation() as observation:
        for mistake in (None, "missing"):
            planted("eager", mistake)[0](torch.randn(1, 4, WIDTH))
    audit = observation.audit()
    audit_sites = [call.call.site for call in audit.calls]
    assert audit_sites == [f"{root}.layers.{n}" for root in ("Stack", "Stack2") for n in range(3)]
    assert {found.site for found in audit.findings if found.severity == "fail"} == set(audit_sites[3:])


def test_dropout_of_a_model_in_training_is_no_finding() -> None:
    class Dropping(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return sdpa(q, q, q, dropout_p=0.5)

    for training in (True, False):
        rules = {found.rule for found in seen(Dropping().train(training)).findings}
        assert ("dropout" in rules) is not training


def test_a_scale_of_the_tests_own_is_a_note_and_a_mistake_is_not() -> None:
    assert {found.severity for found in seen(SHARP["another scale"]).findings} == {"note"}
    assert "fail" in {found.severity for found in seen(lambda q: sdpa(q, q, q, scale=1.0)).findings}


def test_an_audit_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a rule of somebody's")

    monkeypatch.setattr(observe, "judge_all", broken)
    audit = seen(SHARP["causal"])
    assert [(found.rule, "somebody's" in found.message) for found in audit.findings] == [("unmeasured", True)]
    assert [call.verdict for call in audit.calls] == ["unmeasured"]
