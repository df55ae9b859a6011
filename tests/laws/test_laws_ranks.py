"""Law `ranks`: real ranks beside one process; planted faults are named, and right models are kept."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.laws import ask
from sqrtdk.laws.processes.gradients import gradients_beside
from sqrtdk.laws.processes.inputs_of_ranks import whole_inputs
from sqrtdk.laws.processes.made_inputs import made_inputs
from sqrtdk.laws.processes.parting import RunsBeside
from sqrtdk.laws.processes.shards import SHARD_ORDERS, ShardLayout, fitting, on_ranks, shard_layouts, token_orders
from sqrtdk.laws.subject import NotAsked
from sqrtdk.laws.table import names_of
from tests.laws import rank_runs
from tests.laws.rank_models import Decoder, packed_inputs
from tests.laws.rank_runs import (
    FAULTS,
    OTHER_FAULTS,
    PLACED,
    QUICK,
    RIGHT,
    TEN_FAULTS,
    TEN_RIGHT,
    TWO_AT_ONCE,
    odd_work,
)
from tests.monitor.ranks_at_work import run
from tests.support.once import made_once
from tests.support.two_ranks import two_ranks as two_ranks

# Of two causal ranks the last block is the first shard's, so that the rows see what they see without the second.
ALIKE = {"last_block": "keys_left_out", "left_out": "last_block"}
Answers = dict[str, list[dict[str, Any]]]


def _made(factory: pytest.TempPathFactory, name: str, size: int, cases: tuple[str, ...]) -> Answers:
    work = partial(rank_runs.work_of, cases=cases)
    return _read(made_once(factory, name, lambda folder: _run(work, size, folder)), size)


def _run(work: Any, size: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run(work, size, folder)


def _read(folder: Path, size: int) -> Answers:
    every = [json.loads((folder / f"answers-{rank}.json").read_text()) for rank in range(size)]
    assert all(one == every[0] for one in every), "the ranks give one answer"
    first: Answers = every[0]
    return first


@pytest.fixture(scope="session")
def right_of_two(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _made(tmp_path_factory, "right-of-two-ranks", 2, (*TEN_RIGHT,))


@pytest.fixture(scope="session")
def faults_of_two(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _made(tmp_path_factory, "faults-of-two-ranks", 2, (*OTHER_FAULTS,))


@pytest.fixture(scope="session")
def ten_faults_of_two(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _made(tmp_path_factory, "ten-faults-of-two-ranks", 2, (*TEN_FAULTS,))


@pytest.fixture(scope="session")
def odd_of_two(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _read(made_once(tmp_path_factory, "odd-of-two-ranks", lambda folder: _run(odd_work, 2, folder)), 2)


@pytest.fixture(scope="session")
def right_of_four(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _made(tmp_path_factory, "right-of-four-ranks", 4, (*RIGHT, *TWO_AT_ONCE))


@pytest.fixture(scope="session")
def faults_of_four(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _made(tmp_path_factory, "faults-of-four-ranks", 4, (*FAULTS, *PLACED))


def _judged(answers: Answers, case: str, code: str) -> None:
    (one,) = answers[case]
    assert one["state"] == BROKEN, one
    kind = "backward" if "backward" in case or "gradient" in case else "name"
    names = [id for id in one["ids"] if id.startswith(f"laws.ranks.{kind}.")]
    alike = ALIKE.get(case.rpartition(":")[2], "")
    assert [name for name in names if name != f"laws.ranks.{kind}.{alike}"] == (
        [f"laws.ranks.{kind}.{code}"] if code else []
    ), one["reason"]


def test_a_ring_is_kept_and_a_dropped_window_is_named(two_ranks: Path) -> None:
    answers = _read(two_ranks / "laws", 2)
    for case, code in QUICK.items():
        if code:
            _judged(answers, case, code)
        else:
            assert [(one["state"], one["reason"]) for one in answers[case]] == [(KEPT, "")]
    assert answers[f"{rank_runs.MODELS}:window"][0]["site"] == "layers.0"
    (module,) = answers["module"]
    assert (module["state"], module["ids"]) == (NOT_ASKED, ["laws.ranks.no_factory"])


def test_one_process_has_no_ranks_and_all_laws_leave_the_law_out() -> None:
    (one,) = ask(Decoder("ring"), packed_inputs(), "ranks").answers
    assert one.state == NOT_ASKED
    assert "ranks" not in names_of("all")


@pytest.mark.full
@pytest.mark.parametrize("case", TEN_RIGHT)
def test_a_right_model_is_kept_on_two_ranks(right_of_two: Answers, case: str) -> None:
    assert [one["state"] for one in right_of_two[case]] == [KEPT], right_of_two[case]


@pytest.mark.full
@pytest.mark.parametrize(("case", "code"), TEN_FAULTS.items())
def test_a_planted_fault_is_named_on_two_ranks(ten_faults_of_two: Answers, case: str, code: str) -> None:
    """Three that users reported are among them: `mistral_window`, `mistral_documents`, `mistral_positions`."""
    _judged(ten_faults_of_two, case, code)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "code"), OTHER_FAULTS.items())
def test_another_planted_fault_is_named_on_two_ranks(faults_of_two: Answers, case: str, code: str) -> None:
    _judged(faults_of_two, case, code)


@pytest.mark.full
@pytest.mark.parametrize(("name", "state", "id"), [
    ("raises_alone", NOT_ASKED, "laws.ranks.not_built"),
    ("dies_alone", NOT_ASKED, "laws.ranks.child_ended"),
    ("hangs_alone", NOT_ASKED, "laws.ranks.child_late"),
    ("half", NOT_ASKED, "laws.ranks.half"),
    ("other_weights", BROKEN, "laws.ranks.weights"),
])  # fmt: skip
def test_a_model_that_one_process_can_not_have_is_not_asked(
    odd_of_two: Answers, name: str, state: str, id: str
) -> None:
    assert [(one["state"], one["ids"][0]) for one in odd_of_two[name]] == [(state, id)], odd_of_two[name]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*RIGHT, *TWO_AT_ONCE])
def test_a_right_model_is_kept_on_four_ranks(right_of_four: Answers, case: str) -> None:
    assert [one["state"] for one in right_of_four[case]] == [KEPT], right_of_four[case]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "code"), [*FAULTS.items(), *PLACED.items()])
def test_a_planted_fault_is_named_on_four_ranks(faults_of_four: Answers, case: str, code: str) -> None:
    _judged(faults_of_four, case, code)


# -- parts of a whole --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", SHARD_ORDERS)
@pytest.mark.parametrize("tokens", [16, 14])
def test_parts_are_found_in_the_whole_and_put_together(order: str, tokens: int) -> None:
    """Of 16 tokens on 4 ranks; of 14, the last two places are padding."""
    whole = torch.randn(2, tokens, 6)
    places = next(one for one in token_orders(tokens, [4] * 4) if one.order == order)
    layout = ShardLayout(tuple({1: at} for at in places.of_ranks), places)
    parts = [layout.part(whole, rank) for rank in range(4)]
    found = fitting(parts, whole, places, tokens)
    assert found is not None
    torch.testing.assert_close(found.whole(parts, tuple(whole.shape)), whole, rtol=0, atol=0)
    if tokens == 16:  # a model that cuts by itself shows its order
        learned = fitting(parts, whole, None, tokens)
        assert learned is not None
        assert learned.places is not None
        assert learned.places.order == order
    moved = [part.clone() for part in parts if part is not None]
    moved[2][0, 0] += 0.1
    assert fitting(moved, whole, places, tokens) is None


def test_two_axes_are_cut_over_a_mesh() -> None:
    whole = torch.randn(1, 16, 8)
    places = on_ranks(next(token_orders(16, [8, 8])), [0, 0, 1, 1])
    parts = [whole[:, 8 * (rank // 2) :][:, :8, 4 * (rank % 2) :][..., :4] for rank in range(4)]
    layout = fitting(parts, whole, places, 16)
    assert layout is not None
    assert torch.equal(layout.whole(parts, (1, 16, 8)), whole)
    assert [*shard_layouts([(3, 4)] * 2, (5, 4), None, 0)] == []


def test_parts_whose_sum_is_the_whole_are_found_where_asked() -> None:
    parts = [torch.randn(2, 5, 4) for _ in range(3)]
    whole = torch.stack(parts).sum(0)
    assert fitting(parts, whole, None, 5) is None
    layout = fitting(parts, whole, None, 5, sums=True)
    assert layout is not None
    assert layout.summed


def test_factors_of_gradients_are_read() -> None:
    alone = {name: torch.randn(4, 3) for name in "abc"}
    halves = [{name: grad * share for name, grad in alone.items()} for share in (0.25, 0.75)]
    beside = gradients_beside(alone, halves)
    assert (beside.fault, beside.factor) == (None, 1)
    averaged = [{name: grad / 2 for name, grad in alone.items()}] * 2
    beside = gradients_beside(alone, averaged)
    assert (beside.fault, float(beside.factor)) == (None, 0.5)
    mixed = [one | {"c": alone["c"]} for one in averaged]
    fault = gradients_beside(alone, mixed).fault
    assert fault is not None
    assert (fault.parameters, float(fault.factor or 0), float(fault.others)) == (("c",), 1.0, 0.5)
    twice = [{name: grad * 2 for name, grad in alone.items()}] * 2
    fault = gradients_beside(alone, twice).fault
    assert fault is not None
    assert float(fault.factor or 0) == 2.0
    fault = gradients_beside(alone, [{**one, "b": torch.randn(4, 3)} for one in halves]).fault
    assert fault is not None
    assert (fault.parameters, fault.factor) == (("b",), None)
    fault = gradients_beside(alone, [{"a": one["a"], "c": one["c"]} for one in halves]).fault
    assert fault is not None
    assert (fault.parameters, fault.factor) == (("b",), 0)


# -- inputs and outputs of ranks ---------------------------------------------------------------------------------------


def _ids(*rows: int, length: int = 8) -> Tensor:
    return torch.stack([torch.arange(length) + 10 * row for row in rows])


@pytest.mark.parametrize(("other", "mask"), [((1,), 8), ((1,), 14)])
def test_samples_of_ranks_are_no_parts_of_the_first_ranks_own(other: tuple[int, ...], mask: int) -> None:
    """A factory that takes the sample of its rank gives rank 0's on one process; a mask of ones is alike on all."""
    own = {"input_ids": _ids(0), "attention_mask": torch.ones(1, 8)}
    parts = [own, {"input_ids": _ids(*other, length=mask), "attention_mask": torch.ones(1, mask)}]
    with pytest.raises(NotAsked) as told:
        next(whole_inputs(own, parts))
    assert told.value.reason.id == "laws.ranks.inputs_no_parts"


