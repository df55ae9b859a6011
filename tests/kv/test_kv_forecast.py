"""Laws of the forecast: formats by hand, masks, sinks, samples of rows, memory, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sqrtdk.audit.cache import CacheForecast
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.kv import FORMATS, forecast_calls, kv_forecast
from sqrtdk.kv import call as calls_of
from sqrtdk.kv.call import stored_and_read
from sqrtdk.kv.findings import KL_BARS, OUTPUT_BARS
from sqrtdk.kv.forecast import checked_scale
from sqrtdk.kv.formats import bounds, limit_of
from sqrtdk.kv.rows import Weighed, changed_peaks
from sqrtdk.tracing import Trace
from tests.hf.families import ATTENTION_CALLS, FAMILIES
from tests.hf.families import build as build_family
from tests.kv.quantised_caches import SMALL, blocks_of_32, build, tokens

ENCODERS = ("bert", "roberta", "deberta_v2", "xlnet", "vit", "swinv2")


class Plain(nn.Module):
    """One attention of its q, k, v, with whatever SDPA takes."""

    def __init__(self, heads: int = 2, width: int = 32, **options: object) -> None:
        super().__init__()
        self.heads, self.width, self.options = heads, width, options
        self.q, self.k, self.v = (nn.Linear(64, heads * width, bias=False) for _ in range(3))
        for layer in (self.q, self.k):
            nn.init.normal_(layer.weight, std=0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def by_hand(model: Plain, x: Tensor, visible: Tensor, dtype: str, scale: str) -> tuple[Tensor, Tensor]:
    """KL of every row, (B, H, L), and relative error of each head's output, with loops over nothing but tensors."""
    q, k, v = (
        layer(x).detach().unflatten(-1, (model.heads, model.width)).transpose(1, 2).double()
        for layer in (model.q, model.k, model.v)
    )
    form = FORMATS[dtype]
    k2, v2 = (form.store(part.float(), *bounds(part.float(), form.grains[scale])) for part in (k, v))
    p, p2 = (
        ((q @ key.mT) / math.sqrt(model.width)).masked_fill(~visible, -math.inf).softmax(-1).nan_to_num()
        for key in (k, k2)
    )
    kl = torch.where(p > 0, p * (p.log() - p2.log()), 0.0).sum(-1)
    out, out2 = p @ v, p2 @ v2
    return kl, ((out2 - out).square().sum((0, 2, 3)) / out.square().sum((0, 2, 3))).sqrt()


@pytest.mark.parametrize(("dtype", "scale"), [(d, s) for d, form in FORMATS.items() for s in form.grains])
def test_every_grain_is_its_definition(dtype: str, scale: str) -> None:
    model, x = Plain(), torch.randn(2, 48, 64)
    forecast = kv_forecast(model, (x,), kv_dtype=dtype, kv_scale=None if dtype == "q8_0" else scale)
    assert not forecast.calls  # every row sees every key
    assert forecast.without_cache
    model.options = {"is_causal": True}
    (call,) = kv_forecast(model, (x,), kv_dtype=dtype, kv_scale=None if dtype == "q8_0" else scale).calls
    kl, output = by_hand(model, x, torch.ones(48, 48, dtype=torch.bool).tril(), dtype, scale)
    assert call.rows == call.rows_of == 96
    for head, told in enumerate(call.stored.heads):
        rows = kl[:, head].flatten()
        assert told.kl_mean_nats == pytest.approx(float(rows.mean()), rel=1e-6)
        assert told.kl_max_nats == pytest.approx(float(rows.max()), rel=1e-6)
        assert told.kl_median_nats == pytest.approx(float(rows.quantile(0.5)), rel=1e-6)
        assert told.output_error == pytest.approx(float(output[head]), rel=1e-6)


FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize(
    ("dtype", "scale"), [("fp8_e4m3", 1), ("fp8_e4m3", 0.001), ("fp8_e5m2", 0.00001), ("int8", 0.02)]
)
def test_a_fixed_scale_is_that_of_every_number(dtype: str, scale: float) -> None:
    """What is read back is rounded in units of the scale, and cut off at the largest number of the format."""
    model, x = Plain(is_causal=True), torch.randn(2, 24, 64)
    (call,) = kv_forecast(model, (x,), kv_dtype=dtype, kv_scale=scale).calls
    q, k = (layer(x).detach().unflatten(-1, (model.heads, -1)).transpose(1, 2) for layer in (model.q, model.k))
    most = torch.finfo(FLOAT8[dtype]).max if dtype in FLOAT8 else 127.0
    units = (k / scale).clamp(-most, most)
    read_back = (units.to(FLOAT8[dtype]) if dtype in FLOAT8 else units.round()).double() * scale
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    p, p2 = (
        (q.double() @ key.mT / math.sqrt(model.width)).masked_fill(~causal, -math.inf).softmax(-1)
        for key in (k.double(), read_back)
    )
    kl = torch.where(causal, p * (p.log() - p2.log()), 0.0).sum(-1)
    for head, told in enumerate(call.stored.heads):
        assert told.kl_mean_nats == pytest.approx(float(kl[:, head].mean()), rel=1e-5)
        assert call.keys[head].cut_off == pytest.approx(float((k[:, head].abs() > most * scale).double().mean()))
    assert call.stored.name == f"{scale:g}"
    assert [way.name for way in call.others][:2] == ["tensor", "head"]
    assert (call.keys[0].cut_off > 0) is (scale != 1)


def test_a_fixed_scale_has_all_of_its_digits() -> None:
    assert checked_scale("int8", 0.0123456789) == "0.0123456789"
    assert limit_of("int8", checked_scale("int8", 0.0123456789)) == 127 * 0.0123456789


def test_a_fixed_scale_may_reach_beyond_float16() -> None:
    model, x = Plain(is_causal=True).half(), torch.randn(1, 8, 64).half()
    (call,) = kv_forecast(model, (x,), kv_dtype="fp8_e5m2", kv_scale=2.0).calls  # up to 114688
    assert all(math.isfinite(head.kl_mean_nats) for head in call.stored.heads)


def test_hidden_keys_and_blind_rows_do_not_count() -> None:
    model, x = Plain(), torch.randn(1, 24, 64)
    visible = torch.ones(24, 24, dtype=torch.bool).tril()
    visible[:, :5] = False  # padding on the left: rows 0 to 4 see nothing
    (call,) = kv_forecast(model, (x, visible), kv_dtype="int8").calls
    kl, _ = by_hand(model, x, visible, "int8", "tensor")
    assert call.seeing_rows == (19, 19)
    for head, told in enumerate(call.stored.heads):
        assert told.kl_mean_nats == pytest.approx(float(kl[0, head, 5:].mean()), rel=1e-6)


