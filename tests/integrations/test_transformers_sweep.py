"""Eager and ours are equal on the model types of transformers, or ours refuses; see `tests.hf.sweep`."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")  # experts_implementation

import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from sqrtdk.integrations import transformers as ours
from tests.hf import sweep as transformers_sweep
from tests.hf.small import NotBuiltError, needs
from tests.hf.sweep import WRONG, Outcome, apart, compare, main

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


def reaches(model_type: str) -> None:
    """Skip a type that the installed transformers does not have, or whose attention there takes no function."""
    needs(model_type)
    name = model_type_to_module_name(model_type)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{model_type} of transformers {hf.__version__} takes no attention function")


def compared(model_type: str, only: tuple[str, ...] = ()) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare(model_type, only)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_ours_is_eager(model_type: str) -> None:
    reaches(model_type)
    outcome = compared(model_type)
    assert outcome.state == "agree", outcome
    assert outcome.calls >= 2
    agreeing = {name for name, text in outcome.checks.items() if text == "agree"}
    assert {"output", "gradients"} <= agreeing
    untold = {name: text for name, text in outcome.checks.items() if text.startswith("eager fails")}
    wanted = (
        {"left padding", "dynamic cache", "static cache", "one token"} if model_type in WITH_STATIC_CACHE else set()
    )
    assert wanted <= agreeing | set(untold)
    if wanted & set(untold):
        pytest.skip(f"transformers {hf.__version__}: {untold}")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("bridgetower", "calls itself causal and got no mask"), ("minimax_m3_vl_text", "'block_indices'")],
)
def test_ours_refuses(model_type: str, reason: str) -> None:
    reaches(model_type)
    outcome = compared(model_type)
    if outcome.state == "agree":
        pytest.skip(f"{model_type} of transformers {hf.__version__} asks for nothing that is refused")
    assert outcome.state == "refused", outcome
    assert reason in outcome.reason


@pytest.mark.parametrize(("model_type", "argument"), [("inkling2_text", "sinks"), ("t5", "position_bias")])
def test_an_argument_that_is_swallowed_is_seen(model_type: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reaches(model_type)
    whole = ours.attention_forward
    monkeypatch.setattr(ours, "attention_forward", lambda *args, **kwargs: whole(*args, **(kwargs | {argument: None})))
    assert compared(model_type, only=("output",)).state == "differ"


def ends(*_: Any, **__: Any) -> None:
    os._exit(3)


def hangs(*_: Any, **__: Any) -> None:
    threading.Event().wait()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("attention", "seconds", "state"), [(ends, 240, "died"), (hangs, 1, "timed out")])
def test_what_can_not_be_told_is_wrong_unless_eager_alone_does_the_same(
    attention: Any, seconds: int, state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ours, "attention_forward", attention)
    assert apart("vit", seconds).state == state
    monkeypatch.setattr(transformers_sweep, "apart", lambda model_type: Outcome(model_type, state))
    monkeypatch.setattr("sys.argv", ["sweep", "vit"])
    assert main() == 1
    assert f"1 {state}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_where_eager_alone_dies_nothing_is_said_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_sweep, "run_plain", ends)
    outcome = apart("vit")
    assert (outcome.state, outcome.reason) == ("does not run in eager", "died: exit code 3")


def test_a_check_that_eager_fails_is_printed_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no gradients today")

    monkeypatch.setattr(transformers_sweep, "run_gradients", fails)
    monkeypatch.setattr(transformers_sweep, "apart", compared)
    monkeypatch.setattr("sys.argv", ["sweep", "bert", "vit"])
    assert main() == 0
    printed = capsys.readouterr().out
    assert printed.count("gradients: eager fails: RuntimeError: no gradients today") == 2
    assert "output: 2 agree, 0 refused, 0 differ, 0 eager fails\n" in printed
    assert "gradients: 0 agree, 0 refused, 0 differ, 2 eager fails\n" in printed


@pytest.mark.parametrize(("name", "state"), [("sqrtdk", "no attention through the interface"), ("query", "differ")])
def test_only_a_table_without_our_name_keeps_ours_out(name: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = transformers_sweep.build

    def build(config: Any, attn: str, **options: Any) -> Any:
        if attn == ours.ATTENTION_NAME:
            raise NotBuiltError("no such key") from KeyError(name)
        return whole(config, attn, **options)

    monkeypatch.setattr(transformers_sweep, "build", build)
    assert compared("vit").state == state


@pytest.mark.slow
def test_no_model_type_differs() -> None:
    outcomes = [apart(model_type) for model_type in CONFIG_MAPPING]
    assert [outcome for outcome in outcomes if outcome.state in WRONG] == []
    assert sum(outcome.state == "agree" for outcome in outcomes) >= 250
