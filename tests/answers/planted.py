"""Models with a planted mistake, made from transformers' own configs and code, and not by the edits under test."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN

from sqrtdk.answers.rows import Prompt
from sqrtdk.answers.sides import Function

GEMMA = Path(__file__).parent / "gemma"
LENGTH, PROMPTS = 160, 3
Plant = Callable[[PreTrainedModel], None]

# -- by the config: the model is built again with the same weights -----------------------------------------------------


def config(**fields: Any) -> Plant:
    """Other fields of the config."""

    def plant(model: PreTrainedModel) -> None:
        own = copy.deepcopy(model.config)
        for name, value in fields.items():
            setattr(own, name, value)
        own._attn_implementation = "eager"
        built = type(model)(own)
        built.load_state_dict(model.state_dict(), strict=False)
        model.__dict__.update(built.eval().__dict__)

    return plant


def rope(**parameters: Any) -> Plant:
    """Other parameters of the rotation."""

    def plant(model: PreTrainedModel) -> None:
        config(rope_parameters=model.config.rope_parameters | parameters)(model)

    return plant


# -- by modules and weights --------------------------------------------------------------------------------------------


def each(*kinds: str) -> Callable[[Callable[[nn.Module], None]], Plant]:
    """A change of every module whose class or name ends with one of some words."""

    def of(change: Callable[[nn.Module], None]) -> Plant:
        def plant(model: PreTrainedModel) -> None:
            for name, module in list(model.named_modules()):
                if name.endswith(kinds) or type(module).__name__.endswith(kinds):
                    change(module)

        return plant

    return of


def weight(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Put another weight into a module."""
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None:
            setattr(module, name, nn.Parameter(change(getattr(module, name).detach()), requires_grad=False))


def activation(name: str) -> Plant:
    """Another activation."""
    return each("mlp")(lambda mlp: setattr(mlp, "act_fn", ACT2FN[name]))


def frequencies(change: Callable[[Tensor], Tensor]) -> Plant:
    """Other frequencies of the rotation."""

    def plant(model: PreTrainedModel) -> None:
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if name.endswith("inv_freq"):
                    setattr(module, name, change(buffer))

    return plant


def swap(first: str, second: str, of: str) -> Plant:
    """Two layers in each other's place."""

    def change(module: nn.Module) -> None:
        one, other = getattr(module, first), getattr(module, second)
        setattr(module, first, other)
        setattr(module, second, one)

    return each(of)(change)


