"""Records that display and save themselves; `sqrtdk.report` draws them, and is imported only then."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from sqrtdk import _files


def notebook_table(record: object) -> str:
    """Return a record as HTML for a notebook, without a script; names from a model are escaped."""
    return cast(str, import_module("sqrtdk.report.notebook").to_html(record))


class Shown:
    """A record that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return notebook_table(self)


class Saved:
    """A record that can be saved as JSON or as a page."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return the record as one JSON document, ASCII only, that ends with a newline."""
        return self._document(".json")

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the record to a file, whole or not at all; the name's ending decides the format.

        Args:
            path: ".json"; for reports also ".html", a self-contained page; for a check also ".sarif", ".xml" (JUnit)
                and ".md" (a comment on a pull request).
            force: replace an existing file.

        Raises:
            InvalidValueError: The record has no document with this ending.
            OutputError: The file exists, or can't be written.
        """
        path = Path(path)
        _files.check_writable(path, force)
        _files.write_text(path, self._document(path.suffix.lower()), force)

    def _document(self, ending: str) -> str:
        return cast(str, import_module("sqrtdk.report.files").report_document(self, ending))
