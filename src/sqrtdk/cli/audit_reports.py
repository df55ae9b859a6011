"""Shows the report of an audit, or its comparison with a baseline, and writes it to files: for `check` and `kv`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sqrtdk._language import Choice
from sqrtdk.cli import options

if TYPE_CHECKING:
    from sqrtdk.audit.baseline import BaselineComparison
    from sqrtdk.audit.records import CheckReport


@dataclass(frozen=True, slots=True)
class AuditReports:
    """The reports that a command line asks for, and their files; each field is the option of the same name.

    It is false if no report is asked for.

    Attributes:
        json_: Whether JSON is printed.
        output: File of the JSON report.
        html: File of the page.
        sarif: File of the SARIF log.
        junit: File of the JUnit report.
        markdown: File of the comment for a pull request, or "-" for stdout.
        force: Whether existing files are replaced.
    """

    json_: bool = False
    output: Path | None = None
    html: Path | None = None
    sarif: Path | None = None
    junit: Path | None = None
    markdown: str | None = None
    force: bool = False

    @property
    def by_option(self) -> dict[str, object]:
        """The options and their values, as `options.refuse_ignored` takes them."""
        return {
            "--json": self.json_, "--output": self.output, "--html": self.html, "--sarif": self.sarif,
            "--junit": self.junit, "--markdown": self.markdown,
        }  # fmt: skip

    @property
    def comment(self) -> Path | None:
        """File of the comment for a pull request; None if there is none, or if it goes to stdout."""
        return options.file_or_stdout(self.markdown, self.json_ and self.output is None)

    def __bool__(self) -> bool:
        return any(self.by_option.values())

    def refuse_unwritable(self) -> None:
        """Check the files before anything runs.

        Raises:
            OutputError: A file can't be written, or exists and `--force` is not given.
            InvalidValueError: Two documents would go to stdout.
        """
        from sqrtdk import _files

        _files.check_outputs((self.output, self.html, self.sarif, self.junit, self.comment), self.force)


NO_REPORTS = AuditReports()
Reports = Annotated[
    AuditReports,
    options.Fields(
        NO_REPORTS,
        {
            "json_": options.Json, "output": options.Output, "html": options.Html, "sarif": options.Sarif,
            "junit": options.Junit, "markdown": options.Markdown, "force": options.Force,
        },
    ),
]  # fmt: skip


def show(
    report: CheckReport, wanted: AuditReports, lang: Choice, comparison: BaselineComparison | None = None,
    reasons: bool = False,
) -> int:  # fmt: skip
    """Write the documents, print the report or what it is held against, and return the exit code.

    Args:
        report: of the audit.
        wanted: the documents.
        lang: `--lang`.
        comparison: of the report with a baseline. It is shown instead of the report, which SARIF still is of: all
            findings, those too that the baseline knows.
        reasons: whether the report says why each law that was not asked was not.
    """
    from sqrtdk.cli.output import colors, print_text, width, write_stderr
    from sqrtdk.report.check import baseline, json, markdown, terminal
    from sqrtdk.report.check.html import to_html
    from sqrtdk.report.check.junit import to_junit
    from sqrtdk.report.check.sarif import to_sarif

    language = options.language_of_choice(lang)

    def as_comment() -> str:
        if comparison is None:
            return markdown.to_markdown(report, language)
        return baseline.baseline_markdown(comparison, language)

    documents = {
        "JSON": lambda: json.to_json(report) if comparison is None else baseline.to_json(comparison),
        "HTML": lambda: to_html(report, lang),
        "SARIF": lambda: to_sarif(report),
        "JUnit XML": lambda: to_junit(report),
        "Markdown": as_comment,
    }
    on_stdout = written(wanted, documents)
    if on_stdout is not None:
        print_text(on_stdout)
        line = terminal.summary_line(report, language)
        write_stderr(line if comparison is None else baseline.baseline_summary_line(comparison, language))
    elif comparison is None:
        print_text(terminal.to_text(report, width=width(), color=colors(), language=language, reasons=reasons))
    else:
        print_text(baseline.to_text(comparison, width=width(), color=colors(), language=language))
    return report.exit_code if comparison is None else comparison.exit_code


def written(wanted: AuditReports, documents: Mapping[str, Callable[[], str]]) -> str | None:
    """Write the documents that are wanted as files, and return the one for stdout; None if there is none.

    Args:
        wanted: the documents.
        documents: kind of a document -> a function that draws it.
    """
    from sqrtdk import _files
    from sqrtdk.cli.output import say_written

    files = {
        "JSON": wanted.output, "HTML": wanted.html, "SARIF": wanted.sarif, "JUnit XML": wanted.junit,
        "Markdown": wanted.comment,
    }  # fmt: skip
    drawn = [(path, documents[kind](), kind) for kind, path in files.items() if path is not None]
    for path, document, kind in drawn:  # nothing is written before all is drawn
        _files.write_text(path, document, wanted.force)
        say_written(kind, path)
    if wanted.markdown == options.STDOUT:
        return documents["Markdown"]()
    return documents["JSON"]() if wanted.json_ and wanted.output is None else None
