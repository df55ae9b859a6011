"""Maps each kind of record and each file name ending to the function that writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from sqrtdk._language import chosen
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, joined

Draw = Callable[[Any], str]
_TEXT_WIDTH = 100  # columns of a text that goes to no terminal


def drawn(name: str, package: str = "sqrtdk") -> Draw:
    """Return a function that writes a record, whose module is imported on the first call only.

    The modules of the pages load slowly, and most runs write no page.

    Args:
        name: Module and function below the package, as "report.check.html.to_html".
        package: Package that has the module.
    """
    module, _, function = name.rpartition(".")
    return lambda record: str(getattr(import_module(f"{package}.{module}"), function)(record))


def _text(name: str) -> Draw:
    """Return a function that writes the text of a terminal, in the language of the environment."""

    def text(record: object) -> str:
        language = chosen("auto", os.environ)
        return str(
            import_module(f"sqrtdk.report.{name}.terminal").to_text(record, width=_TEXT_WIDTH, language=language)
        )

    return text


WRITERS: Mapping[str, Mapping[str, Draw]] = {
    "CheckReport": {
        ".json": drawn("report.check.json.to_json"),
        ".html": drawn("report.check.html.to_html"),
        ".sarif": drawn("report.check.sarif.to_sarif"),
        ".xml": drawn("report.check.junit.to_junit"),
        ".md": drawn("report.check.markdown.to_markdown"),
        ".txt": _text("check"),
    },
    "DiffReport": {
        ".json": drawn("report.diff.json.to_json"),
        ".html": drawn("report.diff.html.to_html"),
        ".txt": _text("diff"),
    },
    "AnswersReport": {
        ".json": drawn("report.answers.json.to_json"),
        ".html": drawn("report.answers.html.to_html"),
        ".txt": _text("answers"),
    },
    "Summary": {
        ".json": drawn("report.watch.json.to_json"),
        ".html": lambda run: drawn("report.watch.html.to_html")([run]),
    },
    "CacheForecast": {".json": drawn("report.kv.json.to_json")},
}


def report_document(record: object, ending: str, writers: Mapping[str, Mapping[str, Draw]] = WRITERS) -> str:
    r"""Return a record as the document for files with a given name ending.

    Args:
        record: a report, a watch's summary or a cache forecast.
        ending: ending of the file's name, with the dot: ".json".
        writers: kind of record -> ending -> writer.

    Raises:
        InvalidValueError: records of this kind have no such document.

    Example:
        >>> from sqrtdk.audit.records import CheckReport, ModelInfo
        >>> report_document(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ()), ".json")[:21]
        '{\n  "schema_version":'
    """
    # by name: the classes of the records would import torch
    kind = type(record).__name__
    endings = writers[kind]
    if ending not in endings:
        raise InvalidValueError(
            Message("errors.output.ending", kind=kind, names=joined([*endings], "comma"), ending=repr(ending)),
            hint=Message("errors.hint.ending", ending=next(iter(endings))),
        )
    return endings[ending](record)
