"""The sliding window that a config or a module declares, against the mask that ran."""

import pytest

pytest.importorskip("transformers", minversion="5.0")  # masking_utils as it is now

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from transformers import masking_utils

from sqrtdk._check import check
from tests.attentions.each import each
from tests.hf.families import GROUPED, LLAMA, build

W = 8
SLIDING = {"sliding_window": W}
KINDS = ["sliding_attention", "full_attention"]
RELEASED = {
    "mistral": lambda: hf.MistralConfig(**GROUPED, **SLIDING, architectures=["MistralForCausalLM"]),
    "mixtral": lambda: hf.MixtralConfig(
        **GROUPED, **SLIDING, num_local_experts=4, num_experts_per_tok=2, architectures=["MixtralForCausalLM"]
    ),
    "qwen2": lambda: hf.Qwen2Config(
        **GROUPED, **SLIDING, use_sliding_window=True, max_window_layers=1, architectures=["Qwen2ForCausalLM"]
    ),
    "qwen2 without": lambda: hf.Qwen2Config(
        **GROUPED, **SLIDING, use_sliding_window=False, architectures=["Qwen2ForCausalLM"]
    ),
    "qwen3": lambda: hf.Qwen3Config(
        **GROUPED, **SLIDING, use_sliding_window=True, max_window_layers=1, architectures=["Qwen3ForCausalLM"]
    ),
    "phi3": lambda: hf.Phi3Config(**GROUPED, **SLIDING, architectures=["Phi3ForCausalLM"]),
    "cohere2": lambda: hf.Cohere2Config(**GROUPED, **SLIDING, layer_types=KINDS, architectures=["Cohere2ForCausalLM"]),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED, **SLIDING, head_dim=16, architectures=["Gemma2ForCausalLM"]),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **GROUPED, **SLIDING, head_dim=16, layer_types=KINDS, architectures=["Gemma3ForCausalLM"]
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **GROUPED,
        **SLIDING,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=KINDS,
        architectures=["GptOssForCausalLM"],
    ),
    "starcoder2": lambda: hf.Starcoder2Config(**GROUPED, **SLIDING, architectures=["Starcoder2ForCausalLM"]),
    "modernbert": lambda: hf.ModernBertConfig(
        **LLAMA, local_attention=W, layer_types=KINDS, architectures=["ModernBertForMaskedLM"]
    ),
}
LAYERS = {"mistral": 2, "mixtral": 2, "qwen2": 1, "qwen2 without": 0, "phi3": 2, "starcoder2": 2}  # others 1


def told(report):
    return [f for f in report.findings if f.rule == "sliding_window"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_window_is_the_declared_one_and_a_longer_one_is_not(monkeypatch, name, static):
    model = build(RELEASED[name](), "eager")
    report = check(model, seq_len=24, static=static, attn="eager")
    assert [f for f in report.findings if f.severity != "note"] == []
    assert not any("window" in entry.reason for entry in report.not_measured)

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", lambda width: lambda b, h, i, j: j >= i - width)
    side = "sliding_window_bidirectional_overlay"
    monkeypatch.setattr(masking_utils, side, lambda width: lambda b, h, i, j: abs(i - j) <= width + 1)
    report = check(model, seq_len=24, static=static, attn="eager")
    assert len(told(report)) == LAYERS.get(name, 1)
    expected = W // 2 + 1 if name == "modernbert" else W
    for finding in told(report):
        assert (finding.severity, finding.value, finding.threshold) == ("fail", expected + 1, expected)
        assert "config.sliding_window" in finding.message
    assert report.exit_code == int(bool(told(report)))


class Windowed(nn.Module):
    """Causal self-attention whose rows see `keys` keys; attributes are the test's."""

    def __init__(self, keys, way="sdpa", after=0, **attributes):
        super().__init__()
        self.qkv, self.keys, self.way, self.after = nn.Linear(64, 192), keys, way, after
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        i = torch.arange(x.shape[1], device=x.device)
        distance = i[:, None] - i
        visible = (distance < self.keys) & (distance >= -self.after)
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None, None, :]
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return (q @ k.mT * 0.25).masked_fill(~visible, float("-inf")).softmax(-1) @ v


@pytest.fixture
def x():
    return torch.randn(2, 24, 64)


