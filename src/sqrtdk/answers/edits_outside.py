"""Edits outside attention: norms, activations, factors of embeddings and residuals, the final cap, the head, biases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sqrtdk.answers.edit import Change, Edit, edits_of_number, put_parameter
from sqrtdk.answers.edited import Edited

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-3)
EPS_ATTRIBUTES = ("eps", "variance_epsilon", "epsilon")
NORMS_OF_QK = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
MULTIPLIERS = {"residual_multiplier": "residual_factor", "logits_scaling": "logits_divisor"}  # of a config: Granite
FINAL_CAP = "final_logit_softcapping"
OTHER_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu")


def norms(copy: Edited) -> Iterator[nn.Module]:
    """Yield the modules that normalise, by their names."""
    for name, module in copy.module.named_modules():
        if "norm" in type(module).__name__.lower() or "norm" in name.rpartition(".")[2].lower():
            yield module


def epsilons(copy: Edited, _length: int) -> Iterator[Edit]:
    """Other eps in the norms."""
    found = (getattr(norm, name, None) for norm in norms(copy) for name in EPS_ATTRIBUTES)
    own = next((float(value) for value in found if isinstance(value, float)), None)

    def change(value: float) -> Change:
        def apply(copy: Edited) -> None:
            for norm in norms(copy):
                for name in EPS_ATTRIBUTES:
                    if isinstance(getattr(norm, name, None), float):
                        setattr(norm, name, value)

        return apply

    if own is not None:
        yield from edits_of_number("norm_eps", "norm_eps", own, EPSILONS, (1e-12, 1.0), change)


def gain_offsets(copy: Edited, _length: int) -> Iterator[Edit]:
    """A one that is missing from the norms' gains, or added twice."""

    def change(by: float) -> Change:
        def apply(copy: Edited) -> None:
            for norm in norms(copy):
                put_parameter(norm, "weight", lambda old: old + by)

        return apply

    if any(isinstance(getattr(norm, "weight", None), Tensor) for norm in norms(copy)):
        yield Edit("norm_offset", "norm_gain", "its_own", "gain_minus_one", change(-1.0))
        yield Edit("norm_offset", "norm_gain", "its_own", "gain_plus_one", change(1.0))


def qk_norms(copy: Edited, _length: int) -> Iterator[Edit]:
    """No norm of q and k."""
    names = [name for name, _ in copy.module.named_modules() if name.rpartition(".")[2] in NORMS_OF_QK]

    def apply(copy: Edited) -> None:
        for name in names:
            parent, _, last = name.rpartition(".")
            setattr(copy.module.get_submodule(parent), last, nn.Identity())

    if names:
        yield Edit("qk_norm", "qk_norm", "applied", None, apply)


def embedding_factors(copy: Edited, _length: int) -> Iterator[Edit]:
    """Embeddings times sqrt(D), or divided by it, or by a factor of the config."""
    table = copy.embedding
    if table is None or not copy.width:
        return
    own = getattr(copy.config, "embedding_multiplier", None)

    def change(by: float) -> Change:
        def apply(copy: Edited) -> None:
            assert copy.embedding is not None
            copy.embedding.register_forward_hook(lambda _module, _inputs, output: output * by)

        return apply

    values = [copy.width**0.5, copy.width**-0.5, *([1 / own] if own else [])]
    yield from edits_of_number("output_scale", "embedding_factor", 1.0, values, (1e-3, 1e3), change)


def config_multipliers(copy: Edited, _length: int) -> Iterator[Edit]:
    """Multipliers of the config that are left out."""
    for field, what in MULTIPLIERS.items():
        own = getattr(copy.config, field, None)
        if isinstance(own, float | int) and own != 1:

            def apply(copy: Edited, field: str = field) -> None:
                for holder in (copy.config, *copy.module.modules()):
                    if isinstance(getattr(holder, field, None), float | int):
                        setattr(holder, field, 1.0)

            yield Edit("multiplier", what, float(own), 1.0, apply)


def final_caps(copy: Edited, _length: int) -> Iterator[Edit]:
    """No cap on the model's logits, or another one."""
    if not hasattr(copy.config, FINAL_CAP):
        return
    own = getattr(copy.config, FINAL_CAP)

    def change(value: float | None) -> Change:
        return lambda copy: setattr(copy.config, FINAL_CAP, value)

    if own is not None:
        yield Edit("logit_cap", "final_cap", own, None, change(None))
    yield from edits_of_number("logit_cap", "final_cap", own, (30.0, 50.0), (1.0, 400.0), change)


