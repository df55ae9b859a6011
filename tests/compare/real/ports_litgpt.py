"""Models of LitGPT, with weights that LitGPT's own converters took from a Hugging Face state dict."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.compare.real.small import Inputs, hugging_face, tokens

Pair = tuple[nn.Module, nn.Module, Inputs, Inputs]


def _pair(family: str, name: str, mlp: str, head_size: int, **fields: Any) -> Pair:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts import convert_hf_checkpoint as convert

    model = hugging_face(family)
    config = Config(
        name=name,
        n_layer=2,
        n_head=4,
        n_query_groups=2,
        n_embd=64,
        head_size=head_size,
        vocab_size=160,
        padded_vocab_size=160,
        block_size=128,
        rotary_percentage=1.0,
        bias=False,
        parallel_residual=False,
        intermediate_size=96,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name=mlp,
        **fields,
    )
    converted: dict[str, Any] = {}
    weights = dict(model.state_dict())
    if family == "llama":
        convert.copy_weights_hf_llama(config, {}, converted, weights)
    elif family == "qwen3":
        convert.copy_weights_qwen_3(config, {}, converted, weights)
    else:
        convert.copy_weights_gemma_2({}, converted, weights)
    port = GPT(config).eval()
    port.load_state_dict(converted)
    ids = tokens()
    return model, port, {"input_ids": ids}, (ids,)


def llama() -> Pair:
    """The same."""
    return _pair("llama", "small-llama", "LLaMAMLP", 16)


def qwen3() -> Pair:
    """The same."""
    return _pair("qwen3", "small-qwen3", "LLaMAMLP", 24, norm_qk=True)


def gemma2() -> Pair:
    """The same; the scale is query_pre_attn_scalar ** -0.5, and the first layer has a window of 8."""
    return _pair(
        "gemma2",
        "Gemma-2-small",
        "GemmaMLP",
        24,
        gelu_approximate="tanh",
        scale_embeddings=True,
        attention_scores_scalar=20,
        sliding_window_size=8,
        sliding_window_indices=[1, 0],
        post_attention_norm=True,
        post_mlp_norm=True,
        attention_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
