"""What every public function of the theory refuses, and what its documentation shows."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from sqrtdk import theory
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory import logit_distribution
from sqrtdk.theory.parameters import additive_terms, bilinear_terms, multi_head_terms

PUBLIC: dict[str, Callable[..., Any]] = {
    name: value for name, value in vars(theory).items() if inspect.isfunction(value)
}


def _parameters(function: Callable[..., Any]) -> list[tuple[str, inspect.Parameter]]:
    return list(inspect.signature(function).parameters.items())


MOMENTS = {"dim": 4, "query_mean": 1.0, "query_variance": 1.0, "key_mean": 1.0, "key_variance": 1.0}
ROWS = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
NUMBERS: dict[str, dict[str, Any]] = {  # arguments of each function that takes real numbers
    **{name: {"n": 4, "sigma": 1.0} for name in PUBLIC if name.startswith(("expected_", "asymptotic_"))},
    "critical_sigma": {"n": 4},
    "dot_product_moments": MOMENTS,
    "entropy_lower_bound_nats": {"n": 4, "radius": 1.0},
    "logit_bound": {"scale": 1.0, "query_norm": 1.0, "key_norm": 1.0},
    "logit_distribution": MOMENTS | {"scale": 1.0},
    "logit_radius": {"weight_norm": 1.0, "input_norm": 1.0, "scale": 1.0},
    "max_logit_bounds": {"lse": 1.0, "n": 4},
    "overflow_margin": {"max_product": 1.0, "dtype": torch.float16},
    "range_forecast": MOMENTS | {"pairs": 4, "dtype": torch.float16, "scale_before": 1.0},
    "scale_from_entropy": {"query": ROWS, "key": ROWS, "entropy_nats": 1.0},
    "sigma_from_entropy": {"entropy_nats": 1.0, "n": 4},
    "spacing": {"value": 1.0, "dtype": torch.float16},
}
SIZED: dict[str, Callable[..., Any]] = {  # those that take whole numbers alone
    **{name: value for name, value in PUBLIC.items() if name not in NUMBERS and name != "largest_finite"},
    "additive_terms": additive_terms,
    "bilinear_terms": bilinear_terms,
    "multi_head_terms": multi_head_terms,
}
COUNTS = {
    name: {parameter: 4 for parameter, what in _parameters(function) if "int" in what.annotation}
    for name, function in SIZED.items()
}
PLACES = [(name, place) for name, arguments in NUMBERS.items() for place in arguments]
NUMERIC = [(name, place) for name, place in PLACES if isinstance(NUMBERS[name][place], int | float)]
SIZES = [(name, place) for name, arguments in COUNTS.items() for place in arguments]


@pytest.mark.parametrize(("name", "place"), NUMERIC)
def test_what_is_no_number_is_an_error_of_ours(name: str, place: str) -> None:
    """A whole number may also say that NaN is none; None is the default of one argument."""
    function, arguments = PUBLIC[name], NUMBERS[name]
    with pytest.raises((InvalidValueError, InvalidTypeError), match="got"):
        function(**arguments | {place: math.nan})
    if isinstance(arguments[place], float):
        with pytest.raises(InvalidValueError, match="got nan"):
            function(**arguments | {place: math.nan})
    for value in ("a", None, True, 1j, torch.tensor(1.0)):
        if (name, place, value) != ("logit_distribution", "scale", None):
            with pytest.raises(InvalidTypeError, match="got"):
                function(**arguments | {place: value})


@pytest.mark.parametrize(("name", "place"), NUMERIC)
def test_huge_numbers_and_those_of_other_libraries_are_numbers(name: str, place: str) -> None:
    """A huge one has an answer or is an error of ours."""
    function, arguments = PUBLIC[name], NUMBERS[name]
    value = arguments[place]
    for huge in (10**160 if isinstance(value, int) else 1e160, 10**400):
        with contextlib.suppress(InvalidValueError):
            function(**arguments | {place: huge})
    others = [np.int64(value)] if isinstance(value, int) else [np.float64(value), np.float32(value), Fraction(value)]
    expected = function(**arguments)
    for other in others:
        assert function(**arguments | {place: other}) == expected


@pytest.mark.parametrize(("name", "place"), SIZES)
def test_sizes_are_whole_and_above_zero(name: str, place: str) -> None:
    function, arguments = SIZED[name], COUNTS[name]
    dtypes = {"dtype": torch.float16} if "dtype" in inspect.signature(function).parameters else {}
    given = {**arguments, **dtypes}
    assert function(**given) == function(**given | {place: np.int64(4)})
    for value in (0, -8):
        with pytest.raises(InvalidValueError, match=rf"{place} is at least 1; got {value}"):
            function(**given | {place: value})
    for wrong in (4.0, math.nan, "4", True):
        with pytest.raises(InvalidTypeError, match=f"{place} is a whole number; got"):
            function(**given | {place: wrong})


def test_a_head_dimension_that_is_derived_is_at_least_one() -> None:
    with pytest.raises(InvalidValueError, match="head_dim is at least 1; got 0"):
        multi_head_terms(4, 8)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"query_mean": 1e160}, "variance of the product"),
        ({"query_mean": 1e200, "key_mean": 1e200}, "mean of the product"),
        ({"scale": 1e160}, "variance of the logits"),
        ({"query_mean": 1.0, "query_variance": 1e-320}, "square of a mean over its standard deviation"),
    ],
)
def test_moments_that_overflow(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidValueError, match=f"the {what} is a finite number; got"):
        logit_distribution(64, **changes)


@pytest.mark.parametrize("quantity", ["n", "sigma"])
def test_lists_hold_numbers_alone(quantity: str) -> None:
    for name in PUBLIC:
        if name.startswith("expected_"):
            lists = {"n": [4, 8], "sigma": [1.0, 2.0]}
            assert PUBLIC[name](**lists) == PUBLIC[name](**lists | {quantity: np.array(lists[quantity])})
            with pytest.raises(InvalidValueError, match="got nan"):
                PUBLIC[name](**lists | {quantity: [4, math.nan]})
            with pytest.raises(InvalidTypeError, match="got"):
                PUBLIC[name](**lists | {quantity: "48"})


@pytest.mark.parametrize("name", PUBLIC)
def test_help_shows_what_a_reader_needs(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    for section in ("Args:", "Returns:", "Raises:", "Example:", "Reference:"):
        assert section in text, section
    for parameter in inspect.signature(PUBLIC[name]).parameters:
        assert f"    {parameter}: " in text, parameter
