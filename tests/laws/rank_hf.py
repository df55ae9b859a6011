"""A transformers model whose sequence is cut over ranks, with three faults that users reported, rebuilt.

accelerate 4177: a sliding window is dropped for is_causal. axolotl 3608 and 4002: packed documents see one another
through a ring. TransformerEngine 2349: the positions of segments are not cut, so that each rank has the first ones.

On one process it is transformers' own: SDPA with its masks, which find the documents in `position_ids`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

from sqrtdk.models.extras import attention_registers
from tests.laws.rank_models import Gather, packed_inputs, places, ranks

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 6,
}  # fmt: skip


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """The keys of all ranks; places and documents are those that the model around it has left in the config."""
    at, documents, fault = module.config.of_rank
    key, value = (Gather.apply(part, 2, False) for part in (key, value))
    keys, key_documents = (Gather.apply(part, 0, False) for part in (at, documents))
    gap = at[:, None] - keys[None]
    seen = gap >= 0
    if fault != "window":
        seen = seen & (gap < module.config.sliding_window)
    if fault != "documents":
        seen = seen & (documents[:, None] == key_documents[None])
    o = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return o.transpose(1, 2).contiguous(), None


class Packed(nn.Module):
    """A Mistral over a row of documents, of which a rank has some tokens."""

    def __init__(self, fault: str, window: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        size = ranks()[1]
        functions, masks = attention_registers()
        functions.register("over_ranks", attend)
        masks.register("over_ranks", lambda *args, **options: None)
        config = MistralConfig(**SIZES | ({} if window is None else {"sliding_window": window}))
        config._attn_implementation = "over_ranks" if size > 1 else "sdpa"
        self.model = MistralForCausalLM(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rank, size = ranks()
        if size > 1:
            at = torch.arange(input_ids.shape[1]) + rank * input_ids.shape[1]
            self.model.config.of_rank = (at, at - position_ids[0], self.fault)
            if self.fault == "positions":
                position_ids = torch.arange(input_ids.shape[1])[None]
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits


def mistral(fault: str = "", first: int = 20, window: int | None = None) -> tuple[nn.Module, Any]:
    rank, size = ranks()
    whole = packed_inputs(first)
    mine = places("whole", rank, size)
    inputs = {name: whole[name][:, mine] for name in ("input_ids", "position_ids")}
    return Packed(fault, window).eval(), inputs


RIGHT: dict[str, Callable[[], Any]] = {"mistral": mistral}
FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mistral_window": ("window", partial(mistral, "window")),
    "mistral_long_window": ("window", partial(mistral, "window", window=40)),  # beyond the inputs: others are made
    "mistral_documents": ("documents", partial(mistral, "documents", window=64)),
    "mistral_positions": ("positions", partial(mistral, "positions", first=32)),
}


def __getattr__(name: str) -> Callable[[], Any]:
    """The factories by name."""
    if name in RIGHT:
        return RIGHT[name]
    if name in FAULTS:
        return FAULTS[name][1]
    raise AttributeError(name)
