"""Every verb hands each of its options of loading on by name: one that is renamed or left out would be dropped."""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import sqrtdk
import sqrtdk._check
import sqrtdk.compare.diff
import sqrtdk.kv.forecast
import sqrtdk.kv.request
import sqrtdk.monitor.checkpoints
import sqrtdk.recording.record
from sqrtdk import cli
from sqrtdk.cli.diff import OF_A_SIDE
from sqrtdk.cli.options import LOADING, expanded
from sqrtdk.cli.watch_runs import checkpoints
from sqrtdk.models import names
from sqrtdk.models.options import LoadOptions

NAMES = {field.name for field in dataclasses.fields(LoadOptions)}
OF_TWO = {"static", "device_map", "offload_folder"}

# The verb, what it hands the object to, the options that it does not take, and its other arguments.
VERBS: dict[str, tuple[Callable[..., Any], str, set[str], dict[str, Any]]] = {
    "check": (sqrtdk.check, "sqrtdk._check.check_with", set(), {"model": "demo"}),
    "record": (sqrtdk.record, "sqrtdk.recording.record.record_with", {"static"}, {"model": "demo", "path": "x"}),
    "kv_forecast": (sqrtdk.kv.forecast.kv_forecast, "sqrtdk.kv.forecast._loaded", {"static"},
                    {"model": "demo", "kv_dtype": "int8"}),
    "diff": (sqrtdk.diff, "sqrtdk.compare.diff.diff_with", OF_TWO, {"a": "demo", "b": "demo"}),
    "sqrtdk check": (expanded(cli.check_verb), "sqrtdk._check.check_with", set(), {"models": ["demo"]}),
    "sqrtdk check --static": (expanded(cli.check_verb), "sqrtdk._check.check_with", set(),
                              {"models": ["demo", "demo"]}),
    "sqrtdk check --update": (expanded(cli.check_verb), "sqrtdk._check.check_with", set(),
                              {"models": ["demo"], "baseline": Path("x"), "update": True}),
    "sqrtdk kv": (expanded(cli.kv), "sqrtdk.kv.request.audit_and_forecast", {"static"}, {"model": "demo"}),
    "sqrtdk record": (expanded(cli.record_verb), "sqrtdk.recording.record.record_with", {"static"},
                      {"model": "demo", "output": "x"}),
    "sqrtdk diff": (expanded(cli.diff_verb), "sqrtdk.compare.diff.diff_with", OF_TWO, {"a": "demo", "b": "demo"}),
    "sqrtdk watch checkpoints": (expanded(checkpoints), "sqrtdk.monitor.checkpoints.measure_checkpoints",
                                 {"static", "revision", "device_map", "offload_folder"},
                                 {"patterns": ["x"], "output": "x"}),
}  # fmt: skip


class Stop(Exception):
    """Ends a verb once it has handed its options on."""


def handed_on(monkeypatch: pytest.MonkeyPatch, verb: str, **own: Any) -> list[LoadOptions]:
    """The objects of options that a verb builds, when each option that it takes has a value of its own."""

    handed: list[LoadOptions] = []

    def catch(*args: Any, **kwargs: Any) -> None:
        handed.extend(value for value in (*args, *kwargs.values()) if isinstance(value, LoadOptions))
        raise Stop

    function, receiver, without, others = VERBS[verb]
    monkeypatch.setattr(receiver, catch)
    monkeypatch.setattr(names, "check_name", lambda *args: None)
    monkeypatch.setattr(sqrtdk.kv.forecast, "check_sizes", lambda *sizes: None)
    monkeypatch.setattr(sqrtdk.kv.forecast, "check_seed", lambda seed: None)
    values = {name: f"a value of {name}" for name in NAMES - without}
    with pytest.raises((Stop, typer.Exit)):  # a command turns every error into an exit code
        function(**others, **values, **own)
    return handed


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_takes_every_option_of_loading(verb: str) -> None:
    function, _, without, _ = VERBS[verb]
    assert NAMES - set(inspect.signature(function).parameters) == without


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_hands_every_option_on(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    options = handed_on(monkeypatch, verb)[0]
    for name in NAMES - VERBS[verb][2]:
        assert getattr(options, name) == f"a value of {name}"


@pytest.mark.parametrize("verb", ["diff", "sqrtdk diff"])
def test_what_a_side_has_of_its_own_wins(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    own: dict[str, Any] = {f"{name}_{side}": f"{name} of {side}" for name in OF_A_SIDE for side in "ab"}
    if verb == "sqrtdk diff":
        monkeypatch.setattr(sys.modules["sqrtdk.cli.diff"], "ATTN", ("attn of a", "attn of b"))
        own = {f"of_{side}": [f"{name}={name} of {side}" for name in OF_A_SIDE] for side in "ab"}
    a, b = handed_on(monkeypatch, verb, **own)
    for name in OF_A_SIDE:
        assert (getattr(a, name), getattr(b, name)) == (f"{name} of a", f"{name} of b")
    assert (a.text, a.input_file, b.text, b.input_file) == ("a value of text", "a value of input_file", None, None)
    assert a.seed == b.seed == "a value of seed"


def test_what_a_side_may_have_of_its_own_is_an_option_of_both() -> None:
    parameters = set(inspect.signature(sqrtdk.diff).parameters)
    own = {name[:-2] for name in parameters if name.endswith(("_a", "_b"))} - {"inputs"}
    assert own == set(OF_A_SIDE)
    assert own <= parameters & NAMES


def test_each_field_has_an_option_of_its_name() -> None:
    assert list(LOADING) == [field.name for field in dataclasses.fields(LoadOptions)]


def test_an_option_that_there_is_not_is_an_error() -> None:
    with pytest.raises(TypeError, match="divice"):
        LoadOptions(divice="cpu")  # type: ignore[call-arg]
