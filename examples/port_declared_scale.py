"""Port a model whose config declares its scale: Granite has `attention_multiplier` in the place of 1/sqrt(head_dim).

The port below reads the field. Without that line it would apply the textbook's scale to weights that were trained with
another one: the outputs are close enough to look right, and wrong.

    python examples/port_declared_scale.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GraniteConfig

import sqrtdk


class Attention(nn.Module):
    """Causal attention of a port, with the scale of the config or without it."""

    def __init__(self, config: GraniteConfig, follows_config: bool) -> None:
        super().__init__()
        self.config = config
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.scale = config.attention_multiplier if follows_config else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(mixed.transpose(1, 2).flatten(2))


def main() -> None:
    config = GraniteConfig(hidden_size=128, num_attention_heads=4, attention_multiplier=1 / 64)  # head_dim is 32
    x = torch.randn(1, 48, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for follows_config in (True, False):
        torch.manual_seed(0)
        report = sqrtdk.check(nn.Sequential(Attention(config, follows_config)), x)
        (judged,) = report.calls
        print(f"reads the config: {follows_config}")
        ratio = judged.call.scale.ratio
        print(f"  {judged.formula}: ratio {ratio:.3f}, {judged.verdict}, exit code {report.exit_code}")
        for finding in report.findings:
            if finding.rule in ("scale_ledger", "declared_vs_actual"):
                print(f"  {finding.severity}: {finding.message}\n  fix: {finding.fix}")


if __name__ == "__main__":
    main()
