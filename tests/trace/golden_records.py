"""Golden records: what trace and audit say of every style, module, planted mistake, model family and kernel call.

A record is written without what differs from CPU to CPU (statistics, sizes, the fitted slope) and without what is as
by default; numbers that a model's code holds are compared to a thousandth. A change of the trace that changes none of
these lines changed nothing that it says; one that is meant to is seen in the diff of the files:

    python -m tests.trace.golden_records        writes tests/trace/golden/*.json anew
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqrtdk._check import check
from sqrtdk.audit.records import CheckReport
from sqrtdk.tracing import AttentionCall, Mask, Scale, Stage, Trace
from tests.attentions import cases as attention_cases
from tests.attentions import compiled as attention_compiled
from tests.attentions import planted
from tests.hf import families

HOME = Path(__file__).parent / "golden"
# What is measured, and not read off the code: it differs in the last digits from CPU to CPU.
_MEASURED = {
    AttentionCall: {"stats", "future_weight", "max_product", "output_rms", "index", "site", "module_class"},
    Scale: {"numeric", "r_squared", "ratio"},
    Mask: {"masked_weight"},
}
_PLACES = {"at", "product_at", "softmax_at"}  # files and lines, which change with every edit
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


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
        kept["reason"] = _NUMBER.sub("#", kept["reason"])
    return kept


def _differs(record: Any, name: str, default: Any) -> bool:
    value = getattr(record, name)
    return type(value) is not type(default) or value != default


def told(run: Trace) -> dict[str, Any]:
    """What a trace says."""
    return {
        "calls": _counted([condensed(call) for call in run.calls]),
        "not_attention": condensed(run.not_attention),
        "not_measured": condensed(run.not_measured),
    }


def judged(report: CheckReport) -> dict[str, Any]:
    """What an audit says."""
    words = ("verdict", "mistake", "declared_by", "health")
    calls = [condensed(call.call) | {word: getattr(call, word) for word in words} for call in report.calls]
    findings = [[f.rule, f.severity, f.site, _NUMBER.sub("#", f.message)] for f in report.findings]
    return {
        "calls": _counted(calls),
        "not_attention": condensed(report.not_attention),
        "not_measured": condensed(report.not_measured),
        "findings": findings,
    }


def _counted(calls: list[Any]) -> list[Any]:
    """Calls, those that say the same one after the other once, with their number."""
    counted: list[Any] = []
    for call in calls:
        if counted and counted[-1][1] == call:
            counted[-1][0] += 1
        else:
            counted.append([1, call])
    return counted


def _family(name: str, attn: str) -> dict[str, Any]:
    return judged(check(families.build(families.FAMILIES[name](), attn), static=True, seq_len=24, batch=2))


def _planted(style: str, mistake: str | None) -> dict[str, Any]:
    model, inputs = planted.planted(style, mistake)
    return judged(check(model, inputs=inputs))


def _kernel(name: str) -> dict[str, Any]:
    one = attention_compiled.CASES[name]
    return told(attention_compiled.traced(one.model("cpu"), *one.inputs()))


# Group -> case -> what says it.
GROUPS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "styles": {name: lambda name=name: told(attention_cases.traced(name)[1]) for name in attention_cases.CASES},
    "planted": {
        f"{style} {mistake or 'healthy'}": lambda style=style, mistake=mistake: _planted(style, mistake)
        for style in planted.STYLES
        for mistake in (None, *planted.PLANTED)
    },
    "families": {f"{name} {attn}": lambda name=name, attn=attn: _family(name, attn) for name, attn in families.CASES},
    "kernel": {name: lambda name=name: _kernel(name) for name in attention_compiled.CASES},
}


def stored(group: str) -> dict[str, Any]:
    """The golden records of a group."""
    text = (HOME / f"{group}.json").read_text(encoding="utf-8")
    records: dict[str, Any] = json.loads(text)
    return records


def main(groups: list[str]) -> None:
    """Write the records anew."""
    for group in groups or GROUPS:
        lines = [f"{json.dumps(name)}: {json.dumps(tell())}" for name, tell in GROUPS[group].items()]
        (HOME / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"{group}: {len(lines)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
