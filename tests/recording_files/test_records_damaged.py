"""Every kind of record on disk: what is written is read, and what is damaged is one error of ours or does no harm."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqrtdk.audit import baseline_file
from sqrtdk.audit.baseline import ledger_of
from sqrtdk.errors import BaselineError, InvalidValueError, RunFolderError, SqrtdkError, TraceFileError
from sqrtdk.monitor.columns import HEAD_COLUMNS
from sqrtdk.monitor.reading import read_run
from sqrtdk.recording import read_trace_file
from sqrtdk.report.check.baseline import to_file
from sqrtdk.store.manifest import read_manifest
from tests.monitor.run_records import MODEL, SETTINGS, head, told, whole, writer, written
from tests.recording_files.forged import forge
from tests.recording_files.sample_calls import unlike
from tests.report.sample_report import sick
from tests.support.lab_here import LAB

FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
ANYTHING = (None, True, 3, -0.5, "x", [], [1], {}, {"a": 1}, 10**400, "\ud800", [[[]]])


@dataclass(frozen=True)
class Kind:
    """A document of one kind in the file `name`; below the names in `free` it may hold any JSON."""

    error: type[SqrtdkError]
    read: Callable[[Path], object]
    document: Callable[[], dict[str, Any]]
    write: Callable[[Path, dict[str, Any]], object] = lambda path, document: path.write_text(json.dumps(document))
    name: str = "record"
    free: tuple[str, ...] = ()


def _trace() -> dict[str, Any]:
    q = {"factor": 1.5, "steps": [{"name": "norm", "detail": "rms"}]}
    terms = [{"name": "scale", "value": 2}, {"name": "mask", "least": 0, "shape": [1, 1, 3, 5], "fill": -1e9}]
    call = {"site": "a", "index": 0, "layout": "BHLE", "q": q, "terms": terms, "dropout": 0.1, "dtype": "float32"}
    packages = {"packages": {"torch": "2.13"}, "not_measured": [{"site": "b", "reason": "lost"}]}
    return {"schema_version": 1, "writer": "a", "model": "b", "calls": [call], **packages}


def _manifest() -> dict[str, Any]:
    attempt = {"number": 1, "first_step": 0, "started": 1.5, "settings": SETTINGS}
    return {"schema_version": 1, "model": MODEL, "attempts": [attempt, {**attempt, "number": 2, "first_step": 9}]}


def _of_claims() -> dict[str, Kind]:
    """The record of a claim, where the lab is installed."""
    if not LAB:
        return {}
    from sqrtdk_lab import record
    from sqrtdk_lab.register import CLAIMS
    from sqrtdk_lab.runner import run_claim

    written = cache(lambda: record.to_json(run_claim(CLAIMS["softmax-example"], quick=True, command="a command")))
    free = ("parameters", "sound", "decided", "at")
    return {"claim": Kind(InvalidValueError, record.read_record, lambda: json.loads(written()), free=free)}


KINDS = {
    "trace file": Kind(TraceFileError, read_trace_file, _trace, lambda path, document: forge(path, document=document)),
    "manifest": Kind(
        RunFolderError, lambda path: read_manifest(path.parent), _manifest, name="run.json", free=("model", "settings")
    ),
    "baseline": Kind(BaselineError, baseline_file.read_baseline, lambda: json.loads(to_file(ledger_of(sick())))),
    **_of_claims(),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places of a document, the whole left out."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


def refused(kind: Kind, path: Path) -> bool:
    """Whether a file is an error of its kind; any other exception goes through."""
    try:
        kind.read(path)
    except kind.error as error:
        hint = error.hint
    else:
        return False
    assert hint
    return True


def sort(value: Any) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(data=st.data())
def test_a_field_of_another_type_is_one_error(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """None stands for what is missing, or for NaN."""
    kind, path = KINDS[name], tmp_path / KINDS[name].name
    document = copy.deepcopy(kind.document())
    kind.write(path, document)
    kind.read(path)
    place = data.draw(st.sampled_from(list(places(document))))
    value = data.draw(st.sampled_from(ANYTHING))
    at = document
    for step in place[:-1]:
        at = at[step]
    before, at[place[-1]] = at[place[-1]], value
    kind.write(path, document)
    if not refused(kind, path):
        alike = sort(before) == sort(value) or None in (before, value)
        assert alike or {*kind.free} & {*place}, (place, before, value)


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(data=st.data())
def test_a_damaged_byte_or_a_cut_is_one_error_or_does_no_harm(tmp_path: Path, name: str, data: st.DataObject) -> None:
    kind, path = KINDS[name], tmp_path / KINDS[name].name
    kind.write(path, kind.document())
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    path.write_bytes(content)
    refused(kind, path)


@FEW
@given(data=st.data())
def test_a_damaged_byte_of_a_part_is_named_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    written(folder, 2)
    (part,) = (folder / "parts").iterdir()
    content = bytearray(part.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    part.write_bytes(content)
    run = read_run(folder)
    assert [damage.name for damage in run.damaged] == [part.name] if run.damaged else whole(run, 2)


MEASURES = [column.name for column in HEAD_COLUMNS if column.type == "float64"]


@FEW
@given(st.lists(st.dictionaries(st.sampled_from(MEASURES), st.none() | st.floats()), min_size=1, max_size=4))
def test_rows_of_a_run_come_back(tmp_path_factory: pytest.TempPathFactory, changes: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("run")
    rows = [{**head(0, "a", number), **changed} for number, changed in enumerate(changes)]
    with writer(folder) as run:
        run.write(rows, [told(0)], [])
    for row, found in zip(rows, read_run(folder).heads.to_pylist(), strict=True):
        for column, value in found.items():
            assert unlike(row.get(column), value) == [], column
