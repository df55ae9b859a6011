"""What the causes say of planted programs is what was recorded: names, stages, a, b and sentences."""

from __future__ import annotations

import json
import re

import pytest

from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.inside import suspect
from sqrtdk.compare.records import Cause
from sqrtdk.messages import said
from sqrtdk.report.diff.fold import value_in_words
from tests.compare import cause_records
from tests.compare.cause_records import HOME, differences, record, sample

ENGLISH = re.compile(r"\b(the|of|by|and|instead|not|with|has|leaves|turns|keys|rows|every|other|another|none)\b(?![(])")
CHINESE = {
    "turns q and k with base 500000 instead of base 10000": "旋转 q 和 k 时用基数 500000，而不是基数 10000",
    "leaves the scale out (1 in place of 0.25)": "漏掉了缩放因子（A：0.25，B：1）",
    "leaves out the padding mask (the last 2 to 3 keys)": "缺少填充掩码（最后 2 到 3 个键）",
}


def test_the_causes_say_what_was_recorded_and_say_it_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    chinese: dict[str, str] = {}
    unfixed = []
    as_recorded = cause_records._said

    def noted(found: suspect.Suspicion) -> list[object]:
        chinese[found.text] = said(found.text, "zh")
        assert not any(ENGLISH.search(value_in_words(side).zh) for side in (found.a, found.b))
        codes = {"codes": found.codes, "lacks": found.lacks}
        fix = fix_of(Cause(found.name, found.a, found.b, 1.0, found.text, found.stage, **codes))  # type: ignore[arg-type]
        if fix is None or "{" in fix or ENGLISH.search(re.sub(r"1 \+ weight|torch\.\S+", "", said(fix, "zh"))):
            unfixed.append((found.text, fix))
        return as_recorded(found)

    monkeypatch.setattr(cause_records, "_said", noted)
    recorded = json.loads(HOME.read_text(encoding="utf-8"))
    now = {f"sample: {name}": record(make) for name, make in sample()}
    assert list(now) == list(recorded)
    assert {name: said for name, said in now.items() if differences(recorded[name], said)} == {}
    assert [text for text in chinese.values() if ENGLISH.search(text)] == []
    assert unfixed == []
    assert {text: chinese.get(text) for text in CHINESE} == CHINESE
