"""The part of SARIF 2.1.0's schema that a log of ours can touch, and what code scanning asks for beyond it."""

from __future__ import annotations

import json
from typing import Any

from tests.support.optional import jsonschema

_TEXT = {"type": "string", "minLength": 1}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def _array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


_MESSAGE = _object("text", text=_TEXT, markdown=_TEXT)
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_KIND = {"enum": ["notApplicable", "pass", "fail", "review", "open", "informational"]}
_LOCATION = _object(
    "",
    id={"type": "integer", "minimum": -1},
    physicalLocation=_object(
        "artifactLocation",
        artifactLocation=_object("uri", uri=_ref("uri"), uriBaseId={"type": "string"}),
        region=_object("startLine", startLine={"type": "integer", "minimum": 1}),
    ),
    logicalLocations=_array(_object("", fullyQualifiedName={"type": "string"}, kind={"type": "string"})),
    message=_MESSAGE,
)
_RESULT = _object(
    "message",
    ruleId=_TEXT,
    ruleIndex={"type": "integer", "minimum": -1},
    kind=_KIND,
    level=_LEVEL,
    message=_MESSAGE,
    locations=_array(_ref("location")),
    relatedLocations=_array(_ref("location"), uniqueItems=True),
    partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
    properties={"type": "object"},
) | {
    # 3.27.10: a result that is no failure has no level
    "if": {"required": ["kind"], "properties": {"kind": {"not": {"const": "fail"}}}},
    "then": {"properties": {"level": {"const": "none"}}},
}
_RULE = _object(
    "id",
    id=_TEXT,
    shortDescription=_MESSAGE,
    fullDescription=_MESSAGE,
    help=_MESSAGE,
    defaultConfiguration=_object("", level=_LEVEL),
    properties={"type": "object"},
)
_DRIVER = _object("name", name=_TEXT, semanticVersion=_TEXT, rules=_array(_RULE, uniqueItems=True))
_RUN = _object(
    "tool results",
    tool=_object("driver", driver=_DRIVER),
    automationDetails=_object("", id={"type": "string"}),
    invocations=_array(
        _object("executionSuccessful", executionSuccessful={"type": "boolean"}, exitCode={"type": "integer"})
    ),
    originalUriBaseIds={
        "type": "object",
        "additionalProperties": _object("", uri=_ref("uri"), description=_MESSAGE),
    },
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results=_array(_RESULT),
    properties={"type": "object"},
)  # fmt: skip
SCHEMA = {
    "$defs": {
        "location": _LOCATION,
        "uri": {"type": "string", "pattern": r"^([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})+$"},
    },
    **_object("version runs", **{"$schema": _ref("uri"), "version": {"const": "2.1.0"}, "runs": _array(_RUN)}),
}
MOST_RESULTS = 25_000  # that code scanning takes


def checked(text: str) -> dict[str, Any]:
    """The one run of a log that breaks no rule."""
    (run,) = checked_runs(text)
    return run


def checked_runs(text: str) -> list[dict[str, Any]]:
    """The runs of a log that breaks no rule."""
    log = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(log)
    return [_checked_run(run) for run in log["runs"]]


def _checked_run(run: dict[str, Any]) -> dict[str, Any]:
    rules, bases = [rule["id"] for rule in run["tool"]["driver"]["rules"]], run["originalUriBaseIds"]
    assert len(set(rules)) == len(rules)
    assert all(base.get("uri", "/").endswith("/") for base in bases.values())
    assert len(run["results"]) <= MOST_RESULTS
    prints = [tuple(result["partialFingerprints"].items()) for result in run["results"]]
    assert len(set(prints)) == len(prints)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert 1 <= len(result["locations"]) <= 10
        places = [*result["locations"], *result.get("relatedLocations", ())]
        for where in (place["physicalLocation"]["artifactLocation"] for place in places if "physicalLocation" in place):
            relative = not where["uri"].startswith(("/", "file:"))
            assert relative == ("uriBaseId" in where)
            assert not relative or where["uriBaseId"] in bases
            assert ".." not in where["uri"].split("/")
    return run