def test_shards_of_equal_tokens_are_pieces_of_the_whole() -> None:
    own = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    whole = next(whole_inputs(own, [{"input_ids": part} for part in own["input_ids"].chunk(2, 1)]))
    assert whole.inputs is own
    assert whole.places is not None
    assert [places.tolist() for places in whole.places.of_ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_memory_that_ranks_have_parts_of_has_its_own_length() -> None:
    own = {"x": torch.randn(1, 6, 4), "memory": torch.randn(1, 16, 4)}
    whole = next(whole_inputs(own, [{"x": own["x"], "memory": part} for part in own["memory"].chunk(2, 1)]))
    assert (whole.tokens, whole.strange) == (16, ())


def test_two_documents_are_made_in_each_way_that_a_model_knows_them() -> None:
    """Documents of 5 and 3 tokens."""
    ids = _ids(0)
    plain = next(whole_inputs({"input_ids": ids}, [{"input_ids": part} for part in ids.chunk(2, 1)]))
    name, made = next(made_inputs(Decoder("ring"), plain, 0))  # `document_ids`, an argument of its forward
    assert name == "packed"
    assert made.inputs["document_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert made.of_rank(made.inputs, 1)["document_ids"].tolist() == [[0, 1, 1, 1]]
    offsets = {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}
    parts = [{"input_ids": part} | offsets for part in ids.chunk(2, 1)]
    whole = next(whole_inputs({"input_ids": ids} | offsets, parts))
    ((_, made),) = made_inputs(nn.Linear(1, 1), whole, 0)
    assert made.of_rank(made.inputs, 1)["cu_seqlens"].tolist() == [0, 5, 8]
    assert [*made_inputs(nn.Linear(1, 1), plain, 0)] == []


def _beside(*losses: float) -> RunsBeside:
    logits = torch.randn(1, 8, 4)
    runs = [
        {"outputs": {"loss": torch.tensor(loss), "logits": part}, "calls": []}
        for loss, part in zip(losses, logits.chunk(2, 1), strict=True)
    ]
    return RunsBeside({"outputs": {"loss": torch.tensor(1.0), "logits": logits}, "calls": []}, runs, None, 8)


def test_a_loss_of_a_ranks_own_tokens_is_left_out_and_one_of_all_is_compared() -> None:
    assert set(_beside(0.8, 1.2).outputs()) == {"logits"}
    assert _beside(0.8, 0.8).outputs()["loss"] is None
    assert _beside(1.0, 1.0).outputs()["loss"] is not None
    alone = _beside(0.8, 1.2)
    del alone.alone["outputs"]["logits"]
    with pytest.raises(NotAsked) as told:
        alone.outputs()
    assert told.value.reason.id == "laws.ranks.own_number"
