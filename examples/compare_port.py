"""Compare a port with its original, and be told the cause of the difference.

The original is GPT-2 of transformers with random weights. The port is the same model with one line of its attention
changed, as a rewrite changes it by mistake: q is scaled, and then `scaled_dot_product_attention` scales once more.

    python examples/compare_port.py
"""

from __future__ import annotations

import copy
import types

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2Model

import sqrtdk


def written_anew(self: nn.Module, x: Tensor, **_: object) -> tuple[Tensor, None]:
    """The attention of GPT-2 in a port's own words, with the mistake if `self.twice`."""
    q, k, v = self.c_attn(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    if self.twice:
        q = q * self.head_dim**-0.5
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.c_proj(mixed.transpose(1, 2).flatten(2)), None


def port_of(original: GPT2Model, twice: bool) -> GPT2Model:
    """The same weights under the new attention."""
    port = copy.deepcopy(original)
    for block in port.h:
        block.attn.twice = twice
        block.attn.forward = types.MethodType(written_anew, block.attn)
    return port


def main() -> None:
    torch.manual_seed(0)
    original = GPT2Model(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=128, bos_token_id=0, eos_token_id=0)
    ).eval()
    ids = torch.randint(128, (2, 32))
    for twice in (True, False):
        report = sqrtdk.diff(original, port_of(original, twice), {"input_ids": ids})
        print(f"scaled twice: {twice}")
        for pair in report.pairs:
            outcome = "the same" if pair.same else "different"
            causes = ", ".join(cause.name for cause in pair.causes) or "none"
            print(f"  {pair.site_a}: {outcome}; causes: {causes}; residue {pair.residue:.1e}")
        print(f"  exit code {report.exit_code}")


if __name__ == "__main__":
    main()
