"""The audits of several models that one command checked, the worst first; one that failed to load is among them."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.audit.baseline import BaselineComparison
from sqrtdk.audit.records import CheckReport
from sqrtdk.errors import EXIT_INTERRUPTED

NOT_CHECKED = "not_checked"  # outcome of a model that could not be loaded or run
# What a model's answer may be, the worst first: those of a report, that of a comparison, and none.
MODEL_OUTCOMES = (NOT_CHECKED, "failed", "changed", "findings", "incomplete", "warnings", "scales", "passed")
HEALTHY = ("scales", "passed")  # one line says it all
EXIT_NOT_CHECKED = 2


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """One of several models: its report, or why there is none.

    Attributes:
        name: The MODEL argument.
        report: The audit; None if the model could not be loaded or run.
        comparison: With its lines in a baseline, which decides instead of the report; None without a baseline.
        error: Why there is no report; "" if there is one.
        hint: What to do about the error.
    """

    name: str
    report: CheckReport | None = None
    comparison: BaselineComparison | None = None
    error: str = ""
    hint: str = ""

    @property
    def exit_code(self) -> int:
        """2 without a report, else that of the comparison, or of the report if there is no baseline."""
        if self.report is None:
            return EXIT_NOT_CHECKED
        return self.report.exit_code if self.comparison is None else self.comparison.exit_code

    @property
    def outcome(self) -> str:
        """The answer in one word, one of `MODEL_OUTCOMES`. A model that is as its baseline has it passed."""
        if self.report is None:
            return NOT_CHECKED
        if self.comparison is None:
            return self.report.outcome
        if self.comparison.exit_code:
            return "changed"
        return "incomplete" if self.comparison.unjudged else "warnings" if self.comparison.changes else "passed"

    @property
    def healthy(self) -> bool:
        """Whether nothing failed, nothing warns, and nothing was left unjudged."""
        return self.outcome in HEALTHY


@dataclass(frozen=True, slots=True)
class SeveralReport:
    """What one command found in several models, in the order of the command line.

    Attributes:
        models: Each model with its report or its error.
        command: The command line.
        fail_on: The bar, as of `CheckReport`.
        not_in_run: Models that the baseline holds and the command line does not name.
        repeated: Models that the command line names more than once, which are checked once.
        interrupted: Whether Ctrl-C cut the check short.
    """

    models: tuple[CheckedModel, ...]
    command: str = ""
    fail_on: str = "fail"
    not_in_run: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, else the worst of a model: 2 if one was not checked, else 1 if one fails, else 0."""
        return EXIT_INTERRUPTED if self.interrupted else max((model.exit_code for model in self.models), default=0)

    @property
    def worst_first(self) -> tuple[CheckedModel, ...]:
        """The models by outcome, the worst first; equals in the order of the command line."""
        return tuple(sorted(self.models, key=lambda model: MODEL_OUTCOMES.index(model.outcome)))

    @property
    def by_outcome(self) -> dict[str, list[str]]:
        """Names of the models by outcome, the worst first; an outcome that does not occur is absent."""
        names: dict[str, list[str]] = {}
        for model in self.worst_first:
            names.setdefault(model.outcome, []).append(model.name)
        return names

    @property
    def reports(self) -> tuple[CheckReport, ...]:
        """The reports that there are."""
        return tuple(model.report for model in self.models if model.report is not None)

    @property
    def not_checked(self) -> tuple[CheckedModel, ...]:
        """The models without a report."""
        return tuple(model for model in self.models if model.report is None)
