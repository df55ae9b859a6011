"""Several processes that watch together give the statistics of one process on the joined batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sqrtdk.monitor.reading import read_run
from tests.monitor import ranks_at_work as work
from tests.monitor import ranks_models as models
from tests.tolerances import allowed

Found = list[dict[str, Any]]
# Rounded to float32 before they are ordered; what is between is that of two rows' difference.
ROUNDED = ("_p05", "_p50", "_p95", "grad_max")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank gave, by scenario; with the folder that they wrote to."""
    if request.param == 2:
        folder = request.getfixturevalue("two_ranks") / "monitor"
    else:
        work.run(work.work, request.param, folder := tmp_path_factory.mktemp("ranks"))
    ranks = work.written(folder, request.param)
    assert all(ranks), "a rank ended before its scenarios did"
    return [{**rank, "folder": folder} for rank in ranks]


def complaints(joined: dict[str, Any], whole: dict[str, Any], leave: tuple[str, ...] = ()) -> list[str]:
    """Where two samples differ by more than the order of their sums explains.

    A number of a row is a sum of at most WIDTH products or of all keys; that of a head sums up all rows. All terms of a
    sum are of one sign, or of the size of the largest logit; those of a gradient, of that of the largest one.
    """
    found = []
    assert set(joined["calls"]) == set(whole["calls"])
    for place, call in whole["calls"].items():
        other = joined["calls"][place]
        assert other["reason"] is None, other["reason"]
        found += [f"{place}: {name}" for name in ("heads", "ratio") if other[name] != call[name]]
        columns = {name: column for name, column in call["columns"].items() if name not in leave}
        assert set(columns) == set(other["columns"]) - set(leave)
        largest = max(call["columns"]["max_abs_logit"])
        rows = max(call["columns"]["rows"])
        for name, column in columns.items():
            size = max((abs(value) for value in column if not math.isnan(value)), default=0.0)
            if "logit" in name or name == "row_offset":
                size = max(largest, size)
            elif "_grad_" in name and not name.endswith("nonfinite"):
                size = max(column for key, one in columns.items() if key.endswith("_grad_max") for column in one)
            limit = allowed(torch.float64, length=int(rows) * models.WIDTH, logit=largest, magnitude=size)
            if name.endswith(ROUNDED):
                limit += torch.finfo(torch.float32).eps * size
            assert limit <= 1e-6 * max(size, 1e-30)
            for head, (one, two) in enumerate(zip(column, other["columns"][name], strict=True)):
                if not (one == two or abs(one - two) <= limit or (math.isnan(one) and math.isnan(two))):
                    found.append(f"{place} {head} {name}: {two} for {one}")
    return found


@pytest.mark.parametrize("name", ["ddp", "fsdp", "heads", "grid", "uneven", "sequence", "keys"])
def test_ranks_give_what_one_process_gives(found: Found, name: str) -> None:
    """Of rows of their own, shards of heads beside one another, unlike numbers of rows, and keys merged row by row."""
    wholes = work.alone(name)
    for rank in found:
        for joined, whole in zip(rank[name], wholes, strict=True):
            assert complaints(joined, whole) == []
            assert joined["loss"] == (None if whole["loss"] is None else pytest.approx(whole["loss"], rel=1e-12))
            assert joined["missed"] == list(whole["missed"])
    last = found[0][name][-1]["calls"]["layers.1 0"]["columns"]
    assert ("query_grad_p50" in last) == (name in ("ddp", "fsdp", "heads", "grid"))


