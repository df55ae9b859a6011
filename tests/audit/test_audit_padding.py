"""The padding that the inputs mark, against the keys that the masks hid."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sqrtdk._check import check
from tests.attentions.each import each
from tests.hf.families import FAMILIES, build

L = 12
LEFT = torch.arange(L) >= 3
RIGHT = torch.arange(L) < 9
FULL = torch.ones(L, dtype=torch.bool)
BATCH = torch.stack([LEFT, RIGHT, FULL]).long()


def told(report):
    return [f for f in report.findings if f.rule == "padding"]


TEXT = [name for name in FAMILIES if name not in ("whisper", "vit", "swinv2", "detr")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TEXT)
def test_a_family_hides_the_padding_it_is_given(name):
    model = build(FAMILIES[name](), "eager")
    inputs = {"input_ids": torch.randint(3, 160, (3, L)), "attention_mask": BATCH}
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": torch.randint(3, 160, (3, 10))}
    if name == "clip":
        inputs |= {"pixel_values": torch.randn(3, 3, 32, 32)}
    report = check(model, inputs, attn="eager")
    assert told(report) == []
    judged = [entry.call for entry in report.calls if entry.call.padding_seen is not None]
    assert judged
    assert {(call.padding_seen, call.tokens_hidden) for call in judged} == {(0, 0)}


class Padded(nn.Module):
    """Self-attention that makes of the attention mask what `hidden` says: True at keys that no row may see."""

    def __init__(self, hidden, way="sdpa", causal=False):
        super().__init__()
        self.qkv, self.hidden, self.way, self.causal = nn.Linear(64, 192), hidden, way, causal

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        visible = ~self.hidden(attention_mask.bool())[:, None, None, :]
        if self.causal:
            visible = visible & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return (q @ k.mT * 0.25).masked_fill(~visible, -1e9).softmax(-1) @ v


def nothing(tokens):
    return tokens & False


def shifted(tokens):
    return ~tokens.roll(1, -1)


def short_by_one(tokens):
    return ~(tokens | tokens.roll(1, -1))


@each("way", ["sdpa", "eager"])
@each(
    "hidden, causal, value, words",
    [
        (torch.logical_not, False, 0, ""),
        (torch.logical_not, True, 0, ""),
        (nothing, False, 6, "tokens see 6 of 6 keys of padding"),
        (nothing, True, 3, "tokens see 3 of 6 keys of padding"),  # the causal mask hides those on the right
        (lambda tokens: tokens, False, 24, "inverted or shifted: tokens see 6 of 6 keys of padding, and 18 of 18 keys"),
        (shifted, False, 4, "inverted or shifted"),
        (short_by_one, False, 2, "tokens see 2 of 6 keys of padding"),
        (lambda tokens: ~tokens | (torch.arange(L) == 5), False, 2, "2 of 18 keys of tokens are hidden from all"),
    ],
)
def test_a_mask_of_other_keys_than_the_padding(hidden, causal, value, words, way):
    report = check(Padded(hidden, way, causal), (torch.randn(2, L, 64), BATCH[:2]))
    found = told(report)
    assert [(f.severity, f.value, f.threshold) for f in found] == [("fail", value, 0.0)] * (value > 0)
    assert all(words in f.message and f.fix for f in found)
    assert report.exit_code == int(value > 0)


def test_inputs_without_padding_and_rows_of_padding_say_nothing():
    for mask in (torch.ones(2, L), torch.rand(2, L), torch.eye(L)):  # the last may be one of queries and keys
        assert told(check(Padded(nothing), (torch.randn(len(mask), L, 64), mask))) == []

    class Unattended(Padded):
        """As transformers' own for some kernels: the rows that see nothing see everything."""

        def forward(self, x, attention_mask):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            visible = torch.ones(L, L, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible | ~visible.any(-1, keepdim=True))

    assert told(check(Unattended(nothing), (torch.randn(3, L, 64), BATCH))) == []


@each("causal", [False, True])
def test_a_padding_mask_on_the_rows(causal):
    class OnRows(Padded):
        def forward(self, x, attention_mask):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            visible = attention_mask.bool()[:, None, :, None].expand(-1, 1, L, L)
            visible = visible.tril() if causal else visible
            return (q @ k.mT / 4).masked_fill(~visible, -1e4).softmax(-1) @ v

    left = torch.ones(2, L)
    left[1, :4] = 0
    (finding,) = told(check(OnRows(nothing), (torch.randn(2, L, 64), left)))
    assert finding.severity == "fail"
    assert finding.message.startswith("the padding mask lies on the rows, not on the keys: tokens see 4 of 4 keys")
    assert "attention_mask[:, None, None, :]" in finding.fix


@each("train", [False, True])
def test_torch_takes_a_padding_mask_for_each_use(train):
    model = nn.Transformer(64, 4, 1, 1, 96, batch_first=True).train(train)
    hidden = BATCH == 0
    inputs = {"src": torch.randn(3, L, 64), "tgt": torch.randn(3, 7, 64), "src_key_padding_mask": hidden}
    (finding,) = told(check(model, inputs))
    assert finding.site == "decoder.layers.0.multihead_attn"
    assert told(check(model, inputs | {"memory_key_padding_mask": hidden})) == []
    layer = nn.MultiheadAttention(64, 4, batch_first=True).train(train)
    x = torch.randn(3, L, 64)
    report = check(layer, {"query": x, "key": x, "value": x, "key_padding_mask": hidden})
    assert (told(report), report.calls[0].call.padding_seen) == ([], 0)


def test_an_image_as_long_as_the_text_has_no_padding():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.text_model, self.vision_model = Padded(torch.logical_not), Padded(nothing)

        def forward(self, x, attention_mask):
            return self.text_model(x, attention_mask) + self.vision_model(x, attention_mask)

    assert told(check(Two(), (torch.randn(3, L, 64), BATCH))) == []


@each("pad", [LEFT, RIGHT])
@each(
    "visible, severity, word",
    [
        (lambda ones: ones.tril(), None, ""),
        (lambda ones: ones.tril(1), "critical", "off by one"),
        (lambda ones: ones.tril(-1), "warn", "off by one"),
        (lambda ones: ones.tril(3), "fail", "the 3 keys after its own"),
        (lambda ones: ones.triu(1), "critical", "inverted"),
        (lambda ones: ones.triu(), "critical", "inverted"),
    ],
)
def test_a_causal_mask_off_by_one_where_every_sequence_is_padded(pad, visible, severity, word):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x, attention_mask):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            mask = visible(torch.ones(L, L, dtype=torch.bool)) & attention_mask.bool()[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    report = check(Shifted(), (torch.randn(2, L, 64), pad.long().expand(2, -1)))
    found = [f for f in report.findings if f.rule == "mask_audit" and f.severity != "note"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(word in f.message for f in found)
    assert told(report) == []
