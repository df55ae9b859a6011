"""Checks several models in one process, so that torch and transformers are imported once, and reports on all."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqrtdk._language import Choice
from sqrtdk.cli import options
from sqrtdk.cli.audit_reports import AuditReports, written
from sqrtdk.cli.errors import fail, words_of
from sqrtdk.cli.kept_apart import NOTHING_KEPT, Kept
from sqrtdk.cli.output import colors, print_text, tell_reader, width, working, write_stderr
from sqrtdk.cli.process import interrupted
from sqrtdk.errors import EXIT_INTERRUPTED, INTERRUPTS
from sqrtdk.messages import Message
from sqrtdk.models.config import read_config_dict
from sqrtdk.models.options import LoadOptions
from sqrtdk.report.plain import plain

if TYPE_CHECKING:
    from sqrtdk.audit.baseline import Ledger
    from sqrtdk.audit.records import CheckReport
    from sqrtdk.audit.several import CheckedModel


@dataclass(frozen=True, slots=True)
class Several:
    """Several models, and how the command line wants them checked.

    Attributes:
        models: The MODEL arguments.
        audit: Audits one of them: its name and the bar -> the report.
        loading: How they are loaded.
        wanted: The documents.
        fail_on: The bar.
        lang: `--lang`.
        show_traceback: Whether an error shows its traceback.
        reasons: Whether the report says why each law that was not asked was not.
        kept: What an earlier process found, which one of the models ended.
    """

    models: tuple[str, ...]
    audit: Callable[[str, str], CheckReport]
    loading: LoadOptions
    wanted: AuditReports
    fail_on: str
    lang: Choice
    show_traceback: bool
    reasons: bool
    kept: Kept = NOTHING_KEPT

    @property
    def names(self) -> list[str]:
        """The models, each once."""
        return list(dict.fromkeys(self.models))

    @property
    def _cut_short(self) -> bool:
        """Whether Ctrl-C ended the check before all were checked."""
        return self.kept.stopped or interrupted()

    def check(self) -> int:
        """Audit the models one by one, show one report on all, and return the worst exit code.

        A model that can't be loaded or run does not stop the others. A JSON file without a `model_type` is not a config
        of a model: it is left out with a message, as a pre-commit hook passes every file that fits its pattern.
        """
        return self._show(self._each(self.fail_on), self.fail_on)

    def check_against(self, file: Path) -> int:
        """Audit the models as `check` does, and hold each against its lines in one baseline file."""
        from sqrtdk.audit.baseline_file import read_baselines

        before = read_baselines(file, shlex.join(self.models))
        checked = [self._compared(model, before, str(file)) for model in self._each(self.fail_on)]
        return self._show(checked, self.fail_on, before)

    def renew(self, file: Path) -> int:
        """Write the lines of each model into one baseline file, and show what changed since it was written before.

        Models of the file that are not checked now, or that could not be, keep their lines.

        Returns:
            0, or 2 if a model could not be checked.
        """
        from sqrtdk import _files
        from sqrtdk.audit.baseline_file import ledger_with_config, read_for_update
        from sqrtdk.report.check.baseline import ledger_line, to_file

        _files.check_writable(file, force=True)  # before the models run
        before = read_for_update(file, self.wanted.force)
        checked = self._each("never")
        now = {model.name: ledger_with_config(model.report, model.name) for model in checked if model.report}
        if before or self.wanted:
            self._show([self._compared(model, before, str(file)) for model in checked], "never", before)
        _files.write_text(file, to_file(*(before | now).values()), force=True)
        tell_reader(Message("progress.baseline", path=plain(str(file))))
        if not before and not self.wanted:  # what a first file accepts is shown by nothing else
            language = options.language_of_choice(self.lang)
            for name, ledger in now.items():
                write_stderr(f"{plain(name)}  {ledger_line(ledger, language)}")
        if self._cut_short:
            return EXIT_INTERRUPTED
        return max((model.exit_code for model in checked if model.report is None), default=0)

    def _each(self, fail_on: str) -> list[CheckedModel]:
        """Audit each model, once if it is named twice; after Ctrl-C none of those that are left."""
        from sqrtdk.audit.several import CheckedModel

        checked: list[CheckedModel | None] = []
        stopped = False
        for number, name in enumerate(self.names, 1):
            found = self.kept.finished(number, name)
            if found is None and (stopped or self.kept.stopped):
                found = (CheckedModel(name, error=Message("progress.interrupted")),)
            elif found is None:
                self.kept.begin(number)
                with working(Message("progress.checking_of", model=name, number=number, count=len(self.names))):
                    found = (self._one(name, fail_on),)
                stopped = interrupted()
                self.kept.finish(number, *found)
            checked += found
        self.kept.end()
        return [model for model in checked if model is not None]

    def _one(self, name: str, fail_on: str) -> CheckedModel | None:
        """Audit one model; None for a JSON file that is no config of a model."""
        from sqrtdk.audit.several import CheckedModel

        try:
            if name.lower().endswith(".json") and "model_type" not in read_config_dict(Path(name)):
                tell_reader(Message("progress.no_model_type", file=plain(name)))
                return None
            with _left_as_it_was():
                return CheckedModel(name, self.audit(name, fail_on))
        except BaseException as error:  # a model's code may raise anything, and the others are to be answered
            if interrupted():
                return CheckedModel(name, error=Message("progress.interrupted"))
            if isinstance(error, INTERRUPTS):
                raise
            tell_reader(Message("progress.not_checked", file=plain(name)))
            fail(error, self.show_traceback)
            message, hint = words_of(error)
            return CheckedModel(name, error=message, hint=hint)

    def _compared(self, model: CheckedModel, before: Mapping[str, Ledger], file: str) -> CheckedModel:
        """Return a model with the comparison with its baseline; one without a report stays as it is."""
        from sqrtdk.audit.baseline import Ledger
        from sqrtdk.audit.config_changes import compare_model

        if model.report is None:
            return model
        old = before.get(model.name) or Ledger(model.name, model.report.mode, ())
        return replace(model, comparison=compare_model(old, model.report, file, model.name, self.loading, audit_static))

    def _show(self, models: Sequence[CheckedModel], fail_on: str, before: Mapping[str, Ledger] | None = None) -> int:
        """Write the documents, print the report, and return the exit code."""
        from sqrtdk.audit.several import SeveralReport
        from sqrtdk.report.check import several as drawn
        from sqrtdk.report.check.junit import to_junit
        from sqrtdk.report.check.sarif import to_sarif
        from sqrtdk.report.check.several_page import to_html

        left = tuple(name for name in before or () if name not in self.models)
        repeated = tuple(name for name in dict.fromkeys(self.models) if self.models.count(name) > 1)
        several = SeveralReport(
            tuple(models), shlex.join(["sqrtdk", *sys.argv[1:]]), fail_on, left, repeated, self._cut_short
        )
        language = options.language_of_choice(self.lang)
        lost = {model.name: str(model.error) for model in several.not_checked}
        documents = {
            "JSON": lambda: drawn.to_json(several),
            "HTML": lambda: to_html(several, self.lang),
            "SARIF": lambda: to_sarif(*several.reports, not_checked=lost),
            "JUnit XML": lambda: to_junit(*several.reports, not_checked=lost),
            "Markdown": lambda: drawn.several_markdown(several, language),
        }
        on_stdout = written(self.wanted, documents)
        if on_stdout is not None:
            print_text(on_stdout)
            write_stderr(drawn.summary_of_several(several, language))
        elif several.models:  # of files that are no configs there is nothing to say
            settings: Any = {"width": width(), "color": colors(), "language": language}
            print_text(drawn.to_text(several, reasons=self.reasons, **settings))
        return several.exit_code


def audit_static(model: str, loading: LoadOptions) -> CheckReport:
    """Audit a model for its ledger alone, to see what follows from its config."""
    from sqrtdk._check import check_with

    return check_with(model, None, loading, laws="none")


@contextlib.contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Put back what a model's code may change for the models after it: directory, default dtype, gradients, threads."""
    import torch

    here, dtype, threads = os.getcwd(), torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        os.chdir(here)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
