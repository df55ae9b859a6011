"""Small transformers in the styles that real ports are written in, and what may be done otherwise in each.

Models of one base and one seed have the same weights, whatever else differs: side B of a comparison is
`build(base, **planted)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.compare.ports.blocks import Block, Norm
from tests.compare.ports.config import BASES, LENGTH, PAD, Port, draw

BATCH, VOCABULARY = 2, 61


class Model(nn.Module):
    """Embedding, blocks, a last norm."""

    def __init__(self, ports: tuple[Port, ...], seed: int) -> None:
        super().__init__()
        port = ports[0]
        self.port = port
        self.embed = nn.Embedding(VOCABULARY, port.width)
        self.embed.weight.data = draw("embed", VOCABULARY, port.width, seed=seed)
        if port.places:
            self.places = nn.Parameter(draw("places", 4 * LENGTH, port.width, seed=seed, spread=0.3))
        self.add_module(port.names, nn.ModuleList(Block(one, number, seed) for number, one in enumerate(ports)))
        self.last = Norm(port.norm, port.width, "last", seed)

    def blocks(self) -> Iterable[Block]:
        """In order."""
        return self.get_submodule(self.port.names).children()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if self.port.embedding != 1:
            x = x * self.port.embedding
        if self.port.places:
            x = x + self.places[: x.shape[1]]
        for layer in self.blocks():
            x = layer(x, attention_mask)
        return self.last(x)


def port_of(base: str, **changes: Any) -> Port:
    """The description of a base with changes."""
    return replace(BASES[base], **changes)


def build(
    base: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    common: dict[str, Any] | None = None,
    only: Collection[int] | None = None,
    **planted: Any,
) -> nn.Module:
    """A model of the base.

    Args:
        base: of `BASES`.
        seed: of the weights.
        dtype: of the weights.
        common: fields of `Port` that both sides have.
        only: layers in which something is planted; None: all.
        planted: fields of `Port` that this side has.
    """
    plain = port_of(base, **(common or {}))
    changed = replace(plain, **planted)
    ports = tuple(changed if only is None or layer in only else plain for layer in range(plain.layers))
    return Model(ports, seed).to(dtype).eval().requires_grad_(False)


def inputs(base: str, *, batch: int = BATCH, seed: int = 0, **common: Any) -> dict[str, Tensor]:
    """Tokens, and where the port has padding an attention mask: the last sequence is short, all others are whole."""
    port = port_of(base, **common)
    generator = torch.Generator().manual_seed(seed)
    tokens = {"input_ids": torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)}
    if port.padded is None:
        return tokens
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[-1, slice(PAD) if port.padded == "left" else slice(LENGTH - PAD, None)] = 0
    return tokens | {"attention_mask": mask}
