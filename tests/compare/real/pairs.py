"""Real pairs: a Hugging Face model and its port in another released package, with the same weights.

`PAIRS` says of each what is right: the cause by which they differ, or that they are the same. Each
`pair_NAME() -> (a, b, inputs_a, inputs_b)` is `PAIRS[NAME].build()`; inputs are a tuple of arguments or a dict.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from tests.compare.real.small import Inputs

Pair = tuple[nn.Module, nn.Module, Inputs, Inputs]


@dataclass(frozen=True, slots=True)
class Port:
    """One pair.

    Attributes:
        package: module that it needs.
        module: of this folder, that builds it.
        function: of the module.
        cause: why it differs; None where both are the same.
        sites: numbers of the calls with a difference of their own; the others follow from them.
        relabels: by what the attentions differ that the weights around them take back: the models are the same.
    """

    package: str
    module: str
    function: str
    cause: str | None = None
    sites: tuple[int, ...] = ()
    relabels: tuple[str, ...] = ()

    def home(self) -> ModuleType:
        """The module that builds it."""
        return importlib.import_module(f"tests.compare.real.{self.module}")

    def build(self) -> Pair:
        """Both models and their inputs."""
        pair: Pair = getattr(self.home(), self.function)()
        return pair

    @property
    def repair(self) -> Callable[[nn.Module], None] | None:
        """What takes the cause out of B, where that can be done."""
        return getattr(self.home(), f"repair_{self.function}", None)


BOTH = (0, 1)
BLIND = "rows that see no key"  # differ, and a comparison leaves them out: they are no tokens'
# Heads and channels of q, k and v in another order, which rows of their weights and columns of the output's have too.
RELABELS = ("group_order", "head_order", "rope_layout")

PAIRS: dict[str, Port] = {
    "llama_keras_hub": Port("keras_hub", "ports_keras_hub", "llama"),
    "llama_padding_keras_hub": Port("keras_hub", "ports_keras_hub", "llama_padding"),
    "gpt2_padding_keras_hub": Port("keras_hub", "ports_keras_hub", "gpt2_padding", BLIND),
    "gpt2_keras_hub": Port("keras_hub", "ports_keras_hub", "gpt2"),
    "bert_keras_hub": Port("keras_hub", "ports_keras_hub", "bert"),
    "bert_gelu_keras_hub": Port("keras_hub", "ports_keras_hub", "bert_gelu", "input", (1,)),
    "gemma2_keras_hub": Port("keras_hub", "ports_keras_hub", "gemma2"),
    "gemma2_scalar_keras_hub": Port("keras_hub", "ports_keras_hub", "gemma2_scalar", "scale", BOTH),
    "qwen3_keras_hub": Port("keras_hub", "ports_keras_hub", "qwen3", "qk_norm_eps", BOTH),
    "llama_litgpt": Port("litgpt", "ports_litgpt", "llama"),
    "qwen3_litgpt": Port("litgpt", "ports_litgpt", "qwen3"),
    "gemma2_litgpt": Port("litgpt", "ports_litgpt", "gemma2"),
    "bert_curated": Port("curated_transformers", "ports_curated", "bert"),
    "bert_padding_curated": Port("curated_transformers", "ports_curated", "bert_padding"),
    "roberta_curated": Port("curated_transformers", "ports_curated", "roberta"),
    "llama_curated": Port("curated_transformers", "ports_curated", "llama"),
    "gpt_neox_curated": Port("curated_transformers", "ports_curated", "gpt_neox"),
    "falcon_curated": Port("curated_transformers", "ports_curated", "falcon"),
    "llama_fms": Port("fms", "ports_fms", "llama"),
    "granite_fms": Port("fms", "ports_fms", "granite"),
    "qwen3_fms": Port("fms", "ports_fms", "qwen3"),
    "qwen3_base_fms": Port("fms", "ports_fms", "qwen3_base", "rope_base", BOTH),
    "bert_fms": Port("fms", "ports_fms", "bert"),
    "roberta_fms": Port("fms", "ports_fms", "roberta"),
    "roberta_padding_fms": Port("fms", "ports_fms", "roberta_padding", "input", (0,)),
    "llama_x_transformers": Port("x_transformers", "ports_x_transformers", "llama", relabels=RELABELS),
    "llama_groups_x_transformers": Port("x_transformers", "ports_x_transformers", "llama_groups", "group_order", BOTH),
    "t5_x_transformers": Port("x_transformers", "ports_x_transformers", "t5"),
    "diffusers_scale_qk": Port("diffusers", "variants", "diffusers_processors", "scale", (0,)),
    "diffusers_scaled": Port("diffusers", "variants", "diffusers_scaled"),
    "protenix_efficient": Port("protenix", "variants", "protenix_efficient", "scale", (0,)),
}
