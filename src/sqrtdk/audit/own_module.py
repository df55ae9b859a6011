"""Prepares a user's own module for a run, with or without inputs, on its device or on meta."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_buffers, named_modules, unwrapped
from sqrtdk.audit.configs import field, own_fields
from sqrtdk.audit.guard import current, offers_choice, random_state, refusal
from sqrtdk.errors import INTERRUPTS, InvalidTypeError, InvalidValueError, ModelError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.inputs import guess_inputs, without_numbers
from sqrtdk.models.modules import forward_arguments, refuse_odd
from sqrtdk.models.options import ATTN, LoadOptions
from sqrtdk.models.records import AttnBuild, Inputs, LoadedModel
from sqrtdk.models.run import on_cpu_by_default
from sqrtdk.tracing.tape.graph import MOST_CONSTANT_ELEMENTS

_HIDES = -1e3  # an additive mask hides a key by a number below this


def as_inputs(inputs: Any) -> Inputs:
    """Return inputs in the form in which forward is called: a dict of arguments by name, or a tuple by position.

    A single tensor becomes a tuple of one, a list a tuple, and any mapping a dict.

    Raises:
        InvalidTypeError: `inputs` is of another type.
    """
    if isinstance(inputs, Tensor):
        return (inputs,)
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs)
    raise InvalidTypeError(f"inputs are a {type(inputs).__name__}", hint="Give a dict, a tuple, or one tensor.")


def refuse_empty(inputs: Inputs) -> None:
    """Raise if an input is empty, and name it.

    Raises:
        ModelError: A tensor has no elements.
    """
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    empty = [f"{name} {tuple(x.shape)}" for name, x in named if isinstance(x, Tensor) and not x.numel()]
    if empty:
        raise ModelError(
            f"there is nothing to measure: the inputs are empty, {', '.join(empty)}",
            hint="Give inputs with at least one row and one token.",
        )


def _moved(inputs: Inputs) -> Inputs:
    def move(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_nested and value.layout is torch.strided:
            raise ModelError(
                "a nested tensor of the strided layout can't be on the meta device",
                hint="Give it in the jagged layout, or check without static.",
            )
        return value.to("meta") if isinstance(value, Tensor) else value

    return {k: move(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(move, inputs))


def _without_full_masks(inputs: Inputs, model: nn.Module) -> Inputs:
    """Drop optional masks of ones: they hide nothing, which can't be seen once they are on meta."""
    if not isinstance(inputs, dict):
        return inputs
    needed = forward_arguments(model)

    def hides_nothing(name: str, value: Any) -> bool:
        if not name.endswith("attention_mask") or needed.get(name, True) or not isinstance(value, Tensor):
            return False
        return value.dim() == 2 and not value.is_meta and bool((value == 1).all())

    return {name: value for name, value in inputs.items() if not hides_nothing(name, value)}


