"""Records of the library, made again of a report's JSON document: each field of its type, or an error."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from sqrtdk.app import fields
from sqrtdk.audit.records import STATES, CheckReport, Finding, JudgedCall, LawAnswer, ModelInfo
from sqrtdk.compare.records import DiffReport
from sqrtdk.stats.heads import HeadStats
from sqrtdk.tracing.records import NotAttention, NotMeasured

T = TypeVar("T")

_NOT_WRITTEN: Mapping[type, Mapping[str, Any]] = {HeadStats: {"logit_histogram": [], "entropy_histogram": []}}


def check_report(document: Mapping[str, Any]) -> CheckReport:
    """The report whose document this is, but for what JSON leaves out; a value that was NaN is None.

    Raises:
        KeyError: a field is missing.
        TypeError: one has another type.
    """
    model = fields.mapping(document["model"])
    return CheckReport(
        model=record(ModelInfo, {**model, "cls": model["class"]}),
        mode=fields.text(document["mode"]),
        calls=tuple(_judged(fields.mapping(one)) for one in fields.listed(document["calls"])),
        not_attention=tuple(record(NotAttention, one) for one in fields.listed(document["not_attention"])),
        not_measured=tuple(record(NotMeasured, one) for one in fields.listed(document["not_measured"])),
        findings=tuple(record(Finding, one) for one in fields.listed(document["findings"])),
        laws=tuple(_law(one) for one in fields.listed(document.get("laws", []))),  # older documents lack them
    )


def diff_report(document: Mapping[str, Any]) -> DiffReport:
    """The comparison whose document this is, but for what only its page draws.

    Raises:
        KeyError: a field is missing.
        TypeError: one has another type.
    """
    report = record(DiffReport, document)
    pairs = (
        replace(pair, difference=math.nan) if pair.same is False and pair.difference is pair.residue is None else pair
        for pair in report.pairs
    )  # what differs by no number differs by NaN
    return replace(report, pairs=tuple(pairs))


def record(of: type[T], value: Any) -> T:
    """A record of a mapping; what the mapping has besides is left.

    Raises:
        KeyError: a field without a default is missing.
        TypeError: one has another type.

    Example:
        >>> record(NotMeasured, {"site": "h.0", "reason": "it did not run", "seen": 1})
        NotMeasured(site='h.0', reason='it did not run', formula=None, at=None)
    """
    written = {**_NOT_WRITTEN.get(of, {}), **fields.mapping(value)}
    hints = _hints(typing.cast(Hashable, of))
    needed = {
        one.name
        for one in dataclasses.fields(of)  # type: ignore[arg-type]
        if one.default is dataclasses.MISSING is one.default_factory
    }
    return of(**{name: _value(hint, written[name]) for name, hint in hints.items() if name in needed | written.keys()})


def _law(value: Any) -> LawAnswer:
    answer = record(LawAnswer, value)
    fields.of(answer.state, STATES)
    return answer


def _judged(document: Mapping[str, Any]) -> JudgedCall:
    return record(JudgedCall, {**document, "call": document})


@functools.cache
def _hints(of: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(of)
    return {one.name: hints[one.name] for one in dataclasses.fields(of)}


def _value(hint: Any, value: Any) -> Any:
    """A value of the type that a record says."""
    kind, inside = typing.get_origin(hint), typing.get_args(hint)
    if kind is types.UnionType:
        if value is None and type(None) in inside:
            return None
        told = isinstance(value, str) and not (float in inside and value in fields.INFINITE)
        wanted = [one for one in inside if one is not type(None) and (one is str) == told]
        return _value(wanted[0] if wanted else inside[0], value)
    if kind is tuple:
        many = fields.listed(value)
        each = [inside[0]] * len(many) if inside[-1] is Ellipsis else inside
        return tuple(_value(one, item) for one, item in zip(each, many, strict=True))
    if kind is dict:
        return dict(fields.mapping(value))
    if dataclasses.is_dataclass(hint):
        return record(typing.cast(type, hint), value)
    return _PLAIN[hint](value)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a whole number was expected; got a {type(value).__name__}")
    return value


def _yes(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"true or false was expected; got a {type(value).__name__}")
    return value


_PLAIN: Mapping[Any, Callable[[Any], Any]] = {
    str: fields.text,
    float: fields.number,
    int: _whole,
    bool: _yes,
    Any: lambda value: value,
}