@each("way", ["sdpa", "eager"])
@each("static", [False, True])
@each("place", ["module", "config"])
@each("keys, word", [(8, None), (7, "up to 7 keys"), (9, "up to 9 keys"), (99, "not applied")])
def test_a_window_of_a_stranger(x, keys, word, place, static, way):
    declared = {"sliding_window": W} if place == "module" else {"config": {"sliding_window": W}}
    found = told(check(Windowed(keys, way, **declared), x, static=static))
    assert len(found) == int(word is not None)
    assert all(word in f.message and f.threshold == W and "sliding_window = 8" in f.message for f in found)


@each("pad", ["left", "right"])
@each("keys, count", [(8, 0), (9, 1)])
def test_a_window_in_a_padded_batch(x, keys, count, pad):
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, slice(0, 4) if pad == "left" else slice(20, 24)] = 0
    assert len(told(check(Windowed(keys, sliding_window=W), (x, mask)))) == count


def test_rows_of_padding_make_a_row_no_longer(x):
    """Of 24 positions 6 are tokens, fewer than the window: it is not reached."""
    mask = (torch.arange(24) < 6).long().expand(2, -1)
    report = check(Windowed(8, sliding_window=W), (x, mask))
    assert told(report) == []
    assert any("not reached by rows of 6 tokens" in entry.reason for entry in report.not_measured)


@each(
    "declared, keys, after, count",
    [
        ({"window_size": (7, 0)}, 8, 0, 0),  # flash attention: 7 before its own
        ({"window_size": (7, 0)}, 9, 0, 1),
        ({"att_context_size": [7, 2]}, 8, 2, 0),
        ({"window_size": (7, 7)}, 99, 99, 0),  # Swin's: 7 rows and 7 columns
        ({"window_size": 7}, 99, 0, 0),
        ({"sliding_window": 8, "is_causal": False}, 8, 7, 0),  # on either side, with its own or without
        ({"sliding_window": 8, "is_causal": False}, 9, 8, 0),
        ({"sliding_window": 8, "is_causal": False}, 5, 4, 0),  # or both
        ({"sliding_window": 8, "is_causal": False}, 10, 9, 1),
        ({"config": {"sliding_window": 8, "max_window_layers": 3}}, 99, 0, 0),  # which layers it means is not agreed
        ({"config": {"sliding_window": 8, "max_window_layers": 3}}, 9, 0, 1),
        ({"config": {"sliding_window": 8, "use_sliding_window": False}}, 99, 0, 0),
        ({"config": {"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_idx": 0}, 99, 0, 0),
        ({"config": {"sliding_window": 8, "layer_types": ["sliding_attention"]}, "layer_idx": 0}, 99, 0, 1),
        ({"config": {"sliding_window": 8, "layer_types": ["chunked_attention"]}, "layer_idx": 0}, 99, 0, 0),
        ({"config": {"sliding_window_size": 8, "sliding_window_indices": [0]}, "layer_idx": 0}, 99, 0, 0),  # litgpt
        ({"config": {"sliding_window_size": 8, "sliding_window_indices": [1]}, "layer_idx": 0}, 99, 0, 1),
        ({"sliding_window": None}, 5, 0, 0),
    ],
)
def test_what_declares_a_window(x, declared, keys, after, count):
    assert len(told(check(Windowed(keys, after=after, **declared), x))) == count


def test_first_keys_that_stay_visible_are_no_fault(x):
    class Sinks(Windowed):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            i = torch.arange(x.shape[1])
            visible = ((i[:, None] - i < self.keys) | (i < 4)) & (i[:, None] >= i)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    assert told(check(Sinks(8, sliding_window=W), x)) == []


def test_a_window_that_no_row_reaches_is_not_measured():
    model = build(hf.MistralConfig(**GROUPED, sliding_window=64, architectures=["MistralForCausalLM"]), "sdpa")
    (entry,) = check(model, seq_len=24).not_measured
    assert entry.site == ""
    assert "config.sliding_window = 64 is not reached by rows of 24 tokens" in entry.reason


@each("width, made", [(64, 128), (136, 144), (256, 264), (4096, 128)])
def test_made_inputs_reach_a_window_that_is_not_long(width, made):
    config = hf.MistralConfig(**GROUPED | {"max_position_embeddings": 512}, sliding_window=width)
    report = check(build(config, "sdpa"))
    assert report.calls[0].call.key_len == made
    assert told(report) == []
