"""Models of Curated Transformers, with weights and configs that its own converters took from Hugging Face's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.compare.real.small import LENGTH, Inputs, hugging_face, tokens

Pair = tuple[nn.Module, nn.Module, Inputs, Inputs]


def _pair(family: str, encoder: str, **older: Any) -> Pair:
    """`older`: fields of the config under the names that they had when the package was written."""
    from curated_transformers import models
    from curated_transformers.layers import AttentionMask

    whole = hugging_face(family)
    base = getattr(whole, whole.base_model_prefix)
    cls = getattr(models, encoder)
    port = cls.from_hf_config(hf_config=whole.config.to_dict() | older).eval()
    missing = port.load_state_dict(cls.state_dict_from_hf(whole.state_dict()), strict=False).missing_keys
    if missing:
        raise ValueError(f"weights of the port that the converter leaves as they are: {missing}")
    ids = tokens()
    mask = AttentionMask(torch.ones(2, 1, 1, LENGTH, dtype=torch.bool))
    return base, port, {"input_ids": ids}, {"piece_ids": ids, "attention_mask": mask}


def bert() -> Pair:
    """The same."""
    return _pair("bert", "BERTEncoder")


def bert_padding() -> Pair:
    """The same with one sequence padded, to the right."""
    from curated_transformers.layers import AttentionMask

    base, port, given, others = bert()
    mask = torch.ones_like(given["input_ids"])
    mask[1, 18:] = 0
    others["attention_mask"] = AttentionMask(mask[:, None, None].bool())
    return base, port, given | {"attention_mask": mask}, others


def roberta() -> Pair:
    """The same."""
    return _pair("roberta", "RoBERTaEncoder")


def llama() -> Pair:
    """The same."""
    return _pair("llama", "LlamaDecoder", rope_theta=10000.0)


def gpt_neox() -> Pair:
    """The same: a fused q, k and v, and a quarter of each head turned."""
    return _pair("gpt_neox", "GPTNeoXDecoder", rotary_emb_base=10000, rotary_pct=0.25)


def falcon() -> Pair:
    """The same: one key and value head, attention and feed-forward side by side."""
    return _pair("falcon", "FalconDecoder")
