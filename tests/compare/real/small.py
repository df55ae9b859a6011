"""Small Hugging Face models with random weights, what ports of them are given, and how far rounding may take them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Any, ...] | dict[str, Any]

LENGTH = 24  # longer than the windows of the small models, which are 8
DRAWS = 4
SIDES = 2.0  # both round


def hugging_face(family: str, **fields: Any) -> nn.Module:
    """A model of `families`, with other values for some fields of its config, eager, with weights that matter.

    Every parameter is random, those of norms and biases too: a port that loses one can't agree by chance.
    """
    from tests.hf import families

    config = families.FAMILIES[family]()
    for name, value in fields.items():
        setattr(config, name, value)
    return randomised(families.build(config, "eager"), offset_norms=not family.startswith("gemma"))


def randomised(model: nn.Module, offset_norms: bool = True) -> nn.Module:
    """The model in eval mode with every parameter drawn anew; `offset_norms`: its norms' gains are about 1, not 0."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = parameter.ndim == 1 and name.endswith("weight") and offset_norms
            parameter.copy_(0.2 * torch.randn_like(parameter) + float(gain))
    return model.eval()


def tokens() -> Tensor:
    """Two sequences without padding, (2, L)."""
    return torch.randint(3, 160, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@contextmanager
def saved(model: nn.Module) -> Iterator[Path]:
    """A folder with the model as `save_pretrained` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield Path(folder)


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """What a side gives for its inputs: logits where it has a head, else the last hidden states."""
    with torch.no_grad():
        result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    if isinstance(result, dict) and "sequence_output" in result:
        return result["sequence_output"]
    for name in ("logits", "last_hidden_state", "last_hidden_layer_state", "sample"):
        if hasattr(result, name):
            return getattr(result, name)
    return result[0] if isinstance(result, tuple) else result


def rounding(model: nn.Module, inputs: Inputs) -> float:
    """How far two results may be apart by rounding: what they do when every weight moves by float32's last place.

    Two programs of one formula round at other places; what a rounding there does to the result is of the size of what
    a rounding of the weights does, which can be tried.
    """
    expected, largest = call(model, inputs), 0.0
    generator = torch.Generator().manual_seed(2)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(DRAWS):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.copy_(weights[name] * (1 + signs * torch.finfo(torch.float32).eps))
        largest = max(largest, (call(model, inputs) - expected).abs().max().item())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return SIDES * largest
