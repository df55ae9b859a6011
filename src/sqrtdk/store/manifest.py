"""run.json: the run of a folder, its attempts, and how many parts each attempt wrote.

The count is an inventory: a lost part is noticed, even the last one or all of them. run.json is written after each
part, so a process killed in between leaves one part more than run.json counts, never one less.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqrtdk import _json
from sqrtdk._records import parse_json, quote, record_from_json
from sqrtdk.errors import OutputError, RunFolderError
from sqrtdk.messages import Message
from sqrtdk.store import disk

RUN = "run.json"
SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 2**22
MAX_ATTEMPTS = 2**14
MAX_STEP = 10**18 - 1
_INVENTORY = ("parts", "last_step")  # fields of an attempt that older versions did not write
_NOT_A_RUN_HINT = "errors.folder.is_it_a_run"
_DAMAGED = "Copy it again; the parts beside it are Parquet files, which other programs read as well."


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that wrote into the folder.

    Attributes:
        number: counted from 1.
        first_step: step at which it began; its records replace those of earlier attempts from there on.
        started: seconds since the epoch.
        settings: of the watch, as JSON given by the caller.
        parts: number of parts it wrote, including parts merged since; None: an older version wrote, which did not
            count.
        last_step: largest step in them; None: no step, or not noted.
    """

    number: int
    first_step: int
    started: float
    settings: Any
    parts: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `run.json`: the model, as JSON that the caller gave, and the attempts, oldest first."""

    model: Any
    attempts: tuple[Attempt, ...]

    def text(self) -> str:
        """Return the text of `run.json`, with a checksum by which a damaged file is noticed."""
        content = {"schema_version": SCHEMA_VERSION, "attempts": list(map(_fields, self.attempts)), "model": self.model}
        return _json.json_document(content | {"checksum": _checksum(content)})


def plain_json(value: Any, what: str) -> Any:
    """Return a value as it comes back from run.json.

    Raises:
        RunFolderError: The value is nested too deeply or too large.

    Example:
        >>> plain_json({"layers": 12, "shape": (1, 2), "scale": float("nan")}, "the model")
        {'layers': 12, 'shape': [1, 2], 'scale': None}
    """
    text = _json.json_document(value)
    if len(text) > MAX_MANIFEST_BYTES // 4:
        raise RunFolderError(
            f"{what} has {len(text)} bytes of JSON; {MAX_MANIFEST_BYTES // 4} are the limit", hint="Say less."
        )
    return parse_json(text, what, RunFolderError, "Say less.")


def read_manifest(folder: Path) -> Manifest:
    """Read run.json.

    Raises:
        RunFolderError: The file is missing, damaged, or of another schema version.
    """
    path = folder / RUN
    try:
        content = disk.take(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunFolderError(
            Message("errors.folder.no_run", folder=quote(folder), file=RUN), hint=Message(_NOT_A_RUN_HINT)
        ) from error
    except RunFolderError as error:
        raise RunFolderError(f"{quote(path)}: {error}", hint=Message(_NOT_A_RUN_HINT)) from error
    what = quote(path)
    return _manifest(parse_json(content, what, RunFolderError, Message(_NOT_A_RUN_HINT)), what)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write run.json, replacing an existing one.

    Raises:
        OutputError: It can't be written.
    """
    # The limits of `read_manifest` hold here as well, as what can't be read must not be written.
    content = manifest.text().encode()
    if len(content) > MAX_MANIFEST_BYTES or len(manifest.attempts) > MAX_ATTEMPTS:
        raise OutputError(
            f"{folder / RUN} would have {len(manifest.attempts)} attempts in {len(content)} bytes, which is not read",
            hint="Go on in another directory.",
        )
    disk.put(folder / RUN, content)


def model_difference(there: Any, here: Any) -> str:
    """Say where two descriptions of a model differ.

    Example:
        >>> model_difference({"layers": 12, "heads": 12}, {"layers": 24, "heads": 12})
        "layers is '12' there and '24' here"
    """
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"it is {quote(there)} there and {quote(here)} here"
    other = [name for name in here | there if (name in there, there.get(name)) != (name in here, here.get(name))]
    texts = [f"{_name(name)} is {quote(there.get(name))} there and {quote(here.get(name))} here" for name in other]
    return "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if len(texts) > 5 else "")


def _name(name: str) -> str:
    return name if name.isidentifier() and name.isascii() and len(name) < 80 else quote(name)


def _fields(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt as JSON, without the fields that its older version did not write."""
    noted = attempt.parts is not None
    return {name: value for name, value in asdict(attempt).items() if noted or name not in _INVENTORY}


def _checksum(content: dict[str, Any]) -> str:
    """Return the checksum of a document, independent of the whitespace of its file."""
    return disk.digest(_json.json_document(content).encode())


def _manifest(document: Any, what: str) -> Manifest:
    """Return the manifest in a parsed document.

    Raises:
        RunFolderError: A field is missing or wrong, or the checksum differs.
    """
    if not isinstance(document, dict) or "schema_version" not in document:
        raise RunFolderError(f"{what} is not that of a run: it has no 'schema_version'", hint=Message(_NOT_A_RUN_HINT))
    if (version := document["schema_version"]) != SCHEMA_VERSION or isinstance(version, bool):
        raise RunFolderError(
            f"{what} is of schema version {quote(version)}; this version of sqrtdk has {SCHEMA_VERSION}",
            hint="Take the version of sqrtdk that wrote it; to record, choose another directory.",
        )
    attempts = document.get("attempts")
    if "model" not in document or not isinstance(attempts, list) or not len(attempts) <= MAX_ATTEMPTS:
        raise RunFolderError(
            f"{what} lacks the model, or its attempts are no list of at most {MAX_ATTEMPTS}",
            hint=Message(_NOT_A_RUN_HINT),
        )
    some = tuple(_attempt(attempt, f"{what}: attempts[{number}]") for number, attempt in enumerate(attempts))
    if any(after.number <= before.number for before, after in itertools.pairwise(some)):
        raise RunFolderError(f"{what}: the numbers of its attempts don't increase", hint=Message(_NOT_A_RUN_HINT))
    content = {name: value for name, value in document.items() if name != "checksum"}
    # the keys of files written before there were checksums
    old = document.keys() <= {"schema_version", "attempts", "model"}
    if not old and document.get("checksum") != _checksum(content):
        raise RunFolderError(f"{what} is damaged: its checksum is not that of what it says", hint=_DAMAGED)
    return Manifest(document["model"], some)


def _attempt(document: Any, what: str) -> Attempt:
    """Return an attempt in a parsed document.

    Raises:
        RunFolderError: A field is missing, or beyond its limits.
    """
    attempt = record_from_json(Attempt, document, what, RunFolderError, Message(_NOT_A_RUN_HINT), others=True)
    limits = {
        "number": (1, 10**9 - 1),
        "first_step": (0, MAX_STEP),
        "started": (-(2**63), 2**63),
        "parts": (0, 10**12),
        "last_step": (0, MAX_STEP),
    }
    for name, (least, greatest) in limits.items():
        value = getattr(attempt, name)
        if value is not None and not least <= value <= greatest:
            raise RunFolderError(
                f"{what}.{name} is {quote(value)}; it is from {least} to {greatest}",
                hint=Message(_NOT_A_RUN_HINT),
            )
    return attempt
