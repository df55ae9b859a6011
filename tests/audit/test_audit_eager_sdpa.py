"""A Llama: eager attention against SDPA, switching between them, and one layer that differs."""

import pytest
import torch
import torch.nn.functional as F

from sqrtdk.audit.check import check
from sqrtdk.audit.switch import implementation

hf = pytest.importorskip("transformers")


def found(report):
    return {(finding.rule, finding.severity) for finding in report.findings if finding.severity != "note"}


def llama():
    config = hf.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    return hf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def test_eager_against_sdpa_agree_on_a_healthy_model():
    model = llama()
    report = check(model, seq_len=24)
    assert found(report) == set()
    assert report.not_measured == ()
    assert model.config._attn_implementation == "sdpa"


def test_left_padding_is_a_note_and_no_difference():
    model = llama()
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :6] = 0
    report = check(model, {"input_ids": torch.randint(3, 96, (2, 24)), "attention_mask": mask})
    assert {(f.rule, f.severity) for f in report.findings} == {("mask_audit", "note")}
    assert "outputs not compared" in report.not_measured[0].reason


@pytest.mark.parametrize("fault", ["scale", "mask", "small"])
def test_eager_against_sdpa_finds_a_fault_in_one_of_them(monkeypatch, fault):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def wrong(module, query, key, value, attention_mask, scaling=None, **kwargs):
        if fault == "mask":  # every row sees every key
            out = F.scaled_dot_product_attention(query, key, value, scale=scaling)
            return out.transpose(1, 2).contiguous(), None
        factor = 2.0 if fault == "scale" else 1.05
        return right(module, query, key, value, attention_mask, scaling=scaling * factor, **kwargs)

    model = llama()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", wrong)
    report = check(model, seq_len=24)
    (finding,) = [f for f in report.findings if f.rule == "eager_vs_sdpa"]
    assert finding.severity == "fail"
    assert finding.site == "model.layers.0.self_attn"
    assert {"scale": "effective scale", "mask": "mask", "small": "effective scale"}[fault] in finding.message
    if fault != "mask":  # both are shares of the scale
        assert finding.value == pytest.approx({"scale": 1.0, "small": 0.05}[fault], rel=0.01)
        assert finding.threshold == 0.01
    assert model.config._attn_implementation == "sdpa"


def test_responsiveness_finds_an_attention_function_that_ignores_its_scaling(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def deaf(module, query, key, value, attention_mask, scaling=None, **kwargs):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None
        )
        return out.transpose(1, 2).contiguous(), None

    model = llama()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", deaf)
    report = check(model, seq_len=24)
    assert [f.severity for f in report.findings if f.rule == "responsiveness"] == ["note", "note"]
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.3
    report = check(model, seq_len=24, attn="sdpa")
    assert all(layer.self_attn.scaling == 0.3 for layer in model.model.layers)


def test_attn_switches_and_restores():
    model = llama()
    report = check(model, seq_len=24, attn="eager")
    assert {judged.call.kind for judged in report.calls} == {"eager"}
    assert model.config._attn_implementation == "sdpa"
    with implementation(model, "eager"):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ZeroDivisionError), implementation(model, "eager"):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


EAGER_SDPA_FAMILIES = ("gpt2", "llama", "qwen3", "gemma3", "granite", "t5", "bart", "vit")


@pytest.mark.parametrize("name", EAGER_SDPA_FAMILIES)
def test_a_healthy_family_has_no_finding_above_a_note(name):
    from tests.hf.families import ATTENTION_CALLS, FAMILIES

    config = FAMILIES[name]()
    model = getattr(hf, config.architectures[0])._from_config(config, attn_implementation="sdpa")
    report = check(model, seq_len=24)
    assert len(report.calls) == ATTENTION_CALLS[name]
    assert {judged.verdict for judged in report.calls} <= {"exact", "declared"}
    assert found(report) == set()
    assert report.not_measured == ()


@pytest.mark.parametrize(("value", "severity"), [(1.0, "fail"), (0.3, "warn"), (1 / 16, "warn"), (0.0, "fail")])
def test_one_layer_of_llama_that_differs(value, severity):
    model = llama()
    model.model.layers[1].self_attn.scaling = value
    report = check(model, seq_len=24)
    (finding,) = (f for f in report.findings if f.rule == "scale_ledger")
    assert (finding.severity, finding.site) == (severity, "model.layers.1.self_attn")
