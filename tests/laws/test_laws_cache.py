"""Prefill and decode in place of one pass, in own code: planted errors are seen, the right model is left in peace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sqrtdk import check
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from tests.laws.caching_models import Behind, Decoder, Returned, Slots, Store, Stored, ids, noise
from tests.support.sentences import facts, facts_of


def answers(model: torch.nn.Module, inputs: Any, law: str = "cache") -> dict[str, LawAnswer]:
    return {answer.about: answer for answer in check(model, inputs, laws=law).laws}


def test_the_right_decoder_decodes_as_it_runs_in_one_pass() -> None:
    inputs = {"input_ids": ids(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    found = answers(Decoder(), inputs)
    assert {about: answer.state for about, answer in found.items()} == {
        "dynamic": KEPT,
        "static": NOT_ASKED,
        "left padding": KEPT,
    }
    assert facts(found["static"].reason) == ("laws.cache.not_of_transformers", {})


@pytest.mark.parametrize(
    ("wrong", "id", "values"),
    [
        ("corner", "step_differs", {"first": 9}),
        ("again", "step_differs", {"first": 9}),
        ("order", "chunk_differs", {"tokens": 2, "first": 10}),
    ],
)
def test_a_cache_that_moves_outputs(wrong: str, id: str, values: dict[str, int]) -> None:
    answer = answers(Decoder(wrong), (ids(),))["dynamic"]
    assert answer.state == BROKEN
    assert answer.finding is not None
    assert (answer.finding.rule, answer.finding.severity) == ("law_cache", "fail")
    assert answer.site == "layers.0"
    assert facts_of(f"laws.cache.{id}", answer.reason) == values
    assert answer.moved[:9] == (False,) * 9
    assert answer.moved[10:] == (True, True)


def test_the_corner_of_a_mask_is_named() -> None:
    answer = answers(Returned(corner=True), (noise(2, 16, 32),))["dynamic"]
    assert facts_of("laws.cache.is_causal_upper_left", answer.reason) == {"count": 1, "keys": 14}
    assert answers(Returned(), (noise(2, 16, 32),))["dynamic"].state == KEPT


def test_a_chunk_alone_can_show_it() -> None:
    """A step of one row that needs no mask hides that a chunk of two has the wrong one."""

    class Switched(Returned):
        def forward(self, x: torch.Tensor, past_key: Any = None, past_value: Any = None) -> Any:
            self.corner = x.shape[1] > 1
            return super().forward(x, past_key, past_value)

    answer = answers(Switched(), (noise(2, 16, 32),))["dynamic"]
    assert facts_of("laws.cache.chunk_differs", answer.reason) == {"tokens": 2, "first": 14}
    assert facts_of("laws.cache.is_causal_upper_left", answer.reason) == {"count": 2, "keys": 16}


def test_steps_that_begin_at_position_0_are_right_where_positions_are_given() -> None:
    answer = answers(Decoder("offset"), (ids(),))["dynamic"]
    assert (answer.state, facts(answer.reason)) == (KEPT, ("laws.cache.with_position_ids", {}))


def test_a_step_that_forgets_the_padding_before_it() -> None:
    inputs = {"input_ids": ids(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    found = answers(Decoder("short mask"), inputs)
    assert found["dynamic"].state == KEPT
    assert found["left padding"].state == BROKEN
    assert facts_of("laws.cache.of_left_padding", found["left padding"].reason) == {}
    assert found["left padding"].moved == (False,) * 9 + (True,) * 3


@pytest.mark.parametrize("counts", [True, False])
def test_an_object_that_forward_fills_is_a_cache(counts: bool) -> None:
    store = Store()
    answer = answers(Stored(counts), {"x": noise(2, 10, 32), "kv_cache": store})["dynamic"]
    assert answer.state == (KEPT if counts else BROKEN)
    if not counts:
        assert answer.finding is not None
        assert answer.finding.severity == "fail"


def test_a_model_that_is_not_causal_is_not_asked() -> None:
    class Open(Returned):
        def forward(self, x: torch.Tensor, past_key: Any = None, past_value: Any = None) -> Any:
            q, k, v = self.heads(x)
            if past_key is not None:
                k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
            return self.back(torch.nn.functional.scaled_dot_product_attention(q, k, v)), k, v

    answer = answers(Open(), (noise(2, 10, 32),))["dynamic"]
    assert answer.state == NOT_ASKED
    assert facts_of("laws.cache.later_tokens_move", answer.reason) == {}


def test_outputs_that_depend_on_the_number_of_tokens_move_with_no_later_token() -> None:
    class Counted(Returned):
        def forward(self, x: torch.Tensor, past_key: Any = None, past_value: Any = None) -> Any:
            out, k, v = super().forward(x, past_key, past_value)
            return out * len(x[0]), k, v

    assert [a.state for a in check(Counted().eval(), (noise(2, 10, 32),), laws="causal").laws] == [KEPT]
    answer = answers(Counted(), (noise(2, 10, 32),))["dynamic"]
    assert (answer.state, facts(answer.reason)) == (NOT_ASKED, ("laws.cache.length_moves", {}))


@pytest.mark.parametrize(
    ("model", "severity", "id", "values"),
    [
        (Behind(), None, "", None),
        (Behind(flat=True), None, "", None),
        (Behind(unturned=True), None, "", None),
        (Behind("corner"), "fail", "is_causal_upper_left", {"count": 4, "keys": 12}),
        (Behind("corner", flat=True), "fail", "is_causal_upper_left", {"count": 4, "keys": 12}),
        (Behind("offset"), "warn", "turned_from_zero", {"cached": 8}),
        (Behind("offset", flat=True), "warn", "turned_from_zero", {"cached": 8}),
        (Behind("again", unturned=True), "warn", "turned_again", {}),
    ],
)
def test_keys_that_are_given_and_not_returned(
    model: Behind, severity: str | None, id: str, values: dict[str, int] | None
) -> None:
    shape = (2, 8, 2, 16) if model.flat else (2, 2, 8, 16)
    inputs = (noise(2, 4, 32), noise(*shape, seed=3), noise(*shape, seed=4))
    answer = answers(model, inputs)["given keys"]
    assert answer.state == (KEPT if severity is None else BROKEN)
    assert (answer.finding.severity if answer.finding else None) == severity
    assert facts_of(f"laws.cache.{id}", answer.reason) == values


def test_empty_slots_that_rows_see() -> None:
    inputs = (noise(2, 6, 32), torch.arange(6))
    assert answers(Slots(hides=True), inputs)["empty slots"].state == KEPT
    answer = answers(Slots(hides=False), inputs)["empty slots"]
    assert answer.finding is not None
    assert answer.finding.severity == "warn"
    assert facts(answer.reason) == ("laws.cache.empty_slots_seen", {"count": 14})


def test_empty_slots_are_said_of_a_model_that_is_not_asked_the_rest() -> None:
    class Unread(Slots):
        def forward(self, x: torch.Tensor, cache_position: torch.Tensor, past: Any = None) -> torch.Tensor:
            return super().forward(x, cache_position)

    found = answers(Unread(hides=False), (noise(2, 6, 32), torch.arange(6)))
    assert [(about, answer.state) for about, answer in found.items()] == [("empty slots", BROKEN)]


def test_keys_that_are_given_and_returned() -> None:
    """A cache that the inputs begin with stays before the tokens."""
    past = noise(2, 2, 5, 16, seed=3), noise(2, 2, 5, 16, seed=4)
    found = answers(Returned(), (noise(2, 10, 32), *past))
    assert (found["dynamic"].state, facts(found["static"].reason)) == (KEPT, ("laws.cache.own_cache", {}))


def test_reasons_not_to_ask() -> None:
    class Lengths(Decoder):
        def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor, past: Any = None) -> Any:
            return super().forward(input_ids, past_key_values=past, use_cache=True)

    found = answers(Lengths(), {"input_ids": ids(), "lengths": torch.tensor([12, 12])})
    assert facts(found[""].reason) == ("laws.cache.lengths", {})
    found = answers(Decoder(), (ids(2, 5),))
    assert facts(found[""].reason) == ("laws.cache.few_tokens", {"count": 5, "least": 6})
    plain = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1)
    assert facts(answers(plain, (noise(2, 8, 32),))[""].reason) == ("laws.cache.no_argument", {})


def test_asking_leaves_caches_hooks_and_generators_as_they_were() -> None:
    for laws in ("none", "cache"):
        store, model = Store(), Stored()
        generator = torch.random.get_rng_state()
        check(model, {"x": noise(2, 10, 32), "kv_cache": store}, laws=laws)
        assert store.key is None
        assert torch.equal(torch.random.get_rng_state(), generator)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
