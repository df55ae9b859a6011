"""A run with autograd that is traced, with the handles of its attentions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from sqrtdk.laws.backward.handles import Notes, Reached
from sqrtdk.laws.backward.learned_path import learned_path
from sqrtdk.tracing import Trace
from sqrtdk.tracing.tensors import CallTensors


class TracedHandles(Trace):
    """A trace that keeps tensors and tells its notes of every attention when it is read."""

    apart = False
    follows_parameters = False

    def __init__(self, model: nn.Module, notes: Notes, **options: Any) -> None:
        super().__init__(model, **{"stats": False, "numeric": False, "keep": True, **options})
        self._notes = notes

    def _add(self, *args: Any, **kwargs: Any) -> None:
        super()._add(*args, **kwargs)
        record = self._records[-1]
        number = len(self._records) - 1
        self._notes.recorded(number, None if record is None else record.tensors)
        if self.follows_parameters and number in self._notes.reached and self._scene is not None:
            with suppress(Exception):  # a layout that is not followed: the attention itself is judged all the same
                reached = self._notes.reached[number]
                learned = learned_path(args[0], args[1], args[2], self._scene.store)
                # Of q without a factor that a kernel got, the gradient is not the kernel's.
                before_factor = (
                    record is None or record.tensors is None or reached.call.terms is not record.tensors.terms
                )
                apart = before_factor and any(end.name in ("q", "k") for end in learned.ends)
                reached.learned = None if apart else learned

    def pairs(self) -> list[tuple[CallTensors, Reached | None]]:
        """Return each attention of the finished trace, with its handles if it was read in full."""
        numbers = [n for n, record in enumerate(self._records) if record is not None and record.tensors is not None]
        return [(call, self._notes.reached.get(n)) for call, n in zip(self.tensors, numbers, strict=True)]


@contextmanager
def noted(
    model: nn.Module, *, as_is: bool = False, parameters: bool = False, **options: Any
) -> Iterator[TracedHandles]:
    """Trace a run with autograd within the block, and note handles.

    `torch.autograd.Function.apply` is noted too, which modes do not see. A reentrant checkpoint runs as one that is
    not reentrant, because its first pass has no graph.

    Args:
        model: The traced model.
        as_is: Leave reentrant checkpoints as they are; what runs in them has no handles then.
        parameters: Whether to follow parameters from behind the projections to the logits.
        options: Further options of the trace.
    """
    notes, function, thread = Notes(), torch.autograd.Function, threading.get_ident()
    apply, checkpoint = function.__dict__["apply"], torch.utils.checkpoint.CheckpointFunction

    def noting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return apply.__func__(cls, *args, **kwargs)
        notes.note((args, kwargs), read=True)
        result = apply.__func__(cls, *args, **kwargs)
        notes.note(result, read=False)
        return result

    class Open:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve)

    function.apply = classmethod(noting)  # type: ignore[assignment]
    if not as_is:
        torch.utils.checkpoint.CheckpointFunction = Open  # type: ignore[assignment,misc]
    try:
        run = TracedHandles(model, notes, **options)
        run.follows_parameters = parameters
        with run, notes:
            yield run
    finally:
        function.apply = apply  # type: ignore[method-assign]
        torch.utils.checkpoint.CheckpointFunction = checkpoint  # type: ignore[misc]
