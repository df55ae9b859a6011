"""The forecast against transformers' `QuantizedCache` with optimum-quanto, where that is installed."""

from __future__ import annotations

import pytest
import torch
from transformers import QuantizedCache

from sqrtdk.kv import forecast_calls
from tests.hf.families import CACHE
from tests.kv.quantised_caches import CONFIGS, build, measured, tokens
from tests.kv.test_kv_caches import WITHIN, traced_once

pytest.importorskip("optimum.quanto", reason="pip install --no-deps optimum-quanto optimum")
pytestmark = [
    pytest.mark.slow,  # its first use compiles an extension, minutes
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(("axis", "scale"), [(0, None), (-1, "channel")])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_forecast_is_what_quanto_does(family: str, axis: int, scale: str | None) -> None:
    _, calls = traced_once(family)
    forecast = forecast_calls(calls, "int4", scale, rows=1, residual=1)
    model = build(family)
    full = build("llama").config  # layers of sliding windows are refused, and one layer at a time is taken anyway
    for layer, call in enumerate(forecast.calls):
        cache = QuantizedCache("quanto", full, nbits=4, axis_key=axis, axis_value=axis, q_group_size=64)
        came = measured(model, tokens(), layer, cache.layers[layer])
        for told, (kl, output) in zip(call.stored.heads, came, strict=True):
            assert told.kl_mean_nats == pytest.approx(kl, rel=WITHIN)
            assert told.output_error == pytest.approx(output, rel=WITHIN)


def test_it_is_really_quantised() -> None:
    model = build("llama")
    cache = QuantizedCache("quanto", model.config, nbits=4)
    with torch.no_grad():
        model(tokens()[:, :-1], **{CACHE: cache})
    assert type(cache.layers[0]._quantized_keys).__name__.endswith("QBitsTensor")
