"""Train mode for one run, with every dropout off.

Torch's dropout functions, and the dropout rates of fused attentions, are intercepted and set to 0. So a rate is off
wherever it is stored, even as a constant, and what a module computes from its rate (`x * (1 - self.p)`) still shows.
Hand-written dropouts draw random numbers, as do LayerDrop, masked features and the jitter of a router. Their rates are
found by name in modules and configs.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sqrtdk.audit.guard import training_of
from sqrtdk.frontends.module import ForeignModule

# For each function that drops: the position and the name of its rate.
_DROPOUTS = (
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout",
    "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout",
)  # fmt: skip
_RATES = {
    **dict.fromkeys(_DROPOUTS, (1, "p")),
    "scaled_dot_product_attention": (4, "dropout_p"),
    "multi_head_attention_forward": (10, "dropout_p"),
}
_DROP = re.compile(r"drop|stochastic_?depth|jitter|mask_(time|feature)_prob", re.IGNORECASE)
_RATE_OF_DROP = ("p", "prob", "rate")  # rates of a module whose class says drop


class _NoDropout(TorchFunctionMode):
    """Sets the rates of dropout to 0."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _RATES:
            place, rate = _RATES[name]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif rate in kwargs or place == 1:  # F.dropout(x) has a rate of 0.5
                kwargs[rate] = 0.0
        return func(*args, **kwargs)


@contextmanager
def without_dropout(module: nn.Module, trains: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Disable dropout within the block, and set training flags.

    Args:
        module: The model.
        trains: Called with each submodule; returns the training flag that it gets within the block.
    """
    with training_of(module, trains), _NoDropout():
        yield


@contextmanager
def rates_off(module: nn.Module) -> Iterator[None]:
    """Set dropout rates to 0 within the block, and rates of keeping ("keep_prob") to 1; restore them afterwards.

    They are found by name among the float attributes of modules and configs, and in dicts that these hold.
    """
    held: list[tuple[MutableMapping[str, Any], str, float]] = []
    for fields, named in _fields(module):
        for name, value in list(fields.items()):
            says = isinstance(name, str) and (_DROP.search(name) or (named and name in _RATE_OF_DROP))
            if says and isinstance(value, float) and 0 < value <= 1:
                held.append((fields, name, value))
    try:
        for fields, name, _ in held:
            fields[name] = 1.0 if "keep" in name.lower() else 0.0  # keep_prob
        yield
    finally:
        for fields, name, value in held:
            fields[name] = value


def _fields(module: nn.Module) -> Iterator[tuple[MutableMapping[str, Any], bool]]:
    """Yield each mapping of attributes that may hold rates, and whether its owner is a dropout by its class."""
    seen: set[int] = set()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        yield vars(part), _DROP.search(type(part).__name__) is not None
        for value in list(vars(part).values()):
            fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            own = isinstance(value, Tensor | nn.Module | type) or callable(value)
            if isinstance(fields, dict) and not own and id(fields) not in seen:
                seen.add(id(fields))
                yield fields, False


def module_that_trains(module: nn.Module) -> nn.Module | None:
    """Return the module whose backward pass is asked; None for a program that only runs forward here.

    The parameters of a JAX function train in a copy, as they do not in the module. Of other frameworks and of exported
    graphs the operations are known, and not what their gradients are.
    """
    if not isinstance(module, ForeignModule):
        return module
    return copy.deepcopy(module).requires_grad_(True) if module.framework.startswith("JAX ") else None


def seed_all(seed: int) -> None:
    """Seed torch, Python and numpy; the audit restores their states."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)  # numpy takes 32 bits


def draws() -> tuple[Any, ...]:
    """Return the states of all random generators: if two results are equal, nothing was drawn in between."""
    numpy = sys.modules.get("numpy")
    on_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_devices else ())]
    own = None if numpy is None else numpy.random.get_state()
    return (
        *(state.numpy().tobytes() for state in states),
        random.getstate(),
        None if own is None else (own[1].tobytes(), *own[2:]),
    )
