"""Records that show and save themselves; `sqrtdk.report` draws them, and is imported when one is asked to."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from sqrtdk import _files


def table(record: object) -> str:
    """The HTML of a record for a notebook, without a script; names that a model brought are text in it."""
    return cast(str, import_module("sqrtdk.report.notebook").to_html(record))


class Shown:
    """A record that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return table(self)


class Saved:
    """A record that can be written to a file."""

    __slots__ = ()

    def to_json(self) -> str:
        """The record as one JSON document, ASCII only, that ends with a newline."""
        return self._document(".json")

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the record to a file, all of it or nothing; what it is, the name's ending says.

        Args:
            path: ".json", and of reports ".html", a page that needs nothing else; of a check also ".sarif", ".xml"
                (JUnit) and ".md" (a comment on a pull request).
            force: replace a file that exists.

        Raises:
            InvalidValueError: there is no document of this ending for the record.
            OutputError: the file exists, or can't be written.
        """
        path = Path(path)
        _files.check_writable(path, force)
        _files.write_text(path, self._document(path.suffix.lower()), force)

    def _document(self, ending: str) -> str:
        return cast(str, import_module("sqrtdk.report.files").document(self, ending))
