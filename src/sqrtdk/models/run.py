"""Runs a loaded model once, even if its tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sqrtdk._modes import EagerMode, default_device, eager_compiler
from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.alone import alone
from sqrtdk.models.copies import copied
from sqrtdk.models.modules import frozen_hint, is_spread, named_arguments
from sqrtdk.models.records import Inputs
from sqrtdk.models.settings import process_unchanged

aten = torch.ops.aten
ANY_OVERLOADS = (aten.any.default, aten.any.dim, aten.any.dims)


class _Answers(EagerMode):
    """Answers a model that branches on a meta tensor's truth: yes to `all()`, no to `any()`.

    Models ask whether a padding mask is all ones (ours is), and whether any value overflowed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._any: list[Tensor] = []  # kept alive, so that the object can be recognised when its truth is asked

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # bool(tensor) reads the number by this operation.
        if func is aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return not any(args[0] is tensor for tensor in self._any)
        out = func(*args, **(kwargs or {}))
        if func in ANY_OVERLOADS and out.is_meta:
            self._any.append(out)
        return out


class _Numbers(TorchFunctionMode):
    """Leaves `torch.tensor(0.125)` on the CPU, so that a scale keeps its value; meta tensors accept it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args and isinstance(args[0], int | float) and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class _Autocast(torch.autocast):
    """Opens nothing on the meta device, where torch raises: `torch.autocast(x.device.type, enabled=False)`."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        self._nothing = device_type == "meta"
        if not self._nothing:
            super().__init__(device_type, *args, **kwargs)

    def __enter__(self) -> Any:
        return self if self._nothing else super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> Any:
        return None if self._nothing else super().__exit__(*raised)


@contextmanager
def meta_answers() -> Iterator[None]:
    """Let a forward pass on the meta device create its tensors there and branch on their truth.

    Example:
        >>> mask = torch.ones(3, dtype=torch.bool, device="meta")
        >>> with meta_answers():
        ...     bool(mask.all()), bool(mask.any()), torch.arange(3).device.type
        (True, False, 'meta')
    """
    with torch.device("meta"), _Numbers(), _Answers():
        torch.autocast = _Autocast  # type: ignore[misc]
        try:
            yield
        finally:
            torch.autocast = _Autocast.__base__  # type: ignore[misc, assignment]


@contextmanager
def on_cpu_by_default() -> Iterator[None]:
    """Create tensors without a device on the CPU, whatever `torch.set_default_device` says.

    Example:
        >>> with torch.device("meta"), on_cpu_by_default():
        ...     torch.arange(3).device.type
        'cpu'
    """
    with torch.device("cpu") if default_device().type != "cpu" else nullcontext():
        yield


def by_default_of(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which new tensors are made on the CPU, if all weights of the module are there.

    For any other module the default device stays, as the module's `forward` may rely on it.
    """
    elsewhere = any(p.device.type != "cpu" for p in module.parameters())
    return nullcontext() if elsewhere else on_cpu_by_default()


@alone()
def call(module: nn.Module, inputs: Inputs, *, own_inputs: bool = False) -> Any:
    """Run the forward pass without gradients, under `meta_answers` if the module is on the meta device.

    A compiled module runs as it is written. Forward takes copies of the inputs, because it may write into them, unless
    they are our own; and the settings of the process that it changes are put back.

    Raises:
        ModelError: The model raised; the message quotes it, and the hint names the arguments of its forward.

    Example:
        >>> call(nn.Linear(3, 2, device="meta"), (torch.ones(5, 3, device="meta"),)).shape
        torch.Size([5, 2])
        >>> call(nn.Linear(3, 2), (torch.ones(5, 4),))
        Traceback (most recent call last):
        sqrtdk.errors.ModelError: Linear raised RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x4 and 3x2)
        Hint: It got 0 (5, 4); its forward takes input. Give other inputs by these names with --input FILE.safetensors.
    """
    is_meta = any(p.is_meta for p in module.parameters()) and not is_spread(module)
    try:
        entering = inputs if own_inputs else copied(inputs)
        with eager_compiler(), process_unchanged(), torch.no_grad(), meta_answers() if is_meta else nullcontext():
            return module(**entering) if isinstance(entering, dict) else module(*entering)
    except INTERRUPTS:
        raise
    except BaseException as error:  # a user's forward may raise anything, SystemExit included
        named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
        shapes = ", ".join(
            f"{name} {'nested' if value.is_nested else tuple(value.shape)}"
            for name, value in named
            if isinstance(value, Tensor)
        )
        hint = Message(
            "errors.hint.forward_on_meta" if is_meta else "errors.hint.forward",
            shapes=shapes or Message("errors.inputs.no_tensors"),
            names=named_arguments(module) or Message("errors.inputs.anything"),
            advice=frozen_hint(module) or Message("errors.hint.other_inputs"),
        )
        raise ModelError(
            Message("errors.model.raised", kind=type(module).__name__, reason=kind_and_text(error)), hint=hint
        ) from error
