"""The forecast against caches that are really quantised: transformers' own, and casts of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin

from sqrtdk.kv import forecast_calls
from sqrtdk.tracing import CallTensors, Trace
from tests.kv.quantised_caches import CONFIGS, Cast, Grouped, Precise, blocks_of_32, build, fp8, int8, measured, tokens

WITHIN = 0.01
ALL, HEAD, TOKEN, CHANNEL = (0, 1, 2, 3), (0, 2, 3), (3,), (0, 2)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# what is asked for, the newest keys in full precision, and the layer that does it
CACHES: dict[str, tuple[str, str | None, int, Callable[[], CacheLayerMixin] | None]] = {
    "transformers fp8": ("fp8_e4m3", None, 0, getattr(cache_utils, "Fp8QuantizedLayer", None)),
    "transformers groups": ("int4", None, 1, lambda: Grouped(0)),
    "transformers channels": ("int4", "channel", 1, lambda: Grouped(-1)),
    "fp8_e4m3 head": ("fp8_e4m3", "head", 0, lambda: Cast(fp8(E4M3, HEAD))),
    "fp8_e5m2 tensor": ("fp8_e5m2", "tensor", 0, lambda: Cast(fp8(E5M2, ALL))),
    "fp8_e5m2 token": ("fp8_e5m2", "token", 0, lambda: Cast(fp8(E5M2, TOKEN))),
    "int8 tensor": ("int8", None, 0, lambda: Cast(int8(ALL))),
    "int8 head": ("int8", "head", 0, lambda: Cast(int8(HEAD))),
    "int8 token": ("int8", "token", 0, lambda: Cast(int8(TOKEN))),
    "int8 channel": ("int8", "channel", 0, lambda: Cast(int8(CHANNEL))),
    "q8_0": ("q8_0", None, 0, lambda: Cast(blocks_of_32)),
}


@cache
def traced_once(family: str) -> tuple[nn.Module, tuple[CallTensors, ...]]:
    model = build(family)
    # As precise as the run with the cache: otherwise k of the second layer differs by what the float32 softmax of the
    # first one rounds, and a number between two levels is stored as the one here and as the other there.
    with torch.no_grad(), Precise(), Trace(model, stats=False, keep=True) as run:
        model(tokens(), use_cache=False)
    return model, run.tensors


def apart(model: nn.Module, calls: tuple[CallTensors, ...], name: str) -> float:
    """The largest relative difference of a figure, over layers and heads, between forecast and cache."""
    dtype, scale, residual, layer_of = CACHES[name]
    if layer_of is None:
        pytest.skip("the installed transformers has no such layer")
    forecast = forecast_calls(calls, dtype, scale, rows=1, residual=residual)
    assert len(forecast.calls) == 2
    worst = 0.0
    for layer, call in enumerate(forecast.calls):
        for told, (kl, output) in zip(call.stored.heads, measured(model, tokens(), layer, layer_of()), strict=True):
            assert kl > 1e-9
            assert output > 1e-5
            worst = max(worst, abs(told.kl_mean_nats / kl - 1), abs(told.output_error / output - 1))
    return worst


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_forecast_is_what_a_quantised_cache_does(family: str, name: str) -> None:
    assert apart(*traced_once(family), name) < WITHIN


def test_the_newest_keys_are_in_full_precision_as_long_as_the_window_holds_them() -> None:
    model, steps = build("llama"), 7  # of a window of 8
    ids = torch.cat([tokens(1), tokens(2)], 1)[:, : 64 + steps]
    with torch.no_grad(), Precise(), Trace(model, stats=False, keep=True) as run:
        model(ids, use_cache=False)
    for layer in range(2):
        came = [kl for kl, _ in measured(model, ids, layer, Grouped(0), steps)]
        heads = {
            residual: forecast_calls(run.tensors, "int4", rows=1, residual=residual).calls[layer].stored.heads
            for residual in (steps, 0)
        }
        assert [head.kl_mean_nats for head in heads[steps]] == pytest.approx(came, rel=1e-4)
        assert [head.kl_mean_nats for head in heads[0]] != pytest.approx(came, rel=WITHIN)
