"""What a model's forward takes, and how to tell a user to give it."""

from __future__ import annotations

import inspect

from torch import nn

_MOST_NAMES = 8


def forward_arguments(module: nn.Module) -> dict[str, bool]:
    """Named arguments of `module.forward`, and whether each must be given."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (ValueError, TypeError):  # frozen TorchScript has none
        return {}
    return {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def named_arguments(module: nn.Module) -> str:
    """The first names that `module.forward` takes, "" for a forward that names none.

    Example:
        >>> named_arguments(nn.Bilinear(2, 2, 2))
        'input1, input2'
    """
    names = list(forward_arguments(module))
    return ", ".join([*names[:_MOST_NAMES], *(["..."] if len(names) > _MOST_NAMES else [])])


def file_hint(module: nn.Module) -> str:
    """A hint to give inputs from a file, with the names that its tensors need.

    Example:
        >>> file_hint(nn.Linear(2, 2))
        'Pass --input FILE.safetensors with tensors named as in forward(input).'
    """
    return f"Pass --input FILE.safetensors with tensors named as in forward({named_arguments(module)})."
