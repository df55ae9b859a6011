"""What the terminal says of a claim in Chinese."""

from __future__ import annotations

import re

import pytest

from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.report.terminal import claim_text
from tests.report.test_said import SEPARATED


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_in_chinese_has_chinese_punctuation(name: str) -> None:
    claim = CLAIMS[name]
    # an interval, or a distribution
    text = re.sub(r"[\[(](\S+), (\S+)[\])]", r"\1 \2", claim_text(claim, "zh", width=2000))
    for place in {str(place) for part in claim.parts for expect in part.expects for place in expect.at.values()}:
        text = text.replace(place, place.replace(",", ""))
    lines = [line for number, line in enumerate(text.splitlines()) if not number or line.startswith("判据")]
    assert len(lines) == 1 + len([part for part in claim.parts if part.reason is None])
    assert [line for line in lines if SEPARATED.search(line) or " at " in line] == []
