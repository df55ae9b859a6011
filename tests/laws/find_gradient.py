"""A program: asks the law `gradient` of an attention of the package on the path, `find_gradient.py IMPL CALL`.

Prints a line for each fault, "code: operands", and nothing if the backward pass is right.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.audit.records import BROKEN, KEPT
from sqrtdk.laws import ask
from sqrtdk.messages import Message

HEADS, WIDTH, FEATURES, LENGTH = 4, 16, 64, 150  # more than a tile of 128 rows of the compiled kernel
SMALL = 40  # in Triton's interpreter: a tile and a half
CALLS = ("plain", "groups", "softcap", "lse", "sinks", "bias", "scale", "ring")


class Attention(nn.Module):
    """Projections around one call of `sqrtdk.attention`."""

    def __init__(self, impl: str, call: str, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.impl, self.call = impl, call
        key_heads = 2 if call == "groups" else HEADS
        self.q, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.k, self.v = (nn.Linear(FEATURES, key_heads * WIDTH) for _ in range(2))
        if call == "sinks":
            self.sinks = nn.Parameter(torch.randn(HEADS))
        if call == "bias":
            self.bias = nn.Parameter(torch.randn(HEADS, length, length) * 0.3)
        if call == "scale":
            self.tau = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.call == "ring":
            out, aux = sqrtdk.ring_attention(q, k, v, is_causal=True, return_aux=True)
            return out * torch.sigmoid(aux.lse)[..., None]
        if self.call == "lse":
            out, aux = sqrtdk.attention(q, k, v, is_causal=True, return_aux=True, impl=self.impl)
            return out * torch.sigmoid(aux.lse)[..., None]
        options = {
            "groups": {"enable_gqa": True},
            "softcap": {"softcap": 1.0},
            "sinks": {"sinks": getattr(self, "sinks", None)},
            "bias": {"attn_mask": getattr(self, "bias", None)},
            "scale": {"scale": getattr(self, "tau", None)},
        }.get(self.call, {})
        return sqrtdk.attention(q, k, v, is_causal=True, impl=self.impl, **options)


def main(impl: str, call: str) -> int:
    """Ask the law; the exit code is 1 if it is broken, 0 if it is kept, 2 if it was not asked."""
    torch.set_num_threads(1)
    length = SMALL if impl == "triton" else LENGTH
    x = torch.randn(2, length, FEATURES, generator=torch.Generator().manual_seed(0))
    answers = ask(Attention(impl, call, length).train(), {"x": x}, "gradient").answers
    for answer in answers:
        text = answer.reason
        if answer.state == BROKEN and isinstance(text, Message):
            text = text.values["what"] if text.id.endswith(".at") else text
            print(f"{text.id.rpartition('.')[2]}: {text.values['operands']}")
        elif text:
            print(f"{answer.state}: {text}", file=sys.stderr)
    states = {answer.state for answer in answers}
    return 1 if BROKEN in states else 0 if states == {KEPT} else 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