def test_sinks_take_part_in_the_weights() -> None:
    config = hf.GptOssConfig(
        **{k: v for k, v in SMALL.items() if k != "max_position_embeddings"},
        num_local_experts=2, num_experts_per_tok=1, sliding_window=16,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(9.0)
            layer.self_attn.q_proj.weight.mul_(8.0)
            layer.self_attn.k_proj.weight.mul_(8.0)
        with Trace(model, stats=False, keep=True) as run:
            model(tokens(), use_cache=False)
    assert any(term.name == "sinks" for term in run.tensors[0].terms or ())
    told = forecast_calls(run.tensors, "int4").calls[0]
    call = run.tensors[0]
    form, k = FORMATS["int4"], call.key.values
    k2 = form.store(k, *bounds(k, "group"))
    logs = []
    for key in (k, k2):
        z = call.query.values.double() @ key.double().mT
        for term in call.terms or ():
            if term.name == "scale":
                z = z * term.value
            elif term.name == "mask":
                z = z.masked_fill(~term.value, -math.inf)
            else:
                sinks = term.value.double()[:, None, None].expand(*z.shape[:-1], 1)
        logs.append(torch.cat([z, sinks], -1).log_softmax(-1))
    kl = torch.where(logs[0].isfinite(), logs[0].exp() * (logs[0] - logs[1]), 0.0).sum(-1)[0]
    for head, error in enumerate(told.stored.heads):
        assert error.kl_mean_nats == pytest.approx(float(kl[head].mean()), rel=1e-6)
        assert error.kl_mean_nats > 1e-4


def test_changed_rows_count_rows_and_not_ties() -> None:
    model, x = Plain(is_causal=True), torch.randn(1, 64, 64)
    (call,) = kv_forecast(model, (x,), kv_dtype="int4", kv_scale="tensor").calls
    assert 0 < call.stored.heads[0].changed_rows < 64
    (same,) = kv_forecast(model, (x[:, :1].expand(1, 64, 64),), kv_dtype="int4", kv_scale="tensor").calls
    assert same.stored.heads[0].changed_rows == 0
    assert same.stored.heads[0].kl_max_nats < 1e-9


def test_equal_keys_are_tied_whatever_the_last_digit_of_their_logits() -> None:
    logits = torch.tensor([[[3.0, 1.0, 3.0]], [[3.0, 3.0 - 1e-3, 1.0]]], dtype=torch.float64)
    digit = torch.tensor([0.0, 0.0, 1e-15], dtype=torch.float64)
    stored = logits + torch.tensor([[[0.0, 0.0, 0.0]], [[0.0, 2e-3, 0.0]]])
    every = [Weighed(z, z.softmax(-1), z.logsumexp(-1), (z > 0).any(-1)) for z in (logits + digit, stored - digit)]
    assert changed_peaks(*every).tolist() == [[False], [True]]


def test_rows_are_sampled_and_told_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Plain(is_causal=True), torch.randn(2, 64, 64)
    (every,) = kv_forecast(model, (x,), kv_dtype="int8").calls
    (some,) = kv_forecast(model, (x,), kv_dtype="int8", rows=32).calls
    assert (some.rows, some.rows_of, every.rows) == (32, 128, 128)
    monkeypatch.setattr(calls_of, "BLOCK_LOGITS", 200)
    (blocks,) = kv_forecast(model, (x,), kv_dtype="int8").calls
    for told, other in zip(every.stored.heads, blocks.stored.heads, strict=True):
        assert told.kl_mean_nats == pytest.approx(other.kl_mean_nats, rel=1e-9)
        assert told.output_error == pytest.approx(other.output_error, rel=1e-9)


def test_many_heads_and_keys_leave_fewer_rows() -> None:
    request = calls_of.ForecastRequest("int8", "tensor", None, 0)
    assert [request.rows_of(heads * keys) for heads, keys in ((12, 128), (32, 8192), (64, 2**20))] == [256, 64, 16]
    assert calls_of.ForecastRequest("int8", "tensor", 7, 0).rows_of(2**30) == 7


def test_blocks_of_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = calls_of.weigh_rows

    def seen(query: Tensor, key: Tensor, *others: object) -> object:
        sizes.append(query.shape[0] * query.shape[1] * key.shape[0])
        return real(query, key, *others)

    monkeypatch.setattr(calls_of, "weigh_rows", seen)
    monkeypatch.setattr(calls_of, "BLOCK_LOGITS", 1000)
    kv_forecast(Plain(is_causal=True), (torch.randn(1, 96, 64),), kv_dtype="int8")
    assert 96 <= max(sizes) <= 1000


def test_the_newest_keys_stay_as_they_are() -> None:
    model, x = Plain(is_causal=True), torch.randn(1, 40, 64)
    (whole,) = kv_forecast(model, (x,), kv_dtype="int8", rows=1).calls
    (most,) = kv_forecast(model, (x,), kv_dtype="int8", rows=1, residual=39).calls
    assert (whole.stored_keys, most.stored_keys) == (40, 1)
    assert most.stored.heads[0].kl_mean_nats < whole.stored.heads[0].kl_mean_nats
    none = kv_forecast(model, (x,), kv_dtype="int8", residual=40)
    assert not none.calls
    assert "all of its 40 keys" in none.not_measured[0].reason


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e30]), st.sampled_from(sorted(FORMATS)))
def test_what_is_read_back_is_within_a_step(seed: int, size: float, dtype: str) -> None:
    x = torch.randn(1, 2, 70, 32, generator=torch.Generator().manual_seed(seed)) * size
    form = FORMATS[dtype]
    for scale, grain in form.grains.items():
        low, high = bounds(x, grain)
        back = torch.stack([stored_and_read(x, dtype, scale, 70)(0, head) for head in range(2)])[None]
        assert back.isfinite().all() or (dtype == "q8_0" and size == 1e30)  # its scale is a float16
        largest = torch.maximum(low.abs(), high.abs()).double()
        step = {"int8": largest / 127, "q8_0": largest / 127, "int4": (high.double() - low) / 15}.get(dtype)
        if step is None:
            mantissa, least = (3, 2.0**-9 / 448) if dtype == "fp8_e4m3" else (2, 2.0**-16 / 57344)
            step = torch.maximum(x.double().abs() * 2.0**-mantissa, largest * least)
        slack = 1e-6 * largest + (largest * 2.0**-11 + 127 * 2.0**-25 if dtype == "q8_0" else 0.0) + 1e-36
        if not (dtype == "q8_0" and size == 1e30):
            assert bool(((back - x).abs() <= step / 2 + slack).all())


