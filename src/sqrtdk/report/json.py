"""The JSON document of a check, under the name that users import."""

from sqrtdk.report.check.json import to_json as to_json
