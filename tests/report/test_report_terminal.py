import dataclasses
from collections.abc import Sequence
from functools import partial

import pytest

from sqrtdk.audit.records import CheckReport, Finding
from sqrtdk.messages import Message
from sqrtdk.report.check.headline import headline
from sqrtdk.report.terminal import summary_line, to_text
from sqrtdk.tracing.records import NotMeasured
from tests.report.sample_report import healthy, hostile, judged, lawless, leaking, sick, static, unjudged
from tests.report.terminal_text import check_colours, check_fits
from tests.support.optional import SnapshotAssertion

NOTES = (
    Message("premises.config.ignored", name="vision_config.attn_implementation", value="'someone/kernel'"),
    "there are no weights: they are random, with seed 0",
    "seq_len 5000 was cut to 256: the model has no more positions",
    "no pixel_values: the model's own processor must place their tokens; only text was run",
    "the ids are random, with seed 0: there is no tokenizer",
)


def noted(notes: Sequence[object] = NOTES) -> CheckReport:
    """Two layers that ran and a tower of 27 that did not, on what was made up."""
    report = healthy(2, 2)
    idle = tuple(NotMeasured(f"vision.layers.{layer}.attn", "did not run with these inputs") for layer in range(27))
    return dataclasses.replace(report, environment=report.environment | {"notes": list(notes)}, not_measured=idle)


REPORTS = {
    "healthy": healthy,
    "static": static,
    "sick": sick,
    "lawless": lawless,
    "leaking": leaking,
    "unjudged": unjudged,
    "hostile": hostile,
    "noted": noted,
}


@pytest.mark.parametrize("name", REPORTS)
def test_looks(name: str, snapshot: SnapshotAssertion) -> None:
    """Also that no line is too wide, and that colours change no text."""
    report = REPORTS[name]()
    for width in (80, 160):
        assert to_text(report, width=width) == snapshot(name=str(width))
    for width in (80, 100, 160):
        check_fits(to_text(report, width=width), width)
    check_colours(partial(to_text, report))


def test_what_was_made_up_stands_under_the_header() -> None:
    _, *premises = to_text(noted(), width=120).split("\n\n")[0].splitlines()
    assert premises == [f"! {note}" for note in (*NOTES[1:], NOTES[0])]


def test_many_notes_are_cut_and_what_a_config_brings_goes_first() -> None:
    ignored = [
        Message("premises.config.ignored", name=f"part{at}.attn_implementation", value="'x'") for at in range(30)
    ]
    text = to_text(noted([*ignored, *NOTES, *NOTES, "\x1b[2J\u202e", 7]), width=120)
    assert all(note in text for note in NOTES[1:])
    assert "! \\x1b[2J\\u202e" in text
    assert "... and 29 more: see --json or --html" in text


def test_equal_sites_that_were_not_measured_are_one() -> None:
    text = to_text(noted(), width=120)
    assert "Not measured: did not run with these inputs (vision.layers.0-26.attn)" in text


def test_one_line_a_site_where_it_fits() -> None:
    (line,) = [line for line in to_text(healthy(), width=140).splitlines() if "layers.0-31" in line]
    assert "softmax(0.125 * rope(q).rope(k) + causal)" in line
    assert " 1.000  exact" in line


def test_markup_in_names_is_text() -> None:
    report = dataclasses.replace(healthy(1, 1), calls=(judged("[red]x[/red].[link=file:///]y"),))
    assert "[red]x[/red].[link=file:///]y" in to_text(report, width=200)


def test_no_call() -> None:
    text = to_text(dataclasses.replace(healthy(), calls=()))
    assert "No attention was seen." in text


def test_the_names_of_mistakes_and_the_reasons_are_there() -> None:
    text = to_text(sick(), width=200)
    for wanted in ("unexplained: missing", "unexplained: twice", "declared by family vit", "the readings disagree"):
        assert wanted in text


def test_many_findings_are_cut_with_a_word() -> None:
    (first, *_) = sick().findings
    many = tuple(dataclasses.replace(first, rule=f"rule{'x' * i}") for i in range(60))
    assert "... and 20 more" in to_text(dataclasses.replace(sick(), findings=many))


GREEN = "\x1b[32m"


def test_a_call_with_a_failing_finding_is_nowhere_green() -> None:
    report = dataclasses.replace(leaking(), fail_on="never")
    lines = to_text(report, width=140, color=True).splitlines()
    (sound,) = [line for line in lines if "h.0,2.attn" in line]
    said, failing, found = [line for line in lines if "h.1.attn" in line]
    assert sound.count(GREEN) == 3  # ratio, verdict, health
    assert GREEN not in said + failing + found
    assert "critical" in failing
    assert "\x1b[1;32m" not in lines[-1]  # the headline


def test_what_was_not_judged_is_counted_and_not_green() -> None:
    assert "2 attentions not judged. 2 findings: 1 warn, 1 note. Exit code 0" in summary_line(unjudged())
    text = to_text(unjudged(), width=140, color=True)
    assert "\x1b[1;32m" not in text.splitlines()[-1]
    assert text.count("did not run with these inputs") == 1  # as a finding, not once more as an aside


def test_summary_says_what_is_wrong_and_counts() -> None:
    said, counts = summary_line(sick()).split(" 10 attention calls: ")
    assert said == f"{headline(sick()).en}."
    assert counts == (
        "3 exact, 1 declared, 5 unexplained, 1 unmeasured. "
        "12 findings: 4 critical, 6 fail, 1 warn, 1 note. Exit code 1 (fail-on: fail)."
    )


def test_what_is_wrong_stands_above_the_table() -> None:
    text = to_text(sick(), width=400)
    assert text.index("The scale is 8 times too large in 4 of 10 attentions: no") < text.index("ratio  verdict")


def test_consequences_stand_under_their_cause_without_a_fix_of_their_own() -> None:
    cause = Finding("scale_ledger", "fail", "h.1", 8.0, 1.0, "the scale is missing", "put it back", "paper")
    hot = Finding("max_logit", "warn", "h.1", 120.0, 100.0, "head 0 has a logit of 120", "clip it", "another paper")
    other = dataclasses.replace(hot, site="h.9", fix="clip that one")
    text = to_text(dataclasses.replace(healthy(), findings=(cause, hot, other)), width=120)
    lines = text[text.index("Findings") :].splitlines()
    assert lines[1:9] == [
        " fail  the scale is missing",
        "    h.1  scale_ledger  found 8, expected 1",
        "    fix: put it back",
        "    source: paper",
        "    which leads to:",
        "       warn  head 0 has a logit of 120",
        "          h.1  max_logit  found 120, expected at most 100",
        " warn  head 0 has a logit of 120",
    ]
    assert "clip it" not in text
    assert "fix: clip that one" in text


def test_the_mode_is_told_in_words() -> None:
    assert "parameters, model run, seed 0" in to_text(healthy())
    assert "parameters, formulas alone, seed 0" in to_text(static(), width=100)