def activations(copy: Edited, _length: int) -> Iterator[Edit]:
    """Another activation in the MLPs."""
    from transformers.activations import ACT2FN

    fields = ("hidden_activation", "hidden_act", "activation_function")
    own = next((name for name in (getattr(copy.config, field, None) for field in fields) if name in ACT2FN), None)
    if own is None:
        return
    kind = type(ACT2FN[own])
    for name in OTHER_ACTIVATIONS:
        if name == own or (type(ACT2FN[name]) is kind and name != "gelu_pytorch_tanh"):
            continue

        def apply(copy: Edited, name: str = name) -> None:
            for module in list(copy.module.modules()):
                for child, part in list(module.named_children()):
                    if type(part) is kind:
                        setattr(module, child, ACT2FN[name])

        yield Edit("activation", "activation", own, name, apply)


def gates(copy: Edited, _length: int) -> Iterator[Edit]:
    """The gate and what it multiplies in each other's place: up_proj for gate_proj, or the halves of gate_up_proj."""
    pairs = [
        name
        for name, module in copy.module.named_modules()
        if isinstance(getattr(module, "gate_proj", None), nn.Linear)
        and isinstance(getattr(module, "up_proj", None), nn.Linear)
    ]
    fused = [
        name
        for name, module in copy.module.named_modules()
        if name.rpartition(".")[2] == "gate_up_proj" and isinstance(module, nn.Linear)
    ]

    def apply(copy: Edited) -> None:
        for name in pairs:
            module = copy.module.get_submodule(name)
            module.gate_proj, module.up_proj = module.up_proj, module.gate_proj
        for name in fused:
            for part in ("weight", "bias"):
                put_parameter(copy.module.get_submodule(name), part, lambda old: torch.cat(old.chunk(2)[::-1]))

    if pairs or fused:
        yield Edit("gate_place", "gate", "its_own", "swapped", apply)


def heads_tied(copy: Edited, _length: int) -> Iterator[Edit]:
    """The embedding as head, where the model has a head of its own."""
    head, embedding = copy.head, copy.embedding
    if (
        head is None
        or embedding is None
        or head.weight is embedding.weight
        or head.weight.shape != embedding.weight.shape
    ):
        return

    def apply(copy: Edited) -> None:
        assert copy.head is not None
        assert copy.embedding is not None
        copy.head.weight = copy.embedding.weight

    yield Edit("tied_head", "head", "its_own", "embedding", apply)


def biases(copy: Edited, _length: int) -> Iterator[Edit]:
    """Biases that are left out: of the projections of attention, of other layers."""
    attentions = {fact.name for fact in copy.facts}
    biased = {name: module for name, module in copy.module.named_modules() if _has_bias(module)}
    inside = [name for name in biased if any(name.startswith(f"{attention}.") for attention in attentions)]
    outside = [
        name for name, module in biased.items() if name not in inside and "norm" not in type(module).__name__.lower()
    ]
    for cause, what, names in (
        ("projection_bias", "projection_bias", inside), ("layer_bias", "layer_bias", outside)
    ):  # fmt: skip

        def apply(copy: Edited, names: list[str] = names) -> None:
            for name in names:
                put_parameter(copy.module.get_submodule(name), "bias", torch.zeros_like)

        if names:
            yield Edit(cause, what, "added", None, apply)


def swapped_projections(copy: Edited, _length: int) -> Iterator[Edit]:
    """The weights of q for those of k, where their shapes are equal."""
    names = [name for name, module in copy.module.named_modules() if _same_projections(module)]

    def apply(copy: Edited) -> None:
        for name in names:
            module = copy.module.get_submodule(name)
            module.q_proj, module.k_proj = module.k_proj, module.q_proj

    if names:
        yield Edit("weights_elsewhere", "q_and_k", "its_own", "swapped", apply)


def _same_projections(module: nn.Module) -> bool:
    q, k = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
    return isinstance(q, nn.Linear) and isinstance(k, nn.Linear) and q.weight.shape == k.weight.shape


def _has_bias(module: nn.Module) -> bool:
    bias = getattr(module, "bias", None)
    return isinstance(bias, Tensor) and isinstance(getattr(module, "weight", None), Tensor) and bool(bias.any())
