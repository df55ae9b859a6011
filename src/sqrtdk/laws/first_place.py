"""Finds the first module whose output moved where it must not, although its inputs did not move.

It takes two runs with hooks, which are removed afterwards, and is done only for a broken law.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.laws.moved import is_logits, moved_entries
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.models.returned import walk


@dataclass(frozen=True, slots=True, eq=False)
class Protected:
    """Positions (B, n) whose numbers must not move.

    `rest` says what must not move of tensors without positions: "samples" (those marked as a whole), "all", or
    "nothing". "nothing" also leaves out tensors of rows and keys (..., n, n), because two runs of the same tokens in
    other slots have other masks. With "everything", every number of every tensor is compared, bool masks included.
    """

    marked: Tensor
    rest: str = "samples"

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the entries of a tensor at these positions, or None if it has no axis for them.

        (B, n, E), (n, B, E), (B, E, n) and (B, H, n, E) have positions. Of (B, E), the samples that are marked as a
        whole are returned.
        """
        if self.rest == "everything":
            return tensor.float() if tensor.dtype is torch.bool else tensor
        batch, length = self.marked.shape
        marked = self.marked.to(tensor.device)
        if self.rest == "nothing" and tensor.shape[-2:] == (length, length):
            return None
        if tensor.shape[:2] == (batch, length):
            return tensor[marked]
        if tensor.shape[:2] == (length, batch):
            return tensor.transpose(0, 1)[marked]
        if tensor.dim() == 4 and tensor.shape[0] == batch and tensor.shape[2] == length:
            return tensor.transpose(1, 2)[marked]
        if tensor.dim() == 3 and tensor.shape[0] == batch and tensor.shape[2] == length:  # a convolution's (B, E, n)
            return tensor.transpose(1, 2)[marked]
        if self.rest == "all" and tensor.shape[:1] == (batch,):
            return tensor
        whole = marked.all(1)
        if self.rest == "samples" and tensor.dim() > 1 and tensor.shape[0] == batch and bool(whole.any()):
            return tensor[whole]
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One call of a module: the protected entries of its inputs and outputs, by name."""

    path: str
    takes: dict[str, Tensor]
    gives: dict[str, Tensor]


def first_place(
    subject: Subject, before: Mapping[str, Any], after: Mapping[str, Any], protected: Protected
) -> str | None:
    """Return the path of the first module that moves what must not move, or None if no module shows it.

    Args:
        subject: The model.
        before: Changes of the inputs for one run.
        after: Changes of the inputs for the other run.
        protected: What must not move.
    """
    runs = [(subject.over({**subject.inputs, **changes}), protected) for changes in (before, after)]
    return first_unlike(runs[0], runs[1])


def first_unlike(
    one: tuple[Subject, Protected],
    other: tuple[Subject, Protected],
    *,
    among: Container[str] | None = None,
    decoder: bool = False,
) -> str | None:
    """Return the path of the first module whose output differs between two runs although its inputs do not, or None.

    Args:
        one: A model with its inputs, and the positions that are compared.
        other: The same model with other inputs, which hold the same numbers at these positions.
        among: Paths of the modules to compare, whatever their inputs; None compares all.
        decoder: The positions are a decoder's, so modules of an encoder beside it are skipped.
    """
    runs: list[list[_Step]] = []
    for subject, protected in (one, other):
        steps: list[_Step] = []
        try:
            with _listening(subject.module, protected, steps.append):
                subject.run({})
        except NotAsked:
            return None
        runs.append(steps)
    for a, b in zip(runs[0], runs[1], strict=False):
        if a.path != b.path:
            return None  # the runs took different paths
        if (among is not None and a.path not in among) or (decoder and in_encoder(a.path)):
            continue
        if _any_moved(a.gives, b.gives) and (among is not None or not _any_moved(a.takes, b.takes)):
            return a.path
    return None


def first_of_modes(subject: Subject, modes: Sequence[Callable[[], AbstractContextManager[None]]]) -> str | None:
    """Return the path of the first module whose output differs between two modes although its inputs do not, or None.

    The modes may run different modules: one that runs in a single mode counts towards the module around it.

    Args:
        subject: The model with its inputs.
        modes: The context of each of the two runs.
    """
    runs: list[dict[tuple[str, int], _Step]] = []
    everything = Protected(torch.ones(1, 1, dtype=torch.bool), rest="everything")
    for mode in modes:
        steps: list[_Step] = []
        try:
            with _listening(subject.module, everything, steps.append), mode():
                subject.run({})
        except NotAsked:
            return None
        # A module may run several times in a pass.
        counts: Counter[str] = Counter()
        runs.append({})
        for step in steps:
            runs[-1][step.path, counts[step.path]] = step
            counts[step.path] += 1
    for key, a in runs[0].items():
        b = runs[1].get(key)
        if b is None or a.takes.keys() != b.takes.keys() or _any_moved(a.takes, b.takes):
            continue  # its inputs differ already, as with a mask that only one mode builds
        if _any_moved(a.gives, b.gives):
            return a.path
    return None


def in_encoder(path: str) -> bool:
    """Return whether a module is in an encoder and not in a decoder.

    Example:
        >>> in_encoder("model.encoder.layers.0"), in_encoder("model.decoder.layers.0.encoder_attn")
        (True, False)
    """
    return re.findall("encoder|decoder", path)[:1] == ["encoder"]


def taken_by(subject: Subject, site: str, batch: int, length: int) -> Tensor | None:
    """Return the hidden states (B, n, E), or heads as (B, n, H, E), that the module at a path or one around it gets.

    Raises:
        NotAsked: The model raises.
    """
    modules = dict(subject.module.named_modules())
    paths = [site, *(site[:place] for place in range(len(site) - 1, 0, -1) if site[place] == ".")]
    taken: dict[str, Tensor] = {}

    def listen(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for _name, tensor in walk((args, kwargs), objects=False):
                states = tensor.dim() == 3 and tensor.shape[:2] == (batch, length)
                heads = tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2]) == (batch, length)
                if tensor.is_floating_point() and (states or heads):
                    taken.setdefault(path, (tensor.transpose(1, 2) if heads else tensor).detach().clone())

        return hook

    handles = [
        modules[path].register_forward_pre_hook(listen(path), with_kwargs=True) for path in paths if path in modules
    ]
    try:
        subject.run({})
    finally:
        for handle in handles:
            handle.remove()
    return next((taken[path] for path in paths if path in taken), None)


def _any_moved(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether any tensor moved; those of only one run, or of other shapes (masks of other keys), are skipped."""
    return any(
        name in other and x.shape == other[name].shape and bool(moved_entries(x, other[name]).any())
        for name, x in one.items()
    )


@contextmanager
def _listening(module: nn.Module, protected: Protected, add: Callable[[_Step], None]) -> Iterator[None]:
    """Call `add` with every call of a module, in the order in which the calls end."""

    length, bools = protected.marked.shape[1], protected.rest == "everything"

    def kind(tensor: Tensor) -> bool:
        return tensor.is_floating_point() or (bools and tensor.dtype is torch.bool)

    def kept(values: Any, *, given: bool = False) -> dict[str, Tensor]:
        tensors = [(name, x.detach()) for name, x in walk(values, objects=False) if kind(x)]
        if given and not bools:  # logits beside an output also hold those of hidden keys
            tensors = [*tensors[:1], *((name, x) for name, x in tensors[1:] if not is_logits(x, length))]
        entries = ((name, protected.of(x)) for name, x in tensors)
        return {name: entry.clone() for name, entry in entries if entry is not None}

    def listen(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            add(_Step(path, kept((args, kwargs)), kept(output, given=True)))

        return hook

    handles = []
    try:
        for path, part in module.named_modules():
            if not isinstance(part, torch.jit.ScriptModule):
                handles.append(part.register_forward_hook(listen(path), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