def test_q8_0_is_ggml_s() -> None:
    x = torch.randn(1, 1, 3, 64, dtype=torch.float64)
    assert torch.equal(stored_and_read(x, "q8_0", "block", 3)(0, 0), blocks_of_32(x)[0, 0])


def test_heads_that_q8_0_does_not_take_are_told() -> None:
    forecast = kv_forecast(Plain(width=16, is_causal=True), (torch.randn(1, 8, 64),), kv_dtype="q8_0")
    assert not forecast.calls
    assert "16" in forecast.not_measured[0].reason


def test_broken_numbers_are_told() -> None:
    x = torch.randn(1, 8, 64)
    x[0, 3] = math.inf
    forecast = kv_forecast(Plain(is_causal=True), (x,), kv_dtype="int8")
    assert not forecast.calls
    assert "NaN" in forecast.not_measured[0].reason


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_attention_of_every_family_is_forecast_or_keeps_no_cache(family: str) -> None:
    torch.manual_seed(0)
    model = build_family(FAMILIES[family](), "eager").eval()
    forecast = kv_forecast(model, kv_dtype="int8", seq_len=24)
    assert forecast.not_measured == ()
    assert len(forecast.calls) + len(forecast.without_cache) == ATTENTION_CALLS[family]
    assert bool(forecast.calls) is (family not in ENCODERS)
    assert all(0 <= head.kl_mean_nats < 1e-3 for call in forecast.calls for head in call.stored.heads)


@pytest.mark.parametrize(
    ("options", "rule", "fix"),
    [
        ({"kv_dtype": "int3"}, "no cache format 'int3'", "fp8_e4m3"),
        ({"kv_dtype": "int8", "kv_scale": "row"}, "kv_scale is 'row'", "tensor"),
        ({"kv_dtype": "q8_0", "kv_scale": "head"}, "scales of its own", "out"),
        ({"kv_dtype": "q8_0", "kv_scale": 1}, "scales of its own", "out"),
        ({"kv_dtype": "int4", "kv_scale": "1"}, "none can be fixed", "group"),
        ({"kv_dtype": "int8", "kv_scale": 0}, "kv_scale is 0", "above 0"),
        ({"kv_dtype": "int8", "kv_scale": "nan"}, "kv_scale is nan", "finite"),
        ({"kv_dtype": "fp8_e4m3", "kv_scale": "-1"}, "kv_scale is -1", "above 0"),
        ({"kv_dtype": "int8", "rows": 0}, "rows is 0", "from 1"),
        ({"kv_dtype": "int8", "residual": -1}, "residual -1", "from 0"),
    ],
)
def test_bad_requests_get_one_error(options: dict[str, object], rule: str, fix: str) -> None:
    with pytest.raises(InvalidValueError, match=rule) as caught:
        kv_forecast("demo", **{"seq_len": 8, **options})
    assert fix in caught.value.hint


def test_models_that_can_not_run_are_refused() -> None:
    with pytest.raises(InvalidTypeError):
        kv_forecast(3, kv_dtype="int8")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Plain(is_causal=True)
    with pytest.raises(ModelError, match="meta"):
        kv_forecast(model, (torch.randn(1, 8, 64),), kv_dtype="int8")
    with pytest.raises(ModelError, match="no attention"):
        kv_forecast(nn.Linear(4, 4), (torch.randn(2, 4),), kv_dtype="int8")


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = torch.random.get_rng_state()
    forecast = kv_forecast(model, {"input_ids": tokens()}, kv_dtype="int8")
    assert isinstance(forecast, CacheForecast)
    assert model.training
    assert torch.equal(first, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_bars_go_down_from_the_worst() -> None:
    for bars in (KL_BARS, OUTPUT_BARS):
        assert [name for name, _ in bars] == ["fail", "warn", "note"]
        assert [bar for _, bar in bars] == sorted((bar for _, bar in bars), reverse=True)


def test_weights_that_all_became_the_same_are_changed() -> None:
    model, x = Plain(is_causal=True), torch.randn(1, 16, 64)
    with torch.no_grad(), Trace(model, stats=False, keep=True) as run:
        model(x)
    k = run.tensors[0].key.values.clone()
    k[:, 1] *= 1e6  # the other head's keys are read back as 0
    broken = replace(run.tensors[0], key=replace(run.tensors[0].key, values=k))
    assert forecast_calls([broken], "int8").calls[0].stored.heads[0].changed_rows == 15  # row 0 has one key