def neighbours(model: PreTrainedModel) -> None:
    """Rows of q and k in the order of the other layout of rotations."""
    width = model.config.head_dim

    def change(module: nn.Module) -> None:
        weight(
            module, lambda old: torch.stack(old.view(-1, 2, width // 2, *old.shape[1:]).unbind(1), 2).reshape(old.shape)
        )

    each("q_proj", "k_proj", "q_norm", "k_norm")(change)(model)


def embedding_unscaled(model: PreTrainedModel) -> None:
    """No factor on the embeddings, where the model has one."""
    width = model.config.hidden_size
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output / width**0.5)


def tiled(model: PreTrainedModel) -> None:
    """Query head h reads key head h mod H: rows of q and columns of o in the other order."""
    heads, groups, width = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    order = torch.arange(heads).view(heads // groups, groups).T.flatten()
    rows = (order[:, None] * width + torch.arange(width)).flatten()
    each("q_proj")(lambda module: weight(module, lambda old: old[rows]))(model)

    def columns(module: nn.Module) -> None:
        module.weight = nn.Parameter(module.weight.detach()[:, rows], requires_grad=False)

    each("o_proj")(columns)(model)
    for module in model.modules():
        if getattr(module, "sinks", None) is not None:
            module.sinks = nn.Parameter(module.sinks.detach()[order], requires_grad=False)


def both(*plants: Plant) -> Plant:
    """Several mistakes, in this order."""

    def plant(model: PreTrainedModel) -> None:
        for one in plants:
            one(model)

    return plant


def nothing(_model: PreTrainedModel) -> None:
    """No mistake."""


# name of the cause in the report, and the mistake; those of Gemma 2
CAUSES: dict[str, tuple[str, Plant]] = {
    "scale of the head": ("scale", config(query_pre_attn_scalar=32)),
    "no scale": ("scale", config(query_pre_attn_scalar=1)),
    "scale twice": ("scale", config(query_pre_attn_scalar=576)),
    "another scale": ("scale", config(query_pre_attn_scalar=40)),
    "no softcap": ("softcap", config(attn_logit_softcapping=None)),
    "softcap 50": ("softcap", config(attn_logit_softcapping=50.0)),
    "softcap 5": ("softcap", config(attn_logit_softcapping=5.0)),
    "no window": ("window", config(sliding_window=4096)),
    "window and one": ("window", config(sliding_window=33)),
    "window less one": ("window", config(sliding_window=31)),
    "window 24": ("window", config(sliding_window=24)),
    "window everywhere": ("window", config(layer_types=["sliding_attention"] * 4)),
    "window on the others": ("window", config(layer_types=["full_attention", "sliding_attention"] * 2)),
    "base 1e6": ("rope_base", rope(rope_theta=1e6)),
    "base 3e4": ("rope_base", rope(rope_theta=3e4)),
    "linear 4": ("rope_base", rope(rope_type="linear", factor=4.0)),
    "linear 1.1": ("rope_base", rope(rope_type="linear", factor=1.1)),
    "llama3": ("rope_base", rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
    )),
    "no rotation": ("rope_missing", frequencies(torch.zeros_like)),
    "turns backwards": ("rope_layout", frequencies(torch.neg)),
    "neighbours": ("rope_layout", neighbours),
    "tiled": ("group_order", tiled),
    "eps 1e-3": ("norm_eps", config(rms_norm_eps=1e-3)),
    "one missing": ("norm_offset", each("RMSNorm")(lambda norm: weight(norm, lambda old: old - 1))),
    "one twice": ("norm_offset", each("RMSNorm")(lambda norm: weight(norm, lambda old: old + 1))),
    "exact gelu": ("activation", activation("gelu")),
    "silu": ("activation", activation("silu")),
    "gate for up": ("gate_place", swap("gate_proj", "up_proj", "MLP")),
    "embeddings unscaled": ("output_scale", embedding_unscaled),
    "no final cap": ("logit_cap", config(final_logit_softcapping=None)),
    "final cap 50": ("logit_cap", config(final_logit_softcapping=50.0)),
}  # fmt: skip


def swapped_values(model: PreTrainedModel) -> None:
    """The heads of v in another order."""
    width = model.config.head_dim
    each("v_proj")(lambda module: weight(module, lambda old: old.view(2, width, -1)[[1, 0]].reshape(old.shape)))(model)


def layer_twice(model: PreTrainedModel) -> None:
    """One layer stands in two places."""
    model.model.layers[2] = model.model.layers[1]


def swapped_layers(model: PreTrainedModel) -> None:
    """The MLPs of two layers in each other's place."""
    first, second = model.model.layers[1], model.model.layers[2]
    first.mlp, second.mlp = second.mlp, first.mlp


def head_alone(model: PreTrainedModel) -> None:
    """One head of one layer gets another head's output."""
    width = model.config.head_dim
    o_proj = model.model.layers[1].self_attn.o_proj
    columns = torch.arange(o_proj.in_features).roll(width)
    o_proj.weight = nn.Parameter(o_proj.weight.detach()[:, columns], requires_grad=False)


def doubled_gate(model: PreTrainedModel) -> None:
    """The gate of one MLP counts twice."""
    weight(model.model.layers[2].mlp.gate_proj, lambda old: old * 2)


def one_norm(model: PreTrainedModel) -> None:
    """Norms before and after the attention in each other's place."""
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm


def lost_token(model: PreTrainedModel) -> None:
    """Rows of the embedding off by one."""
    table = model.get_input_embeddings()
    table.weight = nn.Parameter(table.weight.detach().roll(1, 0), requires_grad=False)


def noisy(model: PreTrainedModel) -> None:
    """Weights of one projection from another checkpoint."""
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        weight(layer.self_attn.o_proj, lambda old: old + 0.3 * old.std() * torch.randn(old.shape, generator=generator))


OUTSIDE: dict[str, Plant] = {
    "heads of v": swapped_values, "layer twice": layer_twice, "MLPs swapped": swapped_layers,
    "heads rolled": head_alone, "a gate doubled": doubled_gate, "norms swapped": one_norm,
    "embedding off by one": lost_token, "noise": noisy,
}  # fmt: skip

PAIRS: tuple[tuple[str, str], ...] = (
    ("base 1e6", "no softcap"), ("base 1e6", "window and one"), ("base 1e6", "silu"), ("base 1e6", "scale of the head"),
    ("linear 4", "no final cap"), ("linear 4", "no softcap"), ("linear 4", "gate for up"), ("no window", "silu"),
    ("no window", "base 1e6"), ("window and one", "scale of the head"), ("window everywhere", "scale twice"),
    ("tiled", "silu"), ("tiled", "no softcap"), ("neighbours", "no final cap"), ("neighbours", "silu"),
    ("scale twice", "silu"), ("scale twice", "no final cap"), ("no softcap", "silu"), ("gate for up", "no window"),
    ("scale of the head", "no rotation"),  # a model that is built again has its rotation back
)  # fmt: skip


# -- how B is rounded --------------------------------------------------------------------------------------------------


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """B as it is."""
    return model


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """Weights of 8 bits, a float32 scale a row; products in float32."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            rounded = (module.weight.detach() / scale).round() * scale
            module.weight = nn.Parameter(rounded, requires_grad=False)
    return model


def half(model: PreTrainedModel) -> PreTrainedModel:
    """Everything in bfloat16."""
    return model.to(torch.bfloat16)


ROUNDED: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {"float32": exact, "int8": int8, "bfloat16": half}


def reference() -> PreTrainedModel:
    """The trained model, in float32."""
    return AutoModelForCausalLM.from_pretrained(GEMMA, dtype=torch.float32, attn_implementation="eager").eval()


def prompts() -> list[Prompt]:
    """Bytes of the licence: a text that does not change with these tests."""
    text = (Path(__file__).parents[2] / "LICENSE").read_bytes()
    starts = (200, 3000, 7000)
    return [tuple(text[start : start + LENGTH]) for start in starts]


@torch.no_grad()
def side(
    model: PreTrainedModel, plant: Plant, rounded: Callable[[PreTrainedModel], PreTrainedModel], top: int = 20
) -> Function:
    """A side that gives the largest log-probabilities of a copy with a mistake."""
    b = copy.deepcopy(model)
    plant(b)
    b = rounded(b.eval())

    def call(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return b(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()

    return Function(call, "planted", top)


def matrix(*axes: Iterable[Any], each: int) -> list[Any]:
    """Return the cases of a matrix that takes minutes: one in `each` for every run of CI, all others marked slow."""
    return [
        pytest.param(*case, marks=pytest.mark.full if number % each == 0 else pytest.mark.slow)
        for number, case in enumerate(itertools.product(*axes))
    ]
