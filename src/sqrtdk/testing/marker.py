"""Reads the markers `attention` and `laws`, and ends the run at collection if one is wrong.

Like `sqrtdk.testing.plugin`, this file imports no torch until there is a marked test.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Asked:
    """What a marker asks for.

    Attributes:
        allow: names that may stand.
        fail_on: the bar of the test.
        own_bar: name of the marker if it has its own `fail_on`, which the command line then does not change.
        laws: names of the laws; empty for a marker that names none.
    """

    allow: tuple[str, ...]
    fail_on: str
    own_bar: str | None
    laws: tuple[str, ...]


class Marked:
    """The hooks of one marker.

    Args:
        marker: its name.
        fail_on: `--sqrtdk-fail-on`.
        choices: values of `fail_on`.
        takes: names of its options. The first may be given without its name if it is "names".
    """

    def __init__(self, marker: str, fail_on: str, choices: Sequence[str], takes: Sequence[str]) -> None:
        self.marker, self.fail_on, self.choices, self.takes = marker, fail_on, choices, takes

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Make wrong arguments of a marker an error of collection, reported once with the tests that have it."""
        report = yield
        tests: dict[str, list[str]] = {}
        for item in report.result:
            marker = item.get_closest_marker(self.marker) if isinstance(item, pytest.Item) else None
            if marker is not None:
                try:
                    self.asked(marker)
                except pytest.UsageError as error:
                    tests.setdefault(str(error), []).append(item.name)
        if tests:  # text alone, which xdist sends; it can't send a UsageError
            messages = [
                f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {wrong}"
                for wrong, names in tests.items()
            ]
            report.outcome, report.longrepr = "failed", "\n".join([*filter(None, [report.longreprtext]), *messages])
        return report

    def asked(self, marker: pytest.Mark) -> Asked:
        """Return what a marker asks for, from its arguments.

        Raises:
            pytest.UsageError: An argument is unknown or has a wrong value.
        """
        from sqrtdk.errors import SqrtdkError, did_you_mean
        from sqrtdk.laws.table import names_of
        from sqrtdk.testing.standing import as_allowed, check_fail_on, check_kinds

        named = self.takes[0] == "names"
        options = {**dict(zip(self.takes[:named], marker.args, strict=False)), **marker.kwargs}
        unknown = [name for name in options if name not in self.takes]
        extra = [*map(repr, marker.args[named:]), *(name + did_you_mean(name, self.takes) for name in unknown)]
        if extra:
            takes = ", ".join(f"{name}=..." for name in self.takes)
            raise pytest.UsageError(f"marker {self.marker} got {', '.join(extra)}\n  It takes {takes} alone.")
        own = options.get("fail_on")
        try:
            allow = as_allowed(options.get("allow", ()))
            check_kinds(allow)
            check_fail_on(own or self.fail_on, self.choices)
            laws = names_of(options.get("names", "all")) if named else ()
        except SqrtdkError as error:
            raise pytest.UsageError(f"marker {self.marker}: {error}\n  {error.hint}") from None
        return Asked(allow, own or self.fail_on, self.marker if own else None, laws)


def place_in_file(report: pytest.TestReport) -> tuple[str, int]:
    """Return the file of a test and its line there, counted from 0 as pytest does."""
    return report.location[0], report.location[1] or 0


def by_place(records: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the records in the order of their tests' places, since workers send them in any order.

    Example:
        >>> [*by_place({"late": {"place": ("test_a.py", 9)}, "early": {"place": ("test_a.py", 2)}})]
        ['early', 'late']
    """
    return dict(sorted(records.items(), key=lambda one: one[1]["place"]))
