"""Results of long computations, one file each, so that none runs twice.

A file is written whole and at once. It holds the key of its result, a hash of everything that decides it: a result with
another key, like a damaged file, counts as missing, and is computed again and replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sqrtdk import _json
from sqrtdk._records import parse_json
from sqrtdk.errors import RunFolderError
from sqrtdk.store import disk

MAX_RESULTS_BYTES = 2**28  # of one result


class Results:
    """The results in a folder, whose lock the writer holds.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = Results(Path(folder))
        ...     results.put("one", "key", {"loss": 0.5}, computed_from={"x": 1})
        ...     results.get("one", "key"), results.get("one", "another key")
        ({'loss': 0.5}, None)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str, key: str) -> Any:
        """Return a stored result, as JSON values.

        Args:
            name: Name under which it was stored.
            key: Key of the result; what was stored with another key is out of date.

        Returns:
            The result; None if there is none, if its key is another, or if its file is damaged.
        """
        try:
            content = disk.take(self._path(name), MAX_RESULTS_BYTES)
            document = parse_json(content, "the result", RunFolderError, "")
            return document["result"] if document["key"] == key else None
        except (OSError, RunFolderError, ValueError, KeyError, TypeError):  # missing or damaged
            return None

    def put(self, name: str, key: str, result: Any, computed_from: Any) -> None:
        """Write a result.

        Args:
            name: of the file, without its ending; an existing file is replaced.
            key: of the result.
            result: JSON data, NaN and infinities among them.
            computed_from: JSON data for a human who opens the file.

        Raises:
            OutputError: It can't be written.
        """
        content = _json.exact_data({"computed_from": computed_from, "key": key, "result": result})
        disk.put(self._path(name), f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode())

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
