"""Every verb takes the options of loading by their names: one that is called otherwise would be dropped."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import sqrtdk
from sqrtdk import cli
from sqrtdk.models.options import LoadOptions

NAMES = {field.name for field in dataclasses.fields(LoadOptions)}
OF_TWO = {"static", "device_map", "offload_folder"}


@pytest.mark.parametrize(
    ("verb", "without"),
    [
        (sqrtdk.check, set()),
        (cli.check, set()),
        (sqrtdk.record, {"static"}),
        (cli.record, {"static"}),
        (sqrtdk.diff, OF_TWO),
        (cli.diff, OF_TWO),
    ],
    ids=lambda value: f"{value.__module__}.{value.__name__}" if callable(value) else "",
)
def test_a_verb_takes_every_option_of_loading(verb: Callable[..., Any], without: set[str]) -> None:
    assert NAMES - set(inspect.signature(verb).parameters) == without


def test_what_a_side_may_have_of_its_own_is_an_option_of_both() -> None:
    for verb in (sqrtdk.diff, cli.diff):
        names = set(inspect.signature(verb).parameters)
        own = {name[:-2] for name in names if name.endswith(("_a", "_b"))} - {"inputs"}
        assert own == {"attn", "dtype", "device", "revision"}
        assert own <= names & NAMES
