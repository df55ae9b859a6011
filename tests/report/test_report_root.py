"""The root module has one name wherever people read, in both languages; in JSON its site is ""."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk._language import Language
from sqrtdk.audit.records import CheckReport
from sqrtdk.report.check.junit import to_junit
from sqrtdk.report.check.markdown import to_markdown
from sqrtdk.report.check.sarif import to_sarif
from sqrtdk.report.html import to_html
from sqrtdk.report.json import to_json
from sqrtdk.report.terminal import to_text


class Twice(nn.Module):
    """An attention that is the whole model, and applies its scale twice."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 1, 64)).transpose(-4, -2).unbind(-3)
        return functional.scaled_dot_product_attention(q * 64**-0.5, k, v)


@pytest.fixture(scope="module")
def report() -> CheckReport:
    torch.manual_seed(0)
    found = sqrtdk.check(Twice(), torch.randn(1, 16, 64))
    assert {finding.site for finding in found.findings} == {""}
    return found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_root_has_one_name(report: CheckReport, language: Language) -> None:
    page = to_html(report, "en" if language == "en" else "zh-CN")
    texts = {
        "terminal": to_text(report, width=80, language=language),
        "page": re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL),
        "comment": to_markdown(report, language),
        "junit": to_junit(report),
        "sarif": to_sarif(report),
    }
    for kind, text in texts.items():
        assert text.count("(root)") > 1, kind
        assert not re.search(r"\(\(root|（\(root|whole model|整个模型|<code></code>", text), kind
    assert {call["site"] for call in json.loads(to_json(report))["calls"]} == {""}
