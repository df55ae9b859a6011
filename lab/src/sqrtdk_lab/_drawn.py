"""Records of the lab that save themselves, and that a notebook shows as a table."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from sqrtdk.extending import Saved


class Drawn(Saved):
    """A record of a claim; what draws it is imported only then, because the modules of the page load slowly."""

    __slots__ = ()

    def _record(self) -> Any:
        """Return the record that is drawn."""
        return self

    def _document(self, ending: str) -> str:
        record = self._record()
        writers = {
            ".json": lambda _: import_module("sqrtdk_lab.record").to_json(record),
            ".html": lambda _: import_module("sqrtdk_lab.report.page").to_html([record]),
        }
        document = import_module("sqrtdk.report.files").report_document
        return cast(str, document(self, ending, {type(self).__name__: writers}))

    def _repr_html_(self) -> str:
        return cast(str, import_module("sqrtdk_lab.report.page").to_table(self._record()))
