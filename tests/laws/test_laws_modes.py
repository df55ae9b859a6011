"""Law `modes`: what one branch of `if self.training` does otherwise is found; dropout, statistics, chance are not."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk import check
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.laws import modes
from sqrtdk.messages import said
from tests.hf.small import build, inputs_of, needs, small_config
from tests.laws.models_of_modes import (
    Chance,
    Drops,
    Encoder,
    First,
    Keeps,
    Leaves,
    Longest,
    Mixed,
    Model,
    Other,
    Statistics,
    Takes,
    inputs,
)
from tests.laws.own_models import LENGTH, WIDTH

HAN = re.compile(r"[\u4e00-\u9fff]")
GENERATORS = (np.random.default_rng(0), torch.Generator().manual_seed(0))
WRONG = ("causal", "scale", "mask", "norm", "rotation", "rate")


def asked(model: nn.Module, given: Any = None, about: str = "train mode") -> LawAnswer:
    (answer,) = (a for a in check(model, inputs() if given is None else given, laws="modes").laws if a.about == about)
    finding = answer.finding
    for text in (answer.about, answer.reason, *((finding.message, finding.fix, finding.source) if finding else ())):
        assert not text or HAN.search(said(text, "zh")), text
    return answer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("written_out", [False, True], ids=["sdpa", "written out"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_one_mode_does_otherwise_is_found(wrong: str, written_out: bool) -> None:
    answer = asked(Model(wrong, written_out))
    assert answer.finding is not None
    assert (answer.state, answer.site, answer.finding.severity) == (BROKEN, "second", "fail")
    told = {
        "scale": "effective scale 0.707107 against 1.18921", "mask": "mask padding against none",
        "causal": "mask padding against causal",
    }  # fmt: skip
    assert told.get(wrong, "with every dropout off") in answer.reason


@pytest.mark.parametrize("written_out", [False, True], ids=["sdpa", "written out"])
def test_dropout_alone_is_no_difference(written_out: bool) -> None:
    model = Model(None, written_out)
    assert (asked(model).state, asked(model, about="batch of one").state) == (KEPT, KEPT)


def test_what_is_wrong_beside_an_attention_is_a_warning() -> None:
    class Gain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.5 if self.training else x

    answer = asked(Model(extra=Gain()))
    assert answer.finding is not None
    assert (answer.site, answer.finding.severity) == ("extra", "warn")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["attribute", "config", "dict"])
def test_a_dropout_by_hand_is_switched_off_by_its_rate(where: str) -> None:
    drops = Drops(where)
    assert asked(Model(extra=drops)).state == KEPT
    assert asked(Model("causal", extra=drops)).state == BROKEN
    config = vars(getattr(drops, "config", drops))
    held = {"attribute": vars(drops), "config": config, "dict": vars(drops).get("options")}
    assert 0.4 in held[where].values()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "module",
    [
        nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3), nn.Dropout1d(0.3), nn.Dropout(0.3, inplace=True), Keeps(),
        Takes(lambda x, t: torch.dropout(x, 0.3, t)), Takes(lambda x, t: torch.native_dropout(x, 0.3, t)[0]),
        Takes(lambda x, t: F.dropout(x, training=t)), Takes(lambda x, t: torch.dropout(input=x, p=0.3, train=t)),
        Takes(lambda x, t: F.dropout(x, 0.3, t, True)), nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True),
    ],
)  # fmt: skip
def test_every_dropout_of_torch_is_switched_off(module: nn.Module) -> None:
    extra = nn.Sequential(module, First()) if isinstance(module, nn.LSTM) else module
    assert asked(Model(extra=extra)).state == KEPT
    assert asked(Model("scale", extra=extra)).site == "second"


@pytest.mark.parametrize(
    "module",
    [
        Drops("constant"),
        Chance(lambda: torch.rand(())),
        Chance(random.random),
        Chance(np.random.rand),
        Chance(GENERATORS[0].random),
        Chance(lambda: torch.rand((), generator=GENERATORS[1])),
        nn.RReLU(),
    ],
    ids=["constant rate", "torch", "python", "numpy", "own numpy", "own torch", "rrelu"],
)
def test_chance_beside_dropout_is_not_asked(module: nn.Module) -> None:
    answer = asked(Model(extra=module))
    assert (answer.state, answer.reason) == (NOT_ASKED, "in train mode its outputs are random beside dropout")


def test_a_branch_that_is_taken_every_other_time() -> None:
    model = Model(extra=Chance(lambda: float(np.random.rand() > 0.5)))
    states = {check(model, inputs(), laws="modes", seed=seed).laws[1].state for seed in range(8)}
    assert states == {KEPT, NOT_ASKED}


def test_a_norm_over_the_batch_stays_in_eval_mode() -> None:
    norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (-1, LENGTH)))
    assert asked(Model(extra=norm)).state == KEPT
    assert asked(Model("scale", extra=norm)).state == BROKEN
    assert int(norm[1].num_batches_tracked) == 0


@pytest.mark.parametrize("how", ["in place", "replaced", "parameter"])
def test_statistics_of_the_batch_are_left_alone(how: str) -> None:
    own = Statistics(how)
    answer = asked(Model(extra=own))
    assert answer.state == NOT_ASKED
    assert answer.reason == "in train mode it updates extra.mean, and its outputs follow"
    assert asked(Model("scale", extra=own)).site == "second"
    assert not own.mean.any()


def test_what_is_too_large_to_be_put_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs behind a buffer that stays changed tell nothing."""
    monkeypatch.setattr(modes, "MOST_RESTORED_BYTES", 64)
    for wrong in (None, "scale"):
        answer = asked(Model(wrong, extra=Statistics("in place")))
        assert answer.state == NOT_ASKED
        assert answer.reason == "in train mode it updates extra.mean, and its outputs follow"
    assert asked(Model("scale")).state == BROKEN


