"""What laws answer of a model, and a model through one attention whose mask is made of the ids' shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sqrtdk import check
from sqrtdk.audit.records import LawAnswer
from tests.laws.models import HEADS, VOCABULARY, WIDTH


def answers(model: nn.Module, inputs: Any, laws: str) -> list[LawAnswer]:
    return list(check(model.eval(), inputs, laws=laws).laws)


def only(model: nn.Module, inputs: Any, law: str) -> LawAnswer:
    (answer,) = answers(model, inputs, law)
    return answer


class Masked(nn.Module):
    """Ids to logits through one attention that says it is causal, with a mask made of the ids' shape."""

    is_causal = True

    def __init__(self, seen: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen = seen
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def attend(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if mask.dtype is torch.bool:
            out = sdpa(q, k, v, attn_mask=mask)
        else:
            out = (q @ k.mT * q.shape[-1] ** -0.5 + mask.to(q.dtype)).softmax(-1) @ v
        return self.head(x + out.transpose(1, 2).flatten(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.attend(input_ids, self.seen(input_ids.shape[1], attention_mask))
