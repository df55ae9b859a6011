"""Models of IBM's Foundation Model Stack, loaded by `as_fms_model` from a Hugging Face folder.

Its rotation pairs neighbouring channels, so its converter reorders the rows of q's and k's weights: other vectors, the
same products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.compare.real.small import Inputs, hugging_face, saved, tokens

Pair = tuple[nn.Module, nn.Module, Inputs, Inputs]


def _pair(family: str, **fields: Any) -> Pair:
    from fms.models.hf.utils import as_fms_model

    model = hugging_face(family, **fields)
    with saved(model) as folder:
        port = as_fms_model(str(folder), data_type="float32").eval()
    ids = tokens()
    causal = {} if family in ("bert", "roberta") else {"attn_name": "sdpa_causal"}
    return model, port, {"input_ids": ids}, {"x": ids} | causal


def llama() -> Pair:
    """The same; its feed-forward sizes are multiples of 256."""
    return _pair("llama", intermediate_size=256)


def qwen3() -> Pair:
    """The same with a rope_theta of 1e6, as in the released models; q and k are normalised before the rotation."""
    return _pair("qwen3", intermediate_size=256, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def qwen3_base() -> Pair:
    """Not the same with another: the builder hands it on as `rope_base`, and the model's own name is `rope_theta`."""
    return _pair("qwen3", intermediate_size=256, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def repair_qwen3_base(port: nn.Module) -> None:
    """Computes the table of the rotation anew, with the base of the model's config."""
    rotation = port.base_model.rot_emb
    rotation.rope_scaling.ratio = 1e4
    rotation.cached_freqs.clear()
    rotation.max_seq_len_cached.clear()


def granite() -> Pair:
    """The same, with a scale of its own (attention_multiplier)."""
    return _pair("granite")


def bert() -> Pair:
    """The same."""
    return _pair("bert")


def roberta() -> Pair:
    """The same where padding is token 1, as in every released RoBERTa."""
    return _pair("roberta", pad_token_id=1)


def roberta_padding() -> Pair:
    """Not the same where it is token 0: the converter cuts two rows off the positions, the model begins at row 1.

    The embeddings differ, so what comes into the first attention does.
    """
    return _pair("roberta", pad_token_id=0)


def repair_roberta_padding(port: nn.Module) -> None:
    """Moves the positions' rows by one: row 0 of the port was row 2, and belongs to position 1."""
    rows = port.base_model.position_embedding.weight
    with torch.no_grad():
        rows[1:] = rows[:-1].clone()
        rows[0] = hugging_face("roberta", pad_token_id=0).roberta.embeddings.position_embeddings.weight[1]