def test_a_spectral_norm_is_left_alone() -> None:
    answer = asked(Model(extra=nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))
    assert answer.state == NOT_ASKED
    assert answer.reason.startswith("in train mode it updates extra.parametrizations.weight.0._")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("shape", "it returns other outputs in train mode"),
        ("tuple", "it returns other outputs in train mode"),
        ("raises", "in train mode Other raised ValueError: labels are needed"),
        ("auxiliary", ""),
    ],
)
def test_other_outputs_in_train_mode(how: str, told: str) -> None:
    answer = asked(Other(how))
    assert (answer.state, answer.reason) == (NOT_ASKED if told else KEPT, told)


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back(raises: bool) -> None:
    leaves = Leaves(raises)
    model = Model("causal", extra=leaves).train()
    model.first.eval()
    flags = [part.training for part in model.modules()]
    state, of_numpy, of_python = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    asked(model)
    assert [part.training for part in model.modules()] == flags
    assert (leaves.count, leaves.kept, hasattr(leaves, "made"), float(leaves.seen)) == (0, [], False, 0.0)
    assert torch.equal(leaves.code.detach(), torch.ones(WIDTH))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], of_numpy)
    assert random.getstate() == of_python
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert (model.second.rate, model.dropout.p) == (0.3, 0.2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_s_own_encoder() -> None:
    assert asked(Encoder()).state == KEPT
    answer = asked(Encoder(wrong=True))
    assert answer.finding is not None
    assert answer.finding.severity == "fail"
    assert answer.site == ""  # it makes the mask
    assert "mask padding against causal" in answer.reason


def plant(model: nn.Module) -> None:
    """The first attention scales by twice as much in train mode."""
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), float):
            module.register_forward_pre_hook(_scaled, with_kwargs=True)
            module.own = module.scaling
            return


def _scaled(module: nn.Module, args: Any, kwargs: Any) -> None:
    module.scaling = module.own * (2.0 if module.training else 1.0)


@pytest.mark.full
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "bart"])
def test_models_of_transformers(name: str, attn: str) -> None:
    needs(name)
    model = build(small_config(name), attn, torch.float32)
    given = inputs_of(model)
    assert asked(model, given).state == KEPT
    plant(model)
    answer = asked(model, given)
    assert answer.finding is not None
    assert answer.finding.severity == "fail"
    assert "effective scale" in answer.reason


@pytest.mark.full
@pytest.mark.parametrize("name", ["convbert", "levit", "switch_transformers", "wav2vec2", "phimoe", "bart"])
def test_statistics_and_jitter_of_transformers(name: str) -> None:
    needs(name)
    model = build(small_config(name), "eager", torch.float32)
    assert asked(model, inputs_of(model)).state == KEPT


def test_a_batch_of_one() -> None:
    answer = asked(Longest(), about="batch of one")
    assert answer.finding is not None
    assert (answer.state, answer.finding.severity) == (BROKEN, "warn")
    both = check(Longest(), inputs(), laws="samples,modes")
    assert [(a.law, a.about, a.state) for a in both.laws] == [
        ("samples", "", KEPT), ("modes", "batch of one", BROKEN), ("modes", "train mode", KEPT),
    ]  # fmt: skip


def test_samples_that_see_one_another_are_said_once() -> None:
    report = check(Mixed(), inputs(), laws="samples,modes")
    assert [(a.law, a.about, a.state, a.reason) for a in report.laws if a.law == "modes"] == [
        ("modes", "batch of one", NOT_ASKED, "its samples see one another"), ("modes", "train mode", KEPT, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(("laws", "runs"), [("modes", 2), ("samples", 2), ("samples,modes", 3)])
def test_the_two_laws_share_their_runs(laws: str, runs: int) -> None:
    """One sample alone, which both look at; the other end of the batch, as the last sample has padding; train mode."""
    counts = []
    for names in ("finite", laws):
        model, count = Model(), [0]
        model.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        check(model, inputs(), laws=names)
        counts.append(count[0])
    assert counts[1] - counts[0] == runs


@pytest.mark.full
def test_a_compiled_model_runs_as_it_is_written() -> None:
    answer = asked(torch.compile(Model("scale")))
    assert (answer.state, answer.site) == (BROKEN, "second")
    assert asked(torch.compile(Model())).state == KEPT
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)))
    assert asked(Model(extra=scripted)).reason == "in train mode its outputs are random beside dropout"


def test_outputs_that_are_random_in_eval_mode_are_not_asked() -> None:
    for module in (Takes(lambda x, t: F.dropout(x, 0.3)), Takes(lambda x, t: x if t else x + torch.rand(()))):
        report = check(Model(extra=module), inputs(), laws="modes,samples")
        assert {answer.reason for answer in report.laws} == {"its outputs differ from run to run of the same inputs"}
