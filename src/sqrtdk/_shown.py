"""Records that display and save themselves; `sqrtdk.report` draws them, and is imported only then."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sqrtdk import _files
from sqrtdk._leads import no_such_attribute


def notebook_table(record: object) -> str:
    """Return a record as HTML for a notebook, without a script; names from a model are escaped."""
    return cast(str, import_module("sqrtdk.report.notebook").to_html(record))


class Guessed:
    """A record that names what it has for an attribute that it lacks."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker shall still refuse an unknown name

        def __getattr__(self, name: str) -> Any:
            no_such_attribute(self, name)


class Shown(Guessed):
    """A record that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return notebook_table(self)


def figure_of(record: object) -> Any:
    """Return a `matplotlib.figure.Figure` of a record; see `sqrtdk.report.plot.to_figure`."""
    return import_module("sqrtdk.report.plot").to_figure(record)


class Drawn:
    """A record of which there is a picture."""

    __slots__ = ()

    def plot(self) -> Any:
        """Draw the largest logit, the entropy and the largest weight of every head, as a `matplotlib.figure.Figure`.

        Raises:
            InvalidValueError: Nothing was measured.
            MissingExtraError: matplotlib is not installed.
        """
        return figure_of(self)


class Saved(Guessed):
    """A record that can be printed, or saved as JSON or as a page."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return the record as one JSON document, ASCII only, that ends with a newline."""
        return self._document(".json")

    def to_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes, as Python objects; a number that is not finite is a text, such as "NaN"."""
        return cast(dict[str, Any], json.loads(self.to_json()))

    def to_html(self) -> str:
        """Return the self-contained page.

        Raises:
            InvalidValueError: The record has none.
        """
        return self._document(".html")

    def to_markdown(self) -> str:
        """Return a comment for a pull request, as `sqrtdk check --markdown` writes it.

        Raises:
            InvalidValueError: The record has none; a check has one.
        """
        return self._document(".md")

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame`: a check by attention and head, a comparison by pair, answers by change tried.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return import_module("sqrtdk.report.dataframe").to_dataframe(self)

    def summary(self) -> str:
        """Return what the command line prints, without colours, in the language of the environment."""
        return self._document(".txt")

    def print(self) -> None:
        """Print the `summary`."""
        print(self.summary(), end="")

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the record to a file, whole or not at all; the name's ending decides the format.

        Args:
            path: ".json"; for reports also ".html", a self-contained page, and ".txt"; for a check ".sarif", ".xml"
                (JUnit) and ".md" (a comment on a pull request).
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
