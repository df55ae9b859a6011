"""Does the scale of a call follow an attribute of its module? Change the attribute, run once more, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sqrtdk.audit.attributes import ScaleAttribute
from sqrtdk.audit.tolerance import close
from sqrtdk.tracing.records import AttentionCall

FACTOR = 1.25  # exact in every binary format, far outside the tolerance, too small to overflow
Key = tuple[str, int]  # site and index of a call
Probe = Callable[[Mapping[Key, ScaleAttribute]], Mapping[Key, bool]]


@contextmanager
def enlarged(attributes: Iterable[ScaleAttribute], factor: float = FACTOR) -> Iterator[None]:
    """Multiply numbers and buffers by `factor`, and turn switches, for the time of the block; they are put back."""
    restore: list[tuple[MutableMapping[str, Any], str, Any]] = []
    changed: set[tuple[int, str]] = set()
    try:
        for attribute in attributes:
            store, key = attribute.store, (id(attribute.owner), attribute.name)
            if attribute.learned or store is None or key in changed:
                continue
            changed.add(key)
            value = store[attribute.name]
            restore.append((store, attribute.name, value))
            number = value.detach() if isinstance(value, torch.Tensor) else value
            store[attribute.name] = not value if attribute.flag else number * factor
        yield
    finally:
        for store, name, value in restore:
            store[name] = value


def make_probe(calls: Sequence[AttentionCall], run: Callable[[], Sequence[AttentionCall]]) -> Probe:
    """A function that says, for the attribute asked of each call, whether the call's scale changes with it.

    It leaves out what it cannot tell: a learned number, one in TorchScript, a model that raises with another number.
    """
    before = {(call.site, call.index): call.scale.effective for call in calls}

    def probe(asked: Mapping[Key, ScaleAttribute]) -> Mapping[Key, bool]:
        able = {key: a for key, a in asked.items() if not a.learned and a.store is not None}
        if not able:
            return {}
        try:
            with enlarged(able.values()):
                after = {(call.site, call.index): call.scale.effective for call in run()}
        except Exception:  # the attribute was something else's number as well
            return {}
        return {
            key: not close(new, old)
            for key in able
            if (new := after.get(key)) is not None and (old := before.get(key)) is not None
        }

    return probe
