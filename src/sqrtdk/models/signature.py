"""The arguments of a model's forward, and hints that name them."""

from __future__ import annotations

import inspect

from torch import nn

from sqrtdk.messages import Message

_MOST_ARGUMENTS_NAMED = 8


def forward_arguments(module: nn.Module) -> dict[str, bool]:
    """Return the named arguments of `module.forward`, and whether each is required."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
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
