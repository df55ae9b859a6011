"""Attentions of Keras on JAX. Keras runs on one backend a process, so that this file is a program of its own.

It prints what `check` says of each, as JSON: site, formula, verdict and number of key heads of every attention.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import torch

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.frontends import from_jax

B, T, D = 2, 10, 32
Program = Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]  # layer, inputs, inputs by name


def tokens() -> Any:
    return np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


def padded() -> Any:
    return np.arange(T) < np.array([T, 6])[:, None]


def alone(kind: type, *sizes: int, inputs: int = 2, named: dict[str, Any] | None = None, **options: Any) -> Program:
    """A layer by itself, called with queries and values."""

    def program() -> Any:
        layer = kind(*sizes, **options)
        layer.build((B, T, D), (B, T, D))
        return layer, (tokens(),) * inputs, named or {}

    return program


class Block(keras.layers.Layer):  # type: ignore[misc]
    """A norm and an attention with key heads for groups."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = keras.layers.RMSNormalization(name="norm")
        self.attn = keras.layers.GroupQueryAttention(8, 4, 2, name="attn")

    def call(self, x: Any) -> Any:
        """One layer."""
        h = self.norm(x)
        return x + self.attn(h, h, use_causal_mask=True)


class Net(keras.Model):  # type: ignore[misc]
    """Two blocks, by subclassing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(name=f"block_{at}") for at in range(2)]

    def call(self, x: Any) -> Any:
        """All layers."""
        for each in self.blocks:
            x = each(x)
        return x


def subclassed() -> Any:
    model = Net()
    model(tokens())
    return model, (tokens(),), {}


def functional() -> Any:
    ids = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(40, D, mask_zero=True, name="embed")(ids)
    x = keras.layers.MultiHeadAttention(4, 8, name="attn", flash_attention=False)(x, x, use_causal_mask=True)
    model = keras.Model(ids, keras.layers.Dense(40, name="head")(x))
    return model, (np.random.default_rng(1).integers(1, 40, (B, T)).astype(np.int32),), {}


MHA, GQA = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention
PROGRAMS: dict[str, Program] = {
    "mha": alone(MHA, 4, 8),
    "mha_causal": alone(MHA, 4, 8, flash_attention=False, named={"use_causal_mask": True}),
    "mha_padded": alone(MHA, 4, 8, named={"attention_mask": padded()[:, None]}),
    "mha_dropout": alone(MHA, 4, 8, dropout=0.1),
    "gqa": alone(GQA, 8, 4, 2),
    "gqa_causal": alone(GQA, 8, 4, 1, named={"use_causal_mask": True}),
    "subclassed": subclassed,
    "functional": functional,
}


def told(name: str) -> dict[str, Any]:
    layer, inputs, named = PROGRAMS[name]()
    module = from_jax(layer, None, *inputs, **named)
    arguments = dict(zip(_names(module), (*inputs, *named.values()), strict=False))
    arguments = {key: torch.tensor(x) if isinstance(x, np.ndarray) else x for key, x in arguments.items()}
    report = sqrtdk.check(module, arguments, laws="none")
    calls = [[one.call.site, one.call.formula, one.verdict, one.call.kv_heads] for one in report.calls]
    at = str(report.calls[0].call.softmax_at)
    return {"calls": calls, "at": at, "parameters": [name for name, _ in module.named_parameters()]}


def _names(module: torch.nn.Module) -> list[str]:
    import inspect

    return list(inspect.signature(module.forward).parameters)


def refused() -> str:
    try:
        from_jax(keras.layers.Dense(3), None, tokens())
    except ModelError as error:
        return f"{error.message} {error.hint}"
    return ""


def main() -> None:
    """Print the answers."""
    assert keras.backend.backend() == "jax"
    assert jax.default_backend() == "cpu"
    answers = {name: told(name) for name in PROGRAMS}
    json.dump({"programs": answers, "unbuilt": refused()}, sys.stdout)


if __name__ == "__main__":
    main()
