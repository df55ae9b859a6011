"""Questions about a module that may be untrusted, asked before anything relies on the answers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sqrtdk._wrappers import innermost
from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.messages import Message

_MOST_ARGUMENTS_NAMED = 8  # of a hint


def is_spread(module: nn.Module) -> bool:
    """Return whether accelerate has spread weights of the module or of a part; some may be on meta between runs.

    Example:
        >>> is_spread(nn.Linear(2, 2))
        False
    """
    return any(
        isinstance(vars(part).get("hf_device_map"), Mapping) or _brings_weights(vars(part).get("_hf_hook"))
        for part in module.modules()
    )


def _brings_weights(hook: Any) -> bool:
    """Return whether a hook of accelerate brings offloaded weights for a forward, as those of `cpu_offload` do."""
    return any(map(_brings_weights, getattr(hook, "hooks", ()))) or getattr(hook, "offload", False) is True


def frozen_hint(module: nn.Module) -> Message | None:
    """Return what to do if a part of the module is frozen TorchScript, whose weights are constants; None if none is."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and not hasattr(part, "training"):  # freezing removes `training`
            if path:
                return Message("errors.hint.frozen_part", path=path)
            return Message("errors.hint.frozen")
    return None


def is_finite(tensor: Tensor) -> bool:
    """Return whether all stored numbers of a weight are finite; True for a weight on "meta", which stores none.

    Of a sparse tensor, the stored values are read.
    """
    values = tensor.detach()
    if values.is_meta or not values.is_floating_point():
        return True
    if values.layout is torch.sparse_coo:
        values = values._values()
    elif values.layout is not torch.strided:
        values = values.values()
    values = values.float() if values.dtype.itemsize == 1 else values  # isfinite is not implemented for float8
    # One reading: a sum is finite only if all its terms are, though it may overflow where they are.
    wide = torch.promote_types(values.dtype, torch.float32)
    return bool(values.sum(dtype=wide).isfinite()) or bool(values.isfinite().all())


def config_of(module: nn.Module) -> Any:
    """Return the Hugging Face config of a module, recognised by its `model_type`; None if it has none."""
    try:
        config: Any = module.config
        return config if isinstance(config.model_type, str) else None
    except INTERRUPTS:
        raise
    except BaseException:  # there is no config, or a user's __getattr__ raises
        return None


def refuse_odd(module: nn.Module) -> None:
    """Refuse a module that can't list its parts, or whose weights have no shape yet.

    Raises:
        ModelError: The module is refused.

    Example:
        >>> refuse_odd(nn.LazyLinear(4))
        Traceback (most recent call last):
        sqrtdk.errors.ModelError: LazyLinear has weights without a shape yet, first weight
        Hint: Run it once on an input of the right width, then check it.
    """
    name = type(module).__name__
    try:
        parts: list[tuple[Any, Any]] = list(module.named_modules(remove_duplicate=False))
        weights: list[tuple[Any, Any]] = [*module.named_parameters(), *module.named_buffers()]
        parts += [("", part) for part in module.modules()]
        weights += [("", weight) for weight in (*module.parameters(), *module.buffers())]
    except INTERRUPTS:
        raise
    except BaseException as error:  # a method was overridden, or __init__ did not call nn.Module's
        raise ModelError(
            Message("errors.model.parts", name=name, reason=kind_and_text(error)),
            hint=Message("errors.hint.module_init"),
        ) from error
    if not all(isinstance(part, nn.Module) for _, part in parts) or not all(isinstance(w, Tensor) for _, w in weights):
        raise ModelError(
            Message("errors.model.foreign_parts", name=name),
            hint=Message("errors.hint.own_methods"),
        )
    if lazy := [path for path, weight in weights if is_lazy(weight)]:
        raise ModelError(
            Message("errors.model.lazy", name=name, first=lazy[0]),
            hint=Message("errors.hint.run_once"),
        )


def forward_arguments(module: nn.Module) -> dict[str, bool]:
    """Return the named arguments of `module.forward`, and whether each is required.

    Example:
        >>> forward_arguments(nn.Linear(2, 2))
        {'input': True}
    """
    try:
        parameters = inspect.signature(innermost(module).forward).parameters.values()
    except (ValueError, TypeError):  # frozen TorchScript has none
        return {}
    return {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def named_arguments(module: nn.Module) -> str:
    """Return the first names of `module.forward`'s arguments; "" if it names none.

    Example:
        >>> named_arguments(nn.Bilinear(2, 2, 2))
        'input1, input2'
    """
    names = list(forward_arguments(module))
    return ", ".join([*names[:_MOST_ARGUMENTS_NAMED], *(["..."] if len(names) > _MOST_ARGUMENTS_NAMED else [])])


def file_hint(module: nn.Module) -> Message:
    """Return a hint to give inputs from a file, with the names that its tensors need.

    Example:
        >>> file_hint(nn.Linear(2, 2))
        'Pass --input FILE.safetensors with tensors named as in forward(input).'
    """
    return Message("errors.hint.input_file", names=named_arguments(module))
