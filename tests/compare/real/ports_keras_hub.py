"""Models of KerasHub (torch backend), with weights that KerasHub's own converters took from a Hugging Face folder."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tests.compare.real.small import Inputs, hugging_face, saved, tokens

Pair = tuple[nn.Module, nn.Module, Inputs, Inputs]


def _pair(family: str, backbone: str, *, faint: bool = False, **fields: Any) -> Pair:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras_hub

    whole = hugging_face(family, **fields)
    if faint:  # q and k of the size that training begins with: an epsilon matters only beside small squares
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.mul_(0.1 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0)
    base = getattr(whole, whole.base_model_prefix, whole)
    with saved(whole) as folder:
        port = getattr(keras_hub.models, backbone).from_preset(str(folder))
    ids = tokens()
    given = {"token_ids": ids, "padding_mask": torch.ones_like(ids)}
    if family == "bert":
        given["segment_ids"] = torch.zeros_like(ids)
    return base, port, {"input_ids": ids}, (given,)


def llama() -> Pair:
    """The same."""
    return _pair("llama", "Llama3Backbone")


def llama_padding() -> Pair:
    """The same with one sequence padded, to the right."""
    return _padded(llama(), 18, None)


def gpt2() -> Pair:
    """The same."""
    return _pair("gpt2", "GPT2Backbone")


def gpt2_padding() -> Pair:
    """Not the same with padding to the left, in the rows that see no key.

    Hugging Face fills with the least float, and such a row averages all keys; Keras zeroes its weights afterwards.
    """
    return _padded(gpt2(), None, 6)


def _padded(pair: Pair, begin: int | None, end: int | None) -> Pair:
    base, port, given, (others,) = pair
    mask = torch.ones_like(given["input_ids"])
    mask[1, begin:end] = 0
    return base, port, given | {"attention_mask": mask}, (others | {"padding_mask": mask},)


def bert() -> Pair:
    """The same with GELU's tanh form on both sides; BERT has biases in q, k and v, and its norms come after the sum."""
    return _pair("bert", "BertBackbone", architectures=["BertModel"], hidden_act="gelu_pytorch_tanh")


def bert_gelu() -> Pair:
    """Not the same with the exact GELU: KerasHub's feed-forward has the tanh form, whatever the config says.

    No attention differs: the second one gets another input.
    """
    return _pair("bert", "BertBackbone", architectures=["BertModel"])


def repair_bert_gelu(port: nn.Module) -> None:
    """Gives the feed-forward blocks the exact GELU."""
    for layer in range(2):
        port.get_layer(
            f"transformer_layer_{layer}"
        )._feedforward_intermediate_dense.activation = torch.nn.functional.gelu


def gemma2() -> Pair:
    """The same where `query_pre_attn_scalar` is the head dimension, as in the 2B and 9B models."""
    return _pair("gemma2", "GemmaBackbone", query_pre_attn_scalar=24)


def gemma2_scalar() -> Pair:
    """Not the same where it is hidden size / heads, as in the 27B model: the decoder block sets the head dimension's.

    `GemmaDecoderBlock` hands `query_head_dim_normalize=True` to its attention whatever it was given itself.
    """
    return _pair("gemma2", "GemmaBackbone", query_pre_attn_scalar=16)


def repair_gemma2_scalar(port: nn.Module) -> None:
    """Hands on what the blocks were given."""
    for layer in range(2):
        block = port.get_layer(f"decoder_block_{layer}")
        block.attention.query_head_dim_normalize = block.query_head_dim_normalize


def qwen3() -> Pair:
    """Not the same: the norms of q and k add 1e-5 to the mean square, the model's config says 1e-6.

    `Qwen3TransformerDecoder` does not hand its `layer_norm_epsilon` to its attention, whose default is 1e-5.
    """
    return _pair("qwen3", "Qwen3Backbone", faint=True)


def repair_qwen3(port: nn.Module) -> None:
    """Gives the norms of q and k the model's epsilon."""
    for layer in range(2):
        attention = port.get_layer(f"transformer_layer_{layer}")._self_attention_layer
        attention._query_dense_layer_norm.epsilon = port.layer_norm_epsilon
        attention._key_dense_layer_norm.epsilon = port.layer_norm_epsilon
