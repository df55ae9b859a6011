"""Trains a decoder as `train` does, and then disturbs it: `train_heads(cell)`.

What happens when a part fails: the loss with a share of the value channels of an attention set to 0, which is one head
of several or the same number of channels of a single head; and with Gaussian noise on the embedded text. How far the
model overfits: the loss on the text that it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.nn import MultiHeadAttention
from sqrtdk_lab._costs import one_thread
from sqrtdk_lab.claim import stable_seed
from sqrtdk_lab.training.models import Decoder
from sqrtdk_lab.training.settings import TrainingSettings, batch, stdlib_text
from sqrtdk_lab.training.train import trained

SHARES = 4  # parts of the value channels that are removed one at a time
NOISE = 1.0  # standard deviation of the noise, over the root mean square of the embedded text
ROWS, BATCHES = 32, 4  # of the text that a trained model is probed with
_text = cache(stdlib_text)

Data = tuple[Tensor, Tensor]


def train_heads(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Train one decoder, and probe it.

    Args:
        cell: JSON data, see `TrainingSettings`; the number of heads divides `SHARES`.

    Returns:
        JSON data: the entries of `train`, and `probed`, None if the run diverged: `held_out`, `training`, `noisy` and
        `removed`, losses in nats a byte of the whole model on held-out text and on the text of the training, with noise
        on the input, and the mean over all shares of channels that are removed.

    Example:
        >>> small = TrainingSettings("decoder", head_dim=4, rate=1e-2, seed=0, heads=2, steps=2, rows=2, width=8)
        >>> sorted(train_heads(small.cell())["probed"])
        ['held_out', 'noisy', 'removed', 'training']
    """
    settings = TrainingSettings.of(cell)
    assert SHARES % settings.heads == 0, "a share is a head or a part of one"
    with one_thread():
        model, result = trained(settings)
        assert isinstance(model, Decoder)
        return result | {"probed": None if result["held_out"] is None else _probe(model, settings)}


@torch.no_grad()
def _probe(model: Decoder, settings: TrainingSettings) -> dict[str, Any]:
    text, unseen = _text()
    seen = text[: settings.text_bytes] if settings.text_bytes else text
    held_out = _batches(unseen, settings)
    return {
        "held_out": _loss(model, held_out),
        "training": _loss(model, _batches(seen, settings)),
        "noisy": _with_noise(model, held_out),
        "removed": _without_a_share(model, held_out),
    }


def _batches(text: Tensor, settings: TrainingSettings) -> list[Data]:
    """Windows that are the same for every model."""
    generator = torch.Generator().manual_seed(stable_seed(["probe", settings.length]))
    return [batch(text, ROWS, settings.length, generator) for _ in range(BATCHES)]


def _loss(model: nn.Module, batches: Sequence[Data]) -> float:
    losses = [nn.functional.cross_entropy(model(text).flatten(0, 1), after.flatten()) for text, after in batches]
    return torch.stack(losses).mean().item()


def _with_noise(model: Decoder, batches: Sequence[Data]) -> float:
    generator = torch.Generator().manual_seed(stable_seed(["noise"]))

    def disturb(_module: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
        noise = torch.randn(embedded.shape, generator=generator)
        return embedded + NOISE * embedded.square().mean().sqrt() * noise

    handle = model.embed.register_forward_hook(disturb)
    try:
        return _loss(model, batches)
    finally:
        handle.remove()


def _without_a_share(model: Decoder, batches: Sequence[Data]) -> float:
    """Mean loss over all layers and shares of the channels that enter the output's projection."""
    losses = []
    for part in (part for part in model.modules() if isinstance(part, MultiHeadAttention)):
        weight = part.out_proj.weight
        kept = weight.clone()
        for channels in torch.arange(weight.shape[1]).chunk(SHARES):
            weight[:, channels] = 0.0
            losses.append(_loss(model, batches))
            weight.copy_(kept)
    return sum(losses) / len(losses)
