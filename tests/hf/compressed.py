"""A small DeepSeek-V4 that compresses the keys of short inputs, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sqrtdk.models.inputs import make_inputs, move_inputs
from tests.hf.small import build, needs, small_config

LENGTH = 24
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


def deepseek_v4() -> Any:
    """Three layers, of which the second picks two of six compressed keys for each row."""
    needs("deepseek_v4")
    config: Any = small_config("deepseek_v4")
    config.compress_rates, config.index_topk = RATES, 2
    return build(config, "eager", torch.float32)


def inputs_for(model: nn.Module) -> Any:
    """Inputs of two rows, long enough to be compressed."""
    made, _ = make_inputs(model, model.config, batch=2, seq_len=LENGTH, seed=1)
    return move_inputs(made, model)
