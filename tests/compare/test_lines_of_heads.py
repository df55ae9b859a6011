"""Heads that are split, ordered or repeated in the wrong way are named at the line that one has to change."""

from __future__ import annotations

import pytest
import torch

from sqrtdk import diff
from tests.compare.grouped_port import Port, original
from tests.support.paths import ROOT

FILE = "tests/compare/grouped_port.py"
CAUSES = {
    "channel first q": ("head_order", "query"),
    "channel first v": ("head_order", "value"),
    "mixed": ("head_order", "query"),
    "reversed k": ("group_order", "key"),
    "repeated k": ("group_order", "key"),
    "repeated v": ("group_order", "value"),
    "joined v": ("group_order", "value"),
    "helper k": ("group_order", "key"),
    "helper v": ("group_order", "value"),
    "grouped q": ("group_order", "key"),
}


def _marked(mistake: str) -> str:
    lines = (ROOT / FILE).read_text(encoding="utf-8").splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if mistake in text.partition("  # ")[2].split(", "))
    return f"{FILE}:{line}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mistake", CAUSES)
def test_the_line_of_the_heads_is_named(mistake: str) -> None:
    model = original(4 if mistake == "mixed" else 2)
    report = diff(model, Port(model, mistake), {"input_ids": torch.arange(14)[None] * 7 % 97})
    found = [(cause.name, cause.stage, cause.at_b) for pair in report.pairs for cause in pair.causes]
    assert set(found) == {(*CAUSES[mistake], _marked(mistake))}
    # the original repeats nothing: its kernel groups the heads
    assert all("modeling_llama.py" in (cause.at_a or "") for pair in report.pairs for cause in pair.causes)
