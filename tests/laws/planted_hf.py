"""Errors planted in models of transformers by hooks on their modules, whatever implementation of attention runs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

_ATTENTION = re.compile(r"(self_attn|attention\.self|self_attention|SelfAttention|attn|attention)$")


def plant(model: nn.Module, wrong: str) -> int:
    """Plant an error; the number of modules that have it."""
    count = 0
    for path, module in model.named_modules():
        if wrong == "padding" and _inner(model, path):
            module.register_forward_pre_hook(_ones, with_kwargs=True)
        elif wrong == "batch" and _ATTENTION.search(path):
            module.register_forward_hook(_mixed)
        elif wrong == "future" and _ATTENTION.search(path) and "encoder" not in path.replace("decoder", ""):
            module.register_forward_pre_hook(_unmasked, with_kwargs=True)
        else:
            continue
        count += 1
    return count


def _inner(model: nn.Module, path: str) -> bool:
    """The model inside one with a head: its own forward makes the masks."""
    return path == getattr(model, "base_model_prefix", "") and path != ""


def _ones(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    mask = kwargs.get("attention_mask")
    return args, {**kwargs, "attention_mask": None if mask is None else torch.ones_like(mask)}


def _unmasked(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A mask that shows every key."""
    states = kwargs.get("hidden_states", args[0] if args else None)
    batch, length = states.shape[:2]
    return args, {**kwargs, "attention_mask": torch.zeros(batch, 1, length, length)}


def _mixed(_: nn.Module, args: Any, output: Any) -> Any:
    """The mean over the batch is added: as a norm over the wrong axis does."""
    first = output[0] if isinstance(output, tuple) else output
    mixed = first + first.mean(0, keepdim=True)
    return (mixed, *output[1:]) if isinstance(output, tuple) else mixed
