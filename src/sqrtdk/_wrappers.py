"""Modules that only wrap another one, and the names of what they hold as if they were not there.

A compiled, a sharded and a plain model have the same sites and the same parameters. So a report, a diff or a watch of
one can be held against that of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from sqrtdk.messages import Message


def _always(_: Any) -> bool:
    return True


def _never(_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A class of modules that hand their inputs to one inner module, and return what it returns.

    Attributes:
        kind: The class, by its full name, so that its package need not be imported.
        holds: The attribute that is the inner module; it is left out of names.
        alone: Whether the inner module computes the same without the wrapper, asked of an instance.
        fixed_forward: Whether the class sets `forward` on each instance; any other wrapper with one was changed.
    """

    kind: str
    holds: str
    alone: Callable[[Any], bool] = _always
    fixed_forward: bool = False


_PARALLEL = "torch.nn.parallel"
_CHECKPOINT, _FSDP = "torch.distributed.algorithms._checkpoint", "torch.distributed.fsdp"
_TUNER = "peft.tuners.tuners_utils.BaseTuner"
WRAPPERS = (
    Wrapper("torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", fixed_forward=True),
    # With mixed precision it casts the inputs, and holds other weights during the forward.
    Wrapper(f"{_PARALLEL}.distributed.DistributedDataParallel", "module", lambda x: x.mixed_precision is None),
    Wrapper(f"{_PARALLEL}.data_parallel.DataParallel", "module"),
    Wrapper("torch.optim.swa_utils.AveragedModel", "module"),
    Wrapper(f"{_CHECKPOINT}.checkpoint_wrapper.ActivationWrapper", "_checkpoint_wrapped_module"),
    # It gathers the weights.
    Wrapper(f"{_FSDP}.fully_sharded_data_parallel.FullyShardedDataParallel", "_fsdp_wrapped_module", _never),
    # Where no tuner lies between, prompts are put before the inputs.
    Wrapper("peft.peft_model.PeftModel", "base_model", lambda x: is_kind(x.base_model, _TUNER)),
    Wrapper(_TUNER, "model"),
    # It casts the inputs to its precision.
    Wrapper("lightning_fabric.wrappers._FabricModule", "_forward_module", _never),
    Wrapper("lightning.fabric.wrappers._FabricModule", "_forward_module", _never),
)


def is_kind(module: object, kind: str) -> bool:
    """Return whether a class of this full name is among those of an object.

    Example:
        >>> is_kind(nn.Linear(2, 2), "torch.nn.modules.linear.Linear")
        True
    """
    return any(f"{cls.__module__}.{cls.__qualname__}" == kind for cls in type(module).__mro__)


@lru_cache(maxsize=1024)
def _row_of(kind: type) -> Wrapper | None:
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in kind.__mro__}
    return next((wrapper for wrapper in WRAPPERS if wrapper.kind in names), None)


def _wrapper_of(module: nn.Module) -> Wrapper | None:
    kind: Any = type(module)
    wrapper = _row_of(kind)
    return wrapper if wrapper is not None and isinstance(_held(module, wrapper), nn.Module) else None


def _held(module: nn.Module, wrapper: Wrapper) -> Any:
    return (vars(module).get("_modules") or {}).get(wrapper.holds)


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers, whose `forward` names the arguments; a plain module as it is.

    Example:
        >>> type(innermost(nn.DataParallel(nn.Linear(2, 2)))).__name__
        'Linear'
    """
    while (wrapper := _wrapper_of(module)) is not None:
        module = _held(module, wrapper)
    return module


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that can run in the place of a wrapped one, on one process and without gradients.

    A wrapper stays if it does more: with hooks of its own, with a `forward` that a subclass or a user has written,
    and where the table says so.

    Example:
        >>> model = nn.DataParallel(nn.Linear(2, 2))
        >>> type(unwrapped(model)).__name__
        'Linear'
        >>> _ = model.register_forward_hook(lambda module, inputs, output: output + 1)
        >>> type(unwrapped(model)).__name__
        'DataParallel'
    """
    while (wrapper := _wrapper_of(module)) is not None and _passes_on(module, wrapper):
        module = _held(module, wrapper)
    return module


