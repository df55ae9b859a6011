"""Right models with fresh weights, as their own code initialises them: nothing is said of them, not even a note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk import check

Made = tuple[nn.Module, Any]
TEXT = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = TEXT | SIZES | {"max_position_embeddings": 128}
GROUPED = DECODER | {"num_key_value_heads": 2}
FEED = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "d_model": 64, "decoder_start_token_id": 3}
TWO_SIDED = TEXT | FEED | {"encoder_layers": 2, "decoder_layers": 2} | {
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip
SOUND = {"max_source_positions": 50, "max_target_positions": 64, "num_mel_bins": 8}
PICTURE = SIZES | {"image_size": 32, "patch_size": 8}


class NanoAttention(nn.Module):
    """One projection for q, k and v, split along the features."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 4, c // 4).transpose(1, 2) for part in self.c_attn(x).split(c, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return result


class Nano(nn.Module):
    """A small decoder of one's own, with GPT-2's initialisation: logits of about 1e-3."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.head = nn.Embedding(256, 64), nn.Embedding(128, 64), nn.Linear(64, 256, bias=False)
        self.h = nn.ModuleList(nn.ModuleDict({"ln": nn.LayerNorm(64), "attn": NanoAttention()}) for _ in range(2))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = x + block["attn"](block["ln"](x))  # type: ignore[index]
        result: Tensor = self.head(x)
        return result


def of(model: str, config: str, **fields: Any) -> Callable[[], Made]:
    return lambda: (getattr(hf, model)(getattr(hf, config)(**fields)), None)


HEALTHY: dict[str, Callable[[], Made]] = {
    "llama": of("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "qwen2": of("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "qwen3": of("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=32),
    "mistral": of("MistralForCausalLM", "MistralConfig", **GROUPED, head_dim=16),
    "gemma2": of("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=16, query_pre_attn_scalar=16),
    "granite": of("GraniteForCausalLM", "GraniteConfig", **GROUPED, attention_multiplier=1 / 16),
    "phi3": of("Phi3ForCausalLM", "Phi3Config", **DECODER),
    "gpt2": of("GPT2LMHeadModel", "GPT2Config", vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "gpt_neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", **DECODER),
    "bert": of("BertForMaskedLM", "BertConfig", **DECODER),
    "roberta": of("RobertaForMaskedLM", "RobertaConfig", **DECODER),
    "modernbert": of("ModernBertForMaskedLM", "ModernBertConfig", **DECODER),
    "t5": of(
        "T5ForConditionalGeneration", "T5Config", vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=2,
        num_heads=4, decoder_start_token_id=0,
    ),
    "bart": of("BartForConditionalGeneration", "BartConfig", **TWO_SIDED, max_position_embeddings=128),
    "whisper": of("WhisperForConditionalGeneration", "WhisperConfig", **TWO_SIDED, **SOUND),
    "vit": of("ViTForImageClassification", "ViTConfig", **PICTURE),
    "dinov2": of("Dinov2Model", "Dinov2Config", **PICTURE),
    "clip": of("CLIPModel", "CLIPConfig", text_config=DECODER, vision_config=PICTURE),
    "of one's own": lambda: (Nano(), (torch.randint(0, 256, (2, 32)),)),
    "nn.MultiheadAttention": lambda: (nn.MultiheadAttention(64, 4, batch_first=True), (torch.randn(2, 24, 64),) * 3),
    "nn.TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2), (torch.randn(2, 24, 64),),
    ),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_right_model_with_fresh_weights(name: str) -> None:
    model, inputs = HEALTHY[name]()
    report = check(model.eval(), inputs, laws="all")
    assert [(f.severity, f.rule, f.site, f.message) for f in report.findings] == []
