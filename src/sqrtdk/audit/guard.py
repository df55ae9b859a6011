"""What an audit changes for the time of a run and puts back: random state, training flags, hooks."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from sqrtdk.audit.configs import field
from sqrtdk.audit.rules.unused import NORM_NAMES
from sqrtdk.errors import ModelError, kind_and_text


@contextmanager
def random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random state of Python, of numpy, of the CPU and of the model's CUDA devices."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluation mode for the time of the block, submodule by submodule."""
    return training_of(model, lambda _: False)


@contextmanager
def training_of(model: nn.Module, trains: Callable[[nn.Module], bool]) -> Iterator[None]:
    """The training flag that is asked for, for the time of the block, submodule by submodule."""
    before = [(module, field(module, "training")) for module in model.modules()]
    before = [(module, training) for module, training in before if training is not None]  # frozen TorchScript has none
    changed: list[tuple[nn.Module, bool]] = []
    try:
        for module, training in before:
            _set_training(module, trains(module))
            changed.append((module, training))
        yield
    finally:
        for module, training in changed:
            _set_training(module, training)


def _set_training(module: nn.Module, training: bool) -> None:
    try:
        module.training = training
    except Exception as error:  # a user's __setattr__ or property
        raise ModelError(
            f"{type(module).__name__} can't be put in evaluation mode and back: {kind_and_text(error)}",
            hint="Leave `training` as nn.Module has it.",
        ) from error


@contextmanager
def watch_norms(model: nn.Module) -> Iterator[set[str]]:
    """Collect the paths of the QK norms whose forward runs, and of those in TorchScript: they run unseen."""
    ran: set[str] = set()
    handles = []
    try:
        for path, module in model.named_modules(remove_duplicate=False):
            if path.rpartition(".")[2] not in NORM_NAMES:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                ran.add(path)
            else:
                handles.append(module.register_forward_hook(lambda *_, path=path: ran.add(path)))
        yield ran
    finally:
        for handle in handles:
            handle.remove()
