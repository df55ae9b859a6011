"""Where in the model an operation runs: a stack of the modules being called, for the tracing thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


class Sites:
    """Follows module calls through torch's global hooks; the modules themselves are not touched."""

    def __init__(self, model: nn.Module | None) -> None:
        self.names: dict[int, str] = {}
        self.classes: dict[str, str] = {}
        self.modules: dict[str, nn.Module] = {}
        if model is not None:
            for name, module in model.named_modules():
                self.learn(name, module)
        self.stack: list[nn.Module] = []
        self.entering: Callable[[nn.Module, tuple[Any, ...]], None] | None = None  # told of outermost module calls
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def __enter__(self) -> Sites:
        self._thread = threading.get_ident()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._push),
            torch_module.register_module_forward_hook(self._pop, always_call=True),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stack.clear()

    def learn(self, name: str, module: nn.Module) -> None:
        """Give a module the name that its sites are to have."""
        self.names[id(module)] = name
        self.classes[name] = type(module).__name__
        self.modules[name] = module

    def follow_here(self, module: nn.Module) -> None:
        """Follow the thread that asks, in which a module has begun: a backward pass may run in another one."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self.stack.append(module)

    def follow(self, thread: int) -> None:
        """Follow a thread again."""
        self._thread = thread

    def _push(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self.stack and self.entering is not None:
            self.entering(module, args)
        self.stack.append(module)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self.stack:
            if self.stack.pop() is module:
                break

    def here(self) -> str:
        """Path of the innermost running module that the model knows, "" at the root or outside."""
        for module in reversed(self.stack):
            name = self.names.get(id(module))
            if name is not None:
                return name
        return ""

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Name of a parameter that one of the running modules, or a part of the innermost one, holds now."""
        for module in reversed(self.stack):
            path = self.names.get(id(module))
            held = module.named_parameters(recurse=module is self.stack[-1])
            name = next((name for name, one in held if one is parameter), None)
            if path is not None and name is not None:
                return f"{path}.{name}" if path else name
        return None

    @property
    def running(self) -> bool:
        """Whether any module is being called."""
        return bool(self.stack)
