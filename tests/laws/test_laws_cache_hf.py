"""Caches, padding on the left and shifted positions of transformers' models, small and with random weights."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sqrtdk import check
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from tests.hf.small import build, inputs_of, needs, small_config

pytest.importorskip("transformers")
LAWS = "cache,left_padding,shift"
BY_POSITION = "positions are absolute, and forward takes none: tokens move with the padding before them"


def asked(model_type: str, attn: str = "eager") -> dict[tuple[str, str], LawAnswer]:
    needs(model_type)
    model = build(small_config(model_type), attn, torch.float32)
    return {(answer.law, answer.about): answer for answer in check(model, inputs_of(model), laws=LAWS).laws}


def words(answer: LawAnswer) -> str:
    return answer.reason if answer.state == NOT_ASKED else answer.state


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model_type", "attn", "left", "shifted"),
    [
        ("llama", "sdpa", KEPT, KEPT),
        ("gemma2", "eager", KEPT, KEPT),
        ("gpt2", "sdpa", KEPT, "no self-attention rotates q or k"),
        ("opt", "eager", KEPT, "no self-attention rotates q or k"),
        ("phi", "eager", KEPT, KEPT),
        ("falcon", "sdpa", KEPT, KEPT),
        ("bart", "sdpa", BY_POSITION, "forward takes no position_ids"),
    ],
)
def test_decoders_keep_the_laws(model_type: str, attn: str, left: str, shifted: str) -> None:
    answers = asked(model_type, attn)
    assert [answers["cache", about].state for about in ("dynamic", "static", "left padding")] == [KEPT] * 3
    (padded,) = (answer for (law, _), answer in answers.items() if law == "left_padding")
    (turned,) = (answer for (law, _), answer in answers.items() if law == "shift")
    assert (words(padded), words(turned)) == (left, shifted)


def test_alibi_keeps_the_laws() -> None:
    answers = asked("bloom")
    assert answers["cache", "dynamic"].state == answers["cache", "left padding"].state == KEPT
    assert answers["left_padding", "attention_mask"].state == KEPT


def test_an_encoder_decoder_decodes_as_it_runs_in_one_pass() -> None:
    answers = asked("t5")
    assert answers["cache", "dynamic"].state == answers["cache", "static"].state == KEPT
    assert answers["cache", "left padding"].reason == "forward takes no attention_mask of the tokens"


def test_a_state_takes_steps_of_one_token() -> None:
    answers = asked("jamba")
    assert answers["cache", "dynamic"].state == answers["cache", "left padding"].state == KEPT


def test_a_model_without_position_ids_that_needs_them() -> None:
    answer = asked("bamba")["cache", "dynamic"]
    assert (answer.state, answer.reason) == (KEPT, "with position_ids; without them steps begin at position 0")


def test_gains_behind_the_rotation_are_not_shifted() -> None:
    answer = asked("hunyuan_v1_moe")["shift", ""]
    assert answer.reason == "q or k is normalised after its rotation, with gains that do not turn with it"


@pytest.mark.full
def test_keys_that_an_indexer_picks_among_ties() -> None:
    """Its scores end in a relu: which of several zeros are among the best changes with the number of slots."""
    answers = asked("mistral_large4")
    assert answers["cache", "dynamic"].state == KEPT
    assert "the data picks keys" in answers["cache", "static"].reason
    assert "keys that the data picks" in answers["shift", ""].reason


def modelling(model_type: str) -> Any:
    import transformers  # noqa: F401

    __import__(f"transformers.models.{model_type}.modeling_{model_type}")
    return sys.modules[f"transformers.models.{model_type}.modeling_{model_type}"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi"])
def test_masks_that_are_never_made(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask transformers cuts the keys of a chunk down to its rows, and a step of one row sees every slot."""
    needs(model_type)
    module = modelling(model_type)
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda **_: None)
    answers = asked(model_type, "sdpa")
    dynamic, static = answers["cache", "dynamic"], answers["cache", "static"]
    assert dynamic.state == static.state == BROKEN
    assert dynamic.reason.endswith("2 rows there see 2 keys, and none of 7 cached ones")
    assert dynamic.site.endswith("layers.0.self_attn" if model_type != "gpt2" else "h.0.attn")
    assert "a step of one token behind 6 cached ones" in static.reason  # it sees empty slots
    assert answers["left_padding", ""].reason == "attention_mask changes nothing"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi"])
def test_a_rotation_of_q_alone(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(model_type)
    module = modelling(model_type)
    rotated = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *rest: (rotated(q, k, *rest)[0], k))
    answer = asked(model_type)["shift", "position_ids"]
    assert answer.state == BROKEN
    assert (
        answer.reason
        == "outputs move when all positions are shifted by 7: q and k are not turned alike (q is, k is not)"
    )
    assert answer.site.endswith("layers.0.self_attn")


def test_positions_that_count_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("gpt2")
    module = modelling("gpt2")
    forward = module.GPT2Model.forward

    def counting(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(module.GPT2Model, "forward", counting)
    answer = asked("gpt2")["left_padding", "attention_mask"]
    assert answer.state == BROKEN
    assert answer.finding is not None
    assert answer.finding.severity == "fail"


def test_steps_with_the_mask_of_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that hides padding among new tokens alone shows the padding of the prefill."""
    needs("opt")
    module = modelling("opt")
    made = module.create_causal_mask

    def shortened(*, attention_mask: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask.clone()
            attention_mask[:, : -inputs_embeds.shape[1]] = 1
        return made(attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)

    monkeypatch.setattr(module, "create_causal_mask", shortened)
    answers = asked("opt")
    assert answers["cache", "dynamic"].state == KEPT
    assert answers["cache", "left padding"].state == BROKEN
    assert answers["cache", "left padding"].site.endswith("layers.0.self_attn")
