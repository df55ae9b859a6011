"""What the causes say of planted programs is what was recorded: names, stages, a, b and sentences."""

from __future__ import annotations

import json

from tests.compare.cause_records import HOME, differences, record, sample


def test_the_causes_say_what_was_recorded() -> None:
    recorded = json.loads(HOME.read_text(encoding="utf-8"))
    now = {f"sample: {name}": record(make) for name, make in sample()}
    assert list(now) == list(recorded)
    assert {name: said for name, said in now.items() if differences(recorded[name], said)} == {}
