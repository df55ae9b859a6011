"""Reads baseline files, which are not trusted: the ledger of one model, or of several."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sqrtdk import _files
from sqrtdk._records import parse_json, quote, record_from_json
from sqrtdk.audit.baseline import BASELINE_VERSION, WRITE_ANEW, Ledger, LedgerLine, by_key, ledger_of
from sqrtdk.audit.config_changes import config_values
from sqrtdk.audit.records import SEVERITIES, VERDICTS, CheckReport
from sqrtdk.errors import BaselineError, ModelError
from sqrtdk.messages import Message
from sqrtdk.models.limits import read_bytes

MAX_BASELINE_BYTES = 2**24
_SEVERAL = "models"  # the field that a file of several models has instead of those of one


def ledger_with_config(report: CheckReport, model: str) -> Ledger:
    """Return what a baseline file keeps of a report: its ledger, under the name of the MODEL argument, and its config.

    Args:
        report: Of the audit.
        model: The MODEL argument.
    """
    return replace(ledger_of(report), model=model, config=config_values(model))


def of_model(ledgers: Mapping[str, Ledger], model: str) -> Ledger | None:
    """Return the ledger of a model. The only one of a file is of the model that is checked, whatever its name."""
    return next(iter(ledgers.values())) if len(ledgers) == 1 else ledgers.get(model)


def read_for_update(path: Path, force: bool) -> dict[str, Ledger]:
    """Return the ledgers of the baseline that is about to be overwritten, by model; empty if there is no such file.

    Args:
        path: The file.
        force: Return none, instead of an error, for a file that can't be read as a baseline.

    Raises:
        BaselineError: The file exists but can't be read as a baseline, and `force` is False; see `read_baseline`.
    """
    if not os.path.lexists(path):
        return {}
    try:
        return read_baselines(path)
    except BaselineError:
        if force:
            return {}
        raise


def read_baseline(path: str | os.PathLike[str], model: str = "MODEL") -> Ledger:
    """Read and validate a baseline file, and return the ledger of one model.

    Args:
        path: The file, which is not trusted.
        model: The model's name. It chooses among several, and stands in the hint on how to write a baseline.

    Raises:
        BaselineError: As of `read_baselines`; or the file is of several models, and this one is not among them.
    """
    ledgers = read_baselines(path, shlex.quote(model))
    ledger = of_model(ledgers, model)
    if ledger is None:
        raise BaselineError(
            Message("errors.baseline.no_model", path=quote(os.fspath(path)), model=quote(model), count=len(ledgers)),
            hint=Message("errors.hint.write_baseline", model=shlex.quote(model), path=shlex.quote(os.fspath(path))),
        )
    return ledger


def read_baselines(path: str | os.PathLike[str], models: str = "MODEL") -> dict[str, Ledger]:
    """Read and validate a baseline file, and return its ledgers by model.

    Args:
        path: The file, which is not trusted.
        models: The MODEL arguments as a shell takes them, for the hint on how to write a baseline.

    Raises:
        BaselineError: The file can't be read, is not a baseline, has another version, or breaks a rule of the format.
    """
    what = f"the baseline {quote(os.fspath(path))}"
    try:
        content = read_bytes(Path(path), what, MAX_BASELINE_BYTES)
    except OSError as error:
        raise BaselineError(
            Message("errors.baseline.unreadable", path=quote(os.fspath(path)), reason=_files.os_reason(error)),
            hint=Message("errors.hint.write_baseline", model=models, path=shlex.quote(os.fspath(path))),
        ) from error
    except ModelError as error:
        raise BaselineError(error.message, hint=error.hint) from error
    document = parse_json(content, what, BaselineError, WRITE_ANEW)
    each = _documents(document, what)
    ledgers = {ledger.model: ledger for ledger in each}
    if len(ledgers) < len(each):
        raise BaselineError(f"{what} has a model twice", hint=WRITE_ANEW)
    return ledgers


def _documents(document: Any, what: str) -> list[Ledger]:
    """Return the ledgers of a document: those in its list of models, or the one that it is itself."""
    several = document.get(_SEVERAL) if isinstance(document, dict) else None
    if several is None:
        return [from_document(document, what)]
    unlike = set(document) - {"schema_version", _SEVERAL}
    if not isinstance(several, list) or not all(isinstance(one, dict) for one in several) or unlike:
        raise BaselineError(f"{what} has {_SEVERAL} that are no list of ledgers", hint=WRITE_ANEW)
    version = {"schema_version": document.get("schema_version")} if "schema_version" in document else {}
    return [from_document({**version, **one}, f"{what}, model {number}") for number, one in enumerate(several, 1)]


def from_document(document: Any, what: str) -> Ledger:
    """Return the ledger that a parsed JSON document holds.

    Args:
        document: Result of `json.loads`.
        what: What the errors call the document, "the baseline 'ledger.json'".

    Raises:
        BaselineError: The document is not a baseline, has another version, or breaks a rule of the format.
    """
    if not isinstance(document, dict) or "schema_version" not in document:
        raise BaselineError(f"{what} has no schema_version: it is no baseline", hint=WRITE_ANEW)
    version = document["schema_version"]
    # Not isinstance: True is an int as well.
    if type(version) is not int or version != BASELINE_VERSION:
        raise BaselineError(
            f"{what} is of version {quote(version)}; this sqrtdk reads version {BASELINE_VERSION}",
            hint=f"Use the sqrtdk that wrote it. Or: {WRITE_ANEW[0].lower()}{WRITE_ANEW[1:]}",
        )
    config = document.get("config", {})
    if not isinstance(config, dict) or any(isinstance(value, dict) for value in config.values()):
        raise BaselineError(f"{what}: config is no object of plain values", hint=WRITE_ANEW)
    rest = {name: value for name, value in document.items() if name != "config"}
    kept = record_from_json(_Document, rest, what, BaselineError, WRITE_ANEW)
    lines = tuple(_line(entry, f"{what}, attention {number}") for number, entry in enumerate(kept.attentions, 1))
    by_key(lines, what)
    return Ledger(kept.model, kept.mode, lines, config)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line as the file has it."""

    site: str
    index: int | None
    formula: str | None
    ratio: float | None
    verdict: str | None
    mistake: str | None
    findings: str  # "fail scale_ledger, note entropy"


@dataclass(frozen=True, slots=True)
class _Document:
    schema_version: int
    model: str
    mode: Literal["static", "dynamic"]
    attentions: tuple[_Entry, ...]


def _line(entry: _Entry, what: str) -> LedgerLine:
    if entry.index is not None and entry.index < 0:
        raise BaselineError(
            f"{what}: index is {quote(entry.index)}, not a whole number from 0 or null", hint=WRITE_ANEW
        )
    if entry.verdict is not None and entry.verdict not in VERDICTS:
        rule = f"one of {', '.join(VERDICTS)}, or null"
        raise BaselineError(f"{what}: verdict is {quote(entry.verdict)}, not {rule}", hint=WRITE_ANEW)
    kinds = tuple(entry.findings.split(", ")) if entry.findings else ()
    for kind in kinds:
        if kind.partition(" ")[0] not in SEVERITIES or not kind.partition(" ")[2]:
            raise BaselineError(f"{what}: {quote(kind)} is no severity and rule", hint=WRITE_ANEW)
    return LedgerLine(entry.site, entry.index, entry.formula, entry.ratio, entry.verdict, entry.mistake, kinds)
