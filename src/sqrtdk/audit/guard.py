"""What an audit changes for the time of a run and puts back: random state, training flags, hooks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sqrtdk.audit.configs import field
from sqrtdk.audit.rules.unused import NORM_NAMES
from sqrtdk.errors import ModelError, kind_and_text


@contextmanager
def random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random state of Python, of the CPU and of the model's CUDA devices."""
    state = random.getstate()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of the block, submodule by submodule."""
    before = [(module, field(module, "training")) for module in model.modules()]
    before = [(module, training) for module, training in before if training is not None]  # frozen TorchScript has none
    changed: list[tuple[nn.Module, bool]] = []
    try:
        for module, training in before:
            _set_training(module, False)
            changed.append((module, training))
        yield
    finally:
        for module, training in changed:
            _set_training(module, training)


def _set_training(module: nn.Module, training: bool) -> None:
    try:
        module.training = training
    except Exception as error:  # a stranger's __setattr__ or property
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
