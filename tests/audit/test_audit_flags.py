"""A flag that says causal, on a module or in a config, and a mask that shows the keys after a row's own."""

import pytest
import torch
import transformers as hf
from torch import nn

from sqrtdk._check import check
from tests.attentions.each import each
from tests.audit.rules_by_hand import mask, model_with, run
from tests.hf.families import BERT, build


class Attention(nn.Module):
    """Self-attention, or attention to `memory`; with a causal mask where `masked`."""

    def __init__(self, masked=False, **held):
        super().__init__()
        self.q, self.kv, self.masked = nn.Linear(64, 64), nn.Linear(64, 128), masked
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, 4, 16)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT * 0.25
        if self.masked:
            hidden = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(hidden, float("-inf"))
        return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


DECODER = {"is_decoder": True}
SAYS = [
    {"is_causal": True},
    {"causal": True},
    DECODER,
    {"config": DECODER},
    {"is_causal": True, "is_decoder": True},
]
SAYS_NOT = [
    {},
    {"is_causal": False, "config": DECODER},
    {"is_causal": False, "is_decoder": True},
    {"is_causal": True, "is_decoder": False},
    {"config": {"is_decoder": False}},
    {"config": DECODER | {"model_type": "blip_text_model"}},
    {"is_decoder": True, "config": {"prefix_lm": True}},
]


def severities(report):
    return [f.severity for f in report.findings if f.rule == "mask_audit"]


@each("static", [False, True])
@pytest.mark.parametrize("said", SAYS)
def test_a_flag_without_its_mask(said, static):
    x = torch.randn(2, 8, 64)
    report = check(Attention(**said), x, static=static)
    assert (severities(report), report.exit_code) == (["critical"], 1)
    assert severities(check(Attention(masked=True, **said), x, static=static)) == []
    assert severities(check(Attention(**said), x[:, :1], static=static)) == []  # a step with one row


@each("static", [False, True])
@pytest.mark.parametrize("said", SAYS_NOT)
def test_what_says_nothing(said, static):
    assert severities(check(Attention(**said), torch.randn(2, 8, 64), static=static)) == []


@pytest.mark.parametrize("said", SAYS)
def test_attention_to_other_states_is_not_causal(said):
    assert severities(check(Attention(**said), (torch.randn(2, 8, 64), torch.randn(2, 8, 64)))) == []


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_bert_as_a_decoder(monkeypatch, attn):
    model = build(hf.BertConfig(**BERT, is_decoder=True, architectures=["BertLMHeadModel"]), attn)
    assert severities(check(model, seq_len=24)) == []
    module = type(model.bert.encoder.layer[0].attention.self)
    forward = module.forward
    hiding_nothing = torch.zeros(1, 1, 24, 24)
    monkeypatch.setattr(
        module, "forward", lambda self, x, attention_mask, **rest: forward(self, x, hiding_nothing, **rest)
    )
    assert severities(check(model, seq_len=24)) == ["critical", "critical"]


def test_summaries_of_earlier_keys_stand_after_them(make_call):
    summaries = make_call(key_len=28, mask=mask(kind="mask", least=-8, greatest=23, band=False))
    for kinds, expected in ((["compressed_sparse_attention"], []), (["full_attention"], ["critical"])):
        model = model_with(is_causal=True, config={"layer_types": kinds})
        assert [f.severity for f in run("mask_audit", [summaries], model)] == expected
