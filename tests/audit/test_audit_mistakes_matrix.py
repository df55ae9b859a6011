"""Every named mistake, planted in every style of writing attention, is found and named; the healthy one is exact."""

import pytest

from sqrtdk._check import check
from sqrtdk.audit.mistakes import MISTAKES
from tests.attentions.each import each
from tests.attentions.planted import PLANTED, STYLES, planted

CASES = [(style, mistake) for style in STYLES for mistake in PLANTED]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("style", "mistake"), CASES)
def test_planted_mistake_is_named(style: str, mistake: str) -> None:
    module, inputs = planted(style, mistake)
    report = check(module, inputs)
    judged = report.calls[1:] if mistake == "layer_index" else report.calls  # 1/(0 + 1) is right in layer 0
    assert len(report.calls) == 3
    assert {(call.verdict, call.mistake) for call in judged} == {("unexplained", mistake)}
    told = [f for f in report.findings if f.rule in ("scale_ledger", "declared_vs_actual") and f.severity != "note"]
    assert told
    assert all(mistake in f.message for f in told)
    assert report.exit_code == 1


@each("style", STYLES)
def test_healthy_style_is_exact(style: str) -> None:
    module, inputs = planted(style, None)
    report = check(module, inputs)
    assert [call.verdict for call in report.calls] == ["exact"] * 3
    assert [f for f in report.findings if f.severity != "note"] == []
    assert report.exit_code == 0


def test_the_matrix_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nplanted mistakes: {len(CASES)} cases ({len(PLANTED)} mistakes x {len(STYLES)} styles)")
    assert len(set(CASES)) == 70
    assert set(PLANTED) == {name for name, mistake in MISTAKES.items() if mistake.known}
