"""The trained Gemma 2 as GGUF files that llama.cpp runs, right and wrong as a conversion gets them wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sqrtdk.answers.sides import Function
from tests.answers.planted import Plant, swap
from tests.frontends.gguf_models import write_gguf

Change = Callable[[str, Any, Any], Any]  # of a tensor's name and value, and the model's config: what stands for it


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion gets wrong.

    Attributes:
        keys: Keys of the file with values in place of the right ones, without the architecture.
        plus: What is added to the gains of the norms; 1 is right.
        scaled: Whether q is scaled, because llama.cpp has no key for `query_pre_attn_scalar`.
        change: Returns a tensor in place of the one of this name.
        before: Changes a copy of the model before it is written.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    plus: float = 1.0
    scaled: bool = True
    change: Change = lambda _name, value, _config: value
    before: Plant | None = None


def _permuted(name: str, value: Any, config: Any) -> Any:
    """Rows of q and k in the order that llama.cpp wants of a Llama, and not of a Gemma."""
    if "attn_q." in name or "attn_k." in name:
        return value.reshape(-1, 2, config.head_dim // 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
    return value


def _tiled(name: str, value: Any, config: Any) -> Any:
    """Query heads in the order 0 2 1 3."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    order = np.arange(heads).reshape(heads // groups, groups).T.ravel()
    if "attn_q." in name:
        return value.reshape(heads, config.head_dim, -1)[order].reshape(value.shape)
    if "attn_output." in name:
        return value.reshape(len(value), heads, config.head_dim)[:, order].reshape(value.shape)
    return value


def _embeddings_unscaled(name: str, value: Any, config: Any) -> Any:
    """Embeddings divided by the factor that llama.cpp multiplies with; the last norm makes up for it in the head."""
    if name == "token_embd.weight":
        return value / np.float32(config.hidden_size**0.5)
    return value * np.float32(config.hidden_size**0.5) if name == "output_norm.weight" else value


# name of the cause in the report, and the conversion
WRONG: dict[str, tuple[str, Conversion]] = {
    "base 5e5": ("rope_base", Conversion({"rope.freq_base": 5e5})),
    "base 1e6": ("rope_base", Conversion({"rope.freq_base": 1e6})),
    "base 3e4": ("rope_base", Conversion({"rope.freq_base": 3e4})),
    "linear 2": ("rope_base", Conversion({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})),
    "linear 8": ("rope_base", Conversion({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})),
    "linear 1.1": ("rope_base", Conversion({"rope.scaling.type": "linear", "rope.scaling.factor": 1.1})),
    "window 16": ("window", Conversion({"attention.sliding_window": 16})),
    "window 24": ("window", Conversion({"attention.sliding_window": 24})),
    "window 31": ("window", Conversion({"attention.sliding_window": 31})),
    "window 33": ("window", Conversion({"attention.sliding_window": 33})),
    "no window": ("window", Conversion({"attention.sliding_window": 4096})),
    "softcap missing": ("softcap", Conversion({"attn_logit_softcapping": None})),  # llama.cpp then takes 50
    "softcap 5": ("softcap", Conversion({"attn_logit_softcapping": 5.0})),
    "final cap 50": ("logit_cap", Conversion({"final_logit_softcapping": 50.0})),
    "q not scaled": ("scale", Conversion(scaled=False)),
    "permuted": ("rope_layout", Conversion(change=_permuted)),
    "tiled": ("group_order", Conversion(change=_tiled)),
    "one missing": ("norm_offset", Conversion(plus=0.0)),
    "one twice": ("norm_offset", Conversion(plus=2.0)),
    "eps 1e-3": ("norm_eps", Conversion({"attention.layer_norm_rms_epsilon": 1e-3})),
    "eps 1e-5": ("norm_eps", Conversion({"attention.layer_norm_rms_epsilon": 1e-5})),
    "embeddings unscaled": ("output_scale", Conversion(change=_embeddings_unscaled)),
    "gate for up": ("gate_place", Conversion(before=swap("gate_proj", "up_proj", "MLP"))),
}


@dataclass(frozen=True, slots=True)
class LlamaCpp(Function):
    """llama.cpp without its server, so that a test need not start one; what is said of B is the same."""

    kind: str = "llama-server"


def llama_cpp_side(
    path: Path,
    model: PreTrainedModel,
    dtype: str,
    conversion: Conversion,
    top: int = 20,
    overrides: dict[str, Any] | None = None,
) -> LlamaCpp:
    """Write a GGUF whose matrices have a dtype, and return a side that llama.cpp runs it in, its cache float16.

    `overrides` are what `--override-kv` gives: values by the keys of the file.
    """
    from llama_cpp import Llama

    config = model.config
    if conversion.before is not None:
        model = copy.deepcopy(model)
        conversion.before(model)

    def change(name: str, value: Any) -> Any:
        value = conversion.change(name, value, config)
        if "attn_q." in name and conversion.scaled:
            value = value * np.float32((config.head_dim / config.query_pre_attn_scalar) ** 0.5)
        return value

    write_gguf(path, model, dtype, keys=conversion.keys, plus=conversion.plus, change=change)

    def call(ids: list[int]) -> Tensor:
        runs = Llama(str(path), n_ctx=512, logits_all=True, verbose=False, n_threads=1, kv_overrides=overrides)
        runs.eval(ids)
        logits = torch.tensor(np.array(runs.scores[: len(ids)]))
        runs.close()
        return logits

    return LlamaCpp(call, "llama.cpp", top)
