"""Laws on models of transformers: right ones keep all, and what hooks plant in them is found, in eager and sdpa."""

from __future__ import annotations

import pytest
import torch

from sqrtdk._check import check
from tests.hf.small import build, inputs_of, needs, small_config
from tests.laws.own_models import LAW_OF
from tests.laws.planted_hf import plant

LAWS = ("finite", "samples", "causal", "padding", "modes")
MODELS = {  # a model of each kind, and what can be wrong with it
    "llama": ("future", "batch", "padding"),
    "gpt2": ("batch", "padding"),
    "bert": ("batch", "padding"),
    "t5": ("batch",),
    "bart": ("batch",),
    "vit": ("batch",),
    "whisper": ("batch",),
    "clip": ("batch",),
    "mamba": (),
}
ATTN = ("eager", "sdpa")
CASES = [(name, wrong, attn) for name, wrongs in MODELS.items() for wrong in wrongs for attn in ATTN]


def made(name, attn):
    needs(name)
    model = build(small_config(name), attn, torch.float32)
    return model, inputs_of(model)


def broken(report):
    return {answer.law for answer in report.laws if answer.state == "broken"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("attn", ATTN)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "mamba"])
def test_a_right_model_keeps_every_law(name, attn):
    model, inputs = made(name, attn)
    report = check(model, inputs, laws=LAWS)
    assert broken(report) == set()
    kept = {answer.law for answer in report.laws if answer.state == "kept"}
    assert {"finite", "samples", "modes"} | {LAW_OF[wrong] for wrong in MODELS[name]} <= kept


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "wrong", "attn"), CASES, ids=["-".join(case) for case in CASES])
def test_what_is_planted_is_found_by_its_law(name, wrong, attn):
    model, inputs = made(name, attn)
    assert plant(model, wrong)
    report = check(model, inputs, laws=LAWS)
    law = LAW_OF[wrong]
    assert law in broken(report)
    (answer,) = (answer for answer in report.laws if (answer.law, answer.state) == (law, "broken"))
    assert answer.finding is not None
    assert answer.finding.severity in ("fail", "critical", "warn")


def test_outputs_and_generators_are_left_as_they_were():
    model, inputs = made("llama", "sdpa")
    before, state = model(**inputs).logits, torch.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    check(model.train(), inputs, laws="all")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.eval()(**inputs).logits, before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
