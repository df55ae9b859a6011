"""Looking back over samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from sqrtdk.monitor.samples import CallSample, StepSample


def largest(call: CallSample, column: str) -> tuple[float, int]:
    """The largest finite number of a column and its head; minus infinity where there is none.

    >>> largest(CallSample("attn", 0, 3, {"peak": [0.1, float("nan"), 0.3]}, 1.0, ""), "peak")
    (0.3, 2)
    """
    finite = [(value, head) for head, value in enumerate(call.columns.get(column, ())) if math.isfinite(value)]
    return max(finite, default=(-math.inf, 0))


def same_place(samples: Iterable[StepSample], call: CallSample) -> Iterator[tuple[int, CallSample]]:
    """Step and sample of an attention, in each sample that has it."""
    for sample in samples:
        found = next((one for one in sample.calls if one.place == call.place), None)
        if found is not None:
            yield sample.step, found


def first_of(samples: Sequence[StepSample], call: CallSample) -> CallSample | None:
    """The attention as it was first seen."""
    return next((one for _, one in same_place(samples, call)), None)
