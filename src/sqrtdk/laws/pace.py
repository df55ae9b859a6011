"""How long the laws of one model take: what a run costs, what is left to do, and when their time is up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqrtdk.messages import Message

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
        """Whether another run as long as the last one would exceed the time limit; False without a limit."""
        return self.most is not None and time.monotonic() - self._began + self.run_seconds > self.most

    @contextmanager
    def run(self) -> Iterator[None]:
        """Measure the time of the block as that of one run, and keep it in `run_seconds`."""
        start = time.monotonic()
        yield
        self.run_seconds = time.monotonic() - start

    def left(self, runs: int) -> Message | None:
        """Return how long further runs take, as text in seconds or minutes, or None if that is too short to mention.

        Args:
            runs: Number of runs that are left; the time limit, if there is one, bounds the result.
        """
        seconds = runs * self.run_seconds
        if self.most is not None:
            seconds = min(seconds, self.most - (time.monotonic() - self._began))
        if seconds < _WORTH_TELLING_S:
            return None
        if seconds < 60:
            return Message("progress.seconds", count=round(seconds))
        return Message("progress.minutes", count=round(seconds / 60))
