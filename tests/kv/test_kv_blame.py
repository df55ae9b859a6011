"""Which key head is named, and whether the remedies that are named help when they are applied for good."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.cache import COARSE, CUT_OFF, OTHER_HEAD, OUTLIERS, PRECISION, ROWS, VALUES, CacheCall
from sqrtdk.kv import forecast_calls, kv_forecast
from sqrtdk.kv.findings import KL_BARS, with_forecast
from sqrtdk.messages import said
from sqrtdk.tracing import CallTensors, Trace
from tests.kv.quantised_caches import CONFIGS, SMALL, Cast, build, fp8, int8, measured, scale_channels, tokens

PAIR = [7, 23]  # channels that a rotation of 32 turns together
NOTE = KL_BARS[-1][1]
PLAIN = [name for name in CONFIGS if name != "qwen3"]  # behind a norm of k no head is 40 times as large as the others


def traced(model: nn.Module) -> tuple[CallTensors, ...]:
    with torch.no_grad(), Trace(model, stats=False, keep=True) as run:
        model(tokens(), use_cache=False)
    return run.tensors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", PLAIN)
def test_the_head_with_outliers_is_named(family: str) -> None:
    model = build(family)
    assert not [blame for call in forecast_calls(traced(model), "int8").calls for blame in call.blame]
    scale_channels(model, 1, 1, PAIR, 40.0)
    sound, planted = forecast_calls(traced(model), "int8").calls
    assert sound.blame == ()
    assert {blame.key_head for blame in planted.blame} == {1}
    assert {blame.cause for blame in planted.blame} == {OTHER_HEAD, OUTLIERS}
    own = next(blame for blame in planted.blame if blame.cause == OUTLIERS)
    others = next(blame for blame in planted.blame if blame.cause == OTHER_HEAD)
    heads = len(planted.stored.heads)
    group = heads // planted.kv_heads
    assert own.heads == tuple(range(group, 2 * group))
    assert set(own.heads) | set(others.heads) == set(range(heads))
    assert planted.keys[1].outliers == tuple(PAIR)
    assert "head" in others.mended_by
    assert {"channel", "fold"} <= set(own.mended_by)
    assert "head" not in own.mended_by


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", PLAIN)
def test_a_folded_channel_scale_is_what_it_was_forecast_to_be(family: str) -> None:
    """Into the weights: the model stays the same function, and the cache that was bad is good."""
    model = build(family)
    scale_channels(model, 1, 1, PAIR, 40.0)
    before = forecast_calls(traced(model), "int8", rows=1).calls[1]
    size = traced(model)[1].key.values.abs().amax((0, 2)).double()
    times = size.shape[0] // before.kv_heads
    for head in range(before.kv_heads):
        scale = size[head * times]
        if before.folded == "pairs":
            scale = torch.maximum(scale, scale.roll(SMALL["head_dim"] // 2))
        scale_channels(model, 1, head, list(range(SMALL["head_dim"])), 1.0 / scale)
    came = measured(model, tokens(), 1, Cast(int8((0, 1, 2, 3))))
    folded = before.way("fold")
    assert folded is not None
    for head, (kl, output) in enumerate(came):
        assert kl < min(NOTE, before.stored.heads[head].kl_mean_nats / 10)
        assert kl == pytest.approx(folded.heads[head].kl_mean_nats, rel=0.01)
        assert output == pytest.approx(folded.heads[head].output_error, rel=0.01)


def with_norms(model: nn.Module) -> nn.Module:
    """The same weights in Qwen3: Llama with a norm of q and k, whose gains are 1."""
    config = hf.Qwen3Config(**SMALL)
    config._attn_implementation = "eager"
    other = hf.AutoModelForCausalLM.from_config(config).double().eval()
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert all("_norm" in name for name in missing)
    return other


def test_a_norm_of_q_and_k_is_what_it_was_forecast_to_be() -> None:
    model = build("llama", gain=24.0)
    before = forecast_calls(traced(model), "fp8_e4m3", rows=1).calls[0]
    every = forecast_calls(traced(model), "fp8_e4m3").calls[0]
    assert every.blame
    assert all(blame.cause == PRECISION and "qk_norm" in blame.mended_by for blame in every.blame)
    normed = before.way("qk_norm")
    assert normed is not None
    for told, (kl, output) in zip(
        normed.heads,
        measured(with_norms(model), tokens(), 0, Cast(fp8(torch.float8_e4m3fn, (0, 1, 2, 3)))),
        strict=True,
    ):
        assert kl == pytest.approx(told.kl_mean_nats, rel=0.01)
        assert output == pytest.approx(told.output_error, rel=0.01)
    after = forecast_calls(traced(with_norms(model)), "fp8_e4m3").calls[0]
    assert after.blame == ()
    assert after.way("qk_norm") is None  # it has one already


def with_keys(call: CallTensors, by: float, rows: slice, heads: slice) -> CallTensors:
    """A call with some keys multiplied."""
    k = call.key.values.clone()
    k[:, heads, rows] *= by
    return replace(call, key=replace(call.key, values=k))


def causes(call: CacheCall) -> set[tuple[int, str]]:
    return {(blame.key_head, blame.cause) for blame in call.blame}


def test_each_cause_has_its_name() -> None:
    call = traced(build("llama"))[0]
    large_row = with_keys(call, 400.0, slice(40, 41), slice(2, 4))
    assert (1, ROWS) in causes(forecast_calls([large_row], "int8", "head").calls[0])
    v = call.value.values.clone()
    v[:, 2:] *= 60.0
    assert causes(forecast_calls([replace(call, value=replace(call.value, values=v))], "int8").calls[0]) == {
        (0, VALUES)
    }
    (alone,) = [blame for blame in forecast_calls([large_row], "int8", "head").calls[0].blame if blame.cause == ROWS]
    assert "token" in (*alone.mended_by, *alone.helped_by)
    assert "40" in alone.text


def test_a_fixed_scale_is_to_blame_for_what_it_cuts_off_and_for_what_it_leaves_no_digits_for() -> None:
    call = traced(build("llama"))[0]
    large = with_keys(call, 1000.0, slice(2, 4), slice(None))  # both copies of key head 1
    share = float((large.key.values[:, 2].abs() > 448).double().mean())
    found = forecast_calls([large], "fp8_e4m3", 1).calls[0]
    assert found.keys[1].cut_off == pytest.approx(share)
    assert share > 0.01
    blame = next(blame for blame in found.blame if blame.key_head == 1)
    assert blame.cause == CUT_OFF
    assert blame.text == f"in key head 1, {100 * share:.2g}% of k beyond 448 were cut off"
    assert said(blame.text, "zh") == f"键头 1 的 k 有 {100 * share:.2g}% 超出 448，被截断"
    assert "tensor" in (*blame.mended_by, *blame.helped_by)
    assert not forecast_calls([large], "fp8_e4m3").calls[0].keys[1].cut_off
    coarse = forecast_calls([call], "int8", 10.0).calls[0]
    assert {blame.cause for blame in coarse.blame} == {COARSE}
    assert "made for numbers up to 1270" in coarse.blame[0].text
    values = replace(call, key=replace(call.key, values=call.key.values * 0), value=call.value)
    lost = forecast_calls([values], "int8", 10.0).calls[0]  # all weights are even: v alone is lost
    assert {blame.cause for blame in lost.blame} == {VALUES}


def test_findings_name_the_head_and_the_remedy_and_set_the_exit_code() -> None:
    model = build("llama").float()
    scale_channels(model, 1, 1, PAIR, 400.0)
    inputs = {"input_ids": tokens()}
    report = check(model, inputs, fail_on="fail")
    assert report.exit_code == 0
    told = with_forecast(report, kv_forecast(model, inputs, kv_dtype="int8"))
    assert told.exit_code == 1
    found = [finding for finding in told.findings if finding.rule == "kv_cache"]
    assert {finding.site for finding in found} == {"model.layers.1.self_attn"}
    assert all("key head 1" in finding.message for finding in found)
    assert any("--cache-scale channel" in finding.fix and "folding" in finding.fix for finding in found)
    assert [judged.health for judged in told.calls] == [judged.health for judged in report.calls]