def _to_meta(model: nn.Module) -> nn.Module:
    """Copy the model to the meta device without copying its weights.

    0-d floating-point buffers keep their value, because a scale may be stored in one: `register_buffer("scale", ...)`.
    """
    scripted = [path or "the model" for path, m in named_modules(model) if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise ModelError(
            f"{type(model).__name__} can't be copied to the meta device: {scripted[0]} is TorchScript",
            hint="Check it with its weights, without static, or give the Python module that was scripted.",
        )

    def twin_of(tensor: Tensor) -> Tensor:
        known = tensor.dim() == 0 and tensor.is_floating_point() and not tensor.is_meta
        return tensor.detach().cpu().clone() if known else torch.empty_like(tensor, device="meta", requires_grad=False)

    # deepcopy takes the tensors in `memo` in place of the originals, so that no weight is copied.
    attributes = (
        value for module in model.modules() for value in own_fields(module).values() if isinstance(value, Tensor)
    )
    memo: dict[int, Any] = {id(tensor): twin_of(tensor) for tensor in (*attributes, *model.buffers())}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    try:
        twin = copy.deepcopy(model, memo)
        if not isinstance(twin, nn.Module):
            raise TypeError(f"its copy is a {type(twin).__name__}")
        choose: Any = field(twin, "set_experts_implementation")
        if choose is not None and field(model, "config._experts_implementation") is not None:
            choose("batched_mm")  # other implementations route by values, which meta tensors lack
        return twin
    except INTERRUPTS:
        raise
    except BaseException as error:  # a user's __deepcopy__ may raise anything
        raise ModelError(
            f"{type(model).__name__} can't be copied to the meta device: {kind_and_text(error)}",
            hint="Build it under `with torch.device('meta')` and check that.",
        ) from error


def _masks(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module whose values are those of a mask: 0 and 1, or 0 and a large negative number."""

    def is_mask(value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.is_meta or value.is_nested:
            return False
        if value.dim() < 2 or min(value.shape[-2:]) < 2 or value.numel() > MOST_CONSTANT_ELEMENTS or value.is_complex():
            return False
        return value.dtype is torch.bool or bool(((value == 0) | (value == 1) | (value <= _HIDES)).all())

    named = [(path, own_fields(module)) for path, module in named_modules(model)]
    tensors = {f"{path}.{name}".lstrip("."): x for path, values in named for name, x in values.items()}
    return {name: value for name, value in {**tensors, **dict(named_buffers(model))}.items() if is_mask(value)}


def from_module(model: nn.Module, inputs: Inputs | None, options: LoadOptions) -> LoadedModel:
    """Return a module with its inputs as a `LoadedModel`.

    Args:
        model: The module.
        inputs: Its inputs; None makes some from its config.
        options: With `static`, the result is a copy on the meta device; so it is if the inputs have no values.

    Raises:
        InvalidValueError: An option applies to names only, or there are no inputs and no config to make them from.
        ModelError: No inputs or no copy can be made.
    """
    if wrong := options.for_names:
        raise InvalidValueError(
            f"{', '.join(wrong)} given with a module", hint="Prepare the module and its inputs yourself."
        )
    notes: tuple[str, ...] = ()
    refuse_odd(model)
    model = unwrapped(model)
    made = inputs
    if made is None:
        with random_state(model), on_cpu_by_default():
            made, notes = guess_inputs(model, batch=options.rows, seq_len=options.seq_len, seed=options.seed)
    masks: dict[str, Tensor] = {}
    module, weights = model, [parameter.is_meta for parameter in model.parameters()]
    # A model that is on meta already needs no copy.
    wanted = options.static and not any(weights)
    if wanted or without_numbers(model, made):
        made = _moved(_without_full_masks(made, model))
        if wanted or not weights or not all(weights):  # inputs without values need a model without values
            module, masks = _to_meta(model), _masks(model)
    config, ours = field(model, "config"), inputs is None and options.seq_len is None
    return LoadedModel(module, made, type(model).__name__, "module", config, current(model), notes, masks, made=ours)


def choices(loaded: LoadedModel, attn: str | None) -> Iterator[AttnBuild]:
    """Yield which attention implementations of a module to run, or why one of them can't run.

    Args:
        loaded: The module with its inputs.
        attn: "eager", "sdpa", "both", or None for the one that the module has.

    Yields:
        One item, or for "both" one for "eager" and one for "sdpa", with `loaded` None and the reason where the module
        refuses. A module that lets nobody choose, or that refuses both, is run as it is, as "own".
    """
    if attn is None or not offers_choice(loaded.module):
        name = type(loaded.module).__name__
        yield AttnBuild("own", loaded, None if attn is None else Message("premises.attention.no_choice", model=name))
    elif attn != "both":
        yield AttnBuild(attn, loaded)
    else:
        reasons = {name: refusal(loaded.module, name) for name in ATTN}
        for name, reason in reasons.items():
            yield AttnBuild(name, None if reason else loaded, reason)
        if all(reasons.values()):
            yield AttnBuild("own", loaded)
