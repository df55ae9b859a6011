"""`kv_forecast`: run a model once, and compute every attention in it again with its cache stored in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sqrtdk._progress import progress_shown, report_progress
from sqrtdk._wrappers import hint_for
from sqrtdk.audit.cache import CacheForecast
from sqrtdk.audit.context import tokens_of
from sqrtdk.audit.guard import eval_mode, implementation, offers_choice, random_state
from sqrtdk.audit.own_module import as_inputs, from_module, refuse_empty
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.kv.call import ForecastRequest, forecast_of, unfit
from sqrtdk.kv.formats import FORMATS, SCALE_BITS, fixed_scale
from sqrtdk.messages import Message
from sqrtdk.models.inputs import without_numbers
from sqrtdk.models.limits import check_seed, check_sizes
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import ATTN, LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.models.run import by_default_of
from sqrtdk.models.run import call as forward
from sqrtdk.models.unchanged import unchanged
from sqrtdk.tracing import CallTensors, NotMeasured, Trace
from sqrtdk.tracing.tape.stance import fast_path_off


def kv_forecast(
    model: nn.Module | str,
    inputs: Any = None,
    *,
    kv_dtype: str,
    kv_scale: str | float | None = None,
    rows: int | None = None,
    residual: int = 0,
    attn: str | None = None,
    text: str | Path | None = None,
    input_file: str | Path | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    offload_folder: str | Path | None = None,
    base: str | Path | None = None,
) -> CacheForecast:
    """Predict what storing k and v in fewer bits would do to every attention of a model, before it is served so.

    The model runs once, in evaluation mode. Then each attention is computed again in float64, with the q, k, v, mask,
    scale, softcap, bias and sinks that occurred: p = softmax(z), and p' = softmax(z') with k as it is read back from
    the cache. The forecast has KL(p || p') = sum p (log p - log p'), whether the largest key changes, and |p'v' - p v|
    / |p v|. It leaves out how errors of one layer affect the next. docs/en/kv-cache.md has the formats, and
    measurements on quantised caches.

    Args:
        model: A module, or a name as in `check`.
        inputs: A dict or tuple for forward, or one tensor; None makes suitable inputs.
        kv_dtype: "fp8_e4m3", "fp8_e5m2", "int8", "q8_0" or "int4".
        kv_scale: The numbers that share a scale: "tensor", "head", "token" or "channel". None is "tensor" for fp8 and
            int8, and groups of 64 for int4; q8_0 always has blocks of 32, and takes no scale. A number is the one scale
            of all k and v, such as 1 in an engine without calibrated scales: fp8 and int8 then cut off larger numbers.
        rows: Most rows (batch times positions) of a call that are computed, evenly spread, including the last; 1 is the
            next step of decoding. None: 256, or fewer but at least 16 if there are many heads and keys. All keys are
            used.
        residual: The newest keys of each call that stay in full precision (`residual_length` of transformers'
            `QuantizedCache`).
        attn: "eager" or "sdpa" for a model that offers the choice.
        text: UTF-8 file for the tokenizer, for a model given by name.
        input_file: safetensors with the inputs, for a model given by name.
        batch: Rows of made-up inputs, default 1.
        seq_len: Tokens per row of made-up inputs.
        device: For a model given by name; a module runs where it is.
        dtype: For a model given by name; a module keeps its own.
        seed: For weights, inputs and the run.
        revision: Of a hub id.
        trust_remote_code: Let the model's own Python files run.
        device_map: "auto" spreads a checkpoint through accelerate.
        offload_folder: Directory for weights that fit nowhere else.
        base: Base model of an adapter's directory; None takes the directory that the adapter names, or its neighbour.

    Returns:
        The forecast, one entry per call; calls that could not be judged are listed with their reasons.

    Raises:
        InvalidValueError: The format or the scale is unknown, or they do not fit together; or there are no rows.
        InvalidTypeError: `model` or `inputs` has another type.
        ModelError: The model can't be built or has no values, its forward raises, or no attention runs in it.

    Example:
        >>> forecast = kv_forecast("demo", kv_dtype="int8", seq_len=32)
        >>> worst = forecast.calls[0].stored.heads[forecast.calls[0].stored.worst]
        >>> len(forecast.calls), forecast.scale, worst.kl_mean_nats < 0.02
        (3, 'tensor', True)
    """
    request = ForecastRequest(kv_dtype, checked_scale(kv_dtype, kv_scale), rows, residual)
    options = LoadOptions(
        attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device, dtype=dtype,
        seed=seed, revision=revision, trust_remote_code=trust_remote_code, device_map=device_map,
        offload_folder=offload_folder, base=base,
    )  # fmt: skip
    check_seed(options.seed)
    check_sizes(options.rows, options.seq_len)
    with progress_shown("forecast of the cache"), unchanged(model, inputs) as before:
        loaded = _loaded(model, None if inputs is None else as_inputs(inputs), options)
        (forecast,) = forecasts_of_model(loaded, options, (request,))
    return replace(forecast, notes=before.stayed)


def checked_scale(kv_dtype: str, kv_scale: str | float | None) -> str:
    """Return what shares a scale, or the fixed scale, after checking that it fits the format.

    Args:
        kv_dtype: Name of the format.
        kv_scale: "tensor", "token", ... or a number; None: the usual one of the format.

    Raises:
        InvalidValueError: The format does not exist, or has no such scale.

    Example:
        >>> checked_scale("int8", None), checked_scale("int4", "token"), checked_scale("fp8_e4m3", 1.0)
        ('tensor', 'token', '1')
    """
    form = FORMATS.get(kv_dtype)
    if form is None:
        raise InvalidValueError(f"no cache format {kv_dtype!r}", hint=f"Use one of: {', '.join(FORMATS)}.")
    if kv_scale is None:
        return form.scale
    number = fixed_scale(kv_scale)
    if number is not None and form.most is not None:
        if not 0 < number < math.inf:
            raise InvalidValueError(f"kv_scale is {kv_scale}", hint="A fixed scale is above 0, and finite.")
        return str(number).removesuffix(".0")  # all digits, as the store reads the number from this text
    if kv_scale in form.grains and len(form.grains) > 1:
        return str(kv_scale)
    if len(form.grains) == 1:
        raise InvalidValueError(
            f"kv_scale is {kv_scale!r}, and {kv_dtype} has scales of its own, one for each 32 channels of a key",
            hint="Leave the scale out, or take int8.",
        )
    if number is not None:
        raise InvalidValueError(
            f"kv_scale is {kv_scale}, and {kv_dtype} stores a least number beside each scale: none can be fixed",
            hint=f"Use one of: {', '.join(form.grains)}.",
        )
    or_number = "" if form.most is None else ", or a number"
    raise InvalidValueError(f"kv_scale is {kv_scale!r}", hint=f"Use one of: {', '.join(form.grains)}{or_number}.")


def forecasts_of_model(
    loaded: LoadedModel, options: LoadOptions, requests: Sequence[ForecastRequest]
) -> tuple[CacheForecast, ...]:
    """Return a forecast for each request, from one run of a model that is built already."""
    with by_default_of(loaded.module):
        run = _traced(loaded, options)
        every = [_forecast(run.tensors, request) for request in requests]
    return tuple(replace(one, not_measured=(*one.not_measured, *run.not_measured)) for one in every)


def forecast_calls(
    calls: Sequence[CallTensors],
    kv_dtype: str,
    kv_scale: str | float | None = None,
    *,
    rows: int | None = None,
    residual: int = 0,
) -> CacheForecast:
    """Return the forecast for kept calls, from `Trace(model, keep=True)` or a trace file.

    Args:
        calls: their tensors.
        kv_dtype: as in `kv_forecast`.
        kv_scale: as in `kv_forecast`.
        rows: as in `kv_forecast`.
        residual: as in `kv_forecast`.

    Raises:
        InvalidValueError: The format or the scale is unknown, or they do not fit together.
    """
    return _forecast(calls, ForecastRequest(kv_dtype, checked_scale(kv_dtype, kv_scale), rows, residual))


def _forecast(calls: Sequence[CallTensors], request: ForecastRequest) -> CacheForecast:
    """Return the forecast of the calls of one run.

    Raises:
        InvalidValueError: `rows` is below 1, or `residual` is below 0.
    """
    if (request.rows is not None and request.rows < 1) or request.residual < 0:
        raise InvalidValueError(
            f"rows is {request.rows}, residual {request.residual}", hint="Take rows from 1, and residual from 0."
        )
    forecasts, missed, without = [], [], []
    with torch.no_grad():
        for done, call in enumerate(calls):
            report_progress(Message("progress.cache"), done, len(calls))
            reason = unfit(call, request)
            if reason is not None:
                missed.append(NotMeasured(call.site, reason))
            elif _sees_all(call):
                without.append(NotMeasured(call.site, Message("cache.reason.sees_all")))
            else:
                forecasts.append(forecast_of(call, request))
    form = FORMATS[request.dtype]
    bits = form.bits + SCALE_BITS.get(form.grains.get(request.scale, ""), 0.0)
    found = (tuple(forecasts), tuple(missed), tuple(without))
    return CacheForecast(request.dtype, request.scale, bits, Message(form.source), *found)


def _sees_all(call: CallTensors) -> bool:
    """Return whether it is a self-attention whose first row sees the last key, as in an encoder."""
    record = call.call
    if record is None or record.self_attention is not True or not record.query_len == record.key_len > 1:
        return False
    mask = record.mask
    # An encoder's rows see all keys, and nothing is appended later: there is no cache to forecast.
    return mask is None or mask.kind == "padding" or (mask.least is not None and mask.least <= 1 - record.key_len)


def _loaded(model: nn.Module | str, inputs: Inputs | None, options: LoadOptions) -> LoadedModel:
    if isinstance(model, nn.Module):
        return from_module(model, inputs, options)
    if isinstance(model, str):
        return resolve_model(model, options, inputs)
    raise InvalidTypeError(
        f"model is a {type(model).__name__}", hint=hint_for(model, "Give a torch.nn.Module or a name.")
    )


def _traced(loaded: LoadedModel, options: LoadOptions) -> Trace:
    """Run the model once, keeping q, k, v and the terms of the weights."""
    if without_numbers(loaded.module, loaded.inputs):
        raise ModelError(
            f"{loaded.id} is on the meta device, where tensors have no values: there is no cache to forecast",
            hint="Build it with its weights, or with random ones.",
        )
    with ExitStack() as stack:
        stack.enter_context(random_state(loaded.module))
        stack.enter_context(eval_mode(loaded.module))
        if options.attn in ATTN and offers_choice(loaded.module):
            stack.enter_context(implementation(loaded.module, options.attn))
        stack.enter_context(fast_path_off())
        # Models that sample, as some routers do, run as in the audit.
        torch.manual_seed(options.seed)
        tokens = tokens_of(loaded.module, loaded.inputs)
        with Trace(loaded.module, stats=False, tokens=tokens.of, values=loaded.masks, keep=True) as run:
            try:
                forward(loaded.module, loaded.inputs)
            except ModelError:
                refuse_empty(loaded.inputs)
                raise
    if not run.tensors:
        reasons = [entry.reason for entry in run.not_measured] + [entry.reason for entry in run.not_attention]
        raise ModelError(
            f"no attention could be read in {loaded.id}" + (f": {reasons[0]}" if reasons else ""),
            hint="Give a model with softmax(q . k) v in its forward, run without torch.compile.",
        )
    return run
