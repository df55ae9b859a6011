"""Attentions that are easily mistaken over ranks: repeated tokens, copies, shared key heads, a memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sqrtdk
from sqrtdk.audit.records import BROKEN, UNMEASURED, AttentionSplit, CheckReport, Finding, LawAnswer
from sqrtdk.messages import Message
from sqrtdk.ranks.reports import one_report
from sqrtdk.ranks.split import whole_attentions
from sqrtdk.ranks.tokens import AttentionPrint, BlockPrint
from tests.monitor.ranks_at_work import run
from tests.ranks import odd_models
from tests.ranks.split_models import Decoder, alone, whole
from tests.support.once import made_once


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckReport]:
    folder = made_once(tmp_path_factory, "odd-of-two", lambda folder: run(odd_models.work_of, 2, folder))
    first, other = (torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    assert first == other
    grads = [torch.load(folder / f"gradients{rank}.pt") for rank in range(2)]
    assert grads[0]["gain"] == grads[1]["gain"]  # gathered of both ranks, of which one has no gradient
    assert grads[0]["gain"][0] != 0
    assert grads[0]["gain"][2:] == [0, 0]
    reports: dict[str, CheckReport] = first
    return reports


@pytest.fixture(scope="module")
def one() -> dict[str, CheckReport]:
    return odd_models.reports()


@pytest.mark.full
@pytest.mark.parametrize("name", ["then_whole", "one_key_head", "gathered_memory", "one_word"])
def test_the_report_is_that_of_one_process(two: dict[str, CheckReport], one: dict[str, CheckReport], name: str) -> None:
    sizes = ("site", "index", "formula", "heads", "kv_heads", "query_len", "key_len")
    told = [
        [tuple(getattr(judged.call, size) for size in sizes) for judged in reports[name].calls]
        for reports in (two, one)
    ]
    assert told[0] == told[1]
    assert [str(finding.message) for finding in two[name].findings] == [
        str(finding.message) for finding in one[name].findings
    ]
    for judged, right in zip(two[name].calls, one[name].calls, strict=True):
        assert judged.call.stats is not None
        assert right.call.stats is not None
        assert judged.call.stats.entropy_nats == pytest.approx(right.call.stats.entropy_nats, abs=1e-9)


@pytest.mark.full
def test_rows_whose_keys_lie_on_other_ranks_are_not_judged_as_whole(two: dict[str, CheckReport]) -> None:
    report = two["merged_memory"]
    assert [(judged.call.stats, judged.call.part_of_row) for judged in report.calls] == [(None, "summed")] * 2
    assert {entry.reason.id for entry in report.not_measured} == {"ranks.not_joined"}


@pytest.mark.full
def test_ranks_with_other_numbers_of_attentions_wait_for_nothing(two: dict[str, CheckReport]) -> None:
    report = two["one_more"]
    assert report.ranks is not None
    split = {one.site: (one.ranks, one.ways) for one in report.ranks.attentions}
    assert split == {"all.layers.0": ((0, 1), ("heads",)), "more": ((0,), ())}


def _print(rows: str, *blocks: str) -> AttentionPrint:
    """One letter is one token."""
    digests = [tuple(letter.encode() for letter in word) for word in (rows, *blocks)]
    made = tuple(BlockPrint(at, (0, len(rows)), keys) for at, keys in enumerate(digests[1:]))
    return AttentionPrint("", 0, digests[0], made, (1, 1, 8, "float32"), True, "", "")


@pytest.mark.parametrize(("first", "second", "keys", "members"), [
    (("ab", "12", "34"), ("cd", "34", "12"), "1234", 2),
    (("ab", "1212"), ("ab", "1212"), "1212", 2),  # two words, and each rank has one time both
    (("ab", "1234"), ("ab", "1234"), "1234", 1),  # the ranks do the same
    (("ab", "12"), ("ab", "12", "12"), "", 2),  # blocks of a ring that can not be told apart
    (("ab", "56"), ("cd", "56"), "56", 2),  # keys of another sequence, as many as a rank has rows
])  # fmt: skip
def test_the_place_of_each_block_is_known_or_none_is(
    first: tuple[str, ...], second: tuple[str, ...], keys: str, members: int
) -> None:
    (whole,) = whole_attentions([[_print(*first)], [_print(*second)]])
    ((group,),) = whole.batches
    assert len(group.members) == members
    assert b"".join(group.keys).decode() == keys


def _of_weights(weights: str, keys: str, *, rows: str = "ab", inputs: str = "x", split: bool = False) -> AttentionPrint:
    made = _print(rows, keys)
    return replace(made, split=split, inputs=inputs, weights=weights)


@pytest.mark.parametrize(("exchange", "other", "ways"), [
    (True, _of_weights("W2", "34"), [("heads",)]),  # of one input: some heads each
    (False, _of_weights("W2", "34"), [("unlike",), ("unlike",)]),  # the same where nothing is summed over the ranks
    (False, _of_weights("W2", "34", inputs="y"), [("unlike",), ("unlike",)]),
    (False, _of_weights("W1", "34", inputs="y"), [("batch",)]),
    (True, _of_weights("W2", "34", inputs="y"), [(), ()]),  # stages of a pipeline
    (False, _of_weights("W1", "345", rows="abc", inputs="y"), [("lengths",), ("lengths",)]),  # a shorter batch
    (True, _of_weights("W2", "12", rows="cd", inputs="y", split=True), [("rows", "unlike")]),
    (True, _of_weights("W1", "12", rows="cd", inputs="y", split=True), [("rows",)]),
])  # fmt: skip
def test_weights_that_were_never_synchronised_are_no_heads(
    exchange: bool, other: AttentionPrint, ways: list[tuple[str, ...]]
) -> None:
    first = _of_weights("W1", "12", split=other.split)
    assert [one.ways for one in whole_attentions([[first], [other]], exchange)] == ways


def _finding(rule: str, severity: str, message: str, fix: str) -> Finding:
    return Finding(rule, severity, "layers.0", None, None, message, Message(fix), "")


@pytest.mark.parametrize("asked", [False, True])
def test_what_all_ranks_say_of_layers_of_one_name_stands_once(asked: bool) -> None:
    """A law's answer, and what no rank could measure; a fault of one rank's layer stands at that rank."""
    with torch.no_grad():
        report = sqrtdk.check(Decoder(alone, 1).eval(), whole(), laws="none")
    both = (
        _finding("law_ranks", "fail", "other outputs", "laws.ranks.fix_place"),
        _finding(UNMEASURED, "note", "not measured", "rules.unmeasured.fix_ranks"),
    )
    laws = (LawAnswer("ranks", "", BROKEN, "other outputs", "layers.0"),) if asked else ()
    fault = _finding("scale_ledger", "fail", "no scale", "rules.unmeasured.fix")
    reports = [replace(report, findings=both, laws=laws), replace(report, findings=(*both, fault), laws=laws)]
    made = one_report(reports, [[AttentionSplit("layers.0", 0, (rank,), ())] for rank in range(2)])
    assert sorted((one.rule, one.site) for one in made.findings) == [
        ("law_ranks", "layers.0"), ("scale_ledger", "layers.0@rank1"), (UNMEASURED, "layers.0"),
    ]  # fmt: skip
    fixes = {one.rule: one.fix.id for one in made.findings if isinstance(one.fix, Message)}
    assert fixes[UNMEASURED] == ("rules.unmeasured.fix_ranks_asked" if asked else "rules.unmeasured.fix_ranks")
    leak = _finding("mask_audit", "critical", "sees later keys", "rules.mask_audit.fix_leak")
    in_rows = [AttentionSplit("layers.0", 0, (0, 1), ("rows",))]
    made = one_report([replace(report, findings=(leak,))] * 2, [in_rows] * 2)
    assert [one.fix.id for one in made.findings if isinstance(one.fix, Message)] == ["laws.ranks.fix.local_rows"]
    made = one_report([replace(report, laws=laws)] * 2, [in_rows] * 2)
    assert ("ranks.can_be_asked" in [note.id for note in made.environment["notes"]]) is not asked
