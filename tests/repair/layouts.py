"""Small models with random weights, one for each way to lay out the projections of q and k, all in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.tracing import CallTensors
from tests.repair.modules import Attention, Latent, Transposed, WithGain, WithScale, randomised, states

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
LATENT = SIZES | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10], [10, 3, 9, 4, 8, 5, 7, 6]])


@dataclass(frozen=True)
class Layout:
    """A model, its inputs, and the least dtype that it computes q, k or its logits in."""

    model: nn.Module
    inputs: tuple[Any, ...]
    dtype: torch.dtype = torch.float64

    def run(self) -> Any:
        with torch.no_grad():
            return self.model(*self.inputs)


def _hub(config: Any, attn: str = "sdpa", dtype: torch.dtype = torch.float64) -> Layout:
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config, attn_implementation=attn, experts_implementation="eager")
    return Layout(randomised(model).to(dtype), (IDS,), torch.float32)


def _plain(model: nn.Module, *inputs: Tensor) -> Layout:
    return Layout(randomised(model), inputs or (states(),))


def _gpt2(attn: str = "sdpa") -> Layout:
    return _hub(hf.GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=16, bos_token_id=1, eos_token_id=2), attn)


def _mha(*inputs: Tensor, **options: Any) -> Layout:
    return _plain(nn.MultiheadAttention(32, 4, batch_first=True, **options), *inputs)


def terms(kept: CallTensors) -> float:
    """The largest sum of the sizes of what a logit is summed from: its rounding is relative to them."""
    query, key = kept.query.values.double().abs(), kept.key.values.double().abs()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    factors = [float(torch.as_tensor(term.value).abs().max()) for term in kept.terms or () if term.name == "scale"]
    return float((query @ key.mT).amax()) * math.prod(factors)


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "separate": lambda: _plain(Attention()),
    "separate, no bias on k (Whisper's)": lambda: _plain(_without_bias(Attention())),
    "grouped (Llama)": lambda: _hub(hf.LlamaConfig(**GROUPED)),
    "grouped, eager (Llama)": lambda: _hub(hf.LlamaConfig(**GROUPED), "eager"),
    "one key head (Llama)": lambda: _hub(hf.LlamaConfig(**SIZES, num_key_value_heads=1)),
    "grouped, biases (Qwen2)": lambda: _hub(hf.Qwen2Config(**GROUPED)),
    "fused by head (GPT-NeoX)": lambda: _hub(hf.GPTNeoXConfig(**SIZES)),
    "fused by blocks (Phi-3)": lambda: _hub(hf.Phi3Config(**GROUPED)),
    "transposed (GPT-2)": _gpt2,
    "transposed, eager (GPT-2)": lambda: _gpt2("eager"),
    "MultiheadAttention": lambda: _mha(*[states()] * 3),
    "MultiheadAttention, across": lambda: _mha(states(), *[states(3)] * 2),
    "MultiheadAttention, three inputs": lambda: _mha(states(), states(3), states(4)),
    "MultiheadAttention, other widths": lambda: _mha(states(), *[states(3, 16)] * 2, kdim=16, vdim=16),
    "one gain for all heads (Qwen3)": lambda: _hub(hf.Qwen3Config(**GROUPED, head_dim=8)),
    "1 + gain (Gemma 3)": lambda: _hub(hf.Gemma3TextConfig(**GROUPED, head_dim=8)),
    "gains by head, one norm (OLMo 2)": lambda: _hub(hf.Olmo2Config(**GROUPED)),
    "gains by head, a norm each (Cohere)": lambda: _hub(hf.CohereConfig(**GROUPED, use_qk_norm=True)),
    "gain and shift (Persimmon)": lambda: _hub(hf.PersimmonConfig(**SIZES)),
    "gains of the attention's own": lambda: _plain(WithGain()),
    "gains behind an l2 norm": lambda: _plain(WithGain(lambda x: functional.normalize(x, dim=-1))),
    "transposed": lambda: _plain(Transposed()),
    "latent": lambda: _plain(Latent()),
    "latent (DeepSeek-V3)": lambda: _hub(hf.DeepseekV3Config(**LATENT)),
    "latent, eager (DeepSeek-V3)": lambda: _hub(hf.DeepseekV3Config(**LATENT), "eager"),
    "latent, q not (DeepSeek-V2)": lambda: _hub(
        hf.DeepseekV2Config(**(LATENT | {"q_lora_rank": None})), dtype=torch.float32
    ),
    "sinks, biases (gpt-oss)": lambda: _hub(
        hf.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1), "eager"
    ),
    "softcap (Gemma 2)": lambda: _hub(hf.Gemma2Config(**GROUPED, head_dim=8), "eager"),
    "a learned scale for each head": lambda: _plain(WithScale()),
}


def _without_bias(attention: Attention) -> Attention:
    attention.k = nn.Linear(32, 32, bias=False)
    return attention
