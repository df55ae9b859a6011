"""What changed in a model's config.json since its baseline, and which changes of its attentions follow from it.

That a change follows is tried: the config with the old value is built without weights, and the attention must be as the
baseline has it. So one changed value is one change, whatever the number of layers, and what the code changed stays.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqrtdk.audit.baseline import (
    BaselineComparison,
    ConfigChange,
    Ledger,
    LedgerChange,
    LedgerLine,
    by_key,
    compare_with_baseline,
    ledger_of,
    same_formula,
)
from sqrtdk.audit.records import CheckReport
from sqrtdk.audit.sources import config_file, read_lines
from sqrtdk.audit.tolerance import is_close
from sqrtdk.errors import INTERRUPTS, SqrtdkError
from sqrtdk.models.checkpoint import CONFIG, config_path
from sqrtdk.models.config import DROPPED_QUIETLY, read_config_dict
from sqrtdk.models.names import find_local, graph_kind, is_address, is_demo, is_factory
from sqrtdk.models.options import LoadOptions

_MOST_TRIED = 8  # values that are set back, one by one
_LONGEST_TEXT = 200
_LONGEST_LIST = 256
_NOT_KEPT = ("transformers_version", "dtype", "torch_dtype", "use_cache", *DROPPED_QUIETLY)
_SCALARS = (bool, int, float, str, type(None))

# Audits a MODEL that is loaded so.
Audit = Callable[[str, LoadOptions], CheckReport]
# Makes the ledger, without weights, of the config with some values set back: {} is the config as it is.
Build = Callable[[Mapping[str, Any]], Ledger]


def config_values(model: str) -> dict[str, Any]:
    """Return the values of a model's config.json by dotted path; empty for a model without one here.

    Long texts, long lists, lists of objects, and fields that say nothing about attention are left out.

    Args:
        model: The MODEL argument.
    """
    home = _home(model)
    if home is None:
        return {}
    with contextlib.suppress(SqrtdkError, OSError):
        return dict(_flat(read_config_dict(home), ""))
    return {}


def _home(model: str) -> Path | None:
    if is_address(model) or is_demo(model) or is_factory(model) or graph_kind(model) is not None:
        return None
    with contextlib.suppress(SqrtdkError, OSError):
        return find_local(model)
    return None


def _flat(config: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name in _NOT_KEPT:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, list):
            if len(value) <= _LONGEST_LIST and all(isinstance(one, _SCALARS) for one in value):
                yield f"{above}{name}", value
        elif not isinstance(value, str) or len(value) <= _LONGEST_TEXT:
            yield f"{above}{name}", value


def compare_model(
    before: Ledger, report: CheckReport, file: str, model: str, loading: LoadOptions, audit: Audit
) -> BaselineComparison:
    """Compare a report with a baseline as `compare_with_baseline` does, and find what follows from the config.

    Args:
        before: The ledger of the baseline.
        report: The report of this run.
        file: Path of the baseline, for the messages.
        model: The MODEL argument.
        loading: How the model was loaded.
        audit: Audits a model without asking laws.

    Raises:
        BaselineError: As of `compare_with_baseline`.
    """
    comparison = compare_with_baseline(before, report, file)
    home = _home(model)
    changed = _changed(before.config, config_values(model), home) if home is not None and before.config else ()
    if home is None or not changed:
        return comparison
    if comparison.changes and len(changed) <= _MOST_TRIED:
        comparison = _followed(comparison, before, ledger_of(report), changed, _build_of(home, loading, audit))
    causes = {
        name: change.fails for change in comparison.changes if change.follows_from
        for name in change.follows_from.split(", ")
    }  # fmt: skip
    ordered = (replace(one, fails=causes.get(one.field, False)) for one in changed)
    return replace(comparison, config=tuple(sorted(ordered, key=lambda one: not one.fails)))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], home: Path) -> tuple[ConfigChange, ...]:
    """Return the values that differ, each with its line in the file; in the order of the file, what is gone last."""
    lines, missing = read_lines(home), object()
    changes = []
    for name in dict.fromkeys((*now, *before)):
        old, new = before.get(name, missing), now.get(name, missing)
        if old is missing or new is missing or old != new or isinstance(old, bool) != isinstance(new, bool):
            line = lines.get(tuple(name.split(".")))
            at = f"{config_file(home)}:{line}" if line and new is not missing else None
            changes.append(ConfigChange(name, None if old is missing else old, None if new is missing else new, at))
    return tuple(changes)


def _followed(
    comparison: BaselineComparison, before: Ledger, now: Ledger, changed: Sequence[ConfigChange], build: Build
) -> BaselineComparison:
    """Return the comparison with what each change follows from: one value of the config, or all that changed."""
    old, new = by_key(before.lines, "the baseline"), by_key(now.lines, "this run")
    built = _ledger(build, {})
    if built is None:
        return comparison
    as_is = by_key(built.lines, "the config")
    left = {(change.site, change.index) for change in comparison.changes}
    causes: dict[tuple[str, int | None], str] = {}
    trials = [(one,) for one in changed] + ([tuple(changed)] if len(changed) > 1 else [])
    for values in trials:
        if not left:
            break
        ledger = _ledger(build, {one.field: one.before for one in values})
        if ledger is None:
            continue
        back = by_key(ledger.lines, "the config")
        for key in sorted(left, key=str):
            here = back.get(key), old.get(key), as_is.get(key), new.get(key)
            if _same(*here[:2], before.mode) and _same(*here[2:], before.mode) and _moves_formula(*here):
                causes[key] = ", ".join(one.field for one in values)
        left -= set(causes)

    def with_cause(change: LedgerChange) -> LedgerChange:
        if change.what == "finding" and before.mode != "static":
            return change  # without weights no finding on values was tried
        return replace(change, follows_from=causes.get((change.site, change.index)))

    return replace(comparison, changes=tuple(map(with_cause, comparison.changes)))


def _same(built: LedgerLine | None, kept: LedgerLine | None, mode: str) -> bool:
    """Return whether a line of a model without weights says what another line says.

    Without weights the mask's values are unknown, so a line of a run with weights may name it otherwise: only the scale
    and the verdict are held against it.
    """
    if built is None or kept is None:
        return built is kept
    if built.judgement != kept.judgement or (built.ratio is None) != (kept.ratio is None):
        return False
    if built.ratio is not None and kept.ratio is not None and not is_close(built.ratio, kept.ratio):
        return False
    if mode != "static":
        return True
    return same_formula(built.formula, kept.formula) and built.findings == kept.findings


def _moves_formula(
    back: LedgerLine | None, old: LedgerLine | None, as_is: LedgerLine | None, new: LedgerLine | None
) -> bool:
    """Return whether a formula that differs from the baseline's also differs in the models without weights."""
    if old is None or new is None or same_formula(old.formula, new.formula):
        return True
    return back is not None and as_is is not None and not same_formula(back.formula, as_is.formula)


def _ledger(build: Build, values: Mapping[str, Any]) -> Ledger | None:
    """Return the ledger of the config with values set back, or None if such a model can't be built."""
    try:
        return build(values)
    except INTERRUPTS:
        raise
    except Exception:  # the code of a model may raise anything for a value that it was not meant for
        return None


def _build_of(home: Path, loading: LoadOptions, audit: Audit) -> Build:
    def build(values: Mapping[str, Any]) -> Ledger:
        with tempfile.TemporaryDirectory() as directory:
            raw = read_config_dict(home)
            for name, value in values.items():
                _set(raw, name.split("."), value)
            (Path(directory) / CONFIG).write_text(json.dumps(raw), encoding="utf-8")
            if config_path(home) != home and loading.trust_remote_code:
                for code in home.glob("*.py"):
                    shutil.copy(code, directory)
            options = LoadOptions(static=True, seed=loading.seed, trust_remote_code=loading.trust_remote_code)
            return ledger_of(audit(directory, options))

    return build


def _set(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value at a path, or remove it if it was absent (None)."""
    for name in path[:-1]:
        config = config.setdefault(name, {})
    if value is None:
        config.pop(path[-1], None)
    else:
        config[path[-1]] = value
