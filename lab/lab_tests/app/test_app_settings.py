"""What is typed or stands in an address: read whole, or refused with one reason; and the figures that follow."""

from __future__ import annotations

import math
from functools import cache
from urllib.parse import parse_qsl

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sqrtdk.messages import Message
from sqrtdk.scales import SCALES
from sqrtdk.theory import expected_entropy_nats
from sqrtdk_lab.app import sample
from sqrtdk_lab.app.figures import EXPLORER_FIGURES
from sqrtdk_lab.app.settings import (
    CONTROL_BY_RULE,
    CONTROLS,
    LONGEST_VALUE,
    RefusedValueError,
    address,
    parse_settings,
    texts,
)

OFFERED = {name: st.sampled_from(control.offered) for name, control in CONTROLS.items() if name != "parameter"}


@settings(max_examples=50)
@given(st.fixed_dictionaries(OFFERED))
def test_an_address_brings_the_settings_back(typed: dict[str, str]) -> None:
    chosen = parse_settings(typed)
    assert parse_settings(dict(parse_qsl(address(chosen)))) == chosen
    assert parse_settings(texts(chosen)) == chosen


def refused(error: RefusedValueError) -> tuple[str, object]:
    """The control whose value was refused, and the value."""
    name, said = error.message.values["name"], error.message.values["said"]
    assert isinstance(name, Message)
    assert isinstance(said, Message)
    return name.id.removeprefix("app.control."), said.values["got"]


@settings(max_examples=50)
@given(st.sampled_from([name for name in CONTROLS if name != "parameter"]), st.text(max_size=60))
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    told: RefusedValueError | None = None
    value = None
    try:
        value = getattr(parse_settings({name: text}), name)
    except RefusedValueError as error:
        told = error
    assert value is None or isinstance(value, str) or math.isfinite(value)
    assert told is None or refused(told) == (name, repr(text.strip()[:LONGEST_VALUE]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d_k", "0"),
        ("d_k", "1025"),
        ("d_k", "64.5"),
        ("d_k", "64abc"),
        ("d_k", "1e999"),
        ("d_k", "٦٤"),
        ("keys", "1"),
        ("keys", "-8"),
        ("keys", "99999999999999999999999999999999999999999999"),
        ("query_variance", "nan"),
        ("query_variance", "0"),
        ("key_variance", "inf"),
        ("temperature", "0"),
        ("softcap", "-5"),
        ("softcap", "NONE"),
        ("rule", "learned"),
        ("rule", "__class__"),
        ("dtype", "float8_e5m2"),
        ("components", "Cauchy"),
        ("seed", "-1"),
        ("seed", ""),
    ],
)
def test_a_malformed_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(RefusedValueError) as caught:
        parse_settings({name: text})
    assert refused(caught.value)[0] == name


def test_a_slider_begins_at_one_of_its_steps_and_they_ascend() -> None:
    sliders = {**CONTROLS, **{rule: control for rule, control in CONTROL_BY_RULE.items() if control is not None}}
    for name, control in sliders.items():
        if control.low is None:
            continue
        assert control.default in control.offered, name
        steps = [float(one) for one in control.offered if one != "none"]
        assert steps == sorted({*steps})
        assert not steps or control.low <= steps[0] <= steps[-1] <= control.high


def test_every_rule_of_the_library_is_offered_but_those_that_have_a_control_or_train() -> None:
    assert set(CONTROL_BY_RULE) == set(SCALES) - {"temperature", "learned"}


@pytest.mark.parametrize("name", CONTROL_BY_RULE)
def test_a_rule_is_that_of_the_library(name: str) -> None:
    settings = parse_settings({"rule": name, "temperature": "2"})
    of_rule = CONTROL_BY_RULE[name]
    rule = SCALES[name]() if of_rule is None else SCALES[name]((int if of_rule.whole else float)(of_rule.default))
    from sqrtdk.theory import logit_distribution

    assert sample.distribution(settings).scale == logit_distribution(64, rule, keys=256).scale / 2


@pytest.mark.parametrize("components", CONTROLS["components"].offered)
def test_the_sample_has_the_variances_chosen(components: str) -> None:
    settings = parse_settings({"components": components, "query_variance": "4", "key_variance": "0.25", "keys": "2048"})
    query, key, _ = sample.draw_vectors(settings, 64)
    assert float(query.var()) == pytest.approx(4.0, rel=0.1)
    assert float(key.var()) == pytest.approx(0.25, rel=0.1)
    assert query.dtype == torch.float32


def test_measured_is_what_is_expected() -> None:
    one = sample.at_dim(parse_settings({}), 1024)
    assert one.entropy.mean[0] == pytest.approx(expected_entropy_nats(256, 1.0), rel=0.01)
    assert one.expected[0] == expected_entropy_nats(256, 1.0)


CHANGED = {
    "d_k": ("100", set(EXPLORER_FIGURES)),
    "keys": ("64", set(EXPLORER_FIGURES)),
    "components": ("signs", set(EXPLORER_FIGURES) - {"range", "step"}),
    "query_variance": ("4", set(EXPLORER_FIGURES)),
    "key_variance": ("0.25", set(EXPLORER_FIGURES)),
    "rule": ("none", set(EXPLORER_FIGURES)),
    "overlay": ("off", set(EXPLORER_FIGURES) - {"range", "step"}),
    "temperature": ("0.5", set(EXPLORER_FIGURES)),
    "softcap": ("5", set(EXPLORER_FIGURES) - {"range", "step"}),
    "dtype": ("bfloat16", set(EXPLORER_FIGURES) - {"range", "step"}),
    "seed": ("1", set(EXPLORER_FIGURES) - {"range", "step"}),
}


@cache
def before() -> dict[str, object]:
    return {figure: make(parse_settings({})) for figure, make in EXPLORER_FIGURES.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHANGED)
def test_a_control_moves_the_figures_that_it_should(name: str) -> None:
    value, moved = CHANGED[name]
    after = parse_settings({name: value})
    assert {figure for figure, make in EXPLORER_FIGURES.items() if before()[figure] != make(after)} == moved


def test_the_page_opens_with_both_scales_and_they_differ() -> None:
    """Where d_k and keys are as they are at first; the ranges have the product before and after the scale anyway."""
    for name in set(EXPLORER_FIGURES) - {"range", "step"}:
        figure = EXPLORER_FIGURES[name](parse_settings({}))
        assert "app.legend.over_none" in [text.id for _, _, text in figure.legend], name
        alone = EXPLORER_FIGURES[name](parse_settings({"overlay": "off"}))
        assert not [text for _, _, text in alone.legend if "over" in text.id]
        assert len(figure.plot.series) > len(alone.plot.series)
        assert {series.y for series in alone.plot.series} < {series.y for series in figure.plot.series}
    scaled, unscaled = (sample.at_dim(side, 64).entropy.mean[0] for side in parse_settings({}).sides())
    assert scaled > 5 * unscaled


@pytest.mark.parametrize("typed", [{"rule": "none"}, {"overlay": "sqrt_dk"}, {"overlay": "off"}])
def test_a_scale_is_not_drawn_over_itself(typed: dict[str, str]) -> None:
    assert len(parse_settings(typed).sides()) == 1


def test_the_parameter_moves_all() -> None:
    before, after = parse_settings({"rule": "fixed"}), parse_settings({"rule": "fixed", "parameter": "0.5"})
    assert all(make(before) != make(after) for make in EXPLORER_FIGURES.values())