def test_steps_are_those_without_a_watch_bit_by_bit(found: Found) -> None:
    steps = work.EQUAL_STEPS[len(found)]
    for rank in found:
        for watched, plain in (rank["equal"][:2], rank["equal"][2:]):
            assert (watched.pop("samples"), plain.pop("samples")) == (1 + steps // 5, 0)
            assert watched == plain
            assert len(set(plain["losses"])) == steps


def test_what_is_broken_on_one_rank_is_counted(found: Found) -> None:
    columns = found[0]["uneven"][0]["calls"]["layers.0 0"]["columns"]
    assert columns["nan_rows"] == [models.LENGTH - 3] * models.HEADS
    assert all(map(math.isfinite, columns["max_logit"]))


def test_the_first_output_that_is_not_finite_of_all_ranks(found: Found) -> None:
    """The last rank alone has NaN in its inputs; where it began travels to each."""
    for rank in found:
        assert rank["uneven"][0]["first"] == ["layers.0.q_proj", "inputs", len(found) - 1]
        assert {sample["first"] for sample in rank["ddp"]} == {None}
        assert {sample["modules"] for sample in rank["ddp"]} == {12}


def test_a_rank_without_a_call_takes_part(found: Found) -> None:
    whole = work.alone("absent")[0]
    for rank in found:
        first, second = rank["absent"]
        assert complaints(first, whole) == []
        assert bool(second["calls"]) == (len(found) > 2)
    assert found[0]["absent"][1]["how"].startswith("as is" if len(found) > 2 else "not measured")


def test_stages_of_one_name_are_attentions_of_their_own(found: Found) -> None:
    stages = len(found) - 1
    for rank in found:
        calls = rank["stages"][0]["calls"]
        assert len(calls) == 2 * stages
        assert not any(call["reason"] for call in calls.values())
    if stages > 1:
        one, two = (max(calls[f"{name}layers.0 0"]["columns"]["max_logit"]) for name in ("", "stage1."))
        assert two > 1.5 * one


def test_one_collective_a_sample(found: Found) -> None:
    for rank in found:
        again = ["rows", "names", "rows"]
        assert [sample["collectives"] for sample in rank["growing"]] == [again, ["rows"], again, ["rows"]]


def test_rows_that_are_too_many_are_thinned_alike(found: Found) -> None:
    """Each rank may send 24 rows of each of two statistics; the first has 48: of all of them every second one goes."""
    for rank in found:
        sample = rank["thinned"][0]
        columns = sample["calls"]["layers.0 0"]["columns"]
        assert columns["rows"] == [(len(found) * 4 + 4) * models.LENGTH] * models.HEADS
        assert any("every 2th row" in text for text in sample["missed"])
        every = [row for number in range(len(found)) for row in _largest(8 if number == 0 else 4)]
        median = torch.stack(every).float().double().quantile(0.5, 0).tolist()
        assert columns["max_logit_p50"] == pytest.approx(median, rel=torch.finfo(torch.float32).eps)


def _largest(sequences: int) -> list[torch.Tensor]:
    """(Hq,), the largest logit of every second row of the first attention."""
    layer, x = models.decoder().layers[0], models.batch()[:sequences]
    with torch.no_grad():
        q, k = (each(x).unflatten(-1, (models.HEADS, -1)).transpose(1, 2) for each in (layer.q_proj, layer.k_proj))
        logits = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    rows = logits.masked_fill(hidden, -math.inf).amax(-1).transpose(0, 1).flatten(1)
    return list(rows[:, ::2].T)


def test_the_ranks_agree_and_the_first_one_writes_and_warns(found: Found) -> None:
    samples = [rank["raising"][0] for rank in found]
    assert all(sample == samples[0] for sample in samples)
    assert samples[0]["step"] == 2
    ends = [rank["raising"][1] for rank in found]
    assert [end["raised"] for end in ends] == ["fail"] * len(found)
    assert ends[0]["warned"] > 0
    assert not any(end["warned"] for end in ends[1:])
    assert len({end["refused"] for end in ends}) == 1
    run = read_run(found[0]["folder"] / "run")
    assert run is not None


def test_records_that_the_first_rank_could_not_write_are_an_alarm_of_all_at_the_next_sample(found: Found) -> None:
    for rank in found:
        assert rank["unwritten"] == [{"alarms": []}, {"alarms": []}, {"raised": "records"}]


def test_ranks_that_sample_different_steps_are_told_and_no_steps_are_mixed(found: Found) -> None:
    for rank in found:
        (ended,) = rank["apart"]
        assert ended["told"].startswith("the ranks sample different steps at once: 3, 4")
        assert ended["samples"] == 2


def test_a_rank_that_dies_within_a_step_does_not_hold_the_others(found: Found) -> None:
    left(work.ends(found[0]["folder"], len(found)))


@pytest.mark.slow
def test_a_rank_that_hangs_within_a_step_holds_the_others_for_the_time_of_the_group(tmp_path: Path) -> None:
    work.run(work.hang, 2, tmp_path)
    left(work.ends(tmp_path, 2))


def left(ends: list[Any]) -> None:
    """The last rank left within its second step: the others have the first one, and an error in time."""
    assert ends[-1] is None
    for end in ends[:-1]:
        assert end["samples"] == 1
        assert end["seconds"] < 3.0 * work.SECONDS  # before the rank that hangs leaves
        assert "every rank" in end["notes"][0]
