"""How long the laws of one model take: what a run costs, what is left to do, and when their time is up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqrtdk.messages import Message

# Runs of a model that each law takes at most where it is kept: a decoder with a mask, positions and a cache.
RUNS_OF_LAW = {
    "finite": 0, "samples": 1, "causal": 1, "padding": 5, "documents": 1, "left_padding": 3, "cache": 11, "shift": 3,
    "place": 3, "heads": 1, "configured": 0, "parameters": 2, "modes": 1,
}  # fmt: skip
_WORTH_TELLING_S = 10.0


@dataclass(slots=True)
class Pace:
    """The time of the runs so far.

    Attributes:
        most: Seconds that all laws together may take; None: any number.
        run_seconds: Seconds of the last run; at first, of one that was made before any law was asked.
    """

    most: float | None = None
    run_seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    @property
    def is_up(self) -> bool:
        """Whether one more run, if it takes as long as the last, would end after the time is up."""
        return self.most is not None and time.monotonic() - self._began + self.run_seconds > self.most

    @contextmanager
    def run(self) -> Iterator[None]:
        """Take the time of a run."""
        start = time.monotonic()
        yield
        self.run_seconds = time.monotonic() - start

    def left(self, laws: Sequence[str]) -> Message | None:
        """Return how long these laws still take, in words, or None if that is not worth telling."""
        seconds = sum(RUNS_OF_LAW.get(law, 1) for law in laws) * self.run_seconds
        if self.most is not None:
            seconds = min(seconds, self.most - (time.monotonic() - self._began))
        if seconds < _WORTH_TELLING_S:
            return None
        if seconds < 60:
            return Message("progress.seconds", count=round(seconds))
        return Message("progress.minutes", count=round(seconds / 60))
