"""Eager attention against SDPA, and against a function that somebody registered: a faulty one is found and named."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.context import Context, Rerun
from sqrtdk.audit.guard import implementation
from sqrtdk.audit.rules import RULES, eager_vs_sdpa
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.tracing.records import NotMeasured

hf = pytest.importorskip("transformers", minversion="4.53")  # masking_utils
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from tests.attentions.each import each  # noqa: E402
from tests.hf.families import FAMILIES  # noqa: E402  (imports transformers)

FAULTS = (None, "scaling", "softcap", "mask")


def function(fault):
    """An attention function of somebody's, which leaves one thing out."""

    def attend(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if scaling is None or fault == "scaling":
            scaling = query.shape[-1] ** -0.5
        logits = query @ key.transpose(-1, -2) * scaling
        if softcap is not None and fault != "softcap":
            logits = softcap * torch.tanh(logits / softcap)
        if attention_mask is not None and fault != "mask":
            logits = logits + attention_mask[..., : key.shape[-2]]
        weights = logits.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


@contextmanager
def registered(name, attend):
    """An attention function and the mask function for it, under a name of their own."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping[name]
        del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]


def gemma(name):
    """Gemma 2: a declared scale other than the textbook's, a softcap, a causal mask and a window."""
    return hf.Gemma2ForCausalLM._from_config(FAMILIES["gemma2"](), attn_implementation=name)


def llama(name="sdpa"):
    return hf.LlamaForCausalLM._from_config(FAMILIES["llama"](), attn_implementation=name).eval()


def told(report, rule):
    return [finding for finding in report.findings if finding.rule == rule]


@pytest.mark.parametrize("fault", FAULTS)
def test_gemma_with_a_registered_function(fault):
    name = f"somebodys_{fault}"
    with registered(name, function(fault)):
        model = gemma(name)
        report = check(model, seq_len=24)
    assert model.config._attn_implementation == name
    assert report.environment["attn"] == name
    assert report.not_measured == ()
    sites = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    if fault is None:
        assert [finding for finding in report.findings if finding.severity != "note"] == []
        assert report.exit_code == 0
        return
    assert report.exit_code == 1
    (differ,) = told(report, "eager_vs_sdpa")
    assert (differ.severity, differ.site) == ("fail", sites[0])
    assert differ.message.startswith(f"eager and {name} differ: ")
    assert {"scaling": "effective scale", "softcap": "softcap 50.0 against None", "mask": "against none"}[
        fault
    ] in differ.message
    named = {
        "scaling": ("responsiveness", "fail", "the scale does not follow attribute scaling"),
        "softcap": ("unused", "fail", "attn_logit_softcapping = 50, but the logits are not capped"),
        "mask": ("mask_audit", "critical", "weight to future keys"),
    }
    for key, (rule, severity, text) in named.items():
        found = told(report, rule)
        if key != fault:
            assert found == []
            continue
        assert sorted(finding.site for finding in found) == sites
        assert all(finding.severity == severity and text in finding.message for finding in found)
    declared = told(report, "declared_vs_actual")
    assert [finding.site for finding in declared] == (sites if fault == "scaling" else [])


def test_a_fault_that_small_logits_hide_is_found(monkeypatch):
    """Fresh weights give logits near 0, which a clamp at 3 leaves alone: only the enlarged q shows it."""

    def clamped(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = (query @ key.transpose(-1, -2) * scaling).clamp(-3.0, 3.0) + attention_mask
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    with registered("somebodys_clamp", clamped):
        model = llama("somebodys_clamp")
        (finding,) = told(check(model, seq_len=24), "eager_vs_sdpa")
        assert "root mean square" in finding.message
        monkeypatch.setattr(eager_vs_sdpa, "enlargement", lambda context: {})
        assert told(check(model, seq_len=24), "eager_vs_sdpa") == []


def test_a_scaling_that_is_not_read_but_right_is_a_note():
    """Llama's scaling is the textbook's: a function that ignores it is right by chance."""
    with registered("somebodys_deaf", function("scaling")):
        model = llama("somebodys_deaf")
        report = check(model, seq_len=24)
        assert [f.severity for f in told(report, "responsiveness")] == ["note", "note"]
        assert told(report, "eager_vs_sdpa") == []
        assert report.exit_code == 0
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.3
        report = check(model, seq_len=24)
        (finding,) = told(report, "eager_vs_sdpa")
        assert "0.3 against 0.25" in finding.message
        assert report.exit_code == 1


@pytest.mark.parametrize("factor", [2.0, 1.05])
def test_another_scale_of_sdpa_is_found_by_its_share(monkeypatch, factor):
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def wrong(*args, scaling=None, **kwargs):
        return right(*args, scaling=scaling * factor, **kwargs)

    model = llama()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", wrong)
    (finding,) = told(check(model, seq_len=24), "eager_vs_sdpa")
    assert (finding.severity, finding.site) == ("fail", "model.layers.0.self_attn")
    assert "effective scale" in finding.message
    assert (finding.value, finding.threshold) == (pytest.approx(factor - 1.0, rel=0.01), 0.01)
    assert model.config._attn_implementation == "sdpa"


def test_left_padding_is_a_note_and_no_difference():
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :6] = 0
    report = check(llama(), {"input_ids": torch.randint(3, 96, (2, 24)), "attention_mask": mask})
    assert {(f.rule, f.severity) for f in report.findings} == {("mask_audit", "note")}
    assert "outputs not compared" in report.not_measured[0].reason


def test_attn_switches_and_restores():
    model = llama()
    report = check(model, seq_len=24, attn="eager")
    assert {judged.call.kind for judged in report.calls} == {"eager"}
    assert model.config._attn_implementation == "sdpa"
    with implementation(model, "eager"):
        assert model.config._attn_implementation == "eager"
    with pytest.raises(ZeroDivisionError), implementation(model, "eager"):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


@each("value, rule", [*((x, "declared_vs_actual") for x in (1.0, 0.3, 1 / 16)), (0.0, "scale_ledger")])
def test_one_layer_of_llama_that_differs(value, rule):
    model = llama()
    model.model.layers[1].self_attn.scaling = value
    (finding,) = told(check(model, seq_len=24), rule)
    assert (finding.severity, finding.site) == ("fail", "model.layers.1.self_attn")


@each(
    "first, second, said",
    [
        ([torch.ones(2, 3)], [torch.ones(2, 3)], None),
        ([torch.ones(2, 3)], [torch.full((2, 3), 1.01)], (0.01, pytest.approx(4 * torch.finfo().eps ** 0.5))),
        ([], [], "there is none of floating point"),
        ([torch.ones(2, 3)], [torch.ones(3, 2)], "their shapes are [(2, 3)] and [(3, 2)]"),
        ([torch.ones(2, 3)] * 2, [torch.ones(2, 3)], "their shapes are"),
        ([torch.full((2, 3), torch.nan)], [torch.ones(2, 3)], "they hold NaN or infinity"),
    ],
)
def test_outputs_that_cannot_be_compared_say_so(first, second, said):
    told = eager_vs_sdpa._outputs(Rerun((), tuple(first)), Rerun((), tuple(second)), "float32")
    if isinstance(said, str):
        assert said in told
    else:
        assert told == (said and (pytest.approx(said[0], rel=1e-3), said[1]))


def test_a_call_that_is_lost_with_a_larger_attribute_is_not_measured(make_call):
    """Where the second run shows no such call, nobody knows whether its scale follows."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].attn = nn.Module()
    model.layers[0].attn.scaling = 0.25
    call = make_call(0.25)
    for after in ((), (dataclasses.replace(call, index=1),), (make_call(None),)):
        context = Context(model, judge_all([call], model), "dynamic", rerun=lambda *_, calls=after: Rerun(calls, ()))
        (entry,) = RULES["responsiveness"](context)
        assert isinstance(entry, NotMeasured)
        assert "could not be read" in entry.reason
