"""Records from JSON: each error says where, what was received, and the rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from sqrtdk._records import record_from_json
from sqrtdk.errors import InvalidValueError


@dataclass
class Sample:
    """One field of every sort."""

    lists: dict[Annotated[str, Meta(max_length=3)], list[int]]
    pairs: tuple[tuple[str, float], ...] = ()
    number: float | None = None
    value: float | str | None = None
    kind: Literal["a", "b"] = "a"


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (3, "it is '3'; expected object, got int"),
        ({}, "it lacks 'lists'"),
        ({"lists": {}, "more": 1}, "it has the unknown field 'more'"),
        ({"lists": {"long": []}}, "it.lists has a wrong name; expected str of length <= 3"),
        ({"lists": {"a": ["x"]}}, "it.lists[...][0] has a wrong value; expected int, got str"),
        ({"lists": {}, "pairs": [["a"]]}, "it.pairs[0] is a list of 1; expected array of length 2, got 1"),
        ({"lists": {}, "pairs": [["a", "b"]]}, "it.pairs[0][1] is 'b'; expected float, got str"),
        ({"lists": {}, "number": True}, "it.number is 'True'; expected float | null, got bool"),
        ({"lists": {}, "number": "nan"}, "it.number is 'nan'; expected float | null, got str"),
        ({"lists": {}, "number": 10**400}, "beyond every number that is read"),
        ({"lists": {}, "number": "\ud800"}, "it has a text that is not Unicode, where no text belongs"),
        ({"lists": {}, "kind": []}, "it.kind is a list of 0; one of a, b belongs there"),
    ],
)
def test_what_is_no_record_is_refused(document: Any, error: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        record_from_json(Sample, document, "it", InvalidValueError, "Write it anew.")
    assert error in str(caught.value)
    assert caught.value.hint == "Write it anew."


def test_numbers_that_json_lacks_come_back_where_a_number_belongs() -> None:
    document = {"lists": {}, "pairs": [["NaN", None]], "number": "-Infinity", "value": "Infinite"}
    read = record_from_json(Sample, document, "it", InvalidValueError, "")
    assert repr(read.pairs) == "(('NaN', nan),)"
    assert (read.number, read.value) == (float("-inf"), "Infinite")
