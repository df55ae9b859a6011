"""Maps each kind of record and each file name ending to the function that writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, joined

Draw = Callable[[Any], str]


def _drawn(name: str) -> Draw:
    """Return a writer that imports its module on the first call, because the modules of the pages load slowly."""
    module, _, function = name.rpartition(".")
    return lambda record: str(getattr(import_module(f"sqrtdk.{module}"), function)(record))


def _of_record(ending: str, done: Any) -> str:
    """Return the document of the record of a claim that was run."""
    return report_document(done.record, ending)


WRITERS: Mapping[str, Mapping[str, Draw]] = {
    "CheckReport": {
        ".json": _drawn("report.json.to_json"),
        ".html": _drawn("report.html.to_html"),
        ".sarif": _drawn("report.sarif.to_sarif"),
        ".xml": _drawn("report.junit.to_junit"),
        ".md": _drawn("report.markdown.to_markdown"),
    },
    "DiffReport": {".json": _drawn("report.diff_json.to_json"), ".html": _drawn("report.diff_html.to_html")},
    "Summary": {
        ".json": _drawn("report.watch_json.to_json"),
        ".html": lambda run: _drawn("report.watch_html.to_html")([run]),
    },
    "CacheForecast": {".json": _drawn("report.json.forecast_to_json")},
    "Record": {
        ".json": _drawn("lab.record.to_json"),
        ".html": lambda record: _drawn("report.lab_page.to_html")([record]),
    },
    "Done": {ending: partial(_of_record, ending) for ending in (".json", ".html")},
}


def report_document(record: object, ending: str) -> str:
    r"""Return a record as the document for files with a given name ending.

    Args:
        record: a report, a watch's summary, a cache forecast, a claim that was run, or its record.
        ending: ending of the file's name, with the dot: ".json".

    Raises:
        InvalidValueError: records of this kind have no such document.

    Example:
        >>> from sqrtdk.audit.records import CheckReport, ModelInfo
        >>> report_document(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ()), ".json")[:21]
        '{\n  "schema_version":'
    """
    kind = type(record).__name__
    writers = WRITERS[kind]
    if ending not in writers:
        raise InvalidValueError(
            Message("errors.output.ending", kind=kind, names=joined([*writers], "comma"), ending=repr(ending)),
            hint=Message("errors.hint.ending", ending=next(iter(writers))),
        )
    return writers[ending](record)
