"""What traces, audits and kept tensors say, as JSON's own types without what is measured: the form of the records."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from sqrtdk.audit.records import CheckReport
from sqrtdk.graphs import GraphRun
from sqrtdk.tracing import AttentionCall, EffectiveScale, Mask, NotAttention, NotMeasured, Stage, Trace
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, Waypoint

# What is measured, and not read off the code: it differs in the last digits from CPU to CPU.
_MEASURED = {
    AttentionCall: {"stats", "future_weight", "max_product", "output_rms", "index", "site", "module_class"},
    EffectiveScale: {"numeric", "r_squared", "ratio"},
    Mask: {"masked_weight"},
}
_PLACES = {"at", "product_at", "softmax_at"}  # files and lines, which change with every edit
_FILE = re.compile(r"/[\w.-]+/[\w/.-]*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")

# -- traces and audits -------------------------------------------------------------------------------------------------


def condensed(record: Any) -> Any:
    """A record as JSON's own types, without what is measured or as by default."""
    if not dataclasses.is_dataclass(record):
        if isinstance(record, (tuple, list)):
            return [condensed(item) for item in record]
        return str(record) if isinstance(record, float) and record - record != 0 else record
    if isinstance(record, Stage):
        return " ".join(text for text in (record.where, record.name, record.detail) if text)
    left_out = _MEASURED.get(type(record), set()) | _PLACES
    defaults = {field.name: field.default for field in dataclasses.fields(record) if field.name not in left_out}
    names = [name for name, default in defaults.items() if _differs(record, name, default)]
    kept = {name: condensed(getattr(record, name)) for name in names}
    if "reason" in kept:
        kept["reason"] = without_numbers(kept["reason"])
    if isinstance(record, (NotAttention, NotMeasured)) and record.at is None:
        kept["at"] = None
    return kept


def _differs(record: Any, name: str, default: Any) -> bool:
    value = getattr(record, name)
    return type(value) is not type(default) or value != default


def without_numbers(text: str) -> str:
    """The text with "#" for each number.

    Example:
        >>> without_numbers("R^2 = 0.98 of 3 heads")
        'R^# = # of # heads'
    """
    return _NUMBER.sub("#", text)


def told(run: Trace) -> dict[str, Any]:
    """What a trace says."""
    return {
        "calls": counted([condensed(call) for call in run.calls]),
        "not_attention": condensed(run.not_attention),
        "not_measured": condensed(run.not_measured),
    }


def judged(report: CheckReport) -> dict[str, Any]:
    """What an audit says."""
    words = ("verdict", "mistake", "declared_by", "health")
    calls = [condensed(call.call) | {word: getattr(call, word) for word in words} for call in report.calls]
    findings = [[f.rule, f.severity, f.site, without_numbers(f.message)] for f in report.findings]
    return {
        "calls": counted(calls),
        "not_attention": condensed(report.not_attention),
        "not_measured": condensed(report.not_measured),
        "findings": findings,
    }


def notes(report: CheckReport) -> list[str]:
    """What an audit decided for its user, without numbers and names of files."""
    return [without_numbers(_FILE.sub("FILE", note)) for note in report.environment.get("notes", [])]


def without_empty(said: dict[str, Any]) -> dict[str, Any]:
    """Without the lists that have nothing."""
    return {name: value for name, value in said.items() if value}


def counted(calls: list[Any]) -> list[Any]:
    """Calls, those that say the same one after the other once, with their number.

    Example:
        >>> counted(["a", "a", "b"])
        [[2, 'a'], [1, 'b']]
    """
    seen: list[Any] = []
    for call in calls:
        if seen and seen[-1][1] == call:
            seen[-1][0] += 1
        else:
            seen.append([1, call])
    return seen


# -- kept tensors ------------------------------------------------------------------------------------------------------


