"""Tables of reports for pandas: a check by head, a comparison by pair, answers by change that was tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqrtdk.errors import MissingExtraError
from sqrtdk.stats.heads import HeadStats

if TYPE_CHECKING:
    from sqrtdk.answers.records import AnswersReport
    from sqrtdk.audit.records import CheckReport, JudgedCall
    from sqrtdk.compare.records import DiffReport

_NOT_NUMBERS = ("heads", "rows", "logit_histogram", "entropy_histogram")  # all others are a number a head
_OF_A_HEAD = tuple(field.name for field in fields(HeadStats) if field.name not in _NOT_NUMBERS)
_Row = dict[str, Any]


def to_dataframe(report: object) -> Any:
    """Return a report as a `pandas.DataFrame`.

    Raises:
        MissingExtraError: pandas is not installed.

    Example:
        >>> from sqrtdk.audit.records import CheckReport, ModelInfo
        >>> len(to_dataframe(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ())))
        0
    """
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise MissingExtraError(f"a data frame needs pandas: {error}", hint="pip install pandas") from error
    return pandas.DataFrame(list(_FRAMES[type(report).__name__](report)))


def _of_check(report: CheckReport) -> Iterator[_Row]:
    for judged in report.calls:
        yield from _heads(judged)


def _heads(judged: JudgedCall) -> Iterator[_Row]:
    """Yield a row for each head; one row with the head None for a call without statistics."""
    call, scale = judged.call, judged.call.scale
    about = {
        "site": call.site, "index": call.index, "formula": call.formula, "scale": scale.effective, "ratio": scale.ratio,
        "verdict": judged.verdict, "health": judged.health,
    }  # fmt: skip
    if call.stats is None:
        yield about | {"head": None}
        return
    for head in range(call.stats.heads):
        yield about | {"head": head} | {name: getattr(call.stats, name)[head] for name in _OF_A_HEAD}


def _of_diff(report: DiffReport) -> Iterator[_Row]:
    for pair in report.pairs:
        yield {
            "site_a": pair.site_a, "site_b": pair.site_b, "index_a": pair.index_a, "index_b": pair.index_b,
            "same": pair.same, "first_stage": pair.first_stage, "causes": ", ".join(one.name for one in pair.causes),
            "text": "; ".join(str(one.text) for one in pair.causes),
        }  # fmt: skip


def _of_answers(report: AnswersReport) -> Iterator[_Row]:
    proven = tuple(one.name for one in report.causes)
    for edit in report.edits:
        changes = {"names": ", ".join(edit.names), "text": "; ".join(map(str, edit.texts))}
        yield changes | {"residue": edit.residue, "floor": edit.floor, "named": bool(proven) and edit.names == proven}


_FRAMES: Mapping[str, Callable[[Any], Iterator[_Row]]] = {
    "CheckReport": _of_check, "DiffReport": _of_diff, "AnswersReport": _of_answers,
}  # fmt: skip
