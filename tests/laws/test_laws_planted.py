"""Every law on every kind of model: what is planted is found by its law, and the right model keeps all laws."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import LlamaConfig, LlamaForCausalLM

from sqrtdk._check import check
from sqrtdk.audit.model_run import run_model
from sqrtdk.audit.own_module import from_module
from sqrtdk.laws import table
from sqrtdk.laws.subject import subject_of
from sqrtdk.models.options import LoadOptions
from tests.laws.own_models import CAN_BE, INPUTS, LAW_OF, MODELS, Decoder, TorchEncoder, ids, packed, padded

LAWS = ("finite", "samples", "causal", "padding", "documents", "modes")
LEAST = {"future": "critical", "batch": "fail", "padding": "fail", "documents": "fail"}
SMALL_LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
)
CASES = [(kind, wrong) for kind, wrongs in CAN_BE.items() for wrong in wrongs]


def asked(model, inputs):
    torch.manual_seed(0)
    return check(model.eval(), inputs, laws=LAWS)


def broken(report):
    return {answer.law for answer in report.laws if answer.state == "broken"}


@pytest.mark.parametrize("written_out", [False, True], ids=["sdpa", "written out"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_right_model_keeps_every_law(kind, written_out):
    torch.manual_seed(0)
    report = asked(MODELS[kind](None, written_out), INPUTS[kind]())
    assert broken(report) == set()
    kept = {answer.law for answer in report.laws if answer.state == "kept"}
    assert {"finite", "samples", "modes"} | {LAW_OF[wrong] for wrong in CAN_BE[kind]} <= kept


@pytest.mark.parametrize("written_out", [False, True], ids=["sdpa", "written out"])
@pytest.mark.parametrize(("kind", "wrong"), CASES, ids=[f"{kind} {wrong}" for kind, wrong in CASES])
def test_what_is_planted_is_found_by_its_law(kind, wrong, written_out):
    torch.manual_seed(0)
    report = asked(MODELS[kind](wrong, written_out), INPUTS[kind]())
    law = LAW_OF[wrong]
    assert law in broken(report)
    finding = next(finding for finding in report.findings if finding.rule == f"law_{law}")
    assert finding.severity == LEAST[wrong]
    answer = next(answer for answer in report.laws if answer.finding is finding)
    first = {"decoder": "layers.0", "encoder-decoder": "", "cross": "attention"}.get(kind, "layers.0")
    assert answer.site.startswith(first)
    assert report.exit_code == 1


def test_packed_rows_that_see_another_document():
    inputs = {"input_ids": ids(), "position_ids": packed()}
    torch.manual_seed(0)
    report = asked(Decoder("documents"), inputs)
    (finding,) = (finding for finding in report.findings if finding.rule == "law_documents")
    assert (finding.severity, finding.site) == ("fail", "layers.0")
    assert "moves 7 positions of 7 behind it" in finding.message
    (answer,) = (answer for answer in report.laws if answer.law == "documents")
    assert answer.moved == (False,) * 5 + (True,) * 7
    assert broken(asked(Decoder(), inputs)) == set()


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize("wrong", [None, "future", "batch", "padding"])
def test_torch_s_own_encoder(wrong, causal):
    if wrong == "future" and not causal:
        wrong = None
    torch.manual_seed(0)
    report = asked(TorchEncoder(wrong, causal), {"input_ids": ids(), "attention_mask": padded()})
    law = LAW_OF.get(wrong)
    found = {
        finding.rule for finding in report.findings if finding.rule.startswith("law_") if finding.severity != "note"
    }
    assert (f"law_{law}" in found) if law else not found
    if wrong == "batch":
        (finding,) = (finding for finding in report.findings if finding.rule == "law_samples")
        assert "attention runs over the batch axis, 3 rows in each of 12 sequences" in finding.message
        assert finding.site == "encoder.layers.0.self_attn"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wrong", [None, "future"])
def test_a_large_model_is_asked_what_two_runs_tell(wrong, dtype, monkeypatch):
    monkeypatch.setattr(table, "LARGE_MODEL", 0)
    torch.manual_seed(0)
    report = check(Decoder(wrong).eval().to(dtype), INPUTS["decoder"](), laws="all")
    states = {answer.law: answer.state for answer in report.laws}
    assert {law for law, state in states.items() if state != "not asked"} == {"finite", "causal"}
    assert states["causal"] == ("broken" if wrong else "kept")
    assert {answer.reason for answer in report.laws if answer.law == "padding"} == {
        "a run is costly: name it to have it asked"
    }
    named = check(Decoder(wrong).eval().to(dtype), INPUTS["decoder"](), laws="padding")
    assert [answer.state for answer in named.laws] == ["kept"]


@pytest.mark.full
@pytest.mark.parametrize("attn", [None, "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_laws_of_a_large_model_cost_one_forward(dtype, attn, monkeypatch):
    """`finite` looks at what the audit's own run returned, `causal` compares with it."""
    forwards = {}
    for large in (False, True):
        for laws in ("none", "finite,causal", "all"):
            monkeypatch.setattr(table, "LARGE_MODEL", 0 if large else 10**9)
            model, count = LlamaForCausalLM(SMALL_LLAMA).eval().to(dtype), [0]
            model.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
            report = check(model, {"input_ids": ids()}, laws=laws, attn=attn)
            assert {answer.state for answer in report.laws if table.LAWS[answer.law].of_large_models} <= {"kept"}
            forwards[large, laws] = count[0]
    assert forwards[True, "finite,causal"] - forwards[True, "none"] == 1
    assert forwards[True, "all"] - forwards[True, "none"] == 1
    if dtype is torch.float32:  # of a small model in half precision a copy is asked, which has no hook of ours
        assert forwards[False, "finite,causal"] - forwards[False, "none"] == 3


def test_what_the_audit_keeps_is_what_a_run_returns():
    loaded = from_module(LlamaForCausalLM(SMALL_LLAMA).eval(), {"input_ids": ids()}, LoadOptions())
    kept = run_model(loaded, "own", seed=0, compare="never", keep=True).outputs
    plain = subject_of(loaded.module, loaded.inputs).run({})
    assert list(kept) == list(plain)
    assert "logits" in kept
    assert any(name.endswith("0.key") for name in kept)  # of the cache, whose name has changed in transformers 5.24
    assert all(torch.equal(kept[name], value) for name, value in plain.items())
    assert run_model(loaded, "own", seed=0, compare="never").outputs == {}
    assert not any(value.requires_grad or value.is_inference() for value in kept.values())


def test_a_broken_law_of_a_large_model_is_asked_again_without_a_trace(monkeypatch):
    """A model that rounds otherwise where a mode of torch is on, as a trace is, breaks no law by it."""

    class Rounds(Decoder):
        def forward(self, input_ids):
            x = super().forward(input_ids)
            return x * 1.01 if _get_current_dispatch_mode_stack() else x

    monkeypatch.setattr(table, "LARGE_MODEL", 0)
    report = check(Rounds().eval(), {"input_ids": ids()}, laws="all")
    assert {answer.state for answer in report.laws if table.LAWS[answer.law].of_large_models} == {"kept"}
    report = check(Decoder("future").eval(), {"input_ids": ids()}, laws="all")
    assert {answer.law for answer in report.laws if answer.state == "broken"} == {"causal"}