def described(call: CallTensors) -> dict[str, Any]:
    """What was kept of a call: names, shapes and the numbers of the code, and no values.

    Example of a way: "q.weight 4x16x24, bias: 2x7x24 > 2x4x7x16 > rope 2x4x7x16 > 2x4x7x16".
    """
    if call.missing is not None:
        return {"missing": call.missing}
    defaults = {field.name: field.default for field in dataclasses.fields(call)}
    plain = {name: getattr(call, name) for name in ("dropout", "dtype", "logits_dtype", "weights_dtype")}
    ways = {name: _way(getattr(call, name)) for name in ("query", "key", "value")}
    terms = None if call.terms is None else [_term(term) for term in call.terms]
    shapes = {name: getattr(call, name) for name in ("lse", "kept") if getattr(call, name) is not None}
    return (
        ways
        | {"terms": terms, "output": shape(call.output)}
        | {name: shape(tensor) for name, tensor in shapes.items()}
        | {name: value for name, value in plain.items() if value != defaults[name]}
    )


def ran(run: GraphRun) -> dict[str, Any]:
    """What was read of a graph that ran."""
    missing = [[entry.site, without_numbers(entry.reason)] for entry in run.missing]
    return {"calls": counted([described(call) for call in run.calls]), "missing": missing}


def outlined(value: Any) -> Any:
    """A program of a comparison: its fields that are not as by default, the shapes of its tensors and no values."""
    if isinstance(value, Tensor):
        return shape(value)
    if isinstance(value, (tuple, list)):
        return [outlined(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return _number(value) if isinstance(value, float) else value
    fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    kept = {name: outlined(own) for name, (own, usual) in fields.items() if isinstance(own, Tensor) or own != usual}
    return {"kind": type(value).__name__} | kept


def shape(tensor: Tensor) -> str:
    """Sizes and, where it is not float32, the dtype: "2x4x7x16 bool"."""
    name = str(tensor.dtype).removeprefix("torch.")
    return "x".join(map(str, tensor.shape)) + (f" {name}" if name != "float32" else "")


def _way(vector: Vector) -> str:
    projected = None if vector.projected is None else shape(vector.projected)
    last = shape(vector.values) + ("" if _is_one(vector.factor) else f" times {_number(vector.factor)}")
    return " > ".join([_projection(vector.projection), str(projected), *map(_step, vector.steps), last])


def _is_one(factor: Tensor | float) -> bool:
    return not isinstance(factor, Tensor) and factor == 1.0


def _projection(projection: Projection | None) -> str:
    if projection is None:
        return "?"
    weight = "?" if projection.weight is None else shape(projection.weight)
    more = "".join([", bias" * (projection.bias is not None), ", part" * projection.part])
    return f"{projection.name or '(unnamed)'} {weight}{more}: {shape(projection.input)}"


def _step(step: Waypoint) -> str:
    words = [step.name, step.detail, step.gain, "?" if step.values is None else shape(step.values)]
    return " ".join(word for word in words if word)


def _term(term: Term) -> str:
    fill = f"{'plus' if term.added else 'filled with'} {term.fill:.4g}" if term.name == "mask" else ""
    return " ".join(word for word in (term.name, term.detail, _number(term.value), fill) if word)


def _number(value: Tensor | float | None) -> str:
    """Four figures of a number of the code; of a tensor its shape."""
    if value is None:
        return "?"
    return shape(value) if isinstance(value, Tensor) else f"{value:.4g}"


# -- listening ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(hear: Callable[[str, Any], None]) -> Iterator[None]:
    """Hear every trace, audit, comparison, program of one and run of a graph, as ("trace", the trace) and so on."""
    from sqrtdk import _check
    from sqrtdk.compare import diff
    from sqrtdk.compare.inside import build
    from sqrtdk.graphs import onnx

    def heard(kind: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            result = make(*args, **kwargs)
            hear(kind, result)
            return result

        return made

    def closed(self: Trace, *error: Any) -> None:
        close(self, *error)
        hear("trace", self)

    close = Trace.__exit__
    places = [
        (_check, "CheckReport", "audit"),
        (diff, "DiffReport", "comparison"),
        (build, "Program", "program"),
        (onnx, "GraphRun", "graph"),
    ]
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for (module, name, kind), make in zip(places, before, strict=True):
            setattr(module, name, heard(kind, make))
        Trace.__exit__ = closed  # type: ignore[method-assign]
        yield
    finally:
        Trace.__exit__ = close  # type: ignore[method-assign]
        for (module, name, _), make in zip(places, before, strict=True):
            setattr(module, name, make)