def _passes_on(module: nn.Module, wrapper: Wrapper) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or not wrapper.alone(module):
        return False
    if wrapper.fixed_forward:
        return True
    if "forward" in vars(module):
        return False
    written = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return written.__module__ == wrapper.kind.rpartition(".")[0]


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the path of a module, parameter or buffer to that in the model without wrappers.

    Example:
        >>> model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
        >>> name = plain_names(model)
        >>> [name(path) for path, _ in model.named_parameters()]
        ['0.weight', '0.bias']
    """
    left_out = set()
    for path, part in model.named_modules(remove_duplicate=False):
        if (wrapper := _wrapper_of(part)) is not None:
            left_out.add(f"{path}.{wrapper.holds}" if path else wrapper.holds)
    if not left_out:
        return str

    def plain(name: str) -> str:
        words = name.split(".")
        return ".".join(word for at, word in enumerate(words) if ".".join(words[: at + 1]) not in left_out)

    return plain


def named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside a model with their paths, as `model.named_modules` does, but no wrappers.

    Args:
        model: The model.
        remove_duplicate: Whether a module with several paths comes once.
    """
    plain = plain_names(model)
    for path, part in model.named_modules(remove_duplicate=remove_duplicate):
        if plain is str or _wrapper_of(part) is None:
            yield plain(path), part


def named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model as `model.named_parameters` does, by their names without wrappers.

    Args:
        model: The model.
        remove_duplicate: Whether a parameter with several names comes once.
    """
    plain = plain_names(model)
    yield from ((plain(name), x) for name, x in model.named_parameters(remove_duplicate=remove_duplicate))


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a model as `model.named_buffers` does, by their names without wrappers."""
    plain = plain_names(model)
    yield from ((plain(name), x) for name, x in model.named_buffers())


def submodule(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path without wrappers, which are passed through.

    Raises:
        AttributeError: The model has no module there.

    Example:
        >>> submodule(nn.Sequential(nn.DataParallel(nn.Sequential(nn.ReLU()))), "0.0")
        ReLU()
    """
    part = innermost(model)
    for name in path.split(".") if path else ():
        part = innermost(part.get_submodule(name))
    return part


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph; a DTensor is gathered, which every rank of its mesh must do."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor.detach() if gather is None else gather().detach()
    return whole


def hint_for(given: object, otherwise: str) -> str:
    """Return a hint for an error message on what to pass in place of something that is no module.

    Args:
        given: What was passed.
        otherwise: The hint where nothing better is known.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> str(hint_for(torch.compile(lambda x: layer(x)), "Pass a module."))
        'A compiled function has no modules: pass the module that it calls, layer.'
    """
    if is_kind(given, "torch.export.exported_program.ExportedProgram"):
        return Message("errors.hint.exported_program")
    inside = getattr(given, "__dict__", {})
    for name in ("model", "module"):
        if isinstance(inside.get(name), nn.Module):
            return Message("errors.hint.holds_module", kind=type(given).__name__, name=name)
    if (function := getattr(given, "_torchdynamo_orig_callable", None)) is not None:
        called = _modules_of(function)
        if called:
            return Message("errors.hint.compiled_function_of", names=", ".join(called))
        return Message("errors.hint.compiled_function")
    return otherwise


def is_no_factory(given: object) -> bool:
    """Return whether calling it gives no model, though it can be called: what `hint_for` has a hint for."""
    return str(hint_for(given, "")) != ""


def _modules_of(function: Any) -> list[str]:
    """Return the names by which a function reaches modules: those around it, global ones, and that of a method."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [type(owner).__name__]
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None:
        return []
    known = {name: _content(cell) for name, cell in zip(code.co_freevars, cells, strict=True)}
    known |= {name: function.__globals__.get(name) for name in code.co_names}
    return [name for name, value in known.items() if isinstance(value, nn.Module)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put in yet
        return None
