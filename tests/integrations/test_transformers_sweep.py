"""Eager and ours are equal on the model types of transformers, or ours refuses; see `transformers_sweep`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sqrtdk.integrations import transformers as ours
from transformers_sweep import apart, compare

# What each shows that the others do not.
TYPES = {
    "aimv2": "a causal mask in a module that says it is not",
    "bart": "encoder and decoder",
    "bert": "an encoder",
    "deepseek_v32": "keys selected for each row",
    "deepseek_v4": "a mask that the model grows, sinks of heads",
    "gemma2": "softcap",
    "gemma4_text": "rows that are cut before the last layers",
    "gpt_oss": "sinks of heads, a window",
    "inkling2_text": "sinks of rows, a bias",
    "llama": "grouped heads",
    "nllb-moe": "a router that reads the mask",
    "pegasus_x": "an encoder of its own",
    "t5": "a bias, no scale",
    "vit": "no mask",
    "whisper": "sound",
}

WITH_STATIC_CACHE = {"bart", "deepseek_v32", "gemma2", "gemma4_text", "gpt_oss", "inkling2_text", "llama", "t5"}


def compared(model_type: str, only: tuple[str, ...] = ()) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare(model_type, only)


@pytest.mark.parametrize("model_type", TYPES)
def test_ours_is_eager(model_type: str) -> None:
    outcome = compared(model_type)
    assert outcome.state == "agree", outcome
    assert outcome.calls >= 2
    agreeing = {name for name, text in outcome.checks.items() if text == "agree"}
    assert {"output", "gradients"} <= agreeing
    assert model_type not in WITH_STATIC_CACHE or {"left padding", "dynamic cache", "static cache"} <= agreeing


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("bridgetower", "calls itself causal and got no mask"), ("minimax_m3_vl_text", "'block_indices'")],
)
def test_ours_refuses(model_type: str, reason: str) -> None:
    outcome = compared(model_type)
    assert outcome.state == "refused", outcome
    assert reason in outcome.reason


@pytest.mark.parametrize(("model_type", "argument"), [("inkling2_text", "sinks"), ("t5", "position_bias")])
def test_an_argument_that_is_swallowed_is_seen(model_type: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ours.attention_forward
    monkeypatch.setattr(ours, "attention_forward", lambda *args, **kwargs: whole(*args, **(kwargs | {argument: None})))
    assert compared(model_type, only=("output",)).state == "differ"


@pytest.mark.slow
def test_no_model_type_differs() -> None:
    outcomes = [apart(model_type) for model_type in CONFIG_MAPPING]
    assert [outcome for outcome in outcomes if outcome.state == "differ"] == []
    assert sum(outcome.state == "agree" for outcome in outcomes) >= 250
