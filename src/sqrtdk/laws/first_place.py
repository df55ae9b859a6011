"""Finds the first module whose output moved where it must not, although its inputs did not move.

It takes two runs with hooks, which are removed afterwards, and is done only for a broken law.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from sqrtdk._wrappers import named_modules
from sqrtdk.laws.moved import is_logits, moved_entries
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import upwards
from sqrtdk.modules.calls import CallPlace, first_apart, hooked
from sqrtdk.modules.structures import walk


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
class _ModuleTensors:
    """The protected entries of the inputs and outputs of one call of a module, by name."""

    place: CallPlace
    takes: dict[str, Tensor]
    gives: dict[str, Tensor]


_BothCalls = tuple[_ModuleTensors, _ModuleTensors]


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
    try:
        runs = [_ran(subject, protected) for subject, protected in (one, other)]
    except NotAsked:
        return None
    # From the first two calls that are not of one module, the runs took different paths.
    both = takewhile(lambda pair: pair[0].place[0] == pair[1].place[0], zip(*runs, strict=False))
    counted = (
        (a, b) for a, b in both if (among is None or a.place[0] in among) and not (decoder and in_encoder(a.place[0]))
    )
    return _first_path(counted, whatever_inputs=among is not None)


def first_of_modes(subject: Subject, modes: Sequence[Callable[[], AbstractContextManager[None]]]) -> str | None:
    """Return the path of the first module whose output differs between two modes although its inputs do not, or None.

    The modes may run different modules: one that runs in a single mode counts towards the module around it.

    Args:
        subject: The model with its inputs.
        modes: The context of each of the two runs.
    """
    everything = Protected(torch.ones(1, 1, dtype=torch.bool), rest="everything")
    try:
        one, other = [_ran(subject, everything, mode) for mode in modes]
    except NotAsked:
        return None
    again = {call.place: call for call in other}
    both = ((call, again[call.place]) for call in one if call.place in again)
    # Inputs of other names differ already, as with a mask that only one mode builds.
    return _first_path(pair for pair in both if pair[0].takes.keys() == pair[1].takes.keys())


def in_encoder(path: str) -> bool:
    """Return whether a module is in an encoder and not in a decoder.

    Example:
        >>> in_encoder("model.encoder.layers.0"), in_encoder("model.decoder.layers.0.encoder_attn")
        (True, False)
    """
    return re.findall("encoder|decoder", path)[:1] == ["encoder"]


def taken_by(subject: Subject, site: str, batch: int, length: int) -> Tensor | None:
    """Return the hidden states that an attention, or a module around it, receives as input; None if not found.

    Args:
        subject: The model, which is run once.
        site: Path of the attention. It and the modules around it, except the model itself, are asked, the innermost
            first.
        batch: Batch size B.
        length: Number of tokens n.

    Returns:
        The first floating-point input of shape (B, n, E), or of (B, H, n, E), which is returned as (B, n, H, E).

    Raises:
        NotAsked: The model raises.
    """
    modules = dict(named_modules(subject.module))
    paths = upwards(site)[:-1] or [site]
    taken: dict[str, Tensor] = {}

    def begins(place: CallPlace, args: Any, kwargs: Any) -> None:
        for _name, tensor in walk((args, kwargs), objects=False):
            states = tensor.dim() == 3 and tensor.shape[:2] == (batch, length)
            heads = tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2]) == (batch, length)
            if tensor.is_floating_point() and (states or heads):
                taken.setdefault(place[0], (tensor.transpose(1, 2) if heads else tensor).detach().clone())

    with hooked({path: modules[path] for path in paths if path in modules}, begins):
        subject.run({})
    return next((taken[path] for path in paths if path in taken), None)


def _first_path(calls: Iterable[_BothCalls], *, whatever_inputs: bool = False) -> str | None:
    first = first_apart(
        calls,
        lambda pair: whatever_inputs or not _any_moved(pair[0].takes, pair[1].takes),
        lambda pair: _any_moved(pair[0].gives, pair[1].gives),
    )
    return None if first is None else first[0].place[0]


def _any_moved(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether any tensor moved; those of only one run, or of other shapes (masks of other keys), are skipped."""
    return any(
        name in other and x.shape == other[name].shape and bool(moved_entries(x, other[name]).any())
        for name, x in one.items()
    )


def _ran(
    subject: Subject, protected: Protected, mode: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[_ModuleTensors]:
    """Return the calls of the modules in one run, in the order in which they end.

    Raises:
        NotAsked: The model raises.
    """
    calls: list[_ModuleTensors] = []
    length, bools = protected.marked.shape[1], protected.rest == "everything"

    def entries(values: Any, *, gives: bool = False) -> dict[str, Tensor]:
        every = walk(values, objects=False)
        tensors = [
            (name, x.detach()) for name, x in every if x.is_floating_point() or (bools and x.dtype is torch.bool)
        ]
        if gives and not bools:  # logits beside an output also hold those of hidden keys
            tensors = [*tensors[:1], *((name, x) for name, x in tensors[1:] if not is_logits(x, length))]
        of_tensor = ((name, protected.of(x)) for name, x in tensors)
        return {name: entry.clone() for name, entry in of_tensor if entry is not None}

    def ends(place: CallPlace, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(_ModuleTensors(place, entries((args, kwargs)), entries(output, gives=True)))

    with hooked(dict(named_modules(subject.module)), ends=ends), mode():
        subject.run({})
    return calls
