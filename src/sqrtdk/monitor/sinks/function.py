"""A function as a sink: called with the step and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqrtdk.monitor.samples import Alarm


class Function:
    """Calls `function(step, metrics)` at each sampled step; alarms are what `on_alarm` of the watch is for.

    Args:
        function: what it returns is not looked at.
    """

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self._function = function

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call it, with a dictionary of its own."""
        self._function(step, dict(metrics))

    def alarm(self, alarm: Alarm) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
