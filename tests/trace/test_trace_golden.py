"""Trace and audit say what they said: every record is compared with the golden ones."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch.nn.attention.varlen")

from tests.support.kernel_here import needs_kernel
from tests.trace.golden_cases import GROUPS
from tests.trace.golden_records import record, stored

EXPORTERS = ("onnx", "onnxruntime", "onnxscript")
MARKS = {
    "kernel": [needs_kernel],
    "graphs": [pytest.mark.skipif(not all(map(find_spec, EXPORTERS)), reason=f"needs {', '.join(EXPORTERS)}")],
}
CASES = [
    pytest.param(group, name, marks=MARKS.get(group, []), id=f"{group}: {name}")
    for group, cases in GROUPS.items()
    for name in cases
]


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """The first place where two records differ; numbers may by a thousandth."""
    if isinstance(one, dict) and isinstance(other, dict):
        missing = next(iter(one.keys() ^ other.keys()), None)
        if missing is not None:
            return f"{place}.{missing}: only in {'the record' if missing in one else 'the golden one'}"
        return next((d for key in one if (d := difference(one[key], other[key], f"{place}.{key}"))), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{place}[{i}]"))), None)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return None if one == pytest.approx(other, rel=1e-3) else f"{place}: {one} and not {other}"
    return None if one == other else f"{place}: {one!r} and not {other!r}"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("group", "name"), CASES)
def test_the_record_is_the_golden_one(group: str, name: str) -> None:
    assert difference(record(group, name), stored(group)[name]) is None


@pytest.mark.parametrize("group", [pytest.param(group, marks=MARKS.get(group, [])) for group in GROUPS])
def test_the_golden_records_are_whole(group: str) -> None:
    assert list(stored(group)) == list(GROUPS[group])
    assert all(stored(group).values())  # a case in which nothing is told belongs to the `silent` ones of its file


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda call: call["scale"].update(effective=0.2503), ".calls[0][1].scale.effective"),
        (lambda call: call.update(formula="softmax(q.k)"), ".calls[0][1].formula"),
        (lambda call: call["stages"].reverse(), ".calls[0][1].stages[0]"),
        (lambda call: call.pop("model_dim"), ".calls[0][1].model_dim"),
        (lambda call: call["scale"]["factors"].append({}), ".calls[0][1].scale.factors"),
    ],
    ids=["number", "formula", "order", "field", "factor"],
)
def test_a_changed_record_is_seen(change: Any, where: str) -> None:
    golden, other = stored("styles")["matmul"], stored("styles")["matmul"]
    change(other["calls"][0][1])
    assert (difference(other, golden) or "").startswith(where)
